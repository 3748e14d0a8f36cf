"""Short pauses of an event loop, however many answers arrive. For this package's own processes, never at import."""

from __future__ import annotations

import asyncio
import gc
import selectors
from typing import Final

EVENTS_PER_ROUND: Final = 16
"""Reading and decoding an answer takes 0.2 to 0.7 ms: up to 10 ms per iteration."""

THRESHOLDS: Final = (700, 15_000, 100)
"""Arguments of `gc.set_threshold`. Lists of tokens are scanned number by number: 1 to 5 ms for 700 new objects, up to
20 ms for 2,000. With `benchmarks/inference.py`, rarer scans of the older generations saved a fifth of the CPU per
request."""


class _FewAtOnce(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout)[:EVENTS_PER_ROUND]


def loop_with_short_rounds() -> asyncio.AbstractEventLoop:
    """Return a new loop, for `asyncio.Runner(loop_factory=...)`.

    asyncio handles all events that the kernel reports before it checks its timers again: with hundreds of answers at
    once, or as many idle connections closed by a server, for 100 ms. This loop handles a few events per iteration; the
    kernel reports the others again in the next one.
    """
    return asyncio.SelectorEventLoop(_FewAtOnce())


def collect_less_often() -> None:
    """Exclude all current objects from garbage collection, and scan others less often; call once after all imports.

    With thousands of requests in flight, CPython's defaults (3.11: 700, 10, 10) scan the whole heap often, for 0.1 to
    0.5 s each time. Reference counting frees nearly everything here; cycles are still found, later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
