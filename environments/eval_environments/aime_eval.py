"""AIME: the American Invitational Mathematics Examination of 2024 and 2025; accuracy of every year.

There are 30 problems a year, so sample several answers: `--env.num_eval_samples 16` reports avg@16 and pass@16.

Data: HuggingFaceH4/aime_2024 and yentinglin/aime_2025, or JSONL rows with `problem`, `answer` and `year`.
Needs: extras datasets, math.

    python environments/eval_environments/aime_eval.py evaluate --env.years '["2025"]' --env.num_eval_samples 16 ...
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from atroposlib.envs.benchmark_env import BenchmarkConfig, MathBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows


class AIMEEvalConfig(BenchmarkConfig):
    max_token_length: int = 30720
    years: list[str] = Field(default=["2024", "2025"], min_length=1)
    """Years to evaluate."""


class AIMEEvalEnv(MathBenchmarkEnv):
    """An integer from 0 to 999 in a box."""

    name = "aime_eval"
    env_config_cls = AIMEEvalConfig
    config: AIMEEvalConfig
    all_parts = {
        "2024": HubRows(path="HuggingFaceH4/aime_2024"),
        "2025": HubRows(path="yentinglin/aime_2025"),
    }
    part_key, part_setting = "year", "years"

    def parse_row(self, row: dict[str, Any]) -> Question:
        """Return the problem with its answer without leading zeros."""
        groups = {"year": str(row.get("year", "none"))}
        return Question(question=row["problem"], answer=str(int(row["answer"])), groups=groups)

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `aime24`."""
        return f"Question: {row['question']}\nAnswer:"


if __name__ == "__main__":
    AIMEEvalEnv.cli()
