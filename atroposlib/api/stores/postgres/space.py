"""The room of a database: its size, the disk of a server on this machine, and a table as ballast.

A server whose disk is full may end, and not start again before a person makes room, so groups are refused long before.
The hubs of a database share it and the ballast; each measures on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

import asyncpg

from atroposlib.api.stores.base import StoreBroken
from atroposlib.api.stores.postgres.sessions import on_connection
from atroposlib.api.stores.space import Bound, Space, free_bound, used_bound

logger = logging.getLogger(__name__)

MEASURE_S: Final = 1.0
_BALLAST_BYTES: Final = 16 << 20
_FILL_PAUSE_S: Final = 10.0
"""Between attempts: one that fails takes the last room for a moment."""
_MEASURE: Final = """
select pg_database_size(current_database()) as used, coalesce((
  select pg_total_relation_size(oid) from pg_class
  where relnamespace = current_schema()::regnamespace and relname = 'atropos_ballast'
), 0) as ballast, (
  select setting from pg_settings
  where name = 'data_directory' and inet_server_addr() is not distinct from inet_client_addr()
) as directory
"""
"""`directory` is null unless the server is on this machine and the role may see its settings."""
_DROP: Final = f"""
select pg_advisory_xact_lock({0x62616C6C617374});
set local lock_timeout = '100ms';
drop table if exists atropos_ballast
"""
_CREATE: Final = """
create unlogged table atropos_ballast (filling bytea not null) with (autovacuum_enabled = false);
alter table atropos_ballast alter column filling set storage external
"""
"""Unlogged, so that it costs no WAL; a crash of the server empties it, and it is filled again."""
_FILL: Final = "insert into atropos_ballast values (convert_to(repeat('x', $1), 'UTF8'))"


class DatabaseSpace(Space):
    """Groups are refused if the database would be larger than `max_bytes`, or leave less than `min_free_bytes` free.

    `max_bytes` None: no such bound. `min_free_bytes`: of the disk of a server on this machine; None: see `free_bound`.
    """

    def __init__(self, *, max_bytes: int | None = None, min_free_bytes: int | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._ballast_bytes = min(_BALLAST_BYTES, (max_bytes or sys.maxsize) // 8)
        self._fault = ""
        """Of the disk that was full; empty once the ballast is there."""
        self._fill_from_s = float("-inf")
        self._replacing = asyncio.Lock()
        """Held by what drops or makes the ballast: one that is dropped is not there again by another's doing."""
        self._pool: asyncpg.Pool | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, pool: asyncpg.Pool) -> None:
        """Measure the database of `pool`, and again every `MEASURE_S` until `close`."""
        self._pool = pool
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

    async def release_ballast(self, *, fault: str) -> None:
        """Drop the ballast for changes that found the disk full; groups are refused until there is room for it.

        Does nothing if no measurement would find that room.
        """
        if self._pool is not None:
            self._fault = fault
            self.note([self._full()])
            await self._replace_ballast(self._pool, num_bytes=0)

    async def _watch(self, pool: asyncpg.Pool) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            try:
                await self._measure(pool)
            except (StoreBroken, asyncpg.PostgresError) as e:
                logger.warning("the size of the database cannot be measured: %s", e)

    async def _measure(self, pool: asyncpg.Pool) -> None:
        """Measure the database, and restore the ballast if there is room for it."""
        fault = self._fault
        row = await on_connection(
            pool, lambda connection: connection.fetchrow(_MEASURE), who="the size of the database"
        )
        missing = max(0, self._ballast_bytes - row["ballast"])
        bounds = self._bounds_of(row, ballast_bytes=missing)
        has_room = all(bound.left_bytes >= 0 for bound in bounds)
        if not missing and self._fault == fault:  # not one that came meanwhile
            self._fault = ""
        self.note([*bounds, self._full()] if self._fault else bounds)
        if missing and has_room:
            await self._replace_ballast(pool, num_bytes=self._ballast_bytes)

    def _bounds_of(self, row: Any, *, ballast_bytes: int) -> list[Bound]:
        bounds = []
        if self._max_bytes is not None:
            used_bytes, flag = row["used"] + ballast_bytes, "--max-database-bytes"
            bounds.append(
                used_bound(
                    "the database", used_bytes=used_bytes, max_bytes=self._max_bytes, flag=flag
                )
            )
        if row["directory"] is not None:
            with contextlib.suppress(OSError):  # of a container: not visible here
                bounds.append(
                    free_bound(
                        Path(row["directory"]),
                        min_free_bytes=self._min_free_bytes,
                        ballast_bytes=ballast_bytes,
                    )
                )
        return bounds

    def _full(self) -> Bound:
        """Return the bound of a disk that was full, until the ballast is there again."""
        return Bound(
            text=f"the disk of the database is full ({self._fault})",
            left_bytes=-self._ballast_bytes,
            flag=f"--max-database-bytes (now {self._max_bytes})",
        )

    async def _replace_ballast(self, pool: asyncpg.Pool, *, num_bytes: int) -> None:
        """Drop the ballast; if `num_bytes` is not 0, make another. Logs errors of the database: it is tried again."""

        async def replace(connection: Any) -> None:
            async with connection.transaction():
                await connection.execute(_DROP)
                if num_bytes:
                    await connection.execute(_CREATE)
                    await connection.execute(_FILL, num_bytes)

        if not num_bytes:  # also for a filling that waits for its turn
            self._fill_from_s = time.monotonic() + _FILL_PAUSE_S
        try:
            async with self._replacing:
                if num_bytes and time.monotonic() < self._fill_from_s:
                    return
                self._fill_from_s = time.monotonic() + _FILL_PAUSE_S
                await on_connection(pool, replace, who="the ballast")
        except asyncpg.PostgresError as e:
            logger.warning("the ballast of the database stays as it is: %s", e)
            self._fault = str(e) if isinstance(e, asyncpg.DiskFullError) else self._fault
