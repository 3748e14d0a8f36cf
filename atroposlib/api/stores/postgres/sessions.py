"""Connections to the database: how they are made, and calls that wait for a database that cannot be reached.

`Owners` alone does not wait: a hub that cannot renew its membership must stop serving instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import asyncpg

from atroposlib.api.stores.base import StoreBroken
from atroposlib.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_PATIENCE_S: Final = 10.0
"""How long calls wait for a database that cannot be reached."""
_ATTEMPT_S: Final = 10.0
_RETRY_S: Final = 0.1
_SETTINGS: Final = {
    "synchronous_commit": "on",
    "jit": "off",
    # A hub that hangs or is cut off within a transaction must not keep the next owner waiting.
    "idle_in_transaction_session_timeout": "5s",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "5000",
}


class DatabaseUnreachable(StoreBroken):
    """The database cannot be reached; whether the call took effect is unknown."""


SESSION_ENDED: Final = (
    ConnectionError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended the session just before the call
)
"""Errors of a call on a session that the server or the network ended."""
_UNAVAILABLE: Final = (
    *SESSION_ENDED,
    DatabaseUnreachable,
    OSError,  # TimeoutError is one
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.TransactionRollbackError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)
"""Errors after which the same call may succeed on another connection."""


async def connect(url: str, name: str) -> asyncpg.Connection:
    """Open one session, whose name is `name` for the server."""
    return await asyncpg.connect(
        url, timeout=_CONNECT_S, server_settings=_SETTINGS | {"application_name": name}
    )


async def open_pool(url: str, *, name: str, max_size: int) -> asyncpg.Pool:
    """Open connections to the database. Raises `ConfigError`, without the password, if there are none."""

    async def keep(connection: asyncpg.Connection) -> None:
        """Nothing of a session is changed, so nothing is reset: this saves a round trip per call."""

    try:
        pool = await asyncpg.create_pool(
            url,
            min_size=0,  # asyncpg logs a traceback whenever it cannot restore a minimum
            max_size=max_size,
            timeout=_CONNECT_S,
            server_settings=_SETTINGS | {"application_name": name},
            reset=keep,
        )
        async with pool.acquire():
            return pool
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError) as e:
        raise ConfigError(f"the database cannot be reached: {e or type(e).__name__}") from e


async def waiting(call: Callable[[], Awaitable[T]], *, who: str) -> T:
    """Call `call`, and again while the database cannot be reached. Raises `DatabaseUnreachable` after `_PATIENCE_S`.

    An attempt that raised may have taken effect. `who` names the caller in the log.
    """
    lost_s: float | None = None
    while True:
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                answer = await call()
        except _UNAVAILABLE as e:
            if lost_s is None:
                lost_s = time.monotonic()
                logger.warning(
                    "%s: PostgreSQL cannot be reached; retrying for %.0f s: %r", who, _PATIENCE_S, e
                )
            if time.monotonic() - lost_s > _PATIENCE_S:
                raise DatabaseUnreachable(f"the database cannot be reached: {e!r}") from e
            await asyncio.sleep(_RETRY_S)
        else:
            if lost_s is not None:
                away_s = time.monotonic() - lost_s
                logger.info("%s: PostgreSQL answered again after %.1f s", who, away_s)
            return answer


async def on_connection(pool: asyncpg.Pool, work: Callable[[Any], Awaitable[T]], *, who: str) -> T:
    """Call `work` with a connection, and again with another while the database cannot be reached; see `waiting`."""

    async def attempt() -> T:
        async with pool.acquire() as connection:
            try:
                return await work(connection)
            except BaseException:
                with contextlib.suppress(asyncpg.InterfaceError):  # already closed
                    connection.terminate()  # its transaction, if any, is rolled back
                raise

    return await waiting(attempt, who=who)
