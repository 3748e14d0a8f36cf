"""The runs of one database, which any number of hubs share: each run has one owner at a time.

`owners` says which ones are this hub's; `api.run.replica` keeps it a member.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from atroposlib.api.stores.base import GroupStore, OwnedElsewhere, StoreBroken
from atroposlib.api.stores.postgres import rows
from atroposlib.api.stores.postgres.owners import LAPSE_S, Owners, application_name
from atroposlib.api.stores.postgres.schema import migrate
from atroposlib.api.stores.postgres.store import MAX_DROPS, PostgresStore
from atroposlib.api.stores.runs import Kept, StoredRun, kept_as
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_MAX_CONNECTIONS: Final = 8
"""For all runs of a hub; a run's transactions take one, and each batch that is read another."""
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
_KEPT: Final = "kept_of is not null"


async def connect(url: str, *, name: str, max_size: int) -> asyncpg.Pool:
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


class PostgresRuns:
    """Implements `RunStores`. `on_failure` is called with the name of a run whose store broke."""

    _pool: asyncpg.Pool
    _control: asyncpg.Pool
    """For the list of runs: payloads never keep it waiting. Both set by `open`."""

    def __init__(
        self,
        url: str,
        *,
        on_failure: Callable[[str, BaseException], None] | None = None,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self._url = url
        self.on_failure = on_failure
        self._segment_bytes = segment_bytes
        self._is_connected = False
        self.owners = Owners(self._session)
        """This hub's view of who owns which run; it may join once `open` has returned."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[PostgresRuns]:
        """The runs for a command, which serves none and is no member."""
        await self._connect()
        try:
            yield self
        finally:
            await self.close()

    async def open(self) -> None:
        """Connect and migrate. Raises `ConfigError`, `UnreadableRun`."""
        await self._connect()
        if await self._control.fetchval("show fsync") == "off":
            logger.warning("the database runs with fsync = off: a loss of power loses groups")

    async def _connect(self) -> None:
        open_pool = functools.partial(connect, self._url, name=application_name(self.owners.id))
        self._control = await open_pool(max_size=2)
        try:
            await migrate(self._control)
            self._pool = await open_pool(max_size=_MAX_CONNECTIONS)
        except BaseException:
            self._control.terminate()
            raise
        self._is_connected = True

    async def close(self) -> None:
        """Give up every run, and close all connections."""
        if not self._is_connected:
            return
        self._is_connected = False
        try:
            await self.owners.leave()
        except StoreBroken as e:
            logger.warning("the runs of this hub are free only when it lapses: %s", e)
        await self.owners.close()
        self._pool.terminate()
        self._control.terminate()

    async def _session(self, name: str) -> asyncpg.Connection:
        return await asyncpg.connect(
            self._url, timeout=_CONNECT_S, server_settings=_SETTINGS | {"application_name": name}
        )

    async def names(self) -> list[str]:
        found = await self._control.fetch("select name from runs")
        return sorted(name for (name,) in found)

    async def holds(self, name: str) -> bool:
        return bool(await self._control.fetchval("select 1 from runs where name = $1", name))

    async def kept(self) -> list[Kept]:
        found = await self._control.fetch(
            f"select * from runs where {_KEPT} order by kept_at desc, id desc"
        )
        return [_kept(row) for row in found]

    def store(self, name: str) -> GroupStore:
        return PostgresStore(
            name,
            pool=self._pool,
            owners=self.owners,
            on_failure=self.on_failure and functools.partial(self.on_failure, name),
            segment_bytes=self._segment_bytes,
        )

    async def set_aside(
        self, name: str, *, experiment: str, step: int, resumed: Kept | None
    ) -> str:
        async with self._owned(name) as (connection, run_id):
            taken = await connection.fetch("select name from runs")
            kept = kept_as(name, [taken_name for (taken_name,) in taken], experiment, step)
            await connection.execute(
                "update runs set name = $2, kept_of = $3, kept_experiment = $4, kept_step = $5, kept_at = $6,"
                " owner = null where id = $1",
                run_id,
                kept.name,
                name,
                experiment,
                step,
                kept.set_aside_at,
            )
        return kept.name

    async def bring_back(self, kept: Kept) -> None:
        async with self._owned(kept.name, by_force=True) as (connection, run_id):
            await connection.execute(
                "update runs set name = $2, kept_of = null, kept_experiment = null, kept_step = null,"
                " kept_at = null where id = $1",
                run_id,
                kept.of_run,
            )

    async def forget(self, name: str) -> None:
        if not await self.holds(name):
            return
        async with self._owned(name) as (connection, run_id):
            await rows.erase(connection, run_id)
            segments = list(await rows.segment_sizes(connection, run_id))
        # In parts, and before the run's row: after a crash in between, it is an empty run that can be forgotten again.
        for start in range(0, len(segments), MAX_DROPS):
            async with self._owned(name) as (connection, run_id):
                part = segments[start : start + MAX_DROPS]
                await rows.drop_segments(connection, run_id, part)
        async with self._owned(name) as (connection, run_id):
            await connection.execute("delete from states where run_id = $1", run_id)
            await connection.execute("delete from runs where id = $1", run_id)

    @asynccontextmanager
    async def _owned(self, name: str, *, by_force: bool = False) -> AsyncIterator[tuple[Any, int]]:
        """A transaction on a run that this hub owns now, and on which no other may begin a term before it ends."""
        claimed = await self.owners.claim(name, by_force=by_force)
        async with self._control.acquire() as connection, connection.transaction():
            held = await connection.fetchval(
                "select 1 from runs where id = $1 and term = $2 for update",
                claimed.run_id,
                claimed.number,
            )
            if held is None:
                raise OwnedElsewhere(name, "an unknown address")
            yield connection, claimed.run_id

    async def other_hub(self) -> str | None:
        """Return the address of another living hub; waits for the lapse of one that died."""
        deadline_s = time.monotonic() + LAPSE_S + 1
        while others := (await self.owners.look()).others(self.owners.id):
            if time.monotonic() >= deadline_s:
                return others[0].address
            await asyncio.sleep(0.25)
        return None

    async def stored(self) -> list[StoredRun]:
        """The runs with their sizes, by name, as `run-api --list` shows them."""
        found = await self._control.fetch(
            "select runs.*, extract(epoch from changed_at)::float8 as changed_at"
            " from runs left join states on run_id = id"
        )
        listed = []
        for row in found:
            sizes = await rows.segment_sizes(self._control, row["id"])
            listed.append(
                StoredRun(
                    name=row["name"],
                    num_bytes=sum(sizes.values()),
                    changed_at=row["changed_at"] or 0.0,
                    kept=None if row["kept_of"] is None else _kept(row),
                )
            )
        return sorted(listed, key=lambda run: run.name)


def _kept(row: Any) -> Kept:
    return Kept(
        name=row["name"],
        of_run=row["kept_of"],
        experiment=row["kept_experiment"],
        step=row["kept_step"],
        set_aside_at=row["kept_at"],
    )
