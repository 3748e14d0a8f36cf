"""Reward functions that do to their process what model-written text, or a tired author, can make them do.

`KINDS` says what each is expected to come to: a reason of `RewardFailure`, or None where a score comes back all the
same. Processes they leave behind write their ids to files, so that tests can ask whether they have gone.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCORE = 0.25


def note(folder: str, pid: int) -> None:
    (Path(folder) / f"{pid}.pid").touch()


def behave(folder: str) -> float:
    return SCORE


def loop_for_ever(folder: str) -> None:
    while True:
        pass


def hang_in_c(folder: str) -> None:
    """No signal that could be caught gets through."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    ctypes.CDLL(None).sleep(3600)


def hang_in_regex(folder: str) -> None:
    """Holds the interpreter's lock all the time."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def stop_itself(folder: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fork_and_wait(folder: str) -> None:
    """Children in its group, and a grandchild."""
    for _ in range(2):
        if os.fork() == 0:
            note(folder, os.getpid())
            if os.fork() == 0:
                note(folder, os.getpid())
            time.sleep(3600)
    time.sleep(3600)


def leave_a_daemon(folder: str) -> float:
    """A process of its own session that keeps this one's stderr open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(folder, os.getpid())
            time.sleep(3600)
        os._exit(0)
    os.wait()
    return SCORE


def leave_a_program(folder: str) -> float:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(3600)"], start_new_session=True
    )
    note(folder, child.pid)
    return SCORE


def daemon_and_die(folder: str) -> None:
    leave_a_daemon(folder)
    os._exit(9)


def fork_and_both_return(folder: str) -> float:
    """The child comes back as if it were the worker."""
    return 7.0 if os.fork() == 0 else SCORE


def fork_and_child_raises(folder: str) -> float:
    if os.fork() == 0:
        raise RuntimeError("in the child")
    return SCORE


def allocate_8_gb(folder: str) -> int:
    return len(bytearray(8 << 30))


def call_sys_exit(folder: str) -> None:
    sys.exit(0)


def call_os_exit(folder: str) -> None:
    os._exit(0)


def raise_system_exit(folder: str) -> None:
    raise SystemExit("enough")


def raise_keyboard_interrupt(folder: str) -> None:
    raise KeyboardInterrupt


def recurse_for_ever(folder: str) -> Any:
    return recurse_for_ever(folder)


def read_address_zero(folder: str) -> None:
    ctypes.string_at(0)


def print_1_gb(folder: str) -> float:
    block = "x" * (1 << 20)
    for _ in range(1024):
        print(block)
    return SCORE


def write_1_gb_to_stderr(folder: str) -> float:
    block = b"y" * (1 << 20)
    for _ in range(1024):
        os.write(2, block)
    return SCORE


def return_too_much(folder: str) -> str:
    return "z" * (8 << 20)


def return_no_json(folder: str) -> Any:
    return {1, 2}


def read_standard_input(folder: str) -> float:
    return SCORE + len(sys.stdin.read())


def close_every_file(folder: str) -> float:
    os.closerange(0, 1024)
    return SCORE


KINDS: dict[Callable[[str], Any], str | None] = {
    loop_for_ever: "timeout",
    hang_in_c: "timeout",
    hang_in_regex: "timeout",
    stop_itself: "timeout",
    fork_and_wait: "timeout",
    leave_a_daemon: None,
    leave_a_program: None,
    daemon_and_die: "crash",
    fork_and_both_return: None,
    fork_and_child_raises: None,
    allocate_8_gb: "memory",
    call_sys_exit: "exception",
    call_os_exit: "crash",
    raise_system_exit: "exception",
    raise_keyboard_interrupt: "exception",
    recurse_for_ever: "exception",
    read_address_zero: "crash",
    print_1_gb: None,
    write_1_gb_to_stderr: None,
    return_too_much: "output",
    return_no_json: "output",
    read_standard_input: None,
    close_every_file: "crash",
}
