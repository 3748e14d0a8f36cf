"""How a demo ends early: Ctrl-C and a dead part stop everything it started, with the right message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in its warm-up, with the hub running."""
    command = [sys.executable, "-m", "atroposlib.cli.demo", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts its background jobs, and so this test in one, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        try:
            _wait_until(lambda: len(_children(run.pid)) == 2, what="hub and warm-up")
            yield run
        finally:
            run.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything(demo: subprocess.Popen[str], number: signal.Signals) -> None:
    started = _children(demo.pid)
    demo.send_signal(number)
    _, said = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "Traceback" not in said
    _wait_for_the_end_of(started)


def test_a_dead_part_ends_the_demo_with_its_name_and_log(demo: subprocess.Popen[str]) -> None:
    started = _children(demo.pid)
    hub = next(pid for pid, command in started.items() if "run_api" in command)
    os.kill(hub, signal.SIGKILL)
    _, said = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "error: hub was ended by SIGKILL" in said
    assert "hub.log" in said
    _wait_for_the_end_of(started)


def _wait_for_the_end_of(pids: Iterable[int]) -> None:
    """Wait, since the demo does not wait for a part that it was just starting: the kernel ends that with it."""
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="their end")


def _children(parent: int) -> dict[int, str]:
    """Return the command lines of the processes that `parent` started."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text()
            command = (process / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and "-m atroposlib" in command:
            found[int(process.name)] = command
    return found


def _wait_until(is_true: object, *, what: str) -> None:
    assert callable(is_true)
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not appear"
        time.sleep(0.02)
