"""The runs of one database, which any number of hubs share: each run has one owner at a time.

`owners` says which ones are this hub's; `api.run.replica` keeps it a member.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import asyncpg

from atroposlib.api.stores.base import GroupStore, OwnedElsewhere, StoreBroken
from atroposlib.api.stores.postgres import rows
from atroposlib.api.stores.postgres.owners import Owners, Term, application_name
from atroposlib.api.stores.postgres.schema import migrate
from atroposlib.api.stores.postgres.sessions import connect, on_connection, open_pool, waiting
from atroposlib.api.stores.postgres.space import DatabaseSpace
from atroposlib.api.stores.postgres.store import MAX_DROPS, PostgresStore
from atroposlib.api.stores.runs import Kept, StoredRun, kept_as

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 8
"""For all runs of a hub; a run's transactions take one, and each batch that is read another."""
_KEPT: Final = "kept_of is not null"


class PostgresRuns:
    """Implements `RunStores`. `on_failure`, which a replica sets, gets the name of a run whose store broke."""

    _pool: asyncpg.Pool
    _control: asyncpg.Pool
    """For the list of runs: payloads never keep it waiting. Both set by `open`."""

    def __init__(
        self, url: str, *, space: DatabaseSpace | None = None, segment_bytes: int = 64 << 20
    ) -> None:
        """`space` None: not bounded."""
        self._url = url
        self.on_failure: Callable[[str, BaseException], None] | None = None
        self._space = space
        self._segment_bytes = segment_bytes
        self._is_connected = False
        self.owners = Owners(functools.partial(connect, url))
        """This hub's view of who owns which run; it may join once `open` has returned."""

    async def open(self) -> None:
        """Connect and migrate. Raises `ConfigError`, `UnreadableRun`."""
        name = application_name(self.owners.id)
        self._control = await open_pool(self._url, name=name, max_size=2)
        try:
            await migrate(self._control)
            self._pool = await open_pool(self._url, name=name, max_size=_MAX_CONNECTIONS)
            if self._space is not None:
                await self._space.open(self._control)
        except BaseException:
            self._control.terminate()
            raise
        self._is_connected = True
        if await self._control.fetchval("show fsync") == "off":
            logger.warning("the database runs with fsync = off: a loss of power loses groups")

    async def close(self) -> None:
        """Give up every run, and close all connections."""
        if not self._is_connected:
            return
        self._is_connected = False
        if self._space is not None:
            await self._space.close()
        try:
            await self.owners.leave()
        except StoreBroken as e:
            logger.warning("the runs of this hub are free only when it lapses: %s", e)
        await self.owners.close()
        self._pool.terminate()
        self._control.terminate()

    async def names(self) -> list[str]:
        found = await self._fetch("select name from runs")
        return sorted(name for (name,) in found)

    async def holds(self, name: str) -> bool:
        return bool(await self._fetch("select 1 from runs where name = $1", name))

    async def kept(self) -> list[Kept]:
        found = await self._fetch(
            f"select * from runs where {_KEPT} order by kept_at desc, id desc"
        )
        return [_kept(row) for row in found]

    async def _fetch(self, query: str, *arguments: object) -> list[Any]:
        rows: list[Any] = await on_connection(
            self._control,
            lambda connection: connection.fetch(query, *arguments),
            who="the list of runs",
        )
        return rows

    def store(self, name: str) -> GroupStore:
        return PostgresStore(
            name,
            pool=self._pool,
            owners=self.owners,
            space=self._space,
            on_failure=self.on_failure and functools.partial(self.on_failure, name),
            segment_bytes=self._segment_bytes,
        )

    async def set_aside(
        self, name: str, *, experiment: str, step: int, resumed: Kept | None
    ) -> str:
        async def rename(connection: Any, run_id: int) -> str:
            # Of the others: an attempt whose answer was lost may have renamed it already.
            others = await connection.fetch("select name from runs where id <> $1", run_id)
            kept = kept_as(name, [other for (other,) in others], experiment, step)
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

        return await self._change(name, await self._claim(name), rename)

    async def bring_back(self, kept: Kept) -> None:
        async def rename(connection: Any, run_id: int) -> None:
            await connection.execute(
                "update runs set name = $2, kept_of = null, kept_experiment = null, kept_step = null,"
                " kept_at = null where id = $1",
                run_id,
                kept.of_run,
            )

        await self._change(kept.name, await self._claim(kept.name, by_force=True), rename)

    async def forget(self, name: str) -> None:
        if not await self.holds(name):
            return
        term = await self._claim(name)

        async def erase(connection: Any, run_id: int) -> list[int]:
            await rows.erase(connection, run_id)
            return list(await rows.segment_sizes(connection, run_id))

        async def delete(connection: Any, run_id: int) -> None:
            await connection.execute("delete from states where run_id = $1", run_id)
            await connection.execute("delete from runs where id = $1", run_id)

        segments = await self._change(name, term, erase)
        # In parts, and before the run's row: after a crash in between, it is an empty run that can be forgotten again.
        for start in range(0, len(segments), MAX_DROPS):
            part = segments[start : start + MAX_DROPS]
            await self._change(name, term, functools.partial(rows.drop_segments, segments=part))
        try:
            await self._change(name, term, delete)
        except OwnedElsewhere:
            if await self.holds(name):
                raise
            # By an attempt whose answer was lost.

    async def _claim(self, name: str, *, by_force: bool = False) -> Term:
        return await waiting(lambda: self.owners.claim(name, by_force=by_force), who=f"run {name}")

    async def _change(self, name: str, term: Term, work: Callable[[Any, int], Awaitable[T]]) -> T:
        """Call `work` in a transaction on a run of this hub, on which no other may begin a term before it ends.

        If an answer of the database is lost, `work` is called again, perhaps after its effect.
        """

        async def attempt(connection: Any) -> T:
            async with connection.transaction():
                held = await connection.fetchval(
                    "select 1 from runs where id = $1 and term = $2 for update",
                    term.run_id,
                    term.number,
                )
                if held is None:
                    raise OwnedElsewhere(name, "an unknown address")
                return await work(connection, term.run_id)

        return await on_connection(self._control, attempt, who=f"run {name}")

    async def stored(self) -> list[StoredRun]:
        """The runs with their sizes, by name, as `run-api --list` shows them."""
        found = await self._fetch(
            "select runs.*, extract(epoch from changed_at)::float8 as changed_at"
            " from runs left join states on run_id = id"
        )
        listed = []
        for row in found:
            sizes = await on_connection(
                self._control,
                functools.partial(rows.segment_sizes, run_id=row["id"]),
                who="the list of runs",
            )
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
