"""One call of collect_trajectories with scripted answers, and how two of them compare. Pure but for the sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atroposlib.checker.engine import Answer, ProbeSample
from atroposlib.checker.tokens import texts_said
from atroposlib.scored_data import ScoredGroup


@dataclass(slots=True, kw_only=True)
class Run:
    """One call of collect_trajectories and what came of it."""

    item: int
    answers: list[Answer]
    samples: list[ProbeSample]
    groups: list[ScoredGroup] = field(default_factory=list)
    earned: dict[str, list[float]] = field(default_factory=dict)
    """Scores by what was said, in rising order."""

    def most_for(self, answer: Answer) -> float | None:
        """Return the best score that one of the scripted answers earned; None where it was left out."""
        said = texts_said(self.samples)
        found = [
            score
            for persona, given in enumerate(self.answers)
            if given == answer and persona in said
            for score in self.earned.get(said[persona], ())
        ]
        return max(found, default=None)


class Sink:
    """Takes groups where the runtime's outbox would."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    async def accept(
        self,
        scored_data: Any,
        item: Any = None,
        *,
        send: bool = True,
        abort_on_max_length: bool = True,
    ) -> int:
        found = [scored_data] if isinstance(scored_data, Mapping) else list(scored_data or [])
        self.groups += [group for group in found if group is not None]
        return len(found)

    async def post(self, scored_data: Any) -> None:
        """Take what an environment's own sending hands on; `accept` has it already."""


def difference(first: Run, second: Run, *, may_leave_out: bool = False) -> str | None:
    """Name the first answer that earned something else, or nothing, in the second run."""
    for answer, earned in first.earned.items():
        other = second.earned.get(answer)
        if other is None and not may_leave_out:
            return f"{answer!r:.60} earned {_listed(earned)}, but was left out"
        if (
            other
            and len(earned) == len(other)
            and not np.allclose(earned, other, rtol=1e-9, atol=1e-12)
        ):
            return f"{answer!r:.60} earned {_listed(earned)}, but {_listed(other)}"
    return None


def _listed(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:.6g}" for score in scores)
