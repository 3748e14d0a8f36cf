"""Calling the author's code, which may hang, spin, end the process or cancel itself: here it ends with an Exception.

Used by `check.py` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import selectors
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from atroposlib.checker.watch import LoopKilled
from atroposlib.errors import EnvError, cause_of

T = TypeVar("T")

GRACE_S = 0.5
"""How long a cancelled call may take to end."""
_OTHER_TIME_S = 3 * 86_400 + 7 * 3_600 + 11 * 60 + 17.25
"""How far the wall clock is moved when answers are scored again: another day, hour, minute and second."""


class Unfinished(Exception):
    """The author's code did not end in time, or not as code may end."""


def run_in_own_loop(main: Coroutine[Any, Any, T], selector: selectors.BaseSelector) -> T:
    """Like `asyncio.run`, but with this selector, and a task that refuses to be cancelled cannot hold the end up."""
    loop = asyncio.SelectorEventLoop(selector)
    try:
        return loop.run_until_complete(main)
    except SystemExit as error:
        raise EnvError(
            f"the environment called sys.exit({error.code!r}) in a task, which ends its process"
        ) from error
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=GRACE_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def within(
    call: Awaitable[T], what: str, *, timeout_s: float, give_up: Callable[[], None]
) -> T:
    """Await a call for `timeout_s` at most; what it raises is raised, as an Exception in any case.

    `give_up()` is called before a call that takes too long is cancelled.
    """
    task = asyncio.ensure_future(_without_exit(call))
    await asyncio.wait({task}, timeout=timeout_s)
    if not task.done():
        give_up()
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        raise Unfinished(f"{what} did not end within {timeout_s:g} s")
    if task.cancelled():
        raise Unfinished(f"{what} ended with CancelledError, but it was not cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    killed = _find(error, LoopKilled)
    if killed is not None:
        where = traceback.extract_tb(killed.__traceback__)[-1]
        raise Unfinished(
            f"{what} kept the event loop for {timeout_s:g} s"
            f" ({Path(where.filename).name}:{where.lineno} in {where.name})"
        ) from error
    if not isinstance(error, Exception):
        raise Unfinished(f"{what} raised {cause_of(error)!r}") from error
    raise error


async def _without_exit(call: Awaitable[T]) -> T:
    try:
        return await call
    except SystemExit as error:
        raise Unfinished(f"sys.exit({error.code!r}) was called") from error


def _find(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first error of a kind in an error or group of errors."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for e in error.exceptions if (found := _find(e, kind))), None)
    return error if isinstance(error, kind) else None


def describe(error: BaseException) -> str:
    """Return type, message and the innermost place of an error."""
    if isinstance(error, Unfinished):
        return str(error)
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(trace[-1].filename).name}:{trace[-1].lineno})" if trace else ""
    return f"{type(error).__name__}: {str(error):.300}{place}"


def copy_of(item: Any) -> Any:
    """Return a copy, so that an item that is changed while it runs starts afresh; itself where it cannot be copied."""
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 - items hold anything, and copying them may raise anything
        return item


@contextlib.contextmanager
def other_time() -> Iterator[None]:
    """Move the wall clock; durations (`monotonic`, `perf_counter`) stay right."""
    real = time.time
    time.time = lambda: real() + _OTHER_TIME_S
    try:
        yield
    finally:
        time.time = real
