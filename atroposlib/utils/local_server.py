"""Listening sockets, and serving an application in the running event loop without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that the server never closes one that a client is about to use."""


def listening(host: str, port: int, *, family: int | None = None) -> socket.socket:
    """Return a socket that accepts connections; port 0 is any free one. Raises `OSError` for an unusable address.

    `family` None: that of the address as it is written.
    """
    if family is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    send_at_once(listener)
    return listener


def send_at_once(listener: socket.socket) -> None:
    """Set TCP_NODELAY for the connections of a listener.

    asyncio sets it only for sockets made with a protocol number, which these are not. Without it, an answer of several
    pieces waits for the acknowledgement of the first, which the client's kernel delays by 40 ms.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class LocalServer(uvicorn.Server):
    """uvicorn without signal handlers; `ready` is set once it listens."""

    def __init__(self, app: ASGIApp, *, shutdown_s: int) -> None:
        """`shutdown_s` is how long requests in flight may take at shutdown."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=shutdown_s,
            )
        )
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def stop(self) -> None:
        """Stop serving; requests in flight have `shutdown_s`."""
        self.should_exit = True


@asynccontextmanager
async def serve_locally(app: ASGIApp) -> AsyncIterator[str]:
    """Serve `app` on a free port of 127.0.0.1 and yield its URL, without a trailing slash."""
    listener = listening("127.0.0.1", 0)
    server = LocalServer(app, shutdown_s=1)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise RuntimeError("the local server ended before it listened")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ready.cancel()
        server.stop()
        await asyncio.gather(ready, return_exceptions=True)
        await serving
        listener.close()
