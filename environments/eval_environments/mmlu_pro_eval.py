"""MMLU-Pro: harder multiple choice with up to ten options in 14 categories; accuracy of every category.

Data: TIGER-Lab/MMLU-Pro, or JSONL rows with `question`, `options`, `answer_index` and `category`; examples, with the
reasoning in `cot_content`, of its validation split. Source: arXiv:2406.01574.
Needs: extras datasets.

    python environments/eval_environments/mmlu_pro_eval.py evaluate --env.num_few_shot 5 ...
"""

from __future__ import annotations

import string
from typing import Any

from atroposlib.envs.answers import lettered
from atroposlib.envs.benchmark_env import ChoiceBenchmarkConfig, ChoiceBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows


class MMLUProEvalConfig(ChoiceBenchmarkConfig):
    categories: list[str] | None = None
    """Categories to evaluate, such as `law`; None: all."""


class MMLUProEvalEnv(ChoiceBenchmarkEnv):
    """Three to ten choices."""

    name = "mmlu_pro_eval"
    env_config_cls = MMLUProEvalConfig
    config: MMLUProEvalConfig
    accuracy_name = "overall_accuracy"
    benchmark_data = HubRows(path="TIGER-Lab/MMLU-Pro", split="test")
    few_shot_data = HubRows(path="TIGER-Lab/MMLU-Pro", split="validation")

    part_key, part_setting = "category", "categories"

    def parse_row(self, row: dict[str, Any]) -> Question:
        question = Question(
            question=row["question"],
            choices=row["options"],
            answer=string.ascii_uppercase[row["answer_index"]],
            groups={"category": row["category"]},
        )
        shown = row.get("cot_content", "").removeprefix("A: Let's think step by step.").strip()
        return Question(**question, reasoning=shown) if shown else question

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `mmlu_pro`, whose published figures have `--env.num_few_shot 5`."""
        return (
            f"The following are multiple choice questions (with answers) about {row['groups']['category']}. "
            'Think step by step and then finish your answer with "the answer is (X)" where X is the correct letter '
            f"choice.\n{self.lm_eval_examples(row, asked)}"
        )


def asked(row: Question) -> str:
    """Return a question as lm-eval asks it."""
    options = lettered([option.strip() for option in row["choices"]])
    return f"Question:\n{row['question']}\nOptions:\n{options}\nAnswer: Let's think step by step."


if __name__ == "__main__":
    MMLUProEvalEnv.cli()
