"""Start, watch and stop a program that this process owns.

Owns one rule: nothing is ever signalled that was not started here. The program runs in a process group of its own;
stopping it touches that group alone. A program that dies is reported with the end of its log. Called by
the trainer's `vllm_process.py` and `run.py`; it does not know what the program does.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from atroposlib.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
LOG_TAIL_LINES = 15

# Linux only: asks the kernel to send SIGTERM to the program when its parent dies, then becomes the program.
# A child process does this instead of Popen's preexec_fn, which forks a multi-threaded torch process
# and runs Python in the copy (deprecated since Python 3.12). Arguments: parent's pid, then the command.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that asked for this program is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class OwnedProcess:
    """One program, from its command line to its end.

    `name` is how messages call it. `env` is the whole environment (None: inherit). Output goes to the end of
    `log_path`.

    As a context manager it is ready inside the block and gone after it. Without the block, the caller of `start()`
    calls `stop()` in a `finally`. On Linux the program also ends when the starting *thread* ends without either, for
    instance by SIGKILL: start it from a thread that lives as long as the program should.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        stop_grace_s: float = 5.0,
    ) -> None:
        if not argv:
            raise ConfigError(f"{name}: no command line")
        self.argv = [str(part) for part in argv]
        self.name = name
        self.log_path = Path(log_path)
        self._env = None if env is None else dict(env)
        self._stop_grace_s = stop_grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_status: int | None = None

    @property
    def pid(self) -> int | None:
        """The program's process id, which is also its process group; None when it does not run."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the program and return at once; `wait_ready` waits for it. ConfigError if it does not exist."""
        assert self._process is None, "start() called twice without stop()"
        self.check_program()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"\n--- {time.strftime('%F %T')} {' '.join(self.argv)}\n".encode())
            log.flush()
            self._exit_status = None
            self._process = subprocess.Popen(
                _tied_to_this_process(self.argv),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        logger.info("%s started as process %d", self.name, self._process.pid)

    def check_program(self) -> None:
        """Raise ConfigError if the program does not exist."""
        if shutil.which(self.argv[0]) is None:
            raise ConfigError(
                f"command {self.argv[0]!r} of the {self.name}: no such program; "
                "give the path of the Python whose environment holds it"
            )

    def wait_ready(self) -> None:
        """Return when the program can be used; a program that says nothing of itself can be at once."""
        self.check_alive()

    def poll(self) -> int | None:
        """The exit status, or None while the program runs or has not been started.

        Processes that a dead program left behind in its group are killed the moment its death is seen,
        before its process id can be given to anybody else.
        """
        process = self._process
        if process is not None:
            status = process.poll()
            if status is not None:
                self._bury(process, status)
        return self._exit_status

    def check_alive(self) -> None:
        """Raise `EngineError` with the end of the log if the program is not running."""
        status = self.poll()
        if status is not None:
            raise EngineError(
                f"{self.name} {_describe_exit(status)}; command: {' '.join(self.argv)}\n"
                f"{self.log_tail()}"
            )
        if self._process is None:
            raise EngineError(f"{self.name} was not started")

    def stop(self) -> None:
        """Ask the program to end, wait, then kill what is left of its group. Harmless when not running."""
        process = self._process
        if process is None or self.poll() is not None:
            return
        # The leader alone is asked: vLLM's workers end by its order, and complain when signalled themselves.
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(self._stop_grace_s)
        except subprocess.TimeoutExpired:
            logger.warning(
                "%s ignored SIGTERM for %.0f s and is killed", self.name, self._stop_grace_s
            )
            process.kill()
            status = process.wait()
        self._bury(process, status)
        logger.info("%s stopped", self.name)

    def log_tail(self) -> str:
        """The last lines that speak of an error, then the last lines, of this run's log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"(no log at {self.log_path})"
        starts = [i for i, line in enumerate(lines) if line.startswith("--- ")]
        lines = lines[starts[-1] :] if starts else lines
        tail = lines[-LOG_TAIL_LINES:]
        # vLLM ends with pages of shutdown noise; the reason stands further up.
        errors = [line for line in lines[:-LOG_TAIL_LINES] if "Error" in line or "ERROR" in line]
        shown = [*errors[-LOG_TAIL_LINES:], "...", *tail] if errors else tail
        return "\n".join([f"end of {self.log_path}:", *(f"  {line[:500]}" for line in shown)])

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _bury(self, process: subprocess.Popen[bytes], status: int) -> None:
        """Record the leader's end and kill what remains of its group; once, whichever thread sees it first."""
        if self._process is not process:
            return
        self._exit_status = status
        self._process = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no process was left


def _tied_to_this_process(argv: list[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return argv
    return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *argv]


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"
