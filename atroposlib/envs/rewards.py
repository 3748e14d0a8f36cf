"""Run a scoring function in a worker process that can be killed.

On a model's text, scoring code may hang, exhaust memory, call `sys.exit` or crash in C. Each costs one `RewardFailure`:
the environment continues, and the answer does not get a score of zero.

    async with RewardWorkers(num_workers=2, preload=("math_verify",)) as workers:
        outcome = await workers.run(score_answer, gold, completion, timeout_s=10)

Functions are sent by name, arguments and results as JSON; nothing is pickled. A worker is a `reward_worker` process in
its own session that exchanges JSON lines over a pipe.

Every call has a random nonce, which its reply repeats. A reply without it, or output between two calls, ends the
worker, so no call gets another's reply. This protects against accidents only: model text that a scoring function runs
in its own process (`exec`) can still forge the result. Run such text with `sandbox.run_code`, in a process that has
neither this pipe nor the expected answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from atroposlib.envs.keeper import IS_LINUX, kill_group
from atroposlib.envs.reward_worker import MAX_LOGGED_LINES, TAIL_BYTES
from atroposlib.envs.sandbox import hide_if_programs_share_the_user
from atroposlib.errors import EnvError

logger = logging.getLogger(__name__)

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, or lists and string-keyed dicts of these."""

FailureReason: TypeAlias = Literal["timeout", "exception", "memory", "crash", "output"]

_STARTUP_TIMEOUT_S = 120.0
"""To start Python and import the preloaded modules, on a busy machine."""
_EXIT_GRACE_S = 2.0
"""To exit after the pipe was closed; a process still running then has closed the pipe itself."""
_NUM_PASSES_TO_READ = 3
"""Event loop iterations until data in a pipe has reached the task that reads it."""
_END_TIMEOUT_S = 10.0
"""To end a worker and its descendants; a kill takes milliseconds on a responsive machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Scoring gave no value. It does not mean that the completion is wrong: do not treat it as zero."""

    reason: FailureReason
    """timeout: killed at the deadline. exception: the function raised, `SystemExit` included.
    memory: the limit was hit. crash: the process died. output: the result was too large, not JSON (NaN is not) or not
    the reply to this call."""
    detail: str
    """The end of the traceback or of the worker's stderr."""
    error: Exception | None = field(default=None, compare=False, repr=False)
    """The exception, if it was raised in this process."""

    def __bool__(self) -> bool:
        return False


class RewardWorkers:
    """A pool of worker processes; they start on first use and are replaced after a kill."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        memory_limit_mb: int | None = 2048,
        max_output_bytes: int = 1 << 20,
        preload: Sequence[str] = (),
    ) -> None:
        """Configure the pool.

        `memory_limit_mb` limits the address space of each worker, and of each process it starts, in MiB (None: no
        limit). `max_output_bytes` limits one result's JSON. `preload` names modules that every worker imports when it
        starts, so that slow imports do not count against a call's deadline.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least one worker is needed")
        settings = {
            "memory_limit_mb": memory_limit_mb,
            "max_output_bytes": max_output_bytes,
            "preload": [*preload],
        }
        logged: set[str] = set()
        self._workers = [_Worker(settings, logged) for _ in range(num_workers)]
        self.num_calls = 0
        self.failures: Counter[FailureReason] = Counter()
        """Calls that gave no value, by reason."""
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def run(
        self, function: Callable[..., JsonValue] | str, *args: JsonValue, timeout_s: float
    ) -> JsonValue | RewardFailure:
        """Call `function(*args)` in a worker; return its value or a `RewardFailure`.

        `function` is a module-level function or its name, `"package.module:function"`. `timeout_s` limits the call
        alone, in seconds of wall-clock time, without the wait for a free worker and its start. Raises `TypeError` for
        arguments that are not JSON, and `EnvError` when the function cannot be imported or a worker does not start.
        """
        nonce = secrets.token_hex(16)
        request = json.dumps({"nonce": nonce, **_address(function), "args": args}).encode() + b"\n"
        worker = await self._idle.get()
        try:
            outcome = await worker.call(request, nonce, timeout_s)
        finally:
            self._idle.put_nowait(worker)
        self.num_calls += 1
        if isinstance(outcome, RewardFailure):
            self._count(outcome)
        return outcome

    def _count(self, failure: RewardFailure) -> None:
        """Log the first failure of each reason and every hundredth as a warning, others at DEBUG."""
        self.failures[failure.reason] += 1
        count = self.failures[failure.reason]
        level = logging.WARNING if count == 1 or count % 100 == 0 else logging.DEBUG
        logger.log(
            level, "no score (%s, %d so far): %s", failure.reason, count, failure.detail[-1000:]
        )

    @property
    def num_unasked(self) -> int:
        """Workers that were replaced because they wrote to their pipe between two calls."""
        return sum(worker.num_unasked for worker in self._workers)

    async def close(self) -> None:
        """Kill every worker and its descendants."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        if self.num_calls:
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.failures.items()))
            logger.info("%d scoring calls; failed: %s", self.num_calls, reasons or "none")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Worker:
    """The parent's side of one worker process: idle or in one call."""

    def __init__(self, settings: dict[str, Any], logged: set[str]) -> None:
        self._logged = logged
        """Warnings that the pool's workers have sent; each is logged once."""
        self._settings = json.dumps(settings)
        self._line_limit = settings["max_output_bytes"] + TAIL_BYTES + 1024
        self._process: asyncio.subprocess.Process | None = None
        self._first_byte: asyncio.Task[bytes] | None = None
        """Reads the first byte of the next reply; done on an idle worker if it wrote unexpected output or ended."""
        self._drain: asyncio.Task[None] | None = None
        self._stderr_tail = b""
        self.num_unasked = 0

    async def call(self, request: bytes, nonce: str, timeout_s: float) -> JsonValue | RewardFailure:
        try:
            process = await self._ensure_started()
            async with asyncio.timeout(timeout_s):
                line = await self._exchange(process, request)
            reply = await self._reply_in(line, process, nonce)
        except TimeoutError:
            await self.kill()
            return RewardFailure(reason="timeout", detail=f"no result within {timeout_s:g} s")
        except BaseException:
            await self.kill()
            raise
        if isinstance(reply, RewardFailure) or "is_worn" in reply:
            await self.kill()
        match reply:
            case RewardFailure():
                return reply
            case {"value": value}:
                return value
            case {"unusable": detail}:
                raise EnvError(f"the scoring function cannot be called: {detail}")
            case {"reason": reason, "detail": detail}:
                return RewardFailure(reason=reason, detail=detail)
        return RewardFailure(reason="output", detail=f"the reply has no result: {reply!r:.200}")

    async def _ensure_started(self) -> asyncio.subprocess.Process:
        if self._process is not None:
            for _ in range(_NUM_PASSES_TO_READ):
                await asyncio.sleep(0)
            if self._is_quiet(self._process):
                return self._process
        await self.kill()
        await asyncio.to_thread(hide_if_programs_share_the_user)
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "atroposlib.envs.reward_worker",
            self._settings,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=self._line_limit,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        self._drain = asyncio.create_task(self._keep_stderr_tail(process))
        try:
            async with asyncio.timeout(_STARTUP_TIMEOUT_S):
                ready = await self._reply_in(await self._next_line(process), process, nonce="")
        except TimeoutError as error:
            raise EnvError(
                f"a reward worker did not start within {_STARTUP_TIMEOUT_S:g} s"
            ) from error
        if isinstance(ready, RewardFailure) or "unusable" in ready:
            detail = ready.detail if isinstance(ready, RewardFailure) else ready["unusable"]
            raise EnvError(f"a reward worker did not start: {detail}")
        return process

    def _is_quiet(self, process: asyncio.subprocess.Process) -> bool:
        """Whether an idle worker is usable: it runs and has written nothing since its last reply."""
        if self._first_byte is None or not self._first_byte.done():
            return process.returncode is None
        if self._first_byte.result():
            self.num_unasked += 1
            logger.log(
                logging.WARNING if self.num_unasked == 1 else logging.DEBUG,
                "a reward worker wrote to its pipe between two calls; replacing it",
            )
        return False

    async def _exchange(self, process: asyncio.subprocess.Process, request: bytes) -> bytes | None:
        assert process.stdin is not None
        self._stderr_tail = b""
        process.stdin.write(request)
        # If the worker has died, the read below returns an end of file.
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return await self._next_line(process)

    async def _next_line(self, process: asyncio.subprocess.Process) -> bytes | None:
        """Return the next line (partial if the pipe was closed); None if it exceeds its limit."""
        assert process.stdout is not None
        first = await self._first_byte if self._first_byte is not None else b""
        try:
            line = first if first == b"\n" else first + await process.stdout.readline()
        except ValueError:
            return None
        self._first_byte = asyncio.create_task(process.stdout.read(1))
        return line

    async def _reply_in(
        self, line: bytes | None, process: asyncio.subprocess.Process, nonce: str
    ) -> dict[str, Any] | RewardFailure:
        if line is None:
            return RewardFailure(reason="output", detail="the worker's reply exceeds its limit")
        if not line:
            return await self._ending_of(process)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            return RewardFailure(reason="output", detail=f"the result cannot be read: {error}")
        if not isinstance(reply, dict) or reply.pop("nonce", None) != nonce:
            detail = f"the worker's output is not the reply to this call: {line[:200]!r}"
            return RewardFailure(reason="output", detail=detail)
        for text in map(str, reply.pop("logged", ())):
            if text not in self._logged and len(self._logged) < MAX_LOGGED_LINES:
                self._logged.add(text)
                logger.warning("in a reward worker: %s", text)
        return reply

    async def _ending_of(self, process: asyncio.subprocess.Process) -> RewardFailure:
        """Return the failure for a worker that closed its pipe."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_GRACE_S):
                await process.wait()
                if self._drain is not None:
                    await self._drain
        if process.returncode is None:
            return RewardFailure(reason="output", detail="the scoring code closed the pipe")
        tail = self._stderr_tail.decode(errors="replace")
        detail = f"exit status {process.returncode}. {tail}".strip()
        return RewardFailure(reason="crash", detail=detail)

    async def _keep_stderr_tail(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        self._stderr_tail = b""
        while chunk := await process.stderr.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + chunk)[-TAIL_BYTES:]

    async def kill(self) -> None:
        """Kill the process and its descendants, and wait for it."""
        process, self._process = self._process, None
        readers = [task for task in (self._first_byte, self._drain) if task is not None]
        self._first_byte = self._drain = None
        if process is None:
            return
        # Before the first await: once the pipe is closed, the keeper kills them even if this call is cancelled.
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.transport.abort()
        if IS_LINUX:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # a fork of this process may hold the pipe open
        else:
            kill_group(process.pid)
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.error("reward worker %d does not end; killing its process group", process.pid)
            kill_group(process.pid)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _address(function: Callable[..., JsonValue] | str) -> dict[str, str | None]:
    """Return the function's module, the module's file as a fallback, and its qualified name."""
    if isinstance(function, str):
        module_name, separator, qualname = function.partition(":")
        if not (module_name and separator and qualname):
            raise ValueError(f"{function!r} does not have the form 'package.module:function'")
        return {"module": module_name, "file": None, "qualname": qualname}
    if "<" in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} is local; a worker needs a module-level function"
        )
    module = sys.modules[function.__module__]
    file = getattr(module, "__file__", None)  # a builtin module has none
    return {
        "module": function.__module__,
        "file": str(Path(file).resolve()) if file else None,
        "qualname": function.__qualname__,
    }
