"""Run a scoring function in a process that can be killed and that no other group's answers have met.

On a model's text, scoring code may hang, exhaust memory, call `sys.exit` or crash in C. Each costs one `RewardFailure`;
`DatasetEnv` decides what it means.

    async with RewardWorkers(num_workers=2, preload=("math_verify",)) as workers:
        outcome = await workers.run(score_answer, gold, completion, timeout_s=10)

Functions are sent by name, arguments and results as JSON; nothing is pickled. A worker is a `reward_worker` process in
its own session that exchanges JSON lines over a pipe. It imports, and forks a child for the calls of one scope (one
group), so what a call leaves in memory is gone with its group. It has the environment variables of `child_variables`,
and with `is_isolated` no network and few files where bubblewrap works.

Model text that a scoring function runs in its own process (`exec`) can still forge that call's result. Run such text
with `sandbox.run_code`, in a process that has neither this pipe nor the expected answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from atroposlib.envs.child_variables import child_variables
from atroposlib.envs.kept_process import KeptProcess
from atroposlib.envs.reward_worker import MAX_LOGGED_LINES, TAIL_BYTES
from atroposlib.envs.sandbox import hide_if_programs_share_the_user, isolated_command
from atroposlib.errors import EnvError

logger = logging.getLogger(__name__)

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, or lists and string-keyed dicts of these."""

FailureReason: TypeAlias = Literal["timeout", "exception", "memory", "crash", "output", "canary"]

_STARTUP_TIMEOUT_S = 120.0
"""To start Python and import the preloaded modules, on a busy machine."""
_GRACE_S = 60.0
"""For a worker, on a busy machine, to end a call at its deadline; then it is killed itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Scoring gave no value. Whether the completion is wrong or the item is faulty, `DatasetEnv.outcome_of` decides."""

    reason: FailureReason
    """timeout: killed at the deadline. exception: the function raised, `SystemExit` included.
    memory: the limit was hit. crash: the process died. output: the result was too large, not JSON (NaN is not) or not
    the reply to this call. canary: a known call had another value after this one."""
    detail: str
    """The end of the traceback or of the worker's stderr."""
    error: Exception | None = field(default=None, compare=False, repr=False)
    """The exception, if it was raised in this process; of a worker an OSError, which a text hardly causes."""
    is_faulty: bool = False
    """Whether the gold answer fails, too, so that the item is what is wrong."""

    def __bool__(self) -> bool:
        return False


class Canary(NamedTuple):
    """A call whose value is known, made after every other call to see whether that changed the grader."""

    function: Callable[..., JsonValue] | str
    args: Sequence[JsonValue]
    value: JsonValue


class RewardWorkers:
    """A pool of worker processes; they start on first use and are replaced after a kill."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        memory_limit_mb: int | None = 2048,
        max_output_bytes: int = 1 << 20,
        preload: Sequence[str] = (),
        variables: Sequence[str] = (),
        is_isolated: bool = False,
        canary: Canary | None = None,
    ) -> None:
        """Configure the pool.

        `memory_limit_mb` limits the address space of each process that makes calls, in MiB (None: no limit).
        `max_output_bytes` limits one result's JSON. `preload` names modules that every worker imports when it starts
        ("package.module", or "package.module:function" to also call one), so that they do not count against a call's
        deadline. `variables` are named environment variables that workers also get. `is_isolated` runs workers in
        bubblewrap, where it works: functions then have no network, and see only the packages, the folders of `sys.path`
        and a /tmp of their own.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least one worker is needed")
        settings = {
            "memory_limit_mb": memory_limit_mb,
            "max_output_bytes": max_output_bytes,
            "preload": [*preload],
        }
        logged: set[str] = set()
        self._workers = [
            _Worker(settings, logged, variables, is_isolated) for _ in range(num_workers)
        ]
        self.canary = canary
        self.num_calls = 0
        self.failures: Counter[FailureReason] = Counter()
        """Calls that gave no value, by reason."""
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def run(
        self,
        function: Callable[..., JsonValue] | str,
        *args: JsonValue,
        timeout_s: float,
        scope: str | None = None,
    ) -> JsonValue | RewardFailure:
        """Call `function(*args)` in a worker; return its value or a `RewardFailure`.

        `function` is a module-level function or its name, `"package.module:function"`. `timeout_s` limits the call
        alone, in seconds of wall-clock time, without the wait for a free worker and its start. Calls of one `scope` may
        share a process, one after another; None: the call has a process of its own. Raises `TypeError` for arguments
        that are not JSON, and `EnvError` when the function cannot be imported or a worker does not start.
        """
        self.num_calls += 1
        canary = self.canary and {
            "call": {**_address(self.canary.function), "args": self.canary.args},
            "value": self.canary.value,
        }
        request = {
            "call": {**_address(function), "args": args},
            "timeout_s": timeout_s,
            "scope": scope or str(self.num_calls),
            "canary": canary,
        }
        line = json.dumps(request).encode()
        worker = await self._idle.get()
        try:
            outcome = await worker.call(line, 2 * timeout_s + _GRACE_S)
        finally:
            self._idle.put_nowait(worker)
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

    def __init__(
        self,
        settings: dict[str, Any],
        logged: set[str],
        variables: Sequence[str],
        is_isolated: bool,
    ) -> None:
        self._logged = logged
        """Warnings that the pool's workers have sent; each is logged once."""
        self._settings = json.dumps(settings)
        self._line_limit = settings["max_output_bytes"] + 16 * TAIL_BYTES * MAX_LOGGED_LINES
        self._variables = variables
        self._is_isolated = is_isolated
        self._process: KeptProcess | None = None
        """Set until its end was awaited."""

    async def call(self, request: bytes, limit_s: float) -> JsonValue | RewardFailure:
        """Send a request and return the result; start the worker again if it ended before the reply."""
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._reply_to(request)
                if (
                    reply is None
                ):  # killed from outside, for example for want of memory: calls have their own process
                    await self.kill()
                    reply = await self._reply_to(request)
        except TimeoutError as error:
            await self.kill()
            raise EnvError(f"a reward worker gave no reply within {limit_s:g} s") from error
        except BaseException:
            await self.kill()
            raise
        if reply is None:
            raise EnvError(f"a reward worker ended: {await self.kill()}")
        for text in map(str, reply.get("logged", ())):
            if text not in self._logged and len(self._logged) < MAX_LOGGED_LINES:
                self._logged.add(text)
                logger.warning("in a reward worker: %s", text)
        match reply:
            case {"value": value}:
                return value
            case {"reason": reason, "detail": detail}:
                outage = OSError(detail) if reply.get("is_outage") else None
                return RewardFailure(reason=reason, detail=detail, error=outage)
        raise EnvError(f"the scoring function cannot be called: {reply['unusable']}")

    async def _reply_to(self, request: bytes) -> dict[str, Any] | None:
        """Return the reply, None if the worker ended before it."""
        process = await self._ensure_started()
        await process.send(request)
        return await process.receive()

    async def _ensure_started(self) -> KeptProcess:
        if self._process is not None and self._process.is_running:
            return self._process
        await self.kill()
        await asyncio.to_thread(hide_if_programs_share_the_user)
        folders = [entry for entry in sys.path if entry]
        argv = [sys.executable, "-m", "atroposlib.envs.reward_worker", self._settings]
        if self._is_isolated:
            found = await asyncio.to_thread(lambda: isolated_command(argv, readable=folders))
            argv = found or argv
        process = self._process = KeptProcess(
            argv,
            env={
                **child_variables(self._variables),
                **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),  # it forks
                "PYTHONPATH": os.pathsep.join(folders),
            },
            line_limit=self._line_limit,
        )
        try:
            async with asyncio.timeout(_STARTUP_TIMEOUT_S):
                ready = await process.receive() or {}
        except TimeoutError as error:
            raise EnvError(
                f"a reward worker did not start within {_STARTUP_TIMEOUT_S:g} s"
            ) from error
        if "ready" not in ready:
            ending = await self.kill()
            raise EnvError(f"a reward worker did not start: {ready.get('unusable') or ending}")
        return process

    async def kill(self) -> str:
        """Kill the process and its descendants; return how it ended. A call that was cancelled can be repeated."""
        if (process := self._process) is None:
            return ""
        ending = await process.end()
        if self._process is process:
            self._process = None
        return ending


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
