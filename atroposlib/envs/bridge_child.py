"""The child process of a `Bridge`: loads a Python file in its own interpreter and serves its functions over a pipe.

Uses only the standard library, because the interpreter is that of another library's virtual environment. The file
defines an async context manager `bridge(**settings)` that yields a description and a dict of coroutine functions.
Messages are JSON lines. Parent: the settings, then `{"id", "call", "arguments"}` or `{"cancel": id}`. Child:
`{"ready": description}` or `{"failed": reason}`, then `{"id", "result"}` or `{"id", "error"}`. Output of the file's own
code goes to stderr.

On Linux, `keeper.py` kills what the file starts, daemons included, when this process ends, on SIGTERM, or when the
parent closes the pipe or is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import IO, Any

_CLOSE_GRACE_S = 3.0
"""For the file's own cleanup, after the parent has closed the pipe."""


def _serve(script: str, keeper: ModuleType) -> None:
    requests, replies = keeper.reserve_pipes(2)
    sys.path[0] = ""  # the working directory, as for `python -m`, instead of this file's folder
    asyncio.run(_Server(requests, replies).run(script))


class _Server:
    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests = requests
        self._replies = replies
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._closed = asyncio.Event()

    async def run(self, script: str) -> None:
        settings = json.loads(self._requests.readline())
        async with contextlib.AsyncExitStack() as stack:
            try:
                bridge = _load("atropos_bridge", script).bridge(**settings)
                description, functions = await stack.enter_async_context(bridge)
            except Exception as error:  # noqa: BLE001 - the parent raises it
                traceback.print_exc()
                self._send({"failed": _described(error)})
                return
            self._send({"ready": description})
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._read, args=(loop, functions), daemon=True).start()
            await self._closed.wait()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _read(self, loop: asyncio.AbstractEventLoop, functions: dict[str, Any]) -> None:
        for line in self._requests:
            loop.call_soon_threadsafe(self._take, json.loads(line), functions)
        loop.call_soon_threadsafe(self._closed.set)

    def _take(self, message: dict[str, Any], functions: dict[str, Any]) -> None:
        if "cancel" in message:
            if task := self._tasks.get(message["cancel"]):
                task.cancel()
            return
        task = asyncio.create_task(_call(functions, message["call"], message["arguments"]))
        self._tasks[message["id"]] = task
        task.add_done_callback(functools.partial(self._answer, message["id"]))

    def _answer(self, call_id: int, task: asyncio.Task[Any]) -> None:
        del self._tasks[call_id]
        if task.cancelled():
            self._send({"id": call_id, "error": "cancelled"})
        elif (error := task.exception()) is not None:
            self._send({"id": call_id, "error": _described(error)})
        else:
            try:
                self._send({"id": call_id, "result": task.result()})
            except (TypeError, ValueError) as fault:
                self._send({"id": call_id, "error": f"the result is not JSON: {fault}"})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._replies.write(json.dumps(message).encode() + b"\n")
            self._replies.flush()


async def _call(functions: dict[str, Any], name: str, arguments: dict[str, Any]) -> Any:
    """Call a function; a wrong name or argument raises in the call's task, which reports it."""
    return await functions[name](**arguments)


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


if __name__ == "__main__":
    # By its path: in this interpreter the package cannot be imported.
    keeper = _load("atropos_keeper", os.path.join(os.path.dirname(__file__), "keeper.py"))
    keeper.run_kept(functools.partial(_serve, sys.argv[1], keeper), grace_s=_CLOSE_GRACE_S)
