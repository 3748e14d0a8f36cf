"""The processes of the demo: started in their own sessions, watched, and stopped together.

Invariant: every process started here is stopped, and no other. Signals go only to process groups created here, and
only while their leader is not reaped, so that its id cannot have been reused.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from atroposlib.errors import AtroposError

POLL_INTERVAL_S = 0.1
STOP_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
_TAIL_LINES = 25


class PartDied(AtroposError):
    """A process of the demo ended unexpectedly."""


class Part:
    """One process with its own session and log file."""

    def __init__(
        self, name: str, command: Sequence[str], *, log_path: Path, env: Mapping[str, str]
    ) -> None:
        """Start the command; stdout and stderr go to `log_path`."""
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        try:
            with log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    start_new_session=True,
                )
        except OSError as error:
            raise PartDied(f"the {name} could not be started: {command[0]}: {error}") from error

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs. Does not reap it."""
        if self._process.returncode is not None:
            return self._process.returncode
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        exited = result.si_code == os.CLD_EXITED
        return result.si_status if exited else -result.si_status

    def signal(self, number: int) -> None:
        """Signal the process group, unless the process was already reaped."""
        if self._process.returncode is None:
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Kill the rest of the group and reap the process, which adds its CPU time to this process's children."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def death_notice(self) -> str:
        """Return a message with the exit status and the end of the log."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        status = self.exit_status()
        return (
            f"the {self.name} ended with exit status {status}; the end of {self.log_path}:\n{tail}"
        )


class Parts:
    """All running parts; the end of the context stops them."""

    def __init__(self, *, log_dir: Path, env: Mapping[str, str]) -> None:
        """`env` holds the environment variables of every part."""
        self._log_dir = log_dir
        self._env = dict(env)
        self._running: list[Part] = []
        self.commands: dict[str, list[str]] = {}
        """Command line of every started part, by name."""

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> Part:
        """Start a part that should run until it is stopped."""
        log_path = self._log_dir / f"{name.replace(' ', '_')}.log"
        part = Part(name, command, log_path=log_path, env={**self._env, **(env or {})})
        self._running.append(part)
        self.commands[name] = part.command
        return part

    def check(self, *, may_end: Part | None = None) -> None:
        """Raise `PartDied` if a part has ended, except `may_end` with status 0."""
        for part in self._running:
            status = part.exit_status()
            if status is not None and not (part is may_end and status == 0):
                raise PartDied(part.death_notice())

    def wait_until(self, is_true: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Poll until `is_true()`; raises when a part dies or after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            self.check()
            if time.monotonic() > deadline:
                raise AtroposError(f"{what} did not happen in {timeout_s:g} s; see {self._log_dir}")
            time.sleep(POLL_INTERVAL_S)

    def wait(self, part: Part, *, meanwhile: Callable[[], None]) -> None:
        """Wait until `part` ends with status 0, calling `meanwhile` at every poll; the others must keep running."""
        while part.exit_status() is None:
            self.check(may_end=part)
            meanwhile()
            time.sleep(POLL_INTERVAL_S)
        self.check(may_end=part)
        meanwhile()
        part.reap()
        self._running.remove(part)

    def stop(self, *parts: Part) -> None:
        """Stop the given parts (default: all): SIGTERM, then SIGKILL after `STOP_GRACE_S` seconds."""
        chosen = list(parts) or list(self._running)
        with _signals_ignored():
            for part in chosen:
                part.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_GRACE_S
            while any(part.exit_status() is None for part in chosen):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_INTERVAL_S)
            for part in chosen:
                part.reap()
                self._running.remove(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals while stopping, which is bounded in time: a second Ctrl-C must not leave processes running."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that contexts stop what they started."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def free_port() -> int:
    """Return a loopback port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
