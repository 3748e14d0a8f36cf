"""IFEval: instructions with up to three constraints that a program checks; strict and loose accuracy.

The score is 1 if the answer after the thinking keeps all constraints. Loose means: one of eight variants keeps them,
with or without its first and last line and its `*`. Sentences are counted by a rule, not by NLTK, so that figures
of `length_constraints:number_sentences` may differ a little from others'.

Data: google/IFEval, or JSONL rows with `prompt`, `instruction_id_list`, `kwargs`, and optionally `answer`, a text that
keeps the constraints. `instruction_following_constraints.py` has the 25 rules. Source: arXiv:2311.07911.
Needs: extras datasets, examples.

    python environments/eval_environments/ifeval_eval.py evaluate --openai.model_name M --tokenizer_name M
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from atroposlib.environments.instruction_following_constraints import IFEVAL

from atroposlib.envs.answers import solution_of
from atroposlib.envs.benchmark_env import BenchmarkEnv, Question, Reading
from atroposlib.envs.dataset_env import Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.rows import HubRows
from atroposlib.errors import ConfigError
from atroposlib.utils.estimates import estimate_mean


class Instruction(Question, total=False):
    """A row with its constraints."""

    constraints: list[tuple[str, dict[str, Any]]]
    """Name and arguments of each."""


class IFEvalEnv(BenchmarkEnv):
    """Free text."""

    name = "ifeval_eval"
    grader_packages = ("langdetect", "nltk")
    accuracy_name = "prompt_level_strict_acc"
    benchmark_data = HubRows(path="google/IFEval")

    def parse_row(self, row: dict[str, Any]) -> Instruction:
        """Return the instruction with the arguments that are set; ConfigError for a constraint that has others."""
        constraints = [
            (name, {key: value for key, value in arguments.items() if value is not None})
            for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True)
        ]
        for name, arguments in constraints:
            try:
                inspect.signature(IFEVAL[name]).bind("", **arguments)
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"{self.registered_name}: constraint {name}: {error!r}"
                ) from error
        return Instruction(
            question=row["prompt"], answer=row.get("answer", ""), constraints=constraints
        )

    def prompt(self, row: Row) -> str:
        return str(row["question"])

    lm_eval_prompt = prompt

    def gold_answer(self, row: Row) -> str | None:
        return row["answer"] or None

    def read(self, row: Row, text: str) -> Reading:
        return Reading(text.strip() or None, "whole_text" if text.strip() else "none")

    def grade(self, row: Row, answer: str) -> float:
        return float(all(kept(row, answer)))

    def sample_fields(self, row: Row, answer: str) -> dict[str, Any]:
        """Add which constraints are kept, strictly and loosely."""
        text = solution_of(answer).strip()
        each = list(zip(*(kept(row, variant) for variant in variants(text)), strict=True))
        return {
            **super().sample_fields(row, answer),
            "strict": kept(row, text),
            "loose": [any(found) for found in each],
        }

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the accuracy of prompts and of single constraints, strict and loose, and of every constraint."""
        metrics = super().summarize_samples(samples)
        by_name: dict[str, list[float]] = {}
        for how in ("strict", "loose"):
            values = [(s["item_index"], float(kept)) for s in samples for kept in s[how]]
            items = [index for index, _ in values]
            metrics[f"eval/inst_level_{how}_acc"] = estimate_mean(
                [value for _, value in values], clusters=items
            )
        metrics["eval/prompt_level_loose_acc"] = estimate_mean(
            [float(all(s["loose"])) for s in samples], clusters=[s["item_index"] for s in samples]
        )
        for sample in samples:
            for (name, _), found in zip(
                sample["row"]["constraints"], sample["strict"], strict=True
            ):
                by_name.setdefault(name, []).append(float(found))
        metrics["eval/total_instructions"] = float(sum(map(len, by_name.values())))
        rates = {name: estimate_mean(found) for name, found in sorted(by_name.items())}
        return metrics | {f"eval/{name}_accuracy": rate for name, rate in rates.items()}


def kept(row: Row, text: str) -> list[bool]:
    """Return for every constraint whether a text keeps it; an empty text keeps none."""
    return [
        bool(text.strip()) and IFEVAL[name](text, **arguments)
        for name, arguments in row["constraints"]
    ]


def variants(text: str) -> list[str]:
    """Return the text with and without its first line, its last line, and all `*`.

    >>> variants("Sure:\\n*yes*")
    ['Sure:\\n*yes*', 'Sure:\\nyes', 'Sure:', 'Sure:', '*yes*', 'yes', '', '']
    """
    lines = text.split("\n")
    found = []
    for first, last in itertools.product((0, 1), (0, 1)):
        part = "\n".join(lines[first : len(lines) - last]).strip()
        found += [part, part.replace("*", "")]
    return found


if __name__ == "__main__":
    IFEvalEnv.cli()
