"""Turn `sys.exit()` in an environment's code into a failure of the item or hook that called it.

SystemExit or KeyboardInterrupt raised out of a task stops the event loop at once: held groups are not delivered and
the environment does not disconnect from the hub. `as_failures` raises `ExitRaised` instead; `contained` does so at the
outermost frame of every task. Used by `serve` only, which handles Ctrl-C as a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from atroposlib.errors import EnvError


class ExitRaised(EnvError):
    """The environment's code raised SystemExit or KeyboardInterrupt."""


@contextlib.contextmanager
def as_failures() -> Iterator[None]:
    """Raise `ExitRaised` in place of SystemExit and KeyboardInterrupt."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise ExitRaised(
            f"the environment's code raised {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Apply `as_failures` to every task that the running loop creates in this block."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def make_task(
        loop: asyncio.AbstractEventLoop, work: Any, /, **options: Any
    ) -> asyncio.Future[Any]:
        make = before or (lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))
        task = make(loop, _contain(work), **options)
        # A task that is cancelled before its first step never awaits `work`.
        task.add_done_callback(lambda _: work.close())
        return task

    loop.set_task_factory(make_task)
    try:
        yield
    finally:
        loop.set_task_factory(before)


async def _contain(work: Coroutine[Any, Any, Any]) -> Any:
    with as_failures():
        return await work
