"""What an environment does to its process: blocked event loops, and what is left open after an item.

`LoopWatch.selector` belongs into the event loop: the time between two of its `select` calls is the time in which
nothing else could run. What the thread spent waiting for a CPU, or for a thread it starts to begin, is taken off, so
that a busy machine causes no false finding. A second thread looks at where the loop's thread is meanwhile. Counts of
handles and children come from /proc or /dev/fd; None where the system has neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

BLOCKED_S = 0.1
"""Keeping the loop longer than this blocks it."""

LEAKY_RUNS = 3
"""Something leaks when each of this many runs in a row left more of it."""

_LOOK_S = 0.01


class LoopKilled(BaseException):
    """Raised inside code that kept the event loop past all patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The event loop did not turn for `seconds`."""

    run: int
    """Value of `LoopWatch.run` at the time."""
    seconds: float
    where: str | None
    """The author's innermost function and where it begins, `function (file:line)`; None if it was not observed."""


class LoopWatch:
    """Watches the event loop that was made with `selector`, between enter and exit in the loop's thread."""

    def __init__(self, author_files: Collection[str], *, patience_s: float) -> None:
        """After `patience_s` without a turn of the loop `LoopKilled` is raised in its thread."""
        self.run = -1
        """Set by the caller: what is being done; stalls are only recorded while it is 0 or more."""
        self.stalls: list[Stall] = []
        self.selector: selectors.BaseSelector = _WatchedSelector(self)
        self._author_files = author_files
        self._patience_s = patience_s
        self._turned_at: float | None = None
        """When callbacks began to run; None while the loop waits, or is not watched."""
        self._waited_s = 0.0
        self._starting_s = 0.0
        """What `Thread.start` took in this turn of the loop; it returns when the thread has had its first turn."""
        self._start_thread = threading.Thread.start
        self._busy_run = -1
        self._was_seen = False
        self._is_killed = False
        self._where: str | None = None
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._schedstat: int | None = None
        self._thread_id = 0

    def __enter__(self) -> Self:
        self._thread_id = threading.get_ident()
        self._watcher = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._schedstat = _open_schedstat(threading.get_native_id())
        self._watcher.start()
        self._start_thread = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            began = time.monotonic()
            self._start_thread(thread)
            if threading.get_ident() == self._thread_id:
                self._starting_s += time.monotonic() - began

        threading.Thread.start = start  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        threading.Thread.start = self._start_thread  # type: ignore[method-assign]
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        self._turned_at = None
        if self._schedstat is not None:
            os.close(self._schedstat)

    def begin(self, run: int) -> None:
        """Count what follows, up to `end`, as this run."""
        self.run = self._busy_run = run

    def end(self) -> None:
        """Leave the run; the turn of the loop that it ends in still counts."""
        self.run = -1

    def callbacks_begin(self) -> None:
        """Called by the selector when the loop is about to run callbacks."""
        if self._watcher is None or self._stop.is_set():
            return
        self._was_seen, self._where, self._busy_run = False, None, self.run
        self._is_killed = False
        self._starting_s = 0.0
        self._waited_s = _cpu_wait_s(self._schedstat)
        self._turned_at = time.monotonic()

    def callbacks_end(self) -> None:
        """Called by the selector when the loop is about to wait."""
        turned_at, self._turned_at = self._turned_at, None
        if turned_at is None:
            return
        blocked_s = time.monotonic() - turned_at
        if blocked_s <= BLOCKED_S or self._busy_run < 0 or self._is_killed:
            return  # the error names what was killed
        blocked_s -= _cpu_wait_s(self._schedstat) - self._waited_s + self._starting_s
        if blocked_s > BLOCKED_S and (self._where is not None or not self._was_seen):
            self.stalls.append(Stall(run=self._busy_run, seconds=blocked_s, where=self._where))

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            turned_at = self._turned_at
            if turned_at is None:
                continue
            busy_s = time.monotonic() - turned_at
            if busy_s > BLOCKED_S / 2:
                where = self._author_function()
                if self._turned_at == turned_at:
                    self._was_seen, self._where = True, where or self._where
            if busy_s > self._patience_s and not self._is_killed and self._turned_at == turned_at:
                self._is_killed = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(LoopKilled)
                )

    def _author_function(self) -> str | None:
        """Name the innermost function of the author's files; None when none of them is on the stack."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        while frame is not None:
            code = frame.f_code
            if code.co_filename in self._author_files:
                return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
            frame = frame.f_back
        return None


class _WatchedSelector(selectors.DefaultSelector):
    """Tells the watch when the loop waits."""

    def __init__(self, watch: LoopWatch) -> None:
        super().__init__()
        self._watch = watch

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        self._watch.callbacks_end()
        try:
            return super().select(timeout)
        finally:
            self._watch.callbacks_begin()


def author_files(cls: type) -> frozenset[str]:
    """Return the files that define `cls` and its bases outside the library's runtime."""
    files = set()
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        file = getattr(module, "__file__", None)  # builtin modules have none
        if file and base.__module__ not in ("abc", "atroposlib.envs.base"):
            files.add(file)
    return frozenset(files)


def open_handles() -> set[int] | None:
    """Return the open file descriptors of this process."""
    try:
        return {int(name) for name in os.listdir("/dev/fd")}
    except OSError:
        return None


def name_of_handle(handle: int) -> str:
    """Say what a descriptor leads to."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        return f"descriptor {handle}"


def children() -> dict[int, str] | None:
    """Return the child processes of this one and their names, zombies included."""
    if not Path("/proc/self/stat").exists():
        return None
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                name, _, rest = text.partition("(")[2].rpartition(")")
                if int(rest.split()[1]) == os.getpid():
                    found[int(entry)] = name
    return found


def leaked(stock: Sequence[set[Any]]) -> set[Any]:
    """Return what was added by the last runs, if every one of them added something that stayed."""
    recent = stock[-LEAKY_RUNS - 1 :]
    if len(recent) <= LEAKY_RUNS:
        return set()
    stayed = [
        (later - earlier) & recent[-1] for earlier, later in zip(recent, recent[1:], strict=False)
    ]
    return set().union(*stayed) if all(stayed) else set()


def end_children(before: Mapping[int, str]) -> None:
    """Kill the processes that the environment started and left."""
    for pid in (children() or {}).keys() - before.keys():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _open_schedstat(native_id: int) -> int | None:
    try:
        return os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
    except OSError:
        return None


def _cpu_wait_s(schedstat: int | None) -> float:
    """Return how long a Linux thread has waited for a CPU in its life (second field, nanoseconds)."""
    if schedstat is None:
        return 0.0
    fields = os.pread(schedstat, 128, 0).split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0
