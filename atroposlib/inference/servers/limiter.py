"""Limit the requests in flight at one server.

One limiter per budget (training, evaluation). First come, first served, except that a retried request goes first; a
cancelled waiter never keeps a slot. Built on futures, not `asyncio.Semaphore`, because the capacity changes while
requests wait. `concurrency.py` and the hub decide the capacity.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self


class AsyncSemWithAdaptiveWeight:
    """A semaphore of `value` slots of which the share `weight` may be used.

    Several environments share an inference server in proportion to their weight: with 100 slots and weight 0.25,
    25 are usable. At least one always is, so that a small weight slows an environment down but never stops it.
    """

    def __init__(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"a limiter needs at least one slot, got {value}")
        self.max_val = value
        self.weight = 1.0
        self._limit = value
        self.in_use = 0
        """Slots that are taken."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def _value(self) -> int:
        """Free slots, under the name that `asyncio.Semaphore` uses; environments read it."""
        return self.max_val - self.in_use

    @property
    def capacity(self) -> int:
        """Slots that may be used."""
        return max(1, int(min(self.max_val, self._limit) * self.weight + 1e-9))

    def update_limit(self, limit: int) -> None:
        """Use at most `limit` slots, before weighting; `max_val` stays the cap."""
        if limit != self._limit:
            self._limit = limit
            self._wake()

    def min_val(self) -> float:
        """Slots that stay reserved for other environments."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        """Set the usable share, clamped to 0..1; waiters that now fit are admitted at once."""
        self.weight = min(max(weight, 0.0), 1.0)
        self._wake()

    def locked(self) -> bool:
        """Whether a new request would have to wait."""
        return self.in_use >= self.capacity or bool(self._waiters)

    async def acquire(self, *, first: bool = False) -> bool:
        """Wait for a free slot and take it; `first` goes ahead of all waiters."""
        if self.in_use < self.capacity and (first or not self._waiters):
            self.in_use += 1
            return True
        waiter = asyncio.get_running_loop().create_future()
        if first:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release()  # the slot was handed over in the same tick as the cancel
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        return True

    def release(self) -> None:
        """Release a slot."""
        assert self.in_use > 0, "released more often than acquired"
        self.in_use -= 1
        self._wake()

    def _wake(self) -> None:
        if not self._waiters:
            return
        capacity = self.capacity
        while self._waiters and self.in_use < capacity:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.in_use += 1
                waiter.set_result(None)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release()
