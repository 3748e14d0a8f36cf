"""How long the trainer works on a batch and waits for the next one, and how old its groups are.

Time is an argument.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from atroposlib.api.run.types import GroupHeader, version_of

NUM_STEPS = 4
"""Recent steps of which the median counts: a trainer that becomes faster or slower is noticed after two."""


class TrainerTimes:
    """Times of one run's trainer, forgotten at a restart of the hub.

    A leased batch is worked on from its delivery, or from the acknowledgement of the one before if that came later (a
    trainer that prefetches), to its acknowledgement. A batch without a lease is worked on until the next request.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Total, up to the last delivery."""
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._waits_s: deque[float] = deque(maxlen=NUM_STEPS)
        """Before recent deliveries."""
        self._behind: deque[float] = deque(maxlen=NUM_STEPS)
        """Mean number of versions that the groups lay behind in each of the recent batches."""
        self.staleness: float | None = None
        """The mean of `_behind`; None before the first batch."""
        self._asked_at: float | None = None
        self._plain_since: float | None = None
        self._ended_at: float | None = None
        """When the trainer ended its last batch."""

    @property
    def step_s(self) -> float | None:
        """Median of recent steps, without waiting; None before the first has ended."""
        return statistics.median(self._steps_s) if self._steps_s else None

    def ask(self, now: float) -> None:
        """Record a request for a batch; a trainer that polls repeats it until it gets one."""
        if self._plain_since is not None:
            self._end(now, since=self._plain_since)
            self._plain_since = None
        if self._asked_at is None:
            self._asked_at = now

    def deliver(
        self,
        now: float,
        groups: Sequence[GroupHeader],
        *,
        version: int,
        is_plain: bool,
        num_held: int,
    ) -> None:
        """Record a delivery at a policy version, while `num_held` other batches are leased."""
        if groups:
            behind = [max(0, version - version_of(header)) for header in groups]
            self._behind.append(statistics.fmean(behind))
            self.staleness = statistics.fmean(self._behind)
        self._waits_s.append(self.waits_s(now, num_held=num_held) or 0.0)
        self.waited_s += self._waits_s[-1]
        self._asked_at = None
        self._plain_since = now if is_plain else None

    def deliver_again(self) -> None:
        """Record that a repeated request was answered with a batch whose delivery is already recorded."""
        self._asked_at = None

    def wait_share(self, now: float, *, num_held: int) -> float | None:
        """Return the share of recent time, 0 to 1, that the trainer waited; None before its first step has ended."""
        if not self._steps_s:
            return None
        waited_s = sum(self._waits_s) + (self.waits_s(now, num_held=num_held) or 0.0)
        total_s = waited_s + sum(self._steps_s)
        return waited_s / total_s if total_s > 0 else 0.0

    def acknowledge(self, now: float, *, leased_at: float) -> None:
        """Record that the trainer has trained on a leased batch."""
        self._end(now, since=max(leased_at, self._ended_at or leased_at))

    def waits_s(self, now: float, *, num_held: int) -> float | None:
        """Return how long the trainer has waited for a batch; None if it has one or has not asked."""
        if self._asked_at is None or num_held:
            return None
        return now - max(self._asked_at, self._ended_at or self._asked_at)

    def _end(self, now: float, *, since: float) -> None:
        self._steps_s.append(now - since)
        self._ended_at = now
