"""Start processes in the order of their needs, watch them, restart them, and stop them all.

Invariants: only processes started here are signalled; when the context ends, none of them runs; if this process is
killed, the kernel stops them (`OwnedProcess`). Used by `atropos up` and by the demo.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import httpx

from atroposlib.cli.launch.run_file import Restart
from atroposlib.errors import ConfigError, EngineError, cause_of
from atroposlib.patience import Backoff
from atroposlib.utils.owned_process import OwnedProcess, check_port_is_free, describe_exit
from atroposlib.utils.wording import counted

State: TypeAlias = Literal["waiting", "starting", "running", "ready", "restarting", "ended"]
"""A program without a health check is `running`, never `ready`."""

POLL_INTERVAL_S = 0.1
CHECK_INTERVAL_S = 5.0
"""Between health checks of a part that is ready."""
CHECK_TIMEOUT_S = 5.0
STOP_GRACE_S = 15.0
"""Between SIGTERM and SIGKILL."""
CALM_S = 600.0
"""A part that has run for this long starts a new row of restarts."""
WRONG_FLAG = 2
MISUSED_S = 60.0
"""A command that ends with status 2 within this time has a wrong flag, which no restart mends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process to run."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """In addition to the launcher's."""
    url: str | None = None
    """Its address, `http://127.0.0.1:8000`; None for a program that is no server."""
    ready: str | None = None
    """Path at `url` that answers 200, `port` (it accepts connections), `exit` (it has ended with status 0), or None:
    as soon as it is started."""
    timeout_s: float = 600.0
    needs: Sequence[str] = ()
    """Names of programs that must be ready before."""
    restart: Restart = "never"
    max_restarts: int = 5


class Running:
    """A program and what became of it."""

    def __init__(self, program: Program, process: OwnedProcess) -> None:
        self.program = program
        self.process = process
        self.state: State = "waiting"
        self.num_restarts = 0
        self.ending = ""
        """How its last process ended."""
        self.task: asyncio.Task[None] | None = None
        self.is_ready = asyncio.Event()
        self.has_ended = asyncio.Event()
        """Set when it has ended for good, with status 0."""

    @property
    def name(self) -> str:
        return self.program.name


class Launcher:
    """The programs of one run. Made by `launched()`."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        log_dir: Path,
        env: Mapping[str, str],
        say: Callable[[str, str], None],
        first_pause_s: float,
    ) -> None:
        self._tasks = tasks
        self._log_dir = log_dir
        self._env = dict(env)
        self._say = say
        self._first_pause_s = first_pause_s
        trusted = ssl.create_default_context()  # SSL_CERT_FILE, but no proxy of the environment
        self._http = httpx.AsyncClient(timeout=CHECK_TIMEOUT_S, trust_env=False, verify=trusted)
        self.programs: dict[str, Running] = {}

    def start(self, program: Program) -> Running:
        """Start a program as soon as those that it needs are ready; they must have been given before."""
        env = {**self._env, **program.env}
        name, *arguments = program.argv
        process = OwnedProcess(
            [shutil.which(name, path=env.get("PATH")) or name, *arguments],
            name=program.name,
            log_path=self._log_dir / f"{program.name.replace(' ', '_')}.log",
            env=env,
            stop_grace_s=STOP_GRACE_S,
        )
        running = self.programs[program.name] = Running(program, process)
        running.task = self._tasks.create_task(self._run(running))
        return running

    def stop(self, *programs: Running) -> None:
        """Stop programs and wait for their ends: first those that no other one needs."""
        # Stopping is bounded in time, and a second Ctrl-C must not leave processes running.
        with _handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for running in programs:
                if running.task is not None:
                    running.task.cancel()
            remaining = list(programs)
            while remaining:
                needed = {need for each in remaining for need in each.program.needs}
                wave = [each for each in remaining if each.name not in needed] or remaining
                with ThreadPoolExecutor(max_workers=len(wave)) as pool:
                    list(pool.map(_stop, wave))
                remaining = [each for each in remaining if each not in wave]

    async def close(self) -> None:
        await self._http.aclose()

    async def _run(self, running: Running) -> None:
        program = running.program
        for need in program.needs:
            await self.programs[need].is_ready.wait()
        pauses = Backoff(first_s=self._first_pause_s, cap_s=30.0)
        while True:
            started_at = time.monotonic()
            status = await self._run_once(running)
            if status == 0 and program.restart != "always":
                running.state = "ended"
                if program.ready == "exit":
                    running.is_ready.set()
                running.has_ended.set()
                return
            lifetime_s = time.monotonic() - started_at
            if lifetime_s > CALM_S:
                pauses.reset()
            is_misused = status == WRONG_FLAG and lifetime_s < MISUSED_S
            num_restarts = pauses.num_failed
            if program.restart == "never" or num_restarts >= program.max_restarts or is_misused:
                raise _failure(running, num_restarts)
            pause_s = pauses.next()
            running.state = "restarting"
            running.is_ready.clear()
            self._say(running.name, f"{running.ending}; restart in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            running.num_restarts += 1

    async def _run_once(self, running: Running) -> int:
        """Start the process and return its exit status; end it if it is silent for too long."""
        program, process = running.program, running.process
        if program.url is not None:
            address = urlsplit(program.url)
            check_port_is_free(str(address.hostname), address.port or 80, user=program.name)
        running.state = "starting"
        process.start()
        if program.ready is None:
            self._now_ready(running)
        answered_at = checked_at = time.monotonic()
        ending = ""
        while (status := process.poll()) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
            now = time.monotonic()
            interval_s = CHECK_INTERVAL_S if running.is_ready.is_set() else 0.0
            if program.ready in (None, "exit") or now - checked_at < interval_s:
                continue
            checked_at = now
            if await self._answers(program):
                answered_at = now
                if process.poll() is None:  # else another process has answered
                    self._now_ready(running)
            elif now - answered_at > program.timeout_s:
                ending = f"did not answer for {program.timeout_s:g} s"
                await asyncio.to_thread(process.stop)
        running.ending = ending or describe_exit(status)
        return status

    def _now_ready(self, running: Running) -> None:
        running.state = "running" if running.program.ready is None else "ready"
        running.is_ready.set()

    async def _answers(self, program: Program) -> bool:
        assert program.url is not None
        if program.ready != "port":
            try:
                answer = await self._http.get(f"{program.url}{program.ready}")
            except httpx.TransportError:
                return False
            return answer.status_code == httpx.codes.OK
        address = urlsplit(program.url)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


@asynccontextmanager
async def launched(
    *,
    log_dir: Path,
    env: Mapping[str, str],
    say: Callable[[str, str], None] = lambda name, text: None,
    first_pause_s: float = 1.0,
) -> AsyncIterator[Launcher]:
    """Run programs inside the block; all are stopped at its end.

    `env` holds the environment variables of every program; `say` gets a program's name and a change of its state;
    `first_pause_s` is the pause before the first restart. If a program fails for good, the block is cancelled and its
    error raised. SIGTERM and SIGHUP cancel the block as Ctrl-C does under `asyncio.run`.
    """
    tasks = asyncio.TaskGroup()
    launcher = Launcher(tasks, log_dir=log_dir, env=env, say=say, first_pause_s=first_pause_s)
    with _handled_by(_interrupt_handler(), signal.SIGTERM, signal.SIGHUP):
        try:
            async with tasks:
                yield launcher
                launcher.stop(*launcher.programs.values())
        except BaseExceptionGroup as group:
            raise cause_of(group) from None
        finally:
            launcher.stop(*launcher.programs.values())
            await launcher.close()


@contextmanager
def locked(directory: Path, *, flag: str) -> Iterator[None]:
    """Hold the lock of a run's directory; ConfigError that begins with `flag` if another process holds it."""
    path = directory.with_name(f".{directory.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise ConfigError(f"{flag}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{flag}: another process runs there") from error
        yield


def free_port() -> int:
    """Return a loopback port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def terminate_like_interrupt() -> AbstractContextManager[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that contexts stop what they started."""
    return _handled_by(signal.default_int_handler, signal.SIGTERM)


def _interrupt_handler() -> Any:
    """Return the handler of Ctrl-C; a shell may have started this process with SIGINT ignored."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else signal.default_int_handler


@contextmanager
def _handled_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _stop(running: Running) -> None:
    running.state = "ended"
    running.process.stop()


def _failure(running: Running, num_restarts: int) -> EngineError:
    process = running.process
    after = f" after {counted(num_restarts, 'restart')}" if num_restarts else ""
    return EngineError(
        f"{running.name} {running.ending}{after}; command: {' '.join(process.argv)}\n"
        f"{process.log_tail()}"
    )
