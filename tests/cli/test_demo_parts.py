"""Processes of the demo: watched, stopped with everything they started; no other process is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.cli._demo import parts as parts_module
from atroposlib.cli._demo.parts import Parts, terminate_like_interrupt
from atroposlib.errors import AtroposError, ConfigError, EngineError
from tests.faults.drivers import is_alive

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.setattr(parts_module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(parts_module, "STOP_GRACE_S", 1.0)
    with Parts(log_dir=tmp_path, env=os.environ) as running:
        yield running


def test_a_part_that_dies_is_named_with_its_status_and_the_end_of_its_log(parts: Parts) -> None:
    part = parts.start("hub", python("print('port in use'); raise SystemExit(3)"))
    with pytest.raises(EngineError, match=r"hub exited with status 3[\s\S]*port in use"):
        parts.wait_until(lambda: False, what="a healthy hub", timeout_s=10)
    assert part.poll() == 3


def test_a_part_killed_by_a_signal_is_reported_so(parts: Parts) -> None:
    pid = parts.start("engine", SLEEP).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="engine was ended by SIGKILL"):
        parts.wait_until(lambda: False, what="nothing", timeout_s=10)


def test_waiting_for_one_part_notices_the_death_of_another(parts: Parts) -> None:
    trainer = parts.start("trainer", SLEEP)
    parts.start("environment", python("raise SystemExit('no engine')"))
    with pytest.raises(EngineError, match=r"environment exited with[\s\S]*no engine"):
        parts.wait(trainer, meanwhile=lambda: None)


def test_waiting_calls_meanwhile_once_more_after_the_end(parts: Parts, tmp_path: Path) -> None:
    done = tmp_path / "done"
    trainer = parts.start("trainer", python(f"open({str(done)!r}, 'w')"))
    seen: list[bool] = []
    parts.wait(trainer, meanwhile=lambda: seen.append(done.exists()))
    assert seen[-1]
    parts.check()


def test_a_wait_for_a_running_part_ends_at_the_deadline(parts: Parts) -> None:
    trainer = parts.start("trainer", SLEEP)
    assert not parts.wait(trainer, meanwhile=lambda: None, deadline=time.monotonic())
    parts.check()


def test_a_part_that_fails_ends_the_wait_for_it(parts: Parts) -> None:
    trainer = parts.start("trainer", python("raise SystemExit(1)"))
    with pytest.raises(EngineError, match="trainer exited with status 1"):
        parts.wait(trainer, meanwhile=lambda: None)


def test_an_unfulfilled_wait_says_what_did_not_happen(parts: Parts) -> None:
    with pytest.raises(AtroposError, match=r"a healthy hub did not happen in 0\.05 s"):
        parts.wait_until(lambda: False, what="a healthy hub", timeout_s=0.05)


def test_a_command_that_does_not_exist_is_an_error_of_that_part(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="'/no/such/python' of the engine: no such program"):
        parts.start("engine", ["/no/such/python"])


def test_stop_ends_parts_with_their_children_and_spares_others(tmp_path: Path) -> None:
    child_pid = tmp_path / "child"
    spawn = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child_pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    bystander = subprocess.Popen(SLEEP)
    try:
        with Parts(log_dir=tmp_path, env=os.environ) as parts:
            pid = parts.start("environment", python(spawn)).pid
            assert pid is not None
            parts.wait_until(
                lambda: child_pid.exists() and child_pid.read_text() != "",
                what="a child",
                timeout_s=10,
            )
        assert not is_alive(pid)
        assert not _is_alive_soon(int(child_pid.read_text()))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_part_deaf_to_sigterm_is_killed(parts: Parts, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w')\ntime.sleep(600)"
    )
    part = parts.start("engine", python(deaf))
    parts.wait_until(ready.exists, what="readiness", timeout_s=10)
    parts.stop(part)
    assert part.poll() == -signal.SIGKILL


def test_sigterm_unwinds_like_ctrl_c_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_like_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def _is_alive_soon(pid: int) -> bool:
    for _ in range(100):
        if not is_alive(pid):
            return False
        time.sleep(0.01)
    return True
