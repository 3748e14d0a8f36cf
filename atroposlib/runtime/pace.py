"""Token bucket for an environment's calls to the hub's control routes, so that thousands can share a hub.

In any T seconds at most `burst + T / refill_s` calls pass. Callers wait in order of arrival; no call is refused. Used
by `hub_link.py`; sending groups is not limited.
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
        """Calls available now; negative while reserved calls wait."""
        self._counted_at = clock()

    def reserve(self) -> float:
        """Take one call from the bucket; return the seconds to wait before making it."""
        now = self._clock()
        gained = (now - self._counted_at) / self._refill_s
        self._left = min(float(self._burst), self._left + gained) - 1.0
        self._counted_at = now
        return max(0.0, -self._left * self._refill_s)

    async def wait(self) -> None:
        """Wait until a call may be made."""
        wait_s = self.reserve()
        if wait_s > 0:
            await self._sleep(wait_s)
