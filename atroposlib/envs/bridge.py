"""`Bridge`: calls functions of a Python file that runs in another interpreter, for libraries whose pins exclude ours.

    bridge = Bridge(python="venv/bin/python", script=Path("their_side.py"), settings={"id": "x"})
    description = await bridge.open()
    result = await bridge.call("rollout", index=3)
    await bridge.close()

The child is `bridge_child.py`, which documents the protocol. It ends with this process, also if that is killed. If it
ends by itself, the calls in flight raise EnvError, `num_ended` counts it, and the next call starts another. A call that
is cancelled is cancelled in the child; a child that does not react is killed. Its stderr is logged line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.envs import bridge_child
from atroposlib.envs.child_variables import child_variables, reaching_loopback
from atroposlib.envs.keeper import IS_LINUX, kill_group
from atroposlib.errors import EnvError

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 600.0
"""To start; loading another library's tasks may download them."""
CANCEL_GRACE_S = 10.0
"""For the child to end a cancelled call."""
_CLOSE_TIMEOUT_S = 10.0
"""For the child to end after the pipe was closed; its keeper kills the server after 3 s."""
_LINE_LIMIT = 1 << 28
"""Bytes of one message."""
_NUM_LAST_LINES = 15
"""Lines of the child's stderr that an error shows."""


@dataclass(slots=True, kw_only=True)
class _BridgeProcess:
    process: asyncio.subprocess.Process
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_LAST_LINES))
    replies: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Calls in flight, cancelled ones included."""
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        """Kill the child; on Linux its keeper does, together with what it started."""
        if IS_LINUX:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
        else:
            kill_group(self.process.pid)

    def fail_calls(self, reason: str) -> None:
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(EnvError(reason))
        self.replies.clear()


class Bridge:
    """Calls functions in a child process, which it starts and restarts."""

    def __init__(
        self,
        *,
        python: str,
        script: Path,
        settings: Mapping[str, Any],
        remedy: str = "",
        variables: Iterable[str] = (),
    ) -> None:
        """Configure the child; it is started by the first call.

        `python` is its interpreter, "" for this one; `remedy` is added to the error of a missing module; `variables`
        names environment variables that it gets besides `child_variables`.
        """
        self.num_ended = 0
        """Children that ended by themselves or did not react."""
        self._python = python or sys.executable
        self._script = script
        self._settings = settings
        self._remedy = remedy
        self._variables = list(variables)
        self._description: Any = None
        self._child: _BridgeProcess | None = None
        self._starting = asyncio.Lock()  # only one call starts the child
        self._ids = itertools.count()

    async def open(self) -> Any:
        """Start the child, unless it runs, and return its description; EnvError if it does not start."""
        await self._running()
        return self._description

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a function in the child. Raises EnvError if it raised, or if the child ended."""
        child = await self._running()
        call_id = next(self._ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        child.send({"id": call_id, "call": name, "arguments": arguments})
        child.replies[call_id] = reply
        try:
            return await reply
        except asyncio.CancelledError:
            if call_id in child.replies:
                child.send({"cancel": call_id})
                asyncio.get_running_loop().call_later(
                    CANCEL_GRACE_S, self._kill_unless_ended, child, call_id
                )
            raise

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await self._end(child)

    def _kill_unless_ended(self, child: _BridgeProcess, call_id: int) -> None:
        if call_id in child.replies:
            logger.error("%s does not end a cancelled call; killing it", self._script.stem)
            child.kill()

    async def _running(self) -> _BridgeProcess:
        async with self._starting:
            if self._child is None:
                self._child = await self._start()
            return self._child

    async def _start(self) -> _BridgeProcess:
        try:
            process = await asyncio.create_subprocess_exec(
                self._python,
                bridge_child.__file__,
                str(self._script),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
                start_new_session=True,
                env=reaching_loopback(child_variables(self._variables)),
            )
        except OSError as error:
            raise EnvError(f"cannot run {self._python}: {error}") from error
        child = _BridgeProcess(process=process)
        child.readers.append(asyncio.create_task(self._log(child)))
        try:
            child.send(self._settings)
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                assert process.stdout is not None
                line = await process.stdout.readline()
            message = json.loads(line) if line else {"failed": await _ending_of(child)}
            if "ready" not in message:
                reason = str(message["failed"])
                remedy = self._remedy if "No module named" in reason else ""
                raise EnvError(
                    f"{self._script.stem} does not start in {self._python}: {reason}{remedy}"
                )
        except BaseException as error:
            await self._end(child)
            if isinstance(error, TimeoutError):
                raise EnvError(
                    f"{self._script.stem} did not start within {OPEN_TIMEOUT_S:g} s"
                ) from error
            raise
        self._description = message["ready"]
        child.readers.append(asyncio.create_task(self._read(child)))
        return child

    async def _read(self, child: _BridgeProcess) -> None:
        assert child.process.stdout is not None
        try:
            while line := await child.process.stdout.readline():
                self._take(child, json.loads(line))
        except ValueError as error:
            child.last_lines.append(f"a message cannot be read: {error}")
            child.kill()
        if self._child is not child:
            return  # closed
        self._child = None
        self.num_ended += 1
        reason = f"{self._script.stem} has ended: {await _ending_of(child)}"
        logger.error("%s", reason)
        child.fail_calls(reason)

    def _take(self, child: _BridgeProcess, message: dict[str, Any]) -> None:
        reply = child.replies.pop(message["id"], None)
        if reply is None or reply.done():
            return  # closed or cancelled
        if "error" in message:
            reply.set_exception(EnvError(f"{self._script.stem}: {message['error']}"))
        else:
            reply.set_result(message["result"])

    async def _log(self, child: _BridgeProcess) -> None:
        assert child.process.stderr is not None
        rest = b""
        while chunk := await child.process.stderr.read(1 << 16):
            *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
            if rest.endswith(b"\n") or len(rest) > 1 << 16:
                lines, rest = [*lines, rest], b""
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                child.last_lines.append(text)
                logger.info("%s: %s", self._script.stem, text)

    async def _end(self, child: _BridgeProcess) -> None:
        assert child.process.stdin is not None
        child.fail_calls(f"{self._script.stem} was closed")
        child.process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await child.process.wait()
        except TimeoutError:
            child.kill()
            await child.process.wait()
        for reader in child.readers:
            reader.cancel()
        await asyncio.gather(*child.readers, return_exceptions=True)


async def _ending_of(child: _BridgeProcess) -> str:
    """Return the exit status and the end of the stderr of a child that closed its pipe."""
    status = await child.process.wait()
    await child.readers[0]
    return "\n".join([f"exit status {status}", *child.last_lines])
