"""`KeptProcess`: the parent's side of a process that calls `keeper.run_kept` and exchanges JSON lines over its pipes.

Its start is a task of its own, so that `end` also ends a process whose start was cancelled, however often.
Used by `rewards.py` and `bridge.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atroposlib.envs.keeper import IS_LINUX, kill_group
from atroposlib.errors import EnvError

_END_TIMEOUT_S = 10.0
"""To end when it is killed, which takes milliseconds on a responsive machine."""
_LAST_LINES_S = 1.0
"""For the end of its stderr to arrive."""
_NUM_LAST_LINES = 15
_MAX_LINE_BYTES = 1 << 16
"""A longer line of stderr is read as several."""


class KeptProcess:
    """A process from its start to its end."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        line_limit: int,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Begin to start it. `line_limit`: bytes of one message; `log` gets the lines of its stderr."""
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._starting = asyncio.create_task(self._start(argv, env, line_limit))

    async def _start(self, argv: Sequence[str], env: Mapping[str, str], line_limit: int) -> Process:
        pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "limit": line_limit}
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, **pipes, start_new_session=True, env=env
            )
        except OSError as error:
            raise EnvError(f"cannot run {argv[0]}: {error}") from error
        self._logging = asyncio.create_task(self._keep_last_lines(process))
        return process

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        is_started = self._starting.done() and self._starting.exception() is None
        return is_started and self._starting.result().returncode is None

    async def send(self, message: bytes) -> None:
        """Wait for its start and write a line; if it has ended, `receive` says so. EnvError if it cannot be run."""
        process = await asyncio.shield(self._starting)
        assert process.stdin is not None
        process.stdin.write(message + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return its next message; None if it has closed its pipe. ValueError for one that is too long or no JSON."""
        process = await asyncio.shield(self._starting)
        assert process.stdout is not None
        line = await process.stdout.readline()
        message: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return message

    def kill(self) -> None:
        """Kill it; on Linux its keeper does, together with what it started."""
        process = self._starting.result()
        if IS_LINUX:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # a fork of this process may hold the pipe open
        else:
            kill_group(process.pid)

    async def end(self, *, grace_s: float = 0.0) -> str:
        """Close its pipe, kill it after `grace_s` seconds, and return its exit status and the end of its stderr.

        A call that was cancelled can be repeated.
        """
        try:
            process = await asyncio.shield(self._starting)
        except EnvError as error:
            return str(error)
        assert process.stdin is not None
        # Before the next await: once the pipe is closed, the keeper kills them even if this call is cancelled.
        if not process.stdin.is_closing():
            process.stdin.close() if grace_s else process.stdin.transport.abort()
        for wait_s, kill in (
            (grace_s, self.kill),
            (_END_TIMEOUT_S, functools.partial(kill_group, process.pid)),
        ):
            try:
                async with asyncio.timeout(wait_s):
                    await process.wait()
                break
            except TimeoutError:
                kill()
        await asyncio.wait([self._logging], timeout=_LAST_LINES_S)
        self._logging.cancel()
        await asyncio.gather(self._logging, return_exceptions=True)
        return "\n".join([f"exit status {process.returncode}", *self._last_lines])

    async def _keep_last_lines(self, process: Process) -> None:
        assert process.stderr is not None
        rest = b""
        while rest or not process.stderr.at_eof():
            chunk = await process.stderr.read(_MAX_LINE_BYTES)
            *lines, rest = (rest + chunk).split(b"\n")
            if not chunk or len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                self._log(text)
