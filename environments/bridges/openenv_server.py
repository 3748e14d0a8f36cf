"""Serves an OpenEnv application for `openenv_env.py`, in the interpreter that has OpenEnv, on a free loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.importer import import_from_string


@asynccontextmanager
async def bridge(*, app: str) -> AsyncIterator[tuple[Any, Any]]:
    """Serve an application, given as "module:attribute"."""
    config = uvicorn.Config(
        import_from_string(app),
        host="127.0.0.1",
        port=0,
        log_level="warning",
        ws_max_size=2**28,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
        if serving.done():
            serving.result()
            raise RuntimeError(f"{app} did not start")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield {"url": f"http://127.0.0.1:{port}"}, {}
    finally:
        server.should_exit = True
        await serving
