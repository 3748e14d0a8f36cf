"""Keep the garbage collector from stopping an event loop. Called by this package's own processes, never at import.

With thousands of requests in flight the defaults of CPython (3.11: 700, 10, 10) look through the whole heap again and
again, for 0.1 to 0.5 s each time. Reference counting frees nearly everything here; cycles are still found, later.
"""

from __future__ import annotations

import gc

THRESHOLDS = (700, 15_000, 100)
"""New objects before the youngest are looked through, and how often each generation before the next one is. Lists of
tokens are looked through number by number: 1 to 5 ms for 700 objects, up to 20 ms for 2,000. With
`benchmarks/inference.py`, rarer passes over the older ones saved a fifth of the CPU per request."""


def collect_less_often() -> None:
    """Call it once, when everything is imported: what is there now is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
