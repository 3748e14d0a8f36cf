"""The worker process of `rewards.RewardWorkers`: calls scoring functions by name and replies in JSON lines.

`rewards.py` starts it and documents the protocol. It calls functions under a memory limit; `keeper.py` kills the
processes that a call starts, daemons included, when the worker dies or the parent's end of the pipe is closed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from atroposlib.envs.keeper import IS_LINUX, children, run_kept
from atroposlib.envs.sandbox import hide_this_process

TAIL_BYTES = 4000
"""Limit of a traceback in a reply, and of the end of a worker's stderr that is kept."""
MAX_LOGGED_LINES = 10
"""Limit of this library's warnings in one reply, and of those that a pool logs."""
_MAX_CHILDREN = 16
"""A worker with more children after a call is replaced: the scoring code leaks processes."""


def _serve(settings: dict[str, Any]) -> None:
    """Answer requests until the parent closes the pipe."""
    requests, replies = _reserve_pipes()
    if settings["memory_limit_mb"] is not None:
        limit = settings["memory_limit_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        for name in settings["preload"]:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        _reply(replies, {"nonce": "", "unusable": _describe(error)})
        return
    _reply(replies, {"nonce": "", "ready": True})
    warnings = _Warnings(logging.WARNING)
    logging.getLogger("atroposlib").addHandler(warnings)
    server = os.getpid()
    for line in requests:
        request = json.loads(line)
        reply = _answer(request, max_output_bytes=settings["max_output_bytes"])
        reply["nonce"] = request["nonce"]
        if warnings.texts:
            reply["logged"] = [*warnings.texts]
            warnings.texts.clear()
        if os.getpid() != server:
            os._exit(0)  # a process forked by the scoring code that returned here
        if IS_LINUX and len(children()) > _MAX_CHILDREN:
            reply["is_worn"] = True
        _reply(replies, reply)


class _Warnings(logging.Handler):
    """Keeps this library's warnings for the next reply: a worker's stderr is not read."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.texts) < MAX_LOGGED_LINES:
            self.texts.append(record.getMessage()[:1000])


def _reserve_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Reserve the pipes for the protocol: stdin and stdout of the scoring code are /dev/null."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return requests, replies


def _answer(request: dict[str, Any], *, max_output_bytes: int) -> dict[str, Any]:
    try:
        function = _resolve(request["module"], request["file"], request["qualname"])
    except Exception as error:  # noqa: BLE001 - the parent raises it
        return {"unusable": _describe(error)}
    try:
        value = function(*request["args"])
        try:
            size = len(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            return {"reason": "output", "detail": f"the result cannot be sent: {error}"}
        if size > max_output_bytes:
            return {"reason": "output", "detail": f"the result exceeds {max_output_bytes} bytes"}
    except MemoryError as error:
        return {"reason": "memory", "detail": _describe(error)}
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt included
        return {"reason": "exception", "detail": _describe(error)}
    return {"value": value}


def _resolve(module_name: str, file: str | None, qualname: str) -> Callable[..., Any]:
    found: Any = _import(module_name, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{module_name}:{qualname} is not callable")
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
