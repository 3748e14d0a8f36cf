"""Turn `sys.exit()` in an environment's code into a failure of the item or hook that called it.

SystemExit or KeyboardInterrupt raised out of a task stops the event loop at once: held groups are not delivered and
the environment does not disconnect from the hub. `as_failures` raises `ExitRaised` instead; `contained` does so at the
outermost frame of every task. Used by `serve` only, which handles Ctrl-C as a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
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
        raise _failure(error) from error


def _failure(error: BaseException) -> ExitRaised:
    return ExitRaised(f"the environment's code raised {type(error).__name__}: {error}")


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Apply `as_failures` to every task that the running loop creates in this block."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def make_task(
        loop: asyncio.AbstractEventLoop, work: Any, /, **options: Any
    ) -> asyncio.Future[Any]:
        wrapped = _Contained(work)
        if before is not None:
            return before(loop, wrapped, **options)
        return asyncio.Task(wrapped, loop=loop, **options)

    loop.set_task_factory(make_task)
    try:
        yield
    finally:
        loop.set_task_factory(before)


class _Contained(Coroutine[Any, Any, Any]):
    """Wraps a coroutine and raises `ExitRaised` where it would stop the loop.

    Not an `async def` wrapper: if its task were cancelled before the first step, `work` would never be awaited.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    @property
    def __name__(self) -> str:
        return getattr(self._work, "__name__", type(self._work).__name__)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _failure(error) from error
