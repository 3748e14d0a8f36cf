"""Arena-Hard: answers to hard requests, compared with those of a baseline model by a judge; win rate by category.

Each pair is judged in both orders, so that a preference for a position is a tie. The score is the share of wins, a tie
counting half. The win rate with length control is that of a logistic model at equal lengths: judges prefer long
answers. The judge is `--judge.base_url` with `--judge.model_name`, else the policy itself.

Data: lmarena-ai/arena-hard-auto (v2.0, with the answers of o3-mini as baseline), or JSONL rows with `prompt`,
`baseline` and `category`. Source: arXiv:2406.11939.
Needs: extras datasets; --judge.base_url for a judge other than the policy.

    python environments/eval_environments/arena_hard_eval.py evaluate --judge.base_url URL --judge.model_name J ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atroposlib.envs.benchmark_env import BenchmarkConfig, BenchmarkEnv, Question, Reading
from atroposlib.envs.dataset_env import DatasetEnv, Outcome, Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig
from atroposlib.envs.rows import HubRows

_FOLDER = "hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRows(HubRows):
    """The requests, joined with the baseline's answers."""

    baseline: str

    def load(self) -> list[dict[str, Any]]:
        """Download both and return the requests that have an answer."""
        questions = HubRows(path=self.path, files=self.files)
        answers = replace(questions, files=(f"{_FOLDER}model_answer/{self.baseline}.jsonl",))
        found = {row["uid"]: last_answer_in(row["messages"]) for row in answers.load()}
        rows = [row | {"baseline": found.get(row["uid"])} for row in questions.load()]
        return [row for row in rows if row["baseline"]]


def last_answer_in(messages: Sequence[dict[str, Any]]) -> str:
    """Return the content of the last message, which may be an object with the field `answer`."""
    content = messages[-1]["content"]
    return str(content["answer"] if isinstance(content, dict) else content)


class ArenaHardConfig(BenchmarkConfig, JudgeEnvConfig):
    eval_temperature: float | None = 0.0
    judge_max_tokens: int = 4096


class ArenaHardEnv(BenchmarkEnv, JudgeEnv):
    """One answer against the baseline's."""

    name = "arena_hard_eval"
    env_config_cls = ArenaHardConfig
    config: ArenaHardConfig
    judging = "pairwise"
    rubric = (
        "Is it correct, and does it do what was asked? Is it helpful, relevant and concise? Is anything important "
        "missing? Length alone is no merit."
    )
    benchmark_data = ArenaRows(
        path="json", files=(f"{_FOLDER}question.jsonl",), baseline="o3-mini-2025-01-31"
    )
    accuracy_name = "wins"
    judges_text = False
    score_group = DatasetEnv.score_group
    """Against the baseline, not against each other."""

    def parse_row(self, row: dict[str, Any]) -> Question:
        groups = {"category": row.get("category", "none")}
        return Question(question=row["prompt"], answer=row["baseline"], groups=groups)

    def prompt(self, row: Row) -> str:
        return str(row["question"])

    def gold_answer(self, row: Row) -> None:
        """Return None: no answer always wins."""

    def reference(self, row: Row) -> str:
        return str(row["answer"])

    def read(self, row: Row, text: str) -> Reading:
        return Reading(text.strip() or None, "whole_text" if text.strip() else "none")

    async def grade(self, row: Row, answer: str) -> Outcome:
        """Return the share of the two orders in which the answer wins; None if a verdict is missing."""
        return await self.compare(row, answer, self.reference(row))

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the win rate at equal lengths."""
        metrics = super().summarize_samples(samples)
        judged = [s for s in samples if s["score"] is not None]
        if judged:
            gaps = [length_gap(s["extracted_answer"] or "", s["row"]["answer"]) for s in judged]
            metrics["eval/length_controlled_win_rate"] = win_rate_at_equal_lengths(
                [s["score"] for s in judged], gaps
            )
        return metrics


def length_gap(answer: str, baseline: str) -> float:
    """Return the difference of two lengths as a share of their sum, -1 to 1."""
    return (len(answer) - len(baseline)) / max(1, len(answer) + len(baseline))


def win_rate_at_equal_lengths(scores: Sequence[float], gaps: Sequence[float]) -> float:
    """Return the win rate that a logistic model gives for a length gap of 0.

    The log odds of a win are `a + b * gap`, by maximum likelihood with a weak prior (variance 10) on both, so that a
    model that always wins has finite ones. Source of the idea: arXiv:2404.04475.

    >>> round(win_rate_at_equal_lengths([1.0] * 50 + [0.0] * 50, [0.5] * 50 + [-0.5] * 50), 2)
    0.5
    >>> round(win_rate_at_equal_lengths([1.0, 1.0, 1.0, 0.0] * 50, [0.0] * 200), 2)
    0.75
    """
    a = b = 0.0
    prior = 0.1
    for _ in range(100):
        fits = [1 / (1 + math.exp(-(a + b * gap))) for gap in gaps]
        slope_a = sum(s - p for s, p in zip(scores, fits, strict=True)) - prior * a
        slope_b = sum((s - p) * g for s, p, g in zip(scores, fits, gaps, strict=True)) - prior * b
        weights = [p * (1 - p) for p in fits]
        aa = sum(weights) + prior
        ab = sum(w * g for w, g in zip(weights, gaps, strict=True))
        bb = sum(w * g * g for w, g in zip(weights, gaps, strict=True)) + prior
        scale = aa * bb - ab * ab
        step_a = (bb * slope_a - ab * slope_b) / scale
        step_b = (aa * slope_b - ab * slope_a) / scale
        a, b = a + step_a, b + step_b
        if abs(step_a) + abs(step_b) < 1e-9:
            break
    return 1 / (1 + math.exp(-a))


if __name__ == "__main__":
    ArenaHardEnv.cli()
