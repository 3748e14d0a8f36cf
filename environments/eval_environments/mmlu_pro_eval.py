"""MMLU-Pro: harder multiple choice with up to ten options in 14 categories; accuracy of every category.

Data: TIGER-Lab/MMLU-Pro, or JSONL rows with `question`, `options`, `answer_index` and `category`; examples, with the
reasoning in `cot_content`, of its validation split. Source: arXiv:2406.01574.
Needs: extras datasets.

    python environments/eval_environments/mmlu_pro_eval.py evaluate --env.num_few_shot 5 ...
"""

from __future__ import annotations

import string
from typing import Any

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

    def parse_row(self, row: dict[str, Any]) -> Question | None:
        """Return the question, unless its category is not asked for."""
        category = row["category"]
        if self.config.categories is not None and category not in self.config.categories:
            return None
        question = Question(
            question=row["question"],
            choices=row["options"],
            answer=string.ascii_uppercase[row["answer_index"]],
            groups={"category": category},
        )
        reasoning = row.get("cot_content", "").removeprefix("A: ").strip()
        return Question(**question, reasoning=reasoning) if reasoning else question


if __name__ == "__main__":
    MMLUProEvalEnv.cli()
