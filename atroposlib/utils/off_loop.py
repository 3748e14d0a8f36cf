"""Run work that holds the GIL (decoding, checking, converting tokens to text) off the event loop.

One thread runs it in order of arrival, so the loop competes with only one thread for the GIL; several threads would
delay the loop without finishing sooner. For work that waits or releases the GIL (files, compression), use
`asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="off-loop")


async def off_loop(work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`; it has the caller's context variables, and a cancelled caller does not wait for it."""
    run = copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_thread(), run, work, *args)
