"""Programs of Python that end by themselves, the processes of this machine (Linux), and what a command refuses."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.processes import ROOT


def run_python(
    *arguments: object, timeout_s: float | None = None, cwd: Path = ROOT, **variables: str
) -> str:
    """Run Python with the repository in its path; it must end with status 0. Return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def wait_until(
    is_true: Callable[[], object], *, timeout_s: float = 30.0, said: Callable[[], str] = str
) -> None:
    """Poll until `is_true`; `said` is asked for the message of a failure."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


def processes() -> Iterator[tuple[int, int, str]]:
    """Return the id, the parent's id and the command line of every process that is no zombie."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # it has ended
            continue
        if state != "Z":
            yield int(folder.name), int(parent), command.decode(errors="replace")


def is_running(pid: int) -> bool:
    """Whether a process does work; a zombie does not."""
    return any(pid == each for each, *_ in processes())


def refusal(status: int, printed: Any) -> str:
    """Return the one line on stderr of a command that returned 2; `printed` is pytest's `capsys`."""
    assert status == 2
    message: str = printed.readouterr().err
    assert message.count("\n") == 1, message
    return message
