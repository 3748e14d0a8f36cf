"""Find the author's functions that block the event loop, in the check and in a run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import operator
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

BLOCKED_S = 0.1
"""Code that occupies the event loop for longer than this blocks it."""
ENOUGH_RUNS = 3
"""A function that blocks the loop in this many runs is at fault; a single time may be an import."""
_GRACE_S = 0.5
_RUN_CALLBACK = asyncio.Handle._run.__code__


class LoopBlocked(BaseException):
    """Raised inside the author's code that blocked the event loop for the whole timeout."""

    def __init__(self) -> None:
        super().__init__("the event loop was blocked for the whole timeout")


@dataclass(slots=True)
class Stall:
    """How a function blocked the event loop."""

    num_runs: int = 0
    last_run: int = -1
    longest_s: float = 0.0


class _Look(NamedTuple):
    """What the loop's thread was seen to do."""

    function: str
    """The author's innermost one."""
    is_innermost: bool
    """Whether nothing called by it was running."""
    callback: int
    """Identifies what the loop runs, such as a task."""


class LoopWatch:
    """Pings the running event loop from a thread, and adds up how long an author's function runs without an answer.

    asyncio's debug mode reports slow callbacks, too, but names only their task. A busy machine is no fault of the
    function's: time that a thread waits for a CPU is not counted, and of the time before a late look (C code kept the
    GIL, also while it started a process, or this process was stopped) only the CPU time is.
    """

    def __init__(
        self, author_files: Collection[str], *, patience_s: float, look_s: float = 0.02
    ) -> None:
        """`patience_s`: time after which `LoopBlocked` is raised in an author's function that blocks the loop.

        `look_s`: time between two looks, each of which takes 0.3 ms of CPU; shorter stalls may be missed.
        """
        self.run = 0
        """Number of the author's call, set by the caller."""
        self.stalls: dict[str, Stall] = defaultdict(Stall)
        """By function (file:line). The thread adds to it: copy it before a loop.

        Sleeping calls of several tasks in a row are one stall, computing ones are not: agents that start together each
        build a client for 30 ms.
        """
        self.together: dict[str, Stall] = defaultdict(Stall)
        """As `stalls`, with the computing calls of several tasks in a row as one."""
        self.author_files = author_files
        self._patience_s = patience_s
        self._look_s = look_s
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._native_id = threading.get_native_id()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with (
            _kernel_file(self._native_id, "schedstat") as loop_stat,
            _kernel_file(threading.get_native_id(), "schedstat") as own_stat,
            _kernel_file(self._native_id, "stat") as loop_state,
        ):
            self._look_until_stopped(
                time.monotonic,
                time.process_time,
                lambda: _cpu_wait_s(loop_stat()),
                lambda: _cpu_wait_s(own_stat()),
                is_runnable=lambda: b") R" in loop_state(),
            )

    def _look_until_stopped(
        self, *clocks: Callable[[], float], is_runnable: Callable[[], bool]
    ) -> None:
        answered = threading.Event()
        answered.set()
        before, callback = [clock() for clock in clocks], 0
        slept_s = computed_s = computed_in_callback_s = 0.0
        while not self._stop.wait(self._look_s):
            now = [clock() for clock in clocks]
            passed_s, used_s, loop_waited_s, own_waited_s = map(operator.sub, now, before)
            before = now
            is_first = answered.is_set()
            if is_first:
                answered.clear()
                self._loop.call_soon_threadsafe(answered.set)
                slept_s = computed_s = computed_in_callback_s = 0.0
            look = self._look()
            if look is None:
                continue
            now_computed_s = min(passed_s, used_s)
            # Before the first look at a stall, the loop may have been idle while this thread had no CPU.
            known_s = self._look_s if is_first else min(passed_s, self._look_s + own_waited_s)
            # The kernel counts a wait when it has ended, so that it may belong to an earlier look.
            now_slept_s = known_s - loop_waited_s - now_computed_s
            is_late = passed_s - own_waited_s > 1.5 * self._look_s
            if (
                is_late or is_runnable()
            ):  # of C code without the GIL, such as OpenSSL's: it waits for a CPU
                now_slept_s = min(now_slept_s, 0.0)
            slept_s = max(slept_s + now_slept_s, 0.0)
            computed_s += now_computed_s
            computed_in_callback_s += now_computed_s
            if look.callback != callback:  # others may have ended while this thread had no CPU
                callback = look.callback
                computed_in_callback_s = max(now_computed_s - own_waited_s, 0.0)
            self._note(self.stalls, look.function, slept_s + computed_in_callback_s)
            self._note(self.together, look.function, slept_s + computed_s)
            # Elsewhere than in the author's own lines it could be the callback of a weak reference, which drops it.
            if slept_s + computed_s > self._patience_s * (1 if look.is_innermost else 2):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(LoopBlocked)
                )
                answered.wait(_GRACE_S)

    def _note(self, stalls: dict[str, Stall], where: str, blocked_s: float) -> None:
        if blocked_s > BLOCKED_S:
            stall = stalls[where]
            stall.num_runs += stall.last_run != self.run
            stall.last_run = self.run
            stall.longest_s = max(blocked_s, stall.longest_s)

    def _look(self) -> _Look | None:
        """Find the author's innermost function that the loop runs; None if it runs none."""
        found, frames = None, []
        for frame, _ in traceback.walk_stack(_frame_of(self._thread_id)):
            code = frame.f_code
            if code is _RUN_CALLBACK:  # what is below runs the loop, also a program of the author's
                return None if found is None else _Look(*found, callback=frames[-1])
            frames.append(id(frame))
            if found is None and code.co_filename in self.author_files:
                place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                found = f"{code.co_qualname} ({place})", len(frames) == 1
        return None  # the loop is idle


@contextlib.contextmanager
def _kernel_file(native_thread_id: int, name: str) -> Iterator[Callable[[], bytes]]:
    """Yield a function that reads what the kernel says of a thread; b"" where it does not say.

    The file stays open: `open_handles` counts descriptors.
    """
    path = Path(f"/proc/self/task/{native_thread_id}/{name}")
    if not path.exists():
        yield lambda: b""
        return
    with path.open("rb") as file:
        yield lambda: os.pread(file.fileno(), 500, 0)


def _cpu_wait_s(schedstat: bytes) -> float:
    """Return the seconds that a thread has waited for a CPU; 0 if unknown."""
    return int(schedstat.split()[1]) / 1e9 if schedstat else 0.0


def _frame_of(thread_id: int) -> FrameType | None:
    """Return the frame that a thread is in.

    `sys._current_frames` allocates while it holds a lock of the interpreter: a collection then, whose callbacks may
    let another thread run, could wait for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if was_enabled:
            gc.enable()


def author_files(cls: type) -> frozenset[str]:
    """Return the files, or cells of a notebook, that define `cls` and its bases outside the library."""
    bases = [
        base
        for base in cls.__mro__
        if base is not object and not base.__module__.startswith(("abc", "atroposlib.envs."))
    ]
    files = {getattr(sys.modules.get(base.__module__), "__file__", None) for base in bases}
    methods = (value for base in bases for value in vars(base).values())
    files |= {method.__code__.co_filename for method in methods if inspect.isfunction(method)}
    return frozenset(filter(None, files))  # a notebook has none
