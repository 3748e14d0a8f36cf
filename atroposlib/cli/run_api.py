"""`run-api` serves the hub.

One process, one run, state in memory; nothing is watched and nothing restarts it.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from pydantic import BaseModel, Field

from atroposlib.api.server import app, stop_waiting
from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary

SHUTDOWN_GRACE_S = 2
"""How long requests that are being answered may take after a stop signal."""


class RunApiConfig(BaseModel):
    """Flags of `run-api`."""

    host: str = Field(default="127.0.0.1", description="Address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes any")


class _Server(uvicorn.Server):
    """Stops at once although a trainer waits for a batch."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        stop_waiting(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C and return 0; a wrong flag or a port in use returns 2."""
    return cli_boundary(lambda: serve(argv))


def serve(argv: Sequence[str] | None) -> int:
    config = parse_flags(
        RunApiConfig,
        argv,
        prog="run-api",
        description="Serve the Atropos trajectory API (the hub).",
    )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    listener = listen(config.host, config.port)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
    )

    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn raises a signal again after its shutdown; these make that a return, and they also
    # cover the time before uvicorn listens to signals.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if not is_loopback(config.host):
        print(
            f"warning: {config.host} is reachable from other machines and there is no"
            " authentication: whoever reaches this port can read, add and erase data;"
            " use --host 127.0.0.1 or a firewall",
            file=sys.stderr,
            flush=True,
        )
    shown = f"[{config.host}]" if ":" in config.host else config.host
    print(f"atropos hub listening on http://{shown}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` when the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except socket.gaierror as e:
        raise ConfigError(f"--host {host}: not an address of this machine ({e.strerror})") from e
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: already in use on {host}; stop what listens there"
                f" or choose another port, for example --port {port + 1}"
            ) from e
        raise ConfigError(f"--host {host} --port {port}: cannot listen ({e.strerror})") from e


def is_loopback(host: str) -> bool:
    """Can only this machine reach `host`?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
