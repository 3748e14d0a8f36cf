"""GSM8K: grade-school mathematics with a boxed answer. The reference environment.

Each item is a question with its gold answer. `DatasetEnv` keeps the order of the questions, samples a group of answers
with tokens, masks and logprobs through the managed server, and evaluates. This file defines the prompt and the score:
the last box is compared with the gold number. Correct is +1, wrong is -1; if all answers of a group are correct,
shorter ones score higher.

Data: openai/gsm8k, or JSONL rows with `question` and `answer` (`... #### 12`).
Needs: extras datasets, math.

    python environments/gsm8k_server.py serve --openai.base_url http://localhost:9001/v1 --openai.model_name ...
    python environments/gsm8k_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome
from atroposlib.envs.lengths import prefer_shorter
from atroposlib.envs.math_answers import boxed_answer, ends_with_number
from atroposlib.envs.math_env import is_correct
from atroposlib.envs.reward_fns.math_worker import CANARY, PRELOAD
from atroposlib.envs.rows import HubRows


class Problem(NamedTuple):
    """One row of the data set."""

    question: str
    answer: str
    """The number after `####`, without thousands separators."""


class GSM8kConfig(DatasetEnvConfig):
    tokenizer_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    group_size: int = 8
    max_token_length: int = 2048
    seed: int = 42
    """Determines the order of the training problems."""
    min_trained_tokens: int = 10
    """Shorter answers (empty ones, refusals) are dropped from the group."""


class GSM8kEnv(DatasetEnv):
    """Single turn, verifiable reward."""

    name = "gsm8k"
    env_config_cls = GSM8kConfig
    config: GSM8kConfig
    train_data = HubRows(path="openai/gsm8k", config="main")
    eval_data = HubRows(path="openai/gsm8k", config="main", split="test")
    preload = PRELOAD
    canary = CANARY
    isolates_graders = True
    system_prompt = (
        "You are a careful assistant. Think about the problem step by step inside <think> </think> tags, "
        "then give the solution. Put the final answer, and nothing else, inside \\boxed{}."
    )

    def parse_row(self, row: dict[str, Any]) -> Problem:
        """Return the question with the number after `####` (all of `answer` without one)."""
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        return Problem(question=row["question"], answer=answer)

    def prompt(self, row: Problem) -> str:
        return row.question

    def gold_answer(self, row: Problem) -> str:
        """Return the gold number in a box; `setup` fails if it is not rewarded."""
        return f"\\boxed{{{row.answer}}}"

    async def score(self, row: Problem, answer: str) -> Outcome:
        """Return 1 for the correct number, -1 for another; None or a RewardFailure if it could not be judged."""
        is_right = await is_correct(self, row.answer, boxed_answer(answer))
        if not isinstance(is_right, bool):
            return is_right
        return 1.0 if is_right else -1.0

    def audit_score(self, row: Problem, answer: str) -> bool | None:
        """Compare the last number, in a box or not."""
        return ends_with_number(answer, row.answer)

    def shape_group(self, row: Problem, group: ScoredDataGroup) -> ScoredDataGroup:
        """Prefer shorter answers if all are right."""
        return prefer_shorter(group, self.config.max_token_length)


if __name__ == "__main__":
    GSM8kEnv.cli()
