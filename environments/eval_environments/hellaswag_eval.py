"""HellaSwag: choose the sentence that continues the description of an everyday activity.

Texts are prepared as in lm-eval: the mark of a title ends a sentence, what else is in brackets is removed, and the
second part of the beginning has a capital letter first and no other.

Data: Rowan/hellaswag, or JSONL rows with `activity_label`, `ctx_a`, `ctx_b`, `endings` and `label` (index).
Source: arXiv:1905.07830.
Needs: extras datasets.

    python environments/eval_environments/hellaswag_eval.py evaluate --env.num_eval_rows 1000 ...
"""

from __future__ import annotations

import re
from typing import Any

from atroposlib.envs.benchmark_env import ChoiceBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows


class HellaSwagEvalEnv(ChoiceBenchmarkEnv):
    """Four endings."""

    name = "hellaswag_eval"
    benchmark_data = HubRows(path="Rowan/hellaswag", split="validation")
    few_shot_data = HubRows(path="Rowan/hellaswag", split="train")

    def parse_row(self, row: dict[str, Any]) -> Question | None:
        """Return the beginning with its endings; rows without a label are skipped."""
        if str(row["label"]) == "":
            return None
        start = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return Question(
            question=f"Which sentence continues the text?\n\n{without_marks(start)}",
            choices=[without_marks(ending) for ending in row["endings"]],
            answer="ABCD"[int(row["label"])],
        )


def without_marks(text: str) -> str:
    """Remove the marks of the articles' layout.

    >>> without_marks("Bake: [header] How to bake [title] Heat the oven. ")
    'Bake: How to bake. Heat the oven.'
    """
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


if __name__ == "__main__":
    HellaSwagEvalEnv.cli()
