"""How often an environment may call the hub's control routes: a token bucket, so that thousands can share a hub.

Over any stretch of T seconds at most `burst + T / refill_s` calls pass. Callers wait their turn in order of arrival;
nothing is ever refused. `serve.py` is the only user; sending groups is not paced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Pace:
    """A bucket of `burst` calls that gains one every `refill_s` seconds.

    >>> pace = Pace(burst=2, refill_s=1.0, clock=lambda: 0.0)
    >>> [pace.reserve() for _ in range(4)]  # seconds each of four simultaneous calls has to wait
    [0.0, 0.0, 1.0, 2.0]
    """

    def __init__(
        self,
        *,
        burst: int,
        refill_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._clock = clock
        self._sleep = sleep
        self._left = float(burst)
        """Negative: calls that have been promised and wait."""
        self._counted_at = clock()

    def reserve(self) -> float:
        """Take one call out of the bucket; return how long to wait before making it, in seconds."""
        now = self._clock()
        gained = (now - self._counted_at) / self._refill_s
        self._left = min(float(self._burst), self._left + gained) - 1.0
        self._counted_at = now
        return max(0.0, -self._left * self._refill_s)

    async def turn(self) -> None:
        """Wait until a call may be made."""
        wait_s = self.reserve()
        if wait_s > 0:
            await self._sleep(wait_s)
