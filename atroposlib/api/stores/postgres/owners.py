"""Which replica owns which run: one owner per run, whose term fences every transaction of its store.

A member that has not renewed its row for `LAPSE_S`, by the database's clock, has lost its runs. A claim increases the
run's term, and waits for the transactions of the earlier owner that are in progress: afterwards none of its writes can
take effect.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

import asyncpg

LAPSE_S: Final = 5.0
_LAPSE: Final = timedelta(seconds=LAPSE_S)
_LIVES: Final = "renewed_at >= clock_timestamp() - $1::interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The right to write to a run, until a later term begins."""

    run_id: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The living replica that owns a run."""

    address: str


class Member(NamedTuple):
    """A living replica."""

    id: uuid.UUID
    address: str
    num_runs: int


class Owners:
    """One replica's membership and the runs that it owns. Errors of the connection are not handled here."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self.id = uuid.uuid4()
        self.address = ""

    async def join(self, address: str) -> None:
        """Become a member that others reach at `address`."""
        self.address = address
        await self.renew()

    async def renew(self) -> None:
        """Say that this replica lives. It also returns after a lapse, then without its runs if others took them."""
        await self._pool.execute(
            "insert into members (id, address) values ($1, $2) on conflict (id) do update"
            " set renewed_at = clock_timestamp(), address = excluded.address",
            self.id,
            self.address,
        )

    async def claim(self, name: str) -> Term | Owner:
        """Begin a new term of the run, created if there is none, or return the living replica that owns it."""
        claimed = await self._pool.fetchrow(
            "insert into runs as run (name, term, owner) values ($2, 1, $3)"
            " on conflict (name) do update set term = run.term + 1, owner = excluded.owner"
            f" where run.owner is null or run.owner = $3 or run.owner not in (select id from members where {_LIVES})"
            " returning id, term",
            _LAPSE,
            name,
            self.id,
        )
        if claimed is not None:
            return Term(run_id=claimed["id"], number=claimed["term"])
        address = await self._pool.fetchval(
            "select address from runs join members on members.id = owner where name = $1", name
        )
        # Released since: the caller may claim again.
        return Owner(address=address or "")

    async def release(self, name: str) -> None:
        """End the term of a run that this replica owns; its store must be closed."""
        await self._pool.execute(
            "update runs set term = term + 1, owner = null where name = $1 and owner = $2",
            name,
            self.id,
        )

    async def members(self) -> list[Member]:
        """The living replicas, by the time they joined."""
        rows = await self._pool.fetch(
            "select id, address, (select count(*) from runs where owner = members.id) as num_runs"
            f" from members where {_LIVES} order by joined_at, id",
            _LAPSE,
        )
        return [Member(*row) for row in rows]

    async def leave(self) -> None:
        """Release all runs, whose stores must be closed, and end the membership."""
        await self._pool.execute(
            "update runs set term = term + 1, owner = null where owner = $1", self.id
        )
        await self._pool.execute("delete from members where id = $1", self.id)
