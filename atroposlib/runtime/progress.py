"""One line about a run at intervals: what it made, how fast, what was dropped and what it waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 60.0
"""Rates are those of this time."""


class Progress:
    """The counts of a run, as text. Time is an argument."""

    def __init__(self, now: float) -> None:
        self._counts = deque([(now, 0)])
        """Groups made, at the times they were looked at."""

    def line(
        self,
        now: float,
        *,
        num_groups: int,
        wanted: int | None,
        mean_score: float | None,
        dropped: Mapping[str, int],
        failed: Mapping[str, int],
        num_empty: int,
        num_in_flight: int,
        waits_for: str | None,
    ) -> str:
        """Return the line; with `wanted` groups as the end of the run it has the time left.

        `dropped` are groups by reason, `failed` attempts at an item by exception, `num_empty` items without a
        group.
        """
        per_s = self._rate(now, num_groups)
        parts = [f"{num_groups} groups" if wanted is None else f"{num_groups} of {wanted} groups"]
        parts.append(f"{per_s * 60:.1f} a minute")
        if wanted is not None and per_s > 0:
            parts.append(f"{_duration(max(0, wanted - num_groups) / per_s)} left")
        if mean_score is not None:
            parts.append(f"mean score {mean_score:.3f}")
        for what, counts in (("dropped", dropped), ("failed attempts", failed)):
            if counts:
                parts.append(f"{what}: {listed(counts)}")
        if num_empty:
            parts.append(f"{num_empty} items gave no group")
        parts.append(f"{num_in_flight} items in flight")
        if waits_for is not None:
            parts.append(f"waiting for {waits_for}")
        return "; ".join(parts)

    def _rate(self, now: float, num_groups: int) -> float:
        """Return groups per second over the last minute."""
        self._counts.append((now, num_groups))
        while len(self._counts) > 2 and now - self._counts[1][0] >= RATE_WINDOW_S:
            self._counts.popleft()
        then, before = self._counts[0]
        return (num_groups - before) / (now - then) if now > then else 0.0


def listed(counts: Mapping[str, int]) -> str:
    """Return counts as text, sorted by name; "none" if there are none.

    >>> listed({"too_long": 1, "equal_scores": 3})
    'equal_scores 3, too_long 1'
    """
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"


async def report(line: Callable[[Progress, float], str], *, every_s: float) -> None:
    """Log a line at intervals until cancelled."""
    progress = Progress(time.monotonic())
    while True:
        await asyncio.sleep(every_s)
        logger.info("%s", line(progress, time.monotonic()))


def _duration(seconds: float) -> str:
    """Return a duration in its largest unit.

    >>> _duration(42), _duration(600), _duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
