"""Scoring functions that misbehave, addressed by name from the tests of the reward workers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def add(left: float, right: float) -> float:
    print("this must not reach the protocol")
    return left + right


def hang() -> None:
    while True:
        time.sleep(1)


def hang_with_a_child(pid_file: str) -> None:
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(child.pid))
    hang()


def leave() -> None:
    sys.exit(3)


def die() -> None:
    os.write(2, b"last words")
    os._exit(7)


def fail() -> None:
    raise ValueError("a bad completion")


def flood(num_bytes: int) -> str:
    return "x" * num_bytes


def flood_stderr(num_bytes: int) -> str:
    sys.stderr.write("y" * num_bytes)
    return "done"


def hoard(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def not_json() -> object:
    return object()


def pid() -> int:
    return os.getpid()
