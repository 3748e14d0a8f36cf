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
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atroposlib.envs import bridge_child
from atroposlib.envs.child_variables import child_variables, reaching_loopback
from atroposlib.envs.kept_process import KeptProcess
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


class _Child(KeptProcess):
    """One child process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replies: dict[int, asyncio.Future[Any]] = {}
        """Calls in flight, cancelled ones included."""
        self.reader: asyncio.Task[None] | None = None
        """Takes the replies."""
        self.is_open = False
        """Whether it has started, and neither ended nor was closed."""

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
        self._child: _Child | None = None
        """Set until its end was awaited."""
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
        line = _line_of({"id": call_id, "call": name, "arguments": arguments})
        child.replies[call_id] = reply
        try:
            await child.send(line)
            return await reply
        except asyncio.CancelledError:
            if call_id in child.replies:
                await child.send(_line_of({"cancel": call_id}))
                asyncio.get_running_loop().call_later(
                    CANCEL_GRACE_S, self._kill_unless_ended, child, call_id
                )
            raise

    async def close(self) -> None:
        """End the child. A call that was cancelled can be repeated."""
        if (child := self._child) is None:
            return
        grace_s = 0.0
        if child.is_open and child.reader is not None:
            grace_s, child.is_open = _CLOSE_TIMEOUT_S, False
            child.reader.cancel()
            child.fail_calls(f"{self._script.stem} was closed")
        await child.end(grace_s=grace_s)
        if child.reader is not None:
            await asyncio.gather(child.reader, return_exceptions=True)
        if self._child is child:
            self._child = None

    def _kill_unless_ended(self, child: _Child, call_id: int) -> None:
        if call_id in child.replies:
            logger.error("%s does not end a cancelled call; killing it", self._script.stem)
            child.kill()

    async def _running(self) -> _Child:
        async with self._starting:
            if self._child is None or not self._child.is_open:
                await self.close()
                try:
                    await self._start()
                except BaseException:
                    await self.close()
                    raise
            assert self._child is not None
            return self._child

    async def _start(self) -> None:
        name = self._script.stem
        child = self._child = _Child(
            [self._python, bridge_child.__file__, str(self._script)],
            env=reaching_loopback(child_variables(self._variables)),
            line_limit=_LINE_LIMIT,
            log=lambda line: logger.info("%s: %s", name, line),
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await child.send(_line_of(self._settings))
                message = await child.receive()
        except TimeoutError as error:
            raise EnvError(f"{name} did not start within {OPEN_TIMEOUT_S:g} s") from error
        if message is None or "ready" not in message:
            ending = await child.end(grace_s=_CLOSE_TIMEOUT_S)
            reason = message["failed"] if message else ending
            remedy = self._remedy if "No module named" in reason else ""
            raise EnvError(f"{name} does not start in {self._python}: {reason}{remedy}")
        self._description = message["ready"]
        child.reader, child.is_open = asyncio.create_task(self._read(child)), True

    async def _read(self, child: _Child) -> None:
        fault = ""
        try:
            while (message := await child.receive()) is not None:
                self._take(child, message)
        except ValueError as error:
            fault = f"\na message cannot be read: {error}"
            child.kill()
        child.is_open = False
        self.num_ended += 1
        ending = await child.end(grace_s=_CLOSE_TIMEOUT_S)
        reason = f"{self._script.stem} has ended: {ending}{fault}"
        logger.error("%s", reason)
        child.fail_calls(reason)

    def _take(self, child: _Child, message: dict[str, Any]) -> None:
        reply = child.replies.pop(message["id"], None)
        if reply is None or reply.done():
            return  # closed or cancelled
        if "error" in message:
            reply.set_exception(EnvError(f"{self._script.stem}: {message['error']}"))
        else:
            reply.set_result(message["result"])


def _line_of(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()
