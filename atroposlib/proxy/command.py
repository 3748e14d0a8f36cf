"""The proxy for agents that know only a base URL: a session is an endpoint for OpenAI's and Anthropic's SDKs.

    python -m atroposlib.proxy.command --config proxy.json --port 9100

A session's URL is `http://host:port/<uuid>/v1`; agents that take only a key use `http://host:port/v1` with the uuid as
API key. Anyone who knows a uuid may use that session; opening, listing and `/setup` need the token if one is set.
`create_app` makes the application, `main` is the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pydantic import ConfigDict, Field, SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary
from atroposlib.http_guard import is_loopback
from atroposlib.inference.sessions.proxy_client import TOKEN_VARIABLE
from atroposlib.proxy.engines import Engines
from atroposlib.proxy.routes import Routes, no_route
from atroposlib.proxy.sessions import SessionLimits, Sessions
from atroposlib.utils.local_server import LocalServer, listening
from atroposlib.utils.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


def create_app(
    server_manager: Any,
    tokenizer: Any,
    model_name: str = "unknown",
    *,
    token: str | None = None,
    is_private: bool = False,
    limits: SessionLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """Return the proxy's ASGI application; its `Sessions` are `app.state.sessions`.

    `token` guards opening, listing and `/setup`; without one, anyone who reaches the port may use them. A private
    proxy has no such routes and none for a session's sequences: its sessions are opened, read and closed in this
    process. The caller closes the manager.
    """
    if getattr(server_manager, "use_proxy", False):
        raise ConfigError("a proxy cannot use a proxy; unset proxy_url and ATROPOS_PROXY_URL")
    sessions = Sessions(
        server_manager, tokenizer, model_name=model_name, limits=limits, clock=clock
    )
    routes = Routes(sessions, token=token, is_private=is_private)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await routes.close()

    app = Starlette(
        routes=routes.table(),
        exception_handlers={HTTPException: no_route},
        lifespan=lifespan,
    )
    app.state.sessions = sessions
    return app


class ProxyConfig(Engines):
    """Flags of the command; `--config` names the JSON (or YAML) file."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=9100, ge=0, le=65535)
    """0 takes a free port."""
    token: SecretStr | None = None
    """Required to open sessions; prefer ATROPOS_PROXY_TOKEN, which process lists do not show."""
    insecure: bool = False
    """Let other machines open sessions without a token."""
    max_sessions: int = Field(default=SessionLimits().max_sessions, ge=1)
    max_nodes: int = Field(default=SessionLimits().max_nodes, ge=1)
    """Token sequences of one session."""
    idle_s: float = Field(default=SessionLimits().idle_s, gt=0)
    """Seconds until an unused session expires."""
    life_s: float = Field(default=SessionLimits().life_s, gt=0)
    """Seconds until any session expires."""


def serve(argv: Sequence[str] | None) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    config = parse_flags(
        ProxyConfig,
        argv,
        prog="atroposlib.proxy.command",
        description="Serve agents that know only a base URL; keep their tokens for training.",
    )
    token = os.environ.get(TOKEN_VARIABLE) or None
    if config.token is not None:
        token = config.token.get_secret_value()
    if token is None and not config.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} is reachable from other machines and there is no token: set {TOKEN_VARIABLE}"
            " or --token, or listen on 127.0.0.1; --insecure starts it anyway"
        )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    tokenizer = load_tokenizer(config.tokenizer_name or config.model_name, flag="tokenizer_name")
    listener = _listen(config.host, config.port)
    with listener:
        return asyncio.run(_serve(config, tokenizer, token, listener))


async def _serve(
    config: ProxyConfig, tokenizer: Any, token: str | None, listener: socket.socket
) -> int:
    manager = config.manager()
    names = {"max_sessions", "max_nodes", "idle_s", "life_s"}
    limits = SessionLimits(**config.model_dump(include=names))
    app = create_app(manager, tokenizer, config.model_name, token=token, limits=limits)
    server = LocalServer(app, shutdown_s=2)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    host, port = listener.getsockname()[:2]
    logger.info("proxy of %s listening on http://%s:%d", config.model_name, host, port)
    try:
        await server.serve(sockets=[listener])
    finally:
        await manager.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listening(host, port)
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}") from e


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli_boundary(lambda: serve(argv))


if __name__ == "__main__":
    sys.exit(main())
