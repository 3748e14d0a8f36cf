"""Call the author's code, which may hang, spin, exit or leak resources, and observe what it does.

Every call ends with a result or an Exception. `LoopWatch` finds blocked event loops and interrupts code that spins.
Used by `check.py` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from atroposlib.errors import EnvError, cause_of

T = TypeVar("T")

GRACE_S = 0.5
"""Time for a cancelled call to end."""
BLOCKED_S = 0.1
"""Code that occupies the event loop for longer than this blocks it."""
LEAKY_RUNS = 3
"""Growth in this many consecutive runs is a leak."""

_PING_S = 0.02
_LOOK_S = 0.05
_IDLE_SHARE = 0.02
"""A thread that used a smaller share of an interval than this was waiting. A runnable one gets more, even on a machine
with ten times more busy threads than cores."""
_OTHER_TIME_S = 3 * 86_400 + 7 * 3_600 + 11 * 60 + 17.25
"""Shift of the wall clock when answers are scored again: another day, hour, minute and second."""


class Unfinished(Exception):
    """The author's code did not end in time, or exited in a way that is not allowed."""


class LoopKilled(BaseException):
    """Raised inside code that blocked the event loop for the whole timeout."""


class LoopWatch:
    """Pings the running event loop from a thread; while a ping is unanswered, it samples the loop's thread.

    Blocked time is time in which the thread computed (by its CPU clock) or waited (almost no CPU during an interval
    that was itself on time). Time when it was runnable without a CPU does not count, nor does `Thread.start`, which
    waits until the other thread gets a CPU.
    """

    def __init__(self, author_files: Collection[str], *, patience_s: float) -> None:
        """`patience_s`: time without an answer after which `LoopKilled` is raised in the loop's thread."""
        self.run = 0
        """Number of the author's call, set by the caller; 0 between calls."""
        self.stalls: dict[str, dict[int, float]] = defaultdict(dict)
        """Longest blocked time in seconds, by function (file:line), then by run."""
        self._author_files = author_files
        self._patience_s = patience_s
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PING_S):
            answered = threading.Event()
            self._loop.call_soon_threadsafe(answered.set)
            self._wait(answered)

    def _wait(self, answered: threading.Event) -> None:
        """Wait for the answer to a ping, and record a stall."""
        cpu_s = _cpu_clock(self._thread_id)
        asked_at = looked_at = time.monotonic()
        used_s, blocked_s, stall = cpu_s(), 0.0, None
        while not answered.wait(_LOOK_S) and not self._stop.is_set():
            look_s, look_used_s = time.monotonic() - looked_at, cpu_s() - used_s
            looked_at, used_s = looked_at + look_s, used_s + look_used_s
            where, run = self._author_function(), self.run
            if where is not None and run:
                if look_used_s >= _IDLE_SHARE * look_s:
                    blocked_s += look_used_s
                elif look_s < 2 * _LOOK_S:
                    blocked_s += look_s
                stall = where, run
            if looked_at - asked_at > self._patience_s and not answered.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(LoopKilled)
                )
                answered.wait(GRACE_S)
                return  # the error says where
        if stall is not None and blocked_s > BLOCKED_S:
            where, run = stall
            self.stalls[where][run] = max(blocked_s, self.stalls[where].get(run, 0.0))

    def _author_function(self) -> str | None:
        """Return the author's innermost running function; None if there is none or a thread is being started."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        while frame is not None and frame.f_code is not threading.Thread.start.__code__:
            code = frame.f_code
            if code.co_filename in self._author_files:
                return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
            frame = frame.f_back
        return None


def _cpu_clock(thread_id: int) -> Callable[[], float]:
    """Return a clock of a thread's CPU seconds; outside Linux, of the whole process's."""
    if sys.platform == "linux":
        return partial(time.clock_gettime, time.pthread_getcpuclockid(thread_id))
    return time.process_time


def author_files(cls: type) -> frozenset[str]:
    """Return the files that define `cls` and its bases outside the library's runtime."""
    files = set()
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        file = getattr(module, "__file__", None)  # builtin modules have none
        if file and base.__module__ not in ("abc", "atroposlib.envs.base"):
            files.add(file)
    return frozenset(files)


def open_handles() -> set[int]:
    """Return the descriptors below the lowest free one, which rises when a handle is left open."""
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    return set(range(lowest_free))


def kind_of_handle(handle: int) -> str:
    """Return "socket", "pipe", "file", or "handle" for a closed descriptor."""
    try:
        mode = os.fstat(handle).st_mode
    except OSError:  # closed meanwhile
        return "handle"
    return "socket" if stat.S_ISSOCK(mode) else "pipe" if stat.S_ISFIFO(mode) else "file"


def child_processes() -> set[Any]:
    """Return the running processes that `subprocess`, asyncio or `multiprocessing` started.

    `subprocess` keeps the `Popen` of a running process even if the author dropped it.
    """
    if sys.platform == "linux":  # without any child, skip the search of the heap
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()
    return {
        *multiprocessing.active_children(),
        *(
            found
            for found in gc.get_objects()
            if issubclass(type(found), subprocess.Popen) and found.returncode is None
        ),
    }


def end_processes(processes: Collection[Any]) -> None:
    """Kill the processes that the environment left running."""
    for process in processes:
        process.kill()
        process.join() if isinstance(process, BaseProcess) else process.wait()


def leaked(stock: Sequence[set[Any]]) -> set[Any]:
    """Return what the last runs added, if each of them added something that stayed.

    >>> leaked([{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}])
    {2, 3, 4}
    """
    recent = stock[-LEAKY_RUNS - 1 :]
    if len(recent) <= LEAKY_RUNS:
        return set()
    stayed = [
        (later - earlier) & recent[-1] for earlier, later in zip(recent, recent[1:], strict=False)
    ]
    return set().union(*stayed) if all(stayed) else set()


def run_in_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run`, but do not wait for tasks that ignore cancellation."""
    loop = asyncio.new_event_loop()
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
    """Await a call for at most `timeout_s`. Raises its error, as `Unfinished` if that is not an Exception.

    On a timeout, `give_up()` is called before the call is cancelled.
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
    """Return the first error of a kind in an error or exception group."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for e in error.exceptions if (found := _find(e, kind))), None)
    return error if isinstance(error, kind) else None


def describe(error: BaseException) -> str:
    """Return an error's type, message and innermost location."""
    if isinstance(error, Unfinished):
        return str(error)
    trace = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(trace[-1].filename).name}:{trace[-1].lineno})" if trace else ""
    return f"{type(error).__name__}: {str(error):.300}{place}"


def copy_of(item: Any) -> Any:
    """Return a deep copy, because a run may change its item; the item itself if it cannot be copied."""
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 - copying arbitrary items may raise anything
        return item


@contextlib.contextmanager
def other_time() -> Iterator[None]:
    """Shift `time.time`; `monotonic` and `perf_counter` are unchanged."""
    real = time.time
    time.time = lambda: real() + _OTHER_TIME_S
    try:
        yield
    finally:
        time.time = real
