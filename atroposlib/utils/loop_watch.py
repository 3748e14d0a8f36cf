"""Find the author's functions that block the event loop, in the check and in a run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import operator
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Self

BLOCKED_S = 0.1
"""Code that occupies the event loop for longer than this blocks it."""
ENOUGH_RUNS = 3
"""A function that blocks the loop in this many runs is at fault; a single time may be an import."""
_GRACE_S = 0.5
_LOOK_S = 0.02
_LOOP_RUNNERS = (asyncio.BaseEventLoop.run_forever.__code__, asyncio.Runner.run.__code__)


class LoopBlocked(BaseException):
    """Raised inside code that blocked the event loop for the whole timeout."""

    def __init__(self) -> None:
        super().__init__("the event loop was blocked for the whole timeout")


class LoopWatch:
    """Pings the running event loop from a thread, and adds up how long an author's function runs without an answer.

    asyncio's debug mode reports slow callbacks, too, but names only their task. A busy machine is no fault of the
    function's: time that a thread waits for a CPU is not counted, and of the time before a late look (C code kept the
    GIL, also while it started a process, or this process was stopped) only the CPU time is.
    """

    def __init__(self, author_files: Collection[str], *, patience_s: float) -> None:
        """`patience_s`: time without an answer after which `LoopBlocked` is raised in the loop's thread."""
        self.run = 0
        """Number of the author's call, set by the caller."""
        self.stalls: dict[str, dict[int, float]] = defaultdict(dict)
        """Longest blocked time in seconds, by function (file:line), then by run."""
        self.author_files = author_files
        self._patience_s = patience_s
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
            _cpu_wait(self._native_id) as loop_wait,
            _cpu_wait(threading.get_native_id()) as own_wait,
        ):
            self._look_until_stopped(time.monotonic, time.process_time, loop_wait, own_wait)

    def _look_until_stopped(self, *clocks: Callable[[], float]) -> None:
        answered = threading.Event()
        answered.set()
        before = [clock() for clock in clocks]
        asked_at, blocked_s = before[0], 0.0
        while not self._stop.wait(_LOOK_S):
            now = [clock() for clock in clocks]
            passed_s, used_s, loop_waited_s, own_waited_s = map(operator.sub, now, before)
            before = now
            if answered.is_set():
                answered.clear()
                self._loop.call_soon_threadsafe(answered.set)
                asked_at, blocked_s = now[0], 0.0
            if where := self._author_function():
                is_late = passed_s - own_waited_s > 1.5 * _LOOK_S
                slept_s = 0.0 if is_late else _LOOK_S - loop_waited_s
                blocked_s += max(slept_s, min(passed_s, used_s))
                if blocked_s > BLOCKED_S:
                    longest_s = self.stalls[where].get(self.run, 0.0)
                    self.stalls[where][self.run] = max(blocked_s, longest_s)
            if now[0] - asked_at > self._patience_s:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(LoopBlocked)
                )
                answered.wait(_GRACE_S)

    def _author_function(self) -> str | None:
        """Return the author's innermost function in the loop; what started the loop, as a script does, is not in it."""
        for frame, _ in traceback.walk_stack(_frame_of(self._thread_id)):
            code = frame.f_code
            if code in _LOOP_RUNNERS:
                return None
            if code.co_filename in self.author_files:
                return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        return None


@contextlib.contextmanager
def _cpu_wait(native_thread_id: int) -> Iterator[Callable[[], float]]:
    """Yield a clock of the seconds that a thread has waited for a CPU; it stands still where the kernel does not say.

    Its file stays open: `open_handles` counts descriptors.
    """
    path = Path(f"/proc/self/task/{native_thread_id}/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    with path.open("rb") as stat:
        yield lambda: int(os.pread(stat.fileno(), 100, 0).split()[1]) / 1e9


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
    """Return the files that define `cls` and its bases outside the library."""
    modules = {base.__module__ for base in cls.__mro__} - {"abc"}
    own = [name for name in modules if not name.startswith("atroposlib.envs.")]
    files = (getattr(sys.modules.get(name), "__file__", None) for name in own)
    return frozenset(filter(None, files))  # builtin modules have none
