"""Waiting for a change of a run without asking again and again."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes everybody who waits for something to change.

    One event loop; between a look at the state and `wait()` there must be no await, then nothing is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.is_closed = False

    def notify(self) -> None:
        self._event.set()
        if not self.is_closed:
            self._event = asyncio.Event()

    def close(self) -> None:
        """Wake everybody for the last time: nobody waits from here on."""
        self.is_closed = True
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
