"""Multiple choice with thinking: academic questions with four options.

The model thinks in one `<think>` block and ends with "The best answer is: LETTER". The reward is +1 if the only choice
stated after the thinking is right; it is -1 for another choice, for none or several, and for a cut answer.

Data: NousResearch/AcademicMCQA, or JSONL rows with `prompt`, `options` and `ground_truth` (the letter).
Needs: extras datasets.

    python environments/mcqa_thinking_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from typing import Any

from atroposlib.envs.answers import (
    THINK_FIRST,
    ChoiceQuestion,
    after_thinking_once,
    lettered,
    read_choice,
)
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.rows import HubRows


class MCQAConfig(DatasetEnvConfig):
    group_size: int = 32
    max_token_length: int = 15360
    min_trained_tokens: int = 10
    seed: int = 42
    num_eval_rows: int = 500
    eval_temperature: float | None = 0.5


class MCQAThinkingEnv(DatasetEnv):
    """Single turn, reward by the letter."""

    name = "mcqa_thinking"
    env_config_cls = MCQAConfig
    config: MCQAConfig
    train_data = HubRows(path="NousResearch/AcademicMCQA", config="default")
    system_prompt = THINK_FIRST
    truncated_score = -1.0

    def parse_row(self, row: dict[str, Any]) -> ChoiceQuestion:
        """Return the question; its options are added if the prompt does not contain them."""
        text, options = row["prompt"], row["options"]
        if not all(option in text for option in options):
            text = f"{text}\n\n{lettered(options)}"
        return ChoiceQuestion(text, options, row["ground_truth"])

    def prompt(self, row: ChoiceQuestion) -> str:
        return f'{row.text}\n\nEnd with "The best answer is: " and one letter.'

    def gold_answer(self, row: ChoiceQuestion) -> str:
        return f"<think>One option fits.</think> The best answer is: {row.letter}"

    def score(self, row: ChoiceQuestion, answer: str) -> float:
        solution = after_thinking_once(answer)
        is_right = solution is not None and read_choice(solution, row.options)[0] == row.letter
        return 1.0 if is_right else -1.0


if __name__ == "__main__":
    MCQAThinkingEnv.cli()
