"""Start many requests without blocking the event loop: a few in each of its rounds.

When two thousand tasks become ready at once, asyncio runs all of them in one round, and nothing else for half a second.
At most `PER_ROUND` callers of `start_slot` return per round, in order of arrival. A single request does not wait.
Sessions, calls and attempts call `start_slot` before they start; answers do not.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

PER_ROUND = 6
"""Connecting and sending takes 0.2 to 0.8 ms per request: about 4 ms a round."""


class StartSlots:
    """The queue of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, per_round: int = PER_ROUND) -> None:
        self.loop = loop
        self._per_round = per_round
        self._left = per_round
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_counting = False
        """Whether `_next_round` is scheduled."""

    async def take(self) -> None:
        """Return in this round if fewer than `per_round` callers have, else in a later one."""
        if not self._is_counting:
            self._is_counting = True
            self.loop.call_soon(self._next_round)
        if self._left > 0 and not self._waiters:
            self._left -= 1
            return
        waiter = self.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _next_round(self) -> None:
        self._left = self._per_round
        if not self._waiters:
            self._is_counting = False
            return
        while self._left > 0 and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        self.loop.call_soon(self._next_round)


class _OfThread(threading.local):
    slots: StartSlots | None = None
    """Of the event loop that asked last."""


_of_thread = _OfThread()


async def start_slot() -> None:
    """Wait until one more request may start in the running loop."""
    loop = asyncio.get_running_loop()
    slots = _of_thread.slots
    if slots is None or slots.loop is not loop:
        _of_thread.slots = slots = StartSlots(loop)
    await slots.take()
