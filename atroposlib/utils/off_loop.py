"""Work that holds the interpreter's lock (decoding, checking, turning tokens into text), kept off the event loop.

All of it runs in one thread, first come, first served: the loop then waits for one piece of it at most before its own
turn comes, while each of several threads would take a turn before it, and none of them would be done sooner. For work
that waits or gives the lock back (files, compression), `asyncio.to_thread` is the right call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="off-loop")


async def off_loop(work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`; a cancelled caller does not wait for it."""
    return await asyncio.get_running_loop().run_in_executor(_thread(), work, *args)
