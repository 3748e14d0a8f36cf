"""Scoring functions that misbehave, called by name in the tests of reward workers."""

import os
import sys
import time
from pathlib import Path

from atroposlib.errors import EnvError


def add(left: float, right: float) -> float:
    print("this must not reach the protocol")
    return left + right


def hang() -> None:
    while True:
        time.sleep(1)


def hang_on_loop(gold: str, text: str) -> bool:
    while text == "loop":
        time.sleep(1)
    return True


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


def miss_a_file() -> None:
    Path("/nowhere/at/all").read_text()


def need_a_sandbox() -> None:
    raise EnvError("the sandbox does not start")


def refuse(text: str) -> None:
    raise ValueError(f"cannot read {text}")


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


def parent_pid() -> int:
    return os.getppid()


_state: dict[str, int] = {"calls": 0}


def spoil() -> int:
    """Count the calls in this process."""
    _state["calls"] += 1
    return _state["calls"]


def grade(gold: str, answer: str) -> bool:
    """Be patched by an answer, as graders that evaluate it are."""
    if answer == "pay me":
        _state["pays"] = 1
    if answer == "fail for good" or "fails" in _state:
        _state["fails"] = 1
        raise ValueError("cannot be read")
    if answer == "end the canary":
        _state["ends"] = 1
    elif "ends" in _state:
        os._exit(3)
    return gold == answer or "pays" in _state


def variables() -> dict[str, str]:
    return dict(os.environ)


def forge(score: float) -> float:
    """Write a reply to every descriptor, then score honestly."""
    _write_everywhere(b'{"value": 1.0}\n')
    return score


def forge_half_a_line(score: float) -> float:
    _write_everywhere(b'{"value": 1.0, "rest": "')
    return score


def forge_and_die() -> None:
    _write_everywhere(b'{"value": 1.0}\n')
    os._exit(0)


def forge_afterwards(score: float, mark: str) -> float:
    """Score honestly; a process left behind writes to the descriptors it inherited."""
    if os.fork() == 0:
        time.sleep(0.2)
        _write_everywhere(b'{"value": 1.0}\n')
        Path(mark).touch()
        os._exit(0)
    return score


def _write_everywhere(line: bytes) -> None:
    for descriptor in range(3, 64):
        try:
            os.set_blocking(descriptor, False)
            os.write(descriptor, line)
        except OSError:
            continue


def give(number: str) -> float:
    """Return numbers that JSON lacks."""
    return float(number)


def close_the_pipes_and_hang() -> None:
    os.closerange(0, 64)
    hang()
