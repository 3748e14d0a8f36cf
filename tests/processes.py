"""Start the project's own commands as real processes, and stop exactly those."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """Return a free loopback port that stays free while its server is restarted.

    It lies below the ports that Linux gives to outgoing connections (32768 and above), of which tests open thousands.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


_KILL_WHAT_IS_LEFT = """
import os, signal, sys
sys.stdin.read()  # until the test process has ended
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            if sys.argv[1].encode() in environment.read().split(b"\\0"):
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        continue  # it has ended
"""


@contextmanager
def leaving_no_process() -> Iterator[None]:
    """Kill what was started in the block and still runs when the block, or this process by SIGKILL, ends (Linux).

    A child is known by a variable that it inherits. A program that waits for the end of this process kills them.
    """
    name, value = "ATROPOS_TEST_PROCESS", uuid.uuid4().hex
    argv = [sys.executable, "-S", "-c", _KILL_WHAT_IS_LEFT, f"{name}={value}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True):
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]


class Process:
    """One child in a process group of its own; its output goes to `log_path`."""

    def __init__(self, name: str, argv: Sequence[str], *, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        with log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *argv],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log_path.parent,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": str(ROOT),
                },
                start_new_session=True,
            )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; on time-out fail with the log."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} still runs after {timeout_s} s:\n{self.log()[-4000:]}"
            ) from None

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Signal the child's group and return its exit code; SIGKILL after 15 s."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, sig)
            try:
                self.popen.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait()
        return int(self.popen.returncode)


@contextmanager
def running(name: str, argv: Sequence[str], *, log_path: Path) -> Iterator[Process]:
    """Run a command for the length of the block."""
    process = Process(name, argv, log_path=log_path)
    try:
        yield process
    finally:
        process.stop()


def wait_for(condition: Callable[[], bool], *, timeout_s: float, process: Process) -> None:
    """Poll until `condition` holds; fail with the log if the process ends or time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.popen.poll() is not None:
            raise AssertionError(
                f"{process.name} ended with {process.popen.returncode}:\n{process.log()[-4000:]}"
            )
        if time.monotonic() > deadline:
            raise AssertionError(
                f"{process.name}: nothing after {timeout_s} s:\n{process.log()[-4000:]}"
            )
        time.sleep(0.02)


def engine_argv(model: Path, port: int) -> list[str]:
    """The local engine with this model."""
    return ["-m", "atroposlib.engine", f"--model={model}", f"--port={port}"]


def parity_argv(model: Path, *, hub_url: str, engine_url: str) -> list[str]:
    """The environment of `parity_env.py`, which gives groups with any model."""
    return [
        str(ROOT / "tests" / "e2e" / "parity_env.py"),
        "serve",
        f"--env.rollout_server_url={hub_url}",
        f"--env.tokenizer_name={model}",
        f"--openai.base_url={engine_url}/v1",
        f"--openai.model_name={model}",
    ]


def answers(url: str, *, timeout_s: float = 5) -> bool:
    """Does a GET of `url` answer 200?"""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except OSError:
        return False
