"""Start, watch and stop a program that this process owns.

Invariant: only processes started here are signalled. The program runs in its own process group, and stopping it affects
only that group. A program that dies is reported with the end of its log. Called by the trainer's `vllm_process.py` and
`run.py` and by `atropos up` and the demo; it does not know what the program does.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from atroposlib.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
LOG_TAIL_LINES = 15

# Linux only: asks the kernel to send SIGTERM to the program when its parent dies, then executes the program. A forked
# process of the program's group then kills the group: vLLM ignores SIGTERM while it starts.
# Not Popen's preexec_fn, which runs Python in a fork of a multi-threaded torch process (deprecated since Python 3.12).
# Arguments: parent's pid, seconds between SIGTERM and SIGKILL, then the command.
_TIED_TO_PARENT = """
import ctypes, os, select, signal, sys
parent, grace_s, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(parent):
    sys.exit("the process that started this program has ended")
program = os.getpid()
if os.fork() == 0:
    end_of_program = os.pidfd_open(program)
    select.select([os.pidfd_open(int(parent))], [], [])
    select.select([end_of_program], [], [], float(grace_s))
    os.killpg(program, signal.SIGKILL)
os.execvp(command[0], command)
"""


class OwnedProcess:
    """One program, from its command line to its end.

    `name` is used in messages. `env` is the complete environment (None: inherit). Output is appended to `log_path`.

    As a context manager it is ready inside the block and stopped after it. Without the block, the caller of `start()`
    calls `stop()` in a `finally`. On Linux the program is sent SIGTERM when the *thread* that started it ends, for
    example by SIGKILL: start it from a thread that lives as long as the program should. If it ignores SIGTERM, its
    group is killed `stop_grace_s` after the end of this process.
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
        """The program's process id, which is also its process group; None if it does not run."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the program and return at once; `wait_ready` waits for it. ConfigError if it does not exist."""
        assert self._process is None, "start() called twice without stop()"
        if shutil.which(self.argv[0]) is None:
            raise ConfigError(
                f"command {self.argv[0]!r} of the {self.name}: no such program; "
                "give the path of the Python whose environment holds it"
            )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"\n--- {time.strftime('%F %T')} {' '.join(self.argv)}\n".encode())
            log.flush()
            self._exit_status = None
            self._process = subprocess.Popen(
                self._tied_to_this_process(),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        logger.info(
            "%s started as process %d; its log is %s", self.name, self._process.pid, self.log_path
        )

    def wait_ready(self) -> None:
        """Return when the program is ready; default: at once, if it is alive."""
        self.check_alive()

    def poll(self) -> int | None:
        """Return the exit status; None while the program runs or if it was never started.

        The rest of a dead program's group is killed as soon as its death is seen.
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
                f"{self.name} {describe_exit(status)}; command: {' '.join(self.argv)}\n"
                f"{self.log_tail()}"
            )
        if self._process is None:
            raise EngineError(f"{self.name} was not started")

    def stop(self) -> None:
        """Send SIGTERM, wait, then kill the rest of the group. Does nothing if it is not running."""
        process = self._process
        if process is None or self.poll() is not None:
            return
        # Only the leader: it stops vLLM's workers, which log errors when signalled themselves.
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(self._stop_grace_s)
        except subprocess.TimeoutExpired:
            logger.warning(
                "%s ignored SIGTERM for %.0f s; killing it", self.name, self._stop_grace_s
            )
            process.kill()
            status = process.wait()
        self._bury(process, status)
        logger.info("%s stopped", self.name)

    def log_tail(self) -> str:
        """Return the last lines with an error, then the last lines, of this run's log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"(no log at {self.log_path})"
        starts = [i for i, line in enumerate(lines) if line.startswith("--- ")]
        lines = lines[starts[-1] :] if starts else lines
        tail = lines[-LOG_TAIL_LINES:]
        # vLLM ends with many shutdown messages; the cause is logged before them.
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

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _tied_to_this_process(self) -> list[str]:
        if not sys.platform.startswith("linux"):
            return self.argv
        arguments = [str(os.getpid()), str(self._stop_grace_s), *self.argv]
        return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, *arguments]

    def _bury(self, process: subprocess.Popen[bytes], status: int) -> None:
        """Record the leader's exit status and kill the rest of its group; only the first call has an effect."""
        if self._process is not process:
            return
        self._exit_status = status
        self._process = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
            while True:  # the first process of a container inherits them, and must reap them
                os.waitpid(-process.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # no process is left


def check_port_is_free(host: str, port: int, *, user: str) -> None:
    """Raise `EngineError` if another process listens there; `user` is who wants to."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Like servers: ignore closing connections of an earlier process, but not a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise EngineError(
                f"{user}: cannot listen on port {port} of {host} ({e.strerror}). If another "
                "process uses it, stop that process or choose another port; it was left alone"
            ) from e


def describe_exit(status: int) -> str:
    """Say how a process ended.

    >>> describe_exit(3), describe_exit(-9)
    ('exited with status 3', 'was ended by SIGKILL')
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"
