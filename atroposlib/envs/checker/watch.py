"""What an environment does to its process: blocked event loops, and what is left open after an item.

A thread asks the loop for a sign of life every few milliseconds; while none comes it looks at what the loop's thread
is doing. Time in which that thread was only waiting for a CPU does not count as blocked, so that a busy machine
accuses nobody. Counts of handles and children come from /proc or /dev/fd; None where the system has neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

BLOCKED_S = 0.1
"""A callback that keeps the loop longer blocks it."""

_LOOK_S = 0.01
_WAITING_STATES = b"SD"
"""States of a Linux thread that waits for something else than a CPU: interruptible and uninterruptible sleep."""


class LoopKilled(BaseException):
    """Raised inside code that kept the event loop past all patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The event loop did not turn for `seconds`."""

    run: int
    """Value of `LoopWatch.run` at the time."""
    seconds: float
    where: str
    """The author's innermost function, and where it begins: `function (file:line)`."""


class LoopWatch:
    """Watches the running loop of the thread that enters it."""

    def __init__(self, author_files: Collection[str], *, patience_s: float) -> None:
        """After `patience_s` without a sign of life `LoopKilled` is raised in the loop's thread."""
        self.run = -1
        """Set by the caller: what is being done; stalls are only recorded while it is 0 or more."""
        self.stalls: list[Stall] = []
        self._author_files = author_files
        self._patience_s = patience_s
        self._turns = 0
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._watcher = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._watcher.join()

    def _turn(self) -> None:
        self._turns += 1

    def _watch(self) -> None:
        stat = _open_stat(self._native_id)
        try:
            while not self._stop.wait(_LOOK_S):
                self._wait_for_a_turn(stat)
        finally:
            if stat is not None:
                os.close(stat)

    def _wait_for_a_turn(self, stat: int | None) -> None:
        turns, run = self._turns, -1
        began, cpu_began = time.monotonic(), _cpu_s(self._thread_id)
        seen, waiting_s, where, is_killed = began, 0.0, "", False
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:  # the loop is closed
            return
        while self._turns == turns and not self._stop.wait(_LOOK_S):
            now = time.monotonic()
            if stat is None or _state(stat) in _WAITING_STATES:
                waiting_s += now - seen
            seen = now
            if now - began > BLOCKED_S / 2 and (seen_at := self._where()):
                where, run = seen_at, self.run
            if now - began > self._patience_s and not is_killed:
                is_killed = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(LoopKilled)
                )
        busy_s = _cpu_s(self._thread_id) - cpu_began
        blocked_s = min(time.monotonic() - began, waiting_s + busy_s)
        if run >= 0 and blocked_s > BLOCKED_S:
            self.stalls.append(Stall(run=run, seconds=blocked_s, where=where))

    def _where(self) -> str:
        """Name the innermost function of the author's files; "" when none of them is on the stack."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        while frame is not None:
            code = frame.f_code
            if code.co_filename in self._author_files:
                return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
            frame = frame.f_back
        return ""


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


def _cpu_s(thread_id: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread_id))
    except OSError:
        return 0.0


def _open_stat(native_id: int) -> int | None:
    try:
        return os.open(f"/proc/self/task/{native_id}/stat", os.O_RDONLY)
    except OSError:
        return None


def _state(stat: int) -> bytes:
    return os.pread(stat, 512, 0).rpartition(b")")[2].split()[0]
