"""The worker process of `rewards.RewardWorkers`: has scoring functions called and replies in JSON lines.

`rewards.py` starts it and documents the protocol. It calls no function itself: it imports the function's module and
forks a child, which makes the calls of one scope under a memory limit. The child is killed with all that it started
when the scope changes, at a deadline and when it misbehaves. After every call the child gets the canary, a call whose
value is known: another value means that the call changed its grader. `keeper.py` kills all when the parent ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import logging
import os
import resource
import secrets
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from atroposlib.envs.keeper import (
    IS_LINUX,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    kill_children,
    kill_group,
    prctl,
    reserve_pipes,
    run_kept,
)
from atroposlib.envs.sandbox import hide_this_process
from atroposlib.errors import EnvError

TAIL_BYTES = 4000
"""Limit of a traceback in a reply, and of the end of stderr that is kept."""
MAX_LOGGED_LINES = 10
"""Limit of this library's warnings in one reply, and of those that a pool logs."""
_EXIT_GRACE_S = 2.0
"""To exit after the pipe was closed; a process still running then has closed the pipe itself."""


def _serve(settings: dict[str, Any]) -> None:
    """Answer requests until the parent closes the pipe."""
    requests, replies = reserve_pipes(os.open(os.devnull, os.O_WRONLY))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        for name in settings["preload"]:
            module, _, function = name.partition(":")
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
    except Exception as error:  # noqa: BLE001 - the parent raises it
        _reply(replies, {"unusable": _describe(error)})
        return
    _reply(replies, {"ready": True})
    callers = _Callers(settings, (requests, replies))
    for line in requests:
        _reply(replies, callers.answer(json.loads(line)))


class _Callers:
    """Makes calls in children, one child for each scope, one after another."""

    def __init__(self, settings: Mapping[str, Any], own_pipes: tuple[IO[bytes], ...]) -> None:
        self._settings = settings
        self._own_pipes = own_pipes
        self._scope: str | None = None
        self._child: _WorkerProcess | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have a call made, then the canary; return the reply to the parent."""
        call, canary = request["call"], request["canary"]
        try:
            _resolve(call)  # imports: children share them, and the deadline does not include them
        except Exception as error:  # noqa: BLE001 - the parent raises it
            return {"unusable": _describe(error)}
        logged = []
        if self._child is not None and self._child.has_unread_output():
            logged = ["a process that scoring code left behind wrote to its pipe; it is killed"]
            self._end()
        if request["scope"] != self._scope:
            self._end()
            self._scope = request["scope"]
        reply = self._call(call, request["timeout_s"])
        if "value" not in reply:
            self._end()  # what failed may have left its process in any state
        elif canary is not None:
            after = self._call(canary["call"], request["timeout_s"])
            if after.get("value") != canary["value"]:
                self._end()
                detail = f"a call that has the value {canary['value']} then gave {after}"
                reply = {"reason": "canary", "detail": detail[:TAIL_BYTES]}
        reply["logged"] = [*logged, *reply.pop("logged", ())]
        return reply

    def _call(self, call: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Make one call in the current child; end the child unless it replies as agreed."""
        child = self._child = self._child or _WorkerProcess(self._settings, self._own_pipes)
        nonce = secrets.token_hex(16)
        limit = self._settings["max_output_bytes"] + 8 * TAIL_BYTES * MAX_LOGGED_LINES
        line = child.exchange(json.dumps({**call, "nonce": nonce}).encode(), timeout_s, limit)
        if line is None:
            self._end()
            return {"reason": "timeout", "detail": f"no result within {timeout_s:g} s"}
        detail = f"the worker's output is not the reply to this call: {line[:200]!r}"
        if line.endswith(b"\n"):
            try:
                reply = json.loads(line)
                if isinstance(reply, dict) and reply.pop("nonce", None) == nonce:
                    return reply
            except (ValueError, RecursionError) as error:
                detail = f"the result cannot be read: {error}"
        elif len(line) >= limit:
            detail = "the worker's reply exceeds its limit"
        elif not line:
            status = self._end(grace_s=_EXIT_GRACE_S)
            if status is not None:
                tail = child.stderr_tail.decode(errors="replace")
                return {"reason": "crash", "detail": f"exit status {status}. {tail}".strip()}
            detail = "the scoring code closed the pipe"
        self._end()
        return {"reason": "output", "detail": detail}

    def _end(self, *, grace_s: float = 0.0) -> int | None:
        child, self._child = self._child, None
        return None if child is None else child.end(grace_s)


class _WorkerProcess:
    """The parent's side of a forked process that makes calls."""

    def __init__(self, settings: Mapping[str, Any], own_pipes: tuple[IO[bytes], ...]) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._errors, errors = os.pipe()
        self._pipes = (self._requests, self._replies, self._errors)
        self.stderr_tail = b""
        gc.freeze()  # a collection in the child would copy the pages of all that is imported
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setpgid(0, 0)
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:  # else it ended before prctl
                    for pipe in own_pipes:
                        os.close(pipe.fileno())
                    for descriptor in self._pipes:
                        os.close(descriptor)
                    os.dup2(errors, 2)
                    os.close(errors)
                    _make_calls(settings, os.fdopen(requests, "rb"), os.fdopen(replies, "wb"))
            finally:
                os._exit(1)  # also after a process that the scoring code forked returned here
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(self._pid, self._pid)
        self._life: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # not on this system
            self._life = os.pidfd_open(self._pid)
        for descriptor in (requests, replies, errors):
            os.close(descriptor)
        for descriptor in self._pipes:
            os.set_blocking(descriptor, False)

    def has_unread_output(self) -> bool:
        """Whether something has been written since the last reply, by a process that a call left behind."""
        return bool(select.select([self._replies], [], [], 0)[0])

    def exchange(self, request: bytes, timeout_s: float, limit: int) -> bytes | None:
        """Send a request and return the reply's line; None at the deadline.

        The line has no end if the process closed the pipe, or wrote `limit` bytes.
        """
        self.stderr_tail = b""
        deadline = time.monotonic() + timeout_s
        unsent, line = memoryview(request + b"\n"), b""
        # What it left behind may hold the pipe open when it has ended.
        readable = [self._replies, self._errors, *([] if self._life is None else [self._life])]
        while not line.endswith(b"\n") and len(line) < limit:
            left_s = deadline - time.monotonic()
            ready = select.select(
                readable, [self._requests] if unsent else [], [], max(0.0, left_s)
            )
            if left_s <= 0:
                return None
            if ready[1]:
                try:
                    unsent = unsent[os.write(self._requests, unsent) :]
                except OSError:  # it has closed its end; the reply says why
                    unsent = unsent[:0]
            if self._errors in ready[0] and not self._keep_stderr_tail():
                readable.remove(self._errors)
            if self._replies in ready[0]:
                chunk = os.read(self._replies, 1 << 16)
                if not chunk:
                    break
                line += chunk
            elif self._life in ready[0]:
                break
        return line

    def _keep_stderr_tail(self) -> bool:
        """Read what has been written to stderr; return whether the pipe is open."""
        chunk = b""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._errors, 1 << 16)
            self.stderr_tail = (self.stderr_tail + chunk)[-TAIL_BYTES:]
        return bool(chunk)

    def end(self, grace_s: float) -> int | None:
        """Kill the process and all that it started; return its exit status if it ended within `grace_s` seconds."""
        deadline = time.monotonic() + grace_s
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.005)
            ended, status = os.waitpid(self._pid, os.WNOHANG)
        kill_group(self._pid)
        if not ended:
            os.waitpid(self._pid, 0)
        while IS_LINUX and kill_children():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        while self._keep_stderr_tail():
            pass
        for descriptor in (*self._pipes, *([] if self._life is None else [self._life])):
            os.close(descriptor)
        return os.waitstatus_to_exitcode(status) if ended else None


def _make_calls(settings: Mapping[str, Any], requests: IO[bytes], replies: IO[bytes]) -> None:
    """Make the calls of one scope; the whole life of a child."""
    if settings["memory_limit_mb"] is not None:
        limit = settings["memory_limit_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings = _Warnings(logging.WARNING)
    logging.getLogger("atroposlib").addHandler(warnings)
    own_pid = os.getpid()
    for line in requests:
        call = json.loads(line)
        reply = _answer(call, max_output_bytes=settings["max_output_bytes"])
        if os.getpid() != own_pid:
            return  # a process that the scoring code forked
        reply["nonce"] = call["nonce"]
        if warnings.texts:
            reply["logged"] = [*warnings.texts]
            warnings.texts.clear()
        _reply(replies, reply)


class _Warnings(logging.Handler):
    """Keeps this library's warnings for the next reply: a worker's stderr is not shown."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.texts) < MAX_LOGGED_LINES:
            self.texts.append(record.getMessage()[:1000])


def _answer(call: Mapping[str, Any], *, max_output_bytes: int) -> dict[str, Any]:
    try:
        value = _resolve(call)(*call["args"])
        try:
            size = len(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            return {"reason": "output", "detail": f"the result cannot be sent: {error}"}
        if size > max_output_bytes:
            return {"reason": "output", "detail": f"the result exceeds {max_output_bytes} bytes"}
    except EnvError as error:  # such as a sandbox that does not start
        return {"unusable": _describe(error)}
    except MemoryError as error:
        return {"reason": "memory", "detail": _describe(error)}
    except OSError as error:
        return {"reason": "exception", "detail": _describe(error), "is_outage": True}
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt included
        return {"reason": "exception", "detail": _describe(error)}
    return {"value": value}


def _resolve(call: Mapping[str, Any]) -> Callable[..., Any]:
    found: Any = _import(call["module"], call["file"])
    for part in call["qualname"].split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{call['module']}:{call['qualname']} is not callable")
    return found  # type: ignore[no-any-return]


def _import(module_name: str, file: str | None) -> ModuleType:
    """Import a module by name; the main script, or a module not on the path, is loaded from its file."""
    if module_name != "__main__":
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if file is None or error.name not in {module_name, module_name.partition(".")[0]}:
                raise
    alias = f"_scored_by_{Path(file).stem}" if file else module_name
    if alias in sys.modules:
        return sys.modules[alias]
    if file is None:
        raise ModuleNotFoundError(f"module {module_name!r} has no file to load")
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{file} is not a Python file")
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reply(replies: IO[bytes], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-TAIL_BYTES:].strip()


if __name__ == "__main__":
    hide_this_process()
    run_kept(functools.partial(_serve, json.loads(sys.argv[1])))
