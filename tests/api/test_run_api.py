"""`run-api` as a process: start, refusals, stop."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from atroposlib.cli.run_api import is_loopback
from atroposlib.client import TrainerClient, TrainerRegistration

ROOT = Path(__file__).resolve().parents[2]


def start(cwd: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "atroposlib.cli.run_api", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


def listening_url(hub: subprocess.Popen[str]) -> str:
    assert hub.stdout is not None
    line = hub.stdout.readline()
    match = re.fullmatch(r"atropos hub listening on (http://\S+)\n", line)
    assert match, line
    return match[1]


def wait_until_answering(url: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_hub_says_where_it_listens_and_stops_cleanly(tmp_path: Path, stop: signal.Signals) -> None:
    with start(tmp_path, "--port", "0") as hub:
        url = listening_url(hub)
        try:
            wait_until_answering(url)
        finally:
            hub.send_signal(stop)
        output, errors = hub.communicate(timeout=20)
    assert hub.returncode == 0
    assert output == ""
    assert "Traceback" not in errors
    assert "warning" not in errors


def test_waiting_trainer_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    with start(tmp_path, "--port", "0") as hub:
        url = listening_url(hub)
        try:
            with TrainerClient(url) as trainer, ThreadPoolExecutor(1) as pool:
                trainer.register(
                    TrainerRegistration(
                        batch_size=4,
                        max_token_len=9,
                        checkpoint_dir="ck",
                        save_checkpoint_interval=1,
                        starting_step=0,
                        num_steps=1,
                    )
                )
                waiting = pool.submit(trainer.batch, 30.0)
                time.sleep(0.2)
                hub.terminate()
                assert waiting.result(timeout=20) is None
        finally:
            hub.terminate()
        _, errors = hub.communicate(timeout=20)
    assert hub.returncode == 0
    assert "Traceback" not in errors
    assert "exceeded" not in errors


def test_files_written_beside_the_hub_do_not_restart_it(tmp_path: Path) -> None:
    with start(tmp_path, "--port", "0") as hub:
        url = listening_url(hub)
        try:
            wait_until_answering(url)
            group = {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}
            httpx.post(f"{url}/scored_data", json=group).raise_for_status()
            (tmp_path / "step_1").mkdir()
            (tmp_path / "step_1" / "model.py").write_text("x = 1\n")
            time.sleep(0.5)
            assert httpx.get(f"{url}/status").json()["queue_size"] == 1
        finally:
            hub.terminate()
        output, _ = hub.communicate(timeout=20)
    assert (hub.returncode, output) == (0, "")


def test_port_in_use_names_the_port_and_the_cure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with start(tmp_path, "--port", str(port)) as hub:
            output, errors = hub.communicate(timeout=20)
    assert (hub.returncode, output) == (2, "")
    assert f"--port {port}: already in use" in errors
    assert "choose another port" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prot", "1"], "did you mean --port"),
        (["--port", "seventy"], "--port"),
        (["--port", "70000"], "--port"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ],
)
def test_wrong_flag_is_one_clear_line(tmp_path: Path, flags: list[str], message: str) -> None:
    with start(tmp_path, *flags) as hub:
        _, errors = hub.communicate(timeout=20)
    assert hub.returncode == 2
    assert message in errors
    assert "Traceback" not in errors


def test_open_address_is_warned_about(tmp_path: Path) -> None:
    with start(tmp_path, "--host", "0.0.0.0", "--port", "0") as hub:
        listening_url(hub)
        hub.terminate()
        _, errors = hub.communicate(timeout=20)
    assert hub.returncode == 0
    assert "there is no authentication" in errors


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_is_told_from_the_rest(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
