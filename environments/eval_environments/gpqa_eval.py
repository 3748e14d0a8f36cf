"""GPQA: graduate-level questions in physics, chemistry and biology; accuracy of every subdomain.

The order of the four choices depends on `shuffle_seed` and the question alone, so that it is the same in every run.

Data: Idavidrein/gpqa, subset gpqa_diamond (accept its conditions on the hub first), or JSONL rows with `Question`,
`Correct Answer`, `Incorrect Answer 1` to `3` and `Subdomain`. Source: arXiv:2311.12022.
Needs: extras datasets.

    python environments/eval_environments/gpqa_eval.py evaluate --env.num_eval_samples 8 ...
"""

from __future__ import annotations

import random
from typing import Any

from atroposlib.envs.benchmark_env import ChoiceBenchmarkConfig, ChoiceBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows


class GPQAEvalConfig(ChoiceBenchmarkConfig):
    shuffle_seed: int = 42
    """Determines the order of the choices."""


class GPQAEvalEnv(ChoiceBenchmarkEnv):
    """Four choices in an order of our own."""

    name = "gpqa_eval"
    env_config_cls = GPQAEvalConfig
    config: GPQAEvalConfig
    accuracy_name = "overall_accuracy"
    benchmark_data = HubRows(path="Idavidrein/gpqa", config="gpqa_diamond")

    def parse_row(self, row: dict[str, Any]) -> Question:
        """Return the question with its choices shuffled."""
        right = row["Correct Answer"].strip()
        choices = [right, *(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
        order = list(range(4))
        random.Random(f"{self.config.shuffle_seed}:{row['Question']}").shuffle(order)
        return Question(
            question=row["Question"].strip(),
            choices=[choices[i] for i in order],
            answer="ABCD"[order.index(0)],
            groups={"subdomain": row.get("Subdomain") or "none"},
        )

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `gpqa_diamond_cot_zeroshot`, which shuffles the choices in each run."""
        options = zip("ABCD", row["choices"], strict=True)
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in options)
        question = f"What is the correct answer to this question:{row['question']}"
        return f"{question}\nChoices:\n{choices}\nLet's think step by step: "


if __name__ == "__main__":
    GPQAEvalEnv.cli()
