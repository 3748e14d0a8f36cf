"""MATH-500: competition mathematics; accuracy of every subject and level.

Data: HuggingFaceH4/MATH-500, or JSONL rows with `problem`, `answer`, `subject` and `level`. Source: arXiv:2305.20050.
Needs: extras datasets, math.

    python environments/eval_environments/math500_eval.py evaluate --env.num_eval_samples 4 ...
"""

from __future__ import annotations

from typing import Any

from atroposlib.envs.benchmark_env import MathBenchmarkEnv, Question
from atroposlib.envs.math_answers import final_answer
from atroposlib.envs.rows import HubRows


class MATH500EvalEnv(MathBenchmarkEnv):
    """LaTeX in a box."""

    name = "math500_eval"
    benchmark_data = HubRows(path="HuggingFaceH4/MATH-500", split="test")

    def parse_row(self, row: dict[str, Any]) -> Question | None:
        """Return the problem with its answer, else the last box of its solution."""
        gold = row.get("answer") or final_answer(row.get("solution") or "")
        if not gold:
            return None
        groups = {key: str(row[key]) for key in ("subject", "level") if row.get(key)}
        return Question(question=row["problem"], answer=gold, groups=groups)

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `minerva_math500` without examples."""
        return f"Problem:\n{row['question']}\n\nSolution:"


if __name__ == "__main__":
    MATH500EvalEnv.cli()
