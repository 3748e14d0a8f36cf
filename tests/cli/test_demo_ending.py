"""How a demo ends early: Ctrl-C and a dead part stop everything it started, with the right message."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.builders.programs import is_running, processes, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in its warm-up, with the hub running."""
    command = [sys.executable, "-m", "atroposlib.cli.demo", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            wait_until(lambda: len(_children(run.pid)) == 5)
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
    wait_until(lambda: not any(map(is_running, pids)))


def _children(parent: int) -> dict[int, str]:
    """Return the command lines of the processes that `parent` started."""
    return {p: words for p, of, words in processes() if of == parent and "-m atroposlib" in words}
