"""Retry rules: which statuses allow a retry, and how long to wait before it; and waiting for the first of several.

The only set of transient statuses, reader of `Retry-After` and back-off, for clients of the hub and of engines and for
the trainer. Each caller sends and limits its own retries.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

TRANSIENT_4XX = frozenset({408, 425, 429})
"""Request timeout, too early, too many requests: the request itself is fine."""

MAX_RETRY_AFTER_S = 60.0
"""Longest `Retry-After` that is obeyed."""


def is_transient_status(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status >= 500 or status in TRANSIENT_4XX


def read_retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header (a number or a date); None if it is missing or unreadable."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


async def wait_for_first(
    calls: Iterable[Coroutine[Any, Any, Any]], *, timeout_s: float | None = None
) -> None:
    """Run calls concurrently until the first ends; cancel the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Backoff:
    """Pauses of one series of attempts: doubling up to a cap, half fixed and half random."""

    first_s: float = 0.5
    cap_s: float = 15.0
    rng: random.Random = field(default_factory=random.Random)
    num_failed: int = 0
    """Pauses since the last success."""

    def next(self, *, asked_s: float | None = None) -> float:
        """Return the next pause in seconds, at least `asked_s` (capped at `MAX_RETRY_AFTER_S`)."""
        longest = min(self.cap_s, self.first_s * 2.0 ** min(self.num_failed, 30))
        self.num_failed += 1
        pause_s = longest * (0.5 + 0.5 * self.rng.random())
        return max(pause_s, min(asked_s or 0.0, MAX_RETRY_AFTER_S))

    def reset(self) -> None:
        """Restart with the shortest pause, after a success."""
        self.num_failed = 0
