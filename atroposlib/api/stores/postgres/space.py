"""The room of a database: its size, and the disk of a server on this machine.

A server whose disk is full may end, and not start again before a person makes room, so groups are refused long before.
The hubs of a database share it; each measures on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Final

import asyncpg

from atroposlib.api.stores.base import StoreBroken
from atroposlib.api.stores.postgres.sessions import on_connection
from atroposlib.api.stores.space import Space, free_bound, used_bound

logger = logging.getLogger(__name__)

MEASURE_S: Final = 1.0
_MEASURE: Final = """
select pg_database_size(current_database()) as used, (
  select setting from pg_settings
  where name = 'data_directory' and inet_server_addr() is not distinct from inet_client_addr()
) as directory
"""
"""`directory` is null unless the server is on this machine and the role may see its settings."""


class DatabaseSpace(Space):
    """Groups are refused if the database would be larger than `max_bytes`, or leave less than `min_free_bytes` free.

    `max_bytes` None: no such bound. `min_free_bytes`: of the disk of a server on this machine; None: see `free_bound`.
    """

    def __init__(self, *, max_bytes: int | None = None, min_free_bytes: int | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._watching: asyncio.Task[None] | None = None

    async def open(self, pool: asyncpg.Pool) -> None:
        """Measure the database of `pool`, and again every `MEASURE_S` until `close`."""
        await self._measure(pool)
        if self.room_bytes is None:
            logger.warning(
                "nothing bounds the database, and a server whose disk is full ends: give --max-database-bytes"
            )
        self._watching = asyncio.create_task(self._watch(pool))

    async def close(self) -> None:
        """Stop measuring. Does nothing to one that was not opened."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self, pool: asyncpg.Pool) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            try:
                await self._measure(pool)
            except (StoreBroken, asyncpg.PostgresError) as e:
                logger.warning("the size of the database cannot be measured: %s", e)

    async def _measure(self, pool: asyncpg.Pool) -> None:
        row = await on_connection(
            pool, lambda connection: connection.fetchrow(_MEASURE), who="the size of the database"
        )
        bounds = []
        if (max_bytes := self._max_bytes) is not None:
            used, flag = row["used"], "--max-database-bytes"
            bounds.append(
                used_bound("the database", used_bytes=used, max_bytes=max_bytes, flag=flag)
            )
        if (directory := row["directory"]) is not None:
            with contextlib.suppress(OSError):  # of a container: not visible here
                bounds.append(free_bound(Path(directory), min_free_bytes=self._min_free_bytes))
        self.note(bounds)
