"""Which hub process serves which run: the tables `members` and `runs` as one process reads and changes them.

A process is a member while it renews its row. A run has one owner and a term; every claim raises the term, and a store
writes only under the term it was claimed with, so that an earlier owner can never write again. Times are the
database's: clocks of machines need not agree. Who should own what is decided in `api.run.replica`.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import asyncpg

from atroposlib.api.stores.base import OwnedElsewhere
from atroposlib.api.stores.postgres.sessions import SESSION_ENDED, DatabaseUnreachable

T = TypeVar("T")

LAPSE_S: Final = 4.5
"""A member that renewed nothing for this time has lost its runs."""
_CALL_TIMEOUT_S = 2.0
_JOIN_TIMEOUT_S = 20.0
_FORGET_MEMBERS_S = 60.0
"""Rows of members that ended without leaving are deleted after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The right to write to a run, until a later term begins."""

    run_id: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A hub process."""

    id: uuid.UUID
    address: str
    """URL at which the other members reach it."""
    secret: str = field(repr=False)
    """Proves that a request was forwarded by a process that can read the database."""
    is_alive: bool
    """Whether it renewed its row within `LAPSE_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRun:
    """A stored run and its owner."""

    id: int
    name: str
    term: int
    """Its number."""
    owner: uuid.UUID | None
    is_kept: bool
    """Whether it is an experiment that was set aside: opened only when it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Members and runs at one instant."""

    members: Mapping[uuid.UUID, Member] = field(default_factory=dict)
    runs: Mapping[str, OwnedRun] = field(default_factory=dict)

    def owner_of(self, name: str) -> Member | None:
        """Return the living owner of a run; None if it has none."""
        run = self.runs.get(name)
        member = None if run is None or run.owner is None else self.members.get(run.owner)
        return member if member is not None and member.is_alive else None

    def others(self, member: uuid.UUID) -> list[Member]:
        """Return the living members but this one."""
        return [each for each in self.members.values() if each.is_alive and each.id != member]

    def num_runs(self, member: uuid.UUID) -> int:
        return sum(run.owner == member for run in self.runs.values())


class Owners:
    """One member's view of the tables. Every call raises `DatabaseUnreachable` without the database."""

    def __init__(self, connect: Callable[[str], Awaitable[asyncpg.Connection]]) -> None:
        """`connect` makes a connection with an `application_name`."""
        self.id = uuid.uuid4()
        self.secret = secrets.token_urlsafe(24)
        self.terms: dict[str, Term] = {}
        """The terms of this member's runs, by name."""
        self._address = ""
        session = functools.partial(connect, application_name(self.id))
        self._renewing = _Link(session)
        self._changing = _Link(session)
        """Apart, since a claim waits for transactions of the earlier owner."""

    async def join(self, address: str) -> None:
        """Become a member, reachable at the URL `address`."""
        self._address = address
        await self.renew(timeout_s=_JOIN_TIMEOUT_S)

    async def renew(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> Ownership:
        """Prove that this member is alive, and return who owns what."""

        async def work(connection: asyncpg.Connection) -> Ownership:
            await connection.execute(_RENEW, self.id, self._address, self.secret)
            return await _read(connection)

        return await self._renewing.call(work, timeout_s=timeout_s)

    async def look(self) -> Ownership:
        """Return who owns what now."""
        return await self._changing.call(_read)

    async def claim(self, name: str, *, by_force: bool = False) -> Term:
        """Begin a new term of a run, created if there is none. Raises `OwnedElsewhere`, unless `by_force`.

        The sessions of a lapsed owner are ended, in case it stopped within a transaction, for which the claim would
        wait.
        """

        async def work(connection: asyncpg.Connection) -> Any:
            await connection.execute(_END_SESSIONS, name, self.id)
            row = await connection.fetchrow(_CLAIM, name, self.id, by_force)
            if row is None:
                address = await connection.fetchval(_ADDRESS, name)
                raise OwnedElsewhere(name, address or "an unknown address")
            return Term(run_id=row["id"], number=row["term"])

        term: Term = await self._changing.call(work)
        self.terms[name] = term
        return term

    async def release(self, name: str) -> None:
        """Give up a run, whose store is closed."""
        term = self.terms.pop(name, None)
        if term is not None:
            await self._changing.call(
                lambda connection: connection.execute(_RELEASE, term.run_id, term.number)
            )

    async def leave(self) -> None:
        """Give up every run, and end the membership."""
        await self._changing.call(lambda connection: connection.execute(_LEAVE, self.id))

    async def close(self) -> None:
        await self._renewing.close()
        await self._changing.close()


class _Link:
    """A connection, made again after a failure; one call at a time."""

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        self._connect = connect
        self._connection: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()

    async def call(
        self,
        work: Callable[[asyncpg.Connection], Awaitable[T]],
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> T:
        """Return what `work` returns. Raises `DatabaseUnreachable`; then the effect is unknown.

        `work` may run twice: again on a new session, if its first one ended while it was idle.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s):
                    if self._connection is not None:
                        try:
                            return await work(self._connection)
                        except SESSION_ENDED:
                            self._drop()
                    self._connection = await self._connect()
                    return await work(self._connection)
            except BaseException as e:
                self._drop()
                if isinstance(e, _FAILURES):
                    raise DatabaseUnreachable(f"the database is unreachable: {e!r}") from e
                raise

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        async with self._turn:
            self._drop()


async def _read(connection: asyncpg.Connection) -> Ownership:
    members = await connection.fetch(_MEMBERS)
    runs = await connection.fetch(_RUNS)
    return Ownership(
        members={row["id"]: Member(**row) for row in members},
        runs={row["name"]: OwnedRun(**row) for row in runs},
    )


def application_name(member: uuid.UUID | str) -> str:
    """Return the name of all sessions of a member, by which others end them."""
    return f"atropos {member}"


_FAILURES = (*SESSION_ENDED, OSError, asyncpg.PostgresError)  # TimeoutError is an OSError
_ALIVE = f"renewed_at > clock_timestamp() - interval '{LAPSE_S} s'"
_RENEW = f"""
WITH gone AS (
  DELETE FROM members
  WHERE renewed_at < clock_timestamp() - interval '{_FORGET_MEMBERS_S} s' AND id <> $1
)
INSERT INTO members (id, address, secret, renewed_at) VALUES ($1, $2, $3, clock_timestamp())
ON CONFLICT (id) DO UPDATE SET renewed_at = clock_timestamp()
"""
_MEMBERS = f"SELECT id, address, secret, {_ALIVE} AS is_alive FROM members"
_RUNS = "SELECT id, name, term, owner, kept_of IS NOT NULL AS is_kept FROM runs ORDER BY name"
_IS_FREE = f"""
(runs.owner IS NULL OR runs.owner = $2
 OR NOT EXISTS (SELECT FROM members WHERE members.id = runs.owner AND {_ALIVE}))
"""
_END_SESSIONS = f"""
SELECT pg_terminate_backend(pid) FROM runs JOIN pg_stat_activity
  ON application_name = 'atropos ' || runs.owner
WHERE name = $1 AND runs.owner <> $2 AND {_IS_FREE}
"""
_CLAIM = f"""
INSERT INTO runs (name, term, owner) VALUES ($1, 1, $2)
ON CONFLICT (name) DO UPDATE SET term = runs.term + 1, owner = excluded.owner
  WHERE $3 OR {_IS_FREE}
RETURNING id, term
"""
_RELEASE = "UPDATE runs SET term = term + 1, owner = NULL WHERE id = $1 AND term = $2"
_ADDRESS = "SELECT address FROM runs JOIN members ON members.id = owner WHERE name = $1"
_LEAVE = """
WITH released AS (UPDATE runs SET term = term + 1, owner = NULL WHERE owner = $1)
DELETE FROM members WHERE id = $1
"""
