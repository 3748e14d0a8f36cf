"""`VerifiedMathEnv`: mathematical problems whose answers math-verify judges, in workers that are killed if they hang.

It reads the rows of common data sets, evaluates on several, and treats answers that were cut. Used by the environments
`math_server` and `math_server_zero`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Rollout, Split
from atroposlib.envs.math_answers import boxed_answer, compare, ends_with_number, is_equal
from atroposlib.envs.reward_fns.math_worker import CANARY, PRELOAD
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.rollouts import number_of
from atroposlib.envs.rows import HubRows


@dataclass(kw_only=True)
class Problem:
    question: str
    answer: str
    """In LaTeX, without `$` and box."""
    part: str = "held_out"
    """Part of the evaluation that it belongs to."""


class VerifiedMathConfig(DatasetEnvConfig):
    seed: int = 42
    min_trained_tokens: int = 10
    num_reward_workers: int = 8
    mask_too_long_completions: bool = True
    """Whether answers that were cut at the token limit get no advantage."""


class VerifiedMathEnv(DatasetEnv):
    """Problems with one answer, verified; subclasses define `prompt`, and what `verify` is given."""

    config: VerifiedMathConfig
    eval_parts: ClassVar[Mapping[str, HubRows]] = {}
    """The evaluation's data sets, by the name of their figure; {}: `eval_data`."""
    aliases = {"eval/overall_percent_correct": "eval/percent_correct"}
    preload = PRELOAD
    canary = CANARY
    isolates_graders = True
    truncated_score = -1.0

    def __init__(self, config: VerifiedMathConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.silences_truncated = config.mask_too_long_completions

    def load_rows(self, split: Split) -> list[Problem] | None:
        """Return the problems of a split; in evaluation those of all parts, unless a file is configured."""
        has_file = self.config.dataset_path or self.config.eval_dataset_path
        if split == "train" or has_file or not self.eval_parts:
            rows: list[Problem] | None = super().load_rows(split)
            return rows
        parts = {part: map(self.parse_row, rows.load()) for part, rows in self.eval_parts.items()}
        return [replace(row, part=part) for part, rows in parts.items() for row in rows if row]

    def parse_row(self, row: dict[str, Any]) -> Problem | None:
        """Return the problem, with the first of several answers; one without an answer is skipped."""
        answer = row.get("final_answer", row.get("answer"))
        answer = answer[0] if isinstance(answer, list) and answer else answer
        if not isinstance(answer, str | int | float):
            return None
        return Problem(question=row.get("question") or row["problem"], answer=str(answer))

    def item_class(self, item: Problem) -> str:
        """Return what a problem is known by; items that follow from it, such as retries, are others."""
        return super().item_class((type(item).__name__, item.question))

    async def verify(self, row: Problem, answer: str) -> Outcome:
        """Return 1 for the right answer, -1 for another, None if the gold answer cannot be read."""
        is_right = await is_correct(self, row.answer, boxed_answer(answer))
        if is_right is None or isinstance(is_right, RewardFailure):
            return is_right
        return 1.0 if is_right else -1.0

    def audit_score(self, row: Problem, answer: str) -> bool | None:
        """Compare the last number, in a box or not; None if the gold answer is no number."""
        return ends_with_number(answer, row.answer)

    def record_answers(self, rollouts: Sequence[Rollout], outcomes: Sequence[Outcome]) -> None:
        """Record how many answers to a problem are right, how many were cut, and the lengths of the others."""
        scores = list(map(number_of, outcomes))
        self.record("train/pass_at_groupsize", 1.0 in scores)
        for rollout, score in zip(rollouts, scores, strict=True):
            if score is None:
                continue
            is_cut = rollout.finish_reason == "length"
            self.record("train/percent_correct", score == 1.0)
            self.record("train/percent_overanswer", is_cut)
            if not is_cut:
                kind = "correct" if score == 1.0 else "incorrect"
                self.record(f"train/avg_{kind}_answer_len", rollout.num_tokens)

    def train_metrics(self) -> dict[str, float]:
        """Return the position in the data."""
        return {"train/iter": self.num_items}

    def parts_of(self, row: Problem) -> list[str]:
        """Return the name of the accuracy of the row's data set."""
        return [f"eval/{row.part}_percent_correct"]


async def is_correct(
    env: DatasetEnv, gold: str, answer: str | None, *, allows_restating: bool = False
) -> bool | RewardFailure | None:
    """Whether an answer equals the gold answer: numbers are compared here, the rest in a worker of `env`.

    None if math-verify cannot read the gold answer. `allows_restating`: see `math_answers.compare`.
    """
    is_right: bool | RewardFailure | None = compare(gold, answer, allows_restating=allows_restating)
    return await env.in_worker(is_equal, gold, answer) if is_right is None else is_right
