"""Begin many requests without holding up the event loop: a few in each of its rounds, the others in the next ones.

When two thousand tasks are let go at once, asyncio runs all of them in one round, and nothing else for half a second.
At most `PER_ROUND` callers of `turn` pass per round, in order of arrival. Nothing is refused,
and a single request waits for nothing. Sessions, calls and attempts begin here; answers are not slowed down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

PER_ROUND = 6
"""A request costs 0.2 to 0.8 ms until its connection is there and it is sent: some 4 ms a round."""


class Turns:
    """The line of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, per_round: int = PER_ROUND) -> None:
        self._loop = loop
        self._per_round = per_round
        self._left = per_round
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_counting = False
        """`_next_round` will be called in the next round."""

    async def turn(self) -> None:
        """Return in this round while there is room, else in a later one."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._next_round)
        if self._left > 0 and not self._waiters:
            self._left -= 1
            return
        waiter = self._loop.create_future()
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
        self._loop.call_soon(self._next_round)


_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


async def turn() -> None:
    """Wait for a turn in the running loop."""
    loop = asyncio.get_running_loop()
    line = _lines.get(loop)
    if line is None:
        _lines[loop] = line = Turns(loop)
    await line.turn()
