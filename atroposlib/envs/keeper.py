"""Run code in a process whose descendants, daemons included, end with it. Standard library only, for any Python.

On Linux it is two processes: a child, which runs the code, and its keeper. The keeper adopts what the child starts and
kills it all when the child ends, on SIGTERM, or when the writer of its standard input closes that pipe or is killed.
Used by `reward_worker.py` and `bridge_child.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import IO

IS_LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Both from linux/prctl.h."""
_libc = ctypes.CDLL(None)


def run_kept(serve: Callable[[], None], *, grace_s: float = 0.0) -> None:
    """Call `serve` in a child; on other systems in this process.

    `serve` reads standard input. It has `grace_s` seconds to end by itself after the end of that.
    """
    if not IS_LINUX:
        serve()
        return
    keeper = os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # This process may be terminated before it has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:  # else the keeper died before prctl
            serve()
    else:
        _end_as(_keep(child, grace_s))


def prctl(option: int, value: int) -> None:
    """Change an attribute of this process; only Linux has these."""
    if IS_LINUX:
        _libc.prctl(option, value)


def reserve_pipes(output: int) -> tuple[IO[bytes], IO[bytes]]:
    """Return this process's standard input and output, and put /dev/null and `output`, a descriptor, in their place."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(output, 1)
    return pipes


def _keep(child: int, grace_s: float) -> int:
    """Wait for the end of the child or of its input, kill all descendants, and return the child's wait status."""
    # Only the child holds the reply pipe, so its end of file means that the child ended.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    poll = select.poll()
    # The child reads the input; a hang-up is reported without registering for it.
    poll.register(0, 0)
    poll.register(woken, select.POLLIN)
    deadline: float | None = None
    status = _collect(child)
    while status is None:
        left_s = None if deadline is None else deadline - time.monotonic()
        events = poll.poll(left_s and max(0.0, left_s * 1000))
        woken_by = [fd for fd, _ in events]
        if 0 in woken_by:
            poll.unregister(0)
            deadline = time.monotonic() + grace_s
        elif not events or signal.SIGTERM in os.read(woken, 4096):
            break
        status = _collect(child)
    kill_group(child)  # first: processes may fork faster than they can be listed
    while kill_children() or status is None:
        ended, code = os.waitpid(-1, 0)
        status = code if ended == child else status
    signal.set_wakeup_fd(-1)
    return status


def _end_as(status: int) -> None:
    """End this process as the child ended: with its exit status or by its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _collect(child: int) -> int | None:
    """Reap dead children; return the wait status of `child` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def kill_group(leader: int) -> None:
    """Kill the process group of `leader`, if it has not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def kill_children() -> bool:
    """Kill this process's children; return whether there were any, unreaped dead ones included."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        # A thread may have just ended, and some kernels lack this file.
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/self/task/{task}/children") as file,
        ):
            found += map(int, file.read().split())
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)
