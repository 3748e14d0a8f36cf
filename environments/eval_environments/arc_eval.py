"""ARC: multiple choice of school science; the challenge set, or the easy one.

Data: allenai/ai2_arc, subset ARC-Challenge (or ARC-Easy), or JSONL rows with `question`, `choices` (`text` and
`label`) and `answerKey`. Source: arXiv:1803.05457.
Needs: extras datasets.

    python environments/eval_environments/arc_eval.py evaluate --env.subset ARC-Easy ...
"""

from __future__ import annotations

import string
from typing import Any

from atroposlib.envs.answers import lettered
from atroposlib.envs.benchmark_env import ChoiceBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows


class ARCEvalEnv(ChoiceBenchmarkEnv):
    """Three to five choices."""

    name = "arc_eval"
    benchmark_data = HubRows(path="allenai/ai2_arc", config="ARC-Challenge", split="test")
    few_shot_data = HubRows(path="allenai/ai2_arc", config="ARC-Challenge", split="validation")

    def parse_row(self, row: dict[str, Any]) -> Question:
        """Return the question; labels, which are sometimes digits, become letters."""
        choices = row["choices"]
        return Question(
            question=row["question"],
            choices=choices["text"],
            answer=string.ascii_uppercase[choices["label"].index(row["answerKey"])],
        )

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `arc_challenge_chat`."""
        return (
            "Given the following question and four candidate answers (A, B, C and D), choose the best answer.\n"
            f"Question: {row['question'].strip()}\n{lettered(row['choices'][:4])}\n"
            'Your response should end with "The best answer is [the_answer_letter]" where the [the_answer_letter] '
            "is one of A, B, C or D."
        )


if __name__ == "__main__":
    ARCEvalEnv.cli()
