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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import asyncpg

from atroposlib.api.stores.base import StoreBroken
from atroposlib.api.stores.postgres.sessions import on_connection
from atroposlib.api.stores.space import (
    Bound,
    Space,
    free_bound,
    free_bytes,
    min_free_of,
    used_bound,
)

logger = logging.getLogger(__name__)

MEASURE_S: Final = 1.0
_BALLAST_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 1 << 20
_FILL_PAUSE_S: Final = 10.0
"""Between attempts: one that fails takes the last room for a moment."""
_MEASURE: Final = """
select pg_database_size(current_database()) as used, coalesce((
  select pg_total_relation_size(oid) from pg_class
  where relnamespace = current_schema()::regnamespace and relname = 'ballast'
), 0) as ballast, (
  select setting from pg_settings
  where name = 'data_directory' and inet_server_addr() is not distinct from inet_client_addr()
) as directory
"""
"""`directory` is null unless the server is on this machine and the role may see its settings."""
# Unlogged, so that it costs no WAL; a crash of the server empties it, and it is filled again.
_FILL: Final = """
drop table if exists ballast;
create unlogged table ballast (filling bytea not null) with (autovacuum_enabled = false);
alter table ballast alter column filling set storage external
"""


class DatabaseSpace(Space):
    """Groups are refused if the database would be larger than `max_bytes`, or leave less than `min_free_bytes` free.

    `max_bytes` None: no such bound. `min_free_bytes`: of the disk of a server on this machine; None: `min_free_of`.
    """

    def __init__(self, *, max_bytes: int | None = None, min_free_bytes: int | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._ballast_bytes = min(_BALLAST_BYTES, (max_bytes or sys.maxsize) // 8)
        self._pending_bytes = 0
        """Taken by transactions that have not ended."""
        self._fault = ""
        """Of the disk that was full; empty once the ballast is there."""
        self._fill_from_s = float("-inf")
        self._pool: asyncpg.Pool | None = None
        self._watching: asyncio.Task[None] | None = None

    def take(self, num_bytes: int) -> None:
        super().take(num_bytes)
        self._pending_bytes += num_bytes

    def settle(self, num_bytes: int) -> None:
        """Note that so many bytes that were taken are written, or will not be."""
        self._pending_bytes -= num_bytes

    async def open(self, pool: asyncpg.Pool) -> None:
        """Measure the database of `pool`, and again every `MEASURE_S` until `close`."""
        self._pool = pool
        await self._measure(pool)
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
        """Measure the database, and restore the ballast if there is room for it."""
        row = await on_connection(
            pool, lambda connection: connection.fetchrow(_MEASURE), who="the size of the database"
        )
        missing = max(0, self._ballast_bytes - row["ballast"])
        self._fault = self._fault if missing else ""
        bounds = self._bounds_of(row, kept_bytes=missing)
        has_room = all(bound.left_bytes >= 0 for bound in bounds)
        if self._fault:
            bounds.append(self._full_bound())
        self.note(bounds, pending_bytes=self._pending_bytes)
        if missing and has_room and time.monotonic() >= self._fill_from_s:
            self._fill_from_s = time.monotonic() + _FILL_PAUSE_S
            with self._noting_a_full_disk():
                await on_connection(pool, self._fill_ballast, who="the ballast")

    @contextlib.contextmanager
    def _noting_a_full_disk(self) -> Iterator[None]:
        """Log an error of the database about the ballast, which is looked at again at the next measurement."""
        try:
            yield
        except asyncpg.PostgresError as e:
            logger.warning("the ballast of the database: %s", e)
            self._fault = str(e) if isinstance(e, asyncpg.DiskFullError) else self._fault

    def _bounds_of(self, row: Any, *, kept_bytes: int) -> list[Bound]:
        """Return the bounds by a measurement; groups leave `kept_bytes` for the ballast."""
        bounds = []
        if self._max_bytes is not None:
            bounds.append(
                used_bound(
                    "the database",
                    used_bytes=row["used"] + kept_bytes,
                    max_bytes=self._max_bytes,
                    flag="--max-database-bytes",
                )
            )
        if row["directory"] is not None:
            try:
                free = free_bytes(Path(row["directory"]))
                min_free = min_free_of(Path(row["directory"]), self._min_free_bytes)
            except OSError:
                return bounds  # of a container: not visible here
            bounds.append(
                free_bound(
                    "the disk of the database",
                    free_bytes=free,
                    kept_bytes=min_free + kept_bytes,
                    min_free_bytes=min_free,
                )
            )
        return bounds

    def _full_bound(self) -> Bound:
        """Return the bound of a disk that was full, until the ballast is there again."""
        return Bound(
            text=f"the disk of the database is full ({self._fault})",
            left_bytes=-self._ballast_bytes,
            flag=f"--max-database-bytes (now {self._max_bytes})",
        )

    async def _fill_ballast(self, connection: Any) -> None:
        async with connection.transaction():
            # One hub at a time; the others see it at their next measurement.
            if await connection.fetchval("select pg_try_advisory_xact_lock(hashtext('ballast'))"):
                await connection.execute("set local lock_timeout = '100ms'")
                await connection.execute(_FILL)
                await connection.execute(
                    "insert into ballast select convert_to(repeat('x', $1), 'UTF8')"
                    " from generate_series(1, $2)",
                    _CHUNK_BYTES,
                    -(-self._ballast_bytes // _CHUNK_BYTES),
                )

    async def release_ballast(self, *, fault: str) -> None:
        """Drop the ballast for changes that found the disk full; groups are refused until there is room for it.

        Does nothing if no measurement would find that room.
        """
        if self._pool is None:
            return

        async def drop(connection: Any) -> None:
            async with connection.transaction():
                await connection.execute("set local lock_timeout = '100ms'")
                await connection.execute("drop table if exists ballast")

        self._fault = fault
        self._fill_from_s = time.monotonic() + _FILL_PAUSE_S
        self.note([self._full_bound()])
        with self._noting_a_full_disk():
            await on_connection(self._pool, drop, who="the ballast")
