"""Calls of the author's code: what they leave in the process, and how their errors read.

`execution.py` makes the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import multiprocessing
import os
import re
import signal
import traceback
from collections.abc import Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from atroposlib.errors import EnvError

T = TypeVar("T")

GRACE_S = 0.5
"""Time for a cancelled call to end."""
ENOUGH_RUNS = 3
"""A leak in this many consecutive runs is a fault, and so is a function that blocks the loop in this many runs."""

PROC = Path("/proc")
"""Where Linux lists processes."""


class Unfinished(Exception):
    """The author's code did not end in time, or exited in a way that is not allowed."""


def open_handles() -> set[int]:
    """Return the descriptors below the lowest free one, which rises when a handle is left open."""
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    return set(range(lowest_free))


class ChildProcess(NamedTuple):
    """A process, as `/proc` names it."""

    pid: int
    started: str
    """In clock ticks since the machine's start: a pid may be given again."""

    def command(self) -> str:
        return (PROC / str(self.pid) / "cmdline").read_text().replace("\0", " ")


def child_processes() -> set[ChildProcess]:
    """Return every child that runs or was not waited for; none on a machine without `/proc`.

    With those of `multiprocessing`, whose parent may be its fork server, but no other children of children: a process
    that ran before the check may start some.
    """
    forked = {child.pid for child in multiprocessing.active_children()}
    found = set()
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            pid, state = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            if int(state[1]) == os.getpid() or pid in forked:
                found.add(ChildProcess(pid, state[19]))
    return found


def end_processes(processes: Collection[ChildProcess]) -> None:
    """Kill the processes that the environment left running, but not those that serve `multiprocessing` itself."""
    forked = {child.pid for child in multiprocessing.active_children()}
    for process in child_processes() & {*processes}:
        helper = r"multiprocessing\.(resource_tracker|forkserver)"
        with contextlib.suppress(OSError):  # it has ended
            # The server's children have its command line.
            if process.pid in forked or not re.search(helper, process.command()):
                os.kill(process.pid, signal.SIGKILL)


def leaked(stock: Sequence[set[Any]]) -> set[Any]:
    """Return what the last runs added, if each of them added something that stayed.

    >>> leaked([{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}])
    {2, 3, 4}
    """
    recent = stock[-ENOUGH_RUNS - 1 :]
    stayed = [(later - earlier) & recent[-1] for earlier, later in itertools.pairwise(recent)]
    return set().union(*stayed) if len(stayed) == ENOUGH_RUNS and all(stayed) else set()


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
