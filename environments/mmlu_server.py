"""MMLU: multiple-choice questions on 57 subjects, to train on and to evaluate.

The reward is 1 if the only choice that the answer states, after its thinking if there is some, is right; else 0. The
evaluation runs on the test split and reports the accuracy of every subject.

Data: cais/mmlu (training: its auxiliary split), or JSONL rows with `question`, `choices`, `answer` (index), `subject`.
Needs: extras datasets.

    python environments/mmlu_server.py evaluate --env.subjects '["astronomy"]' --env.data_dir_to_save_evals evals ...
"""

from __future__ import annotations

import string
from typing import Any

from atroposlib.envs.answers import ChoiceQuestion, lettered, read_choice, solution_of
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Split
from atroposlib.envs.rows import HubRows


class MMLUConfig(DatasetEnvConfig):
    group_size: int = 8
    max_token_length: int = 4096
    subjects: list[str] | None = None
    """Subjects to evaluate, such as `astronomy`; None: all."""


class MMLUEnv(DatasetEnv):
    """Single turn, reward by the letter."""

    name = "mmlu"
    env_config_cls = MMLUConfig
    config: MMLUConfig
    train_data = HubRows(path="cais/mmlu", config="all", split="auxiliary_train")
    eval_data = HubRows(path="cais/mmlu", config="all", split="test")
    system_prompt = "Answer the multiple-choice question. Think it through first."

    def load_rows(self, split: Split) -> list[ChoiceQuestion] | None:
        rows: list[ChoiceQuestion] | None = super().load_rows(split)
        if split == "train" or rows is None or self.config.subjects is None:
            return rows
        return [row for row in rows if row.subject in self.config.subjects]

    def parse_row(self, row: dict[str, Any]) -> ChoiceQuestion:
        letter = string.ascii_uppercase[row["answer"]]
        return ChoiceQuestion(row["question"], row["choices"], letter, row.get("subject") or "none")

    def prompt(self, row: ChoiceQuestion) -> str:
        question = f"{row.text}\n\n{lettered(row.options)}"
        return f'{question}\n\nEnd with "The best answer is: " and one letter.'

    def gold_answer(self, row: ChoiceQuestion) -> str:
        return f"The best answer is: {row.letter}"

    def score(self, row: ChoiceQuestion, answer: str) -> float:
        return float(read_choice(solution_of(answer), row.options)[0] == row.letter)

    def parts_of(self, row: ChoiceQuestion) -> list[str]:
        return [f"eval/percent_correct_{row.subject}"]


if __name__ == "__main__":
    MMLUEnv.cli()
