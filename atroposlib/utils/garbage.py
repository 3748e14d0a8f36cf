"""Prevent long pauses of an event loop by the garbage collector. Called by this package's processes, never at import.

With thousands of requests in flight, CPython's defaults (3.11: 700, 10, 10) scan the whole heap often, for 0.1 to 0.5 s
each time. Reference counting frees nearly everything here; cycles are still found, later.
"""

from __future__ import annotations

import gc

THRESHOLDS = (700, 15_000, 100)
"""Arguments of `gc.set_threshold`. Lists of tokens are scanned number by number: 1 to 5 ms for 700 new objects, up to
20 ms for 2,000. With `benchmarks/inference.py`, rarer scans of the older generations saved a fifth of the CPU per
request."""


def collect_less_often() -> None:
    """Set the thresholds and exclude all current objects from collection; call once after all imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
