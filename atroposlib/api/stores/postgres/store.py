"""One run in PostgreSQL. Implements `GroupStore`.

One task writes. Calls that arrive while it is busy become one transaction, which takes effect only in this owner's
term. If the connection is lost, the transaction is tried again (`sessions`), exactly once: its serial number says
whether an attempt without an answer was committed. After any other failure the store is broken until the run is opened
again, here or by another replica.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import asyncpg
from isal.isal_zlib import crc32

from atroposlib.api.stores.base import (
    Change,
    CorruptGroups,
    Durability,
    NewGroup,
    SavedRun,
    StoreBroken,
    StoreFull,
    StoreUsage,
    TermLost,
    known_and_new,
)
from atroposlib.api.stores.postgres import rows
from atroposlib.api.stores.postgres.owners import Owners, Term
from atroposlib.api.stores.postgres.segments import Effects, Location, Segments
from atroposlib.api.stores.postgres.sessions import on_connection
from atroposlib.api.stores.postgres.space import DatabaseSpace
from atroposlib.api.stores.writing import Job, JobStore

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_COMMIT_BYTES: Final = 16 << 20
"""Payload bytes per transaction."""
_LOCKED_S: Final = 60.0
"""When the writer looks after the segments next, if another session reads one of them."""
MAX_DROPS: Final = 50
"""Tables dropped in one transaction: each takes four of the server's locks."""


class PostgresStore(JobStore):
    """One run of a database; `pool`, `owners` and `space` (None: not bounded) are shared by all runs of a replica.

    An error of `on_failure` may be `TermLost`.
    """

    durability = Durability.POWER

    _term: Term
    """Set by `open`."""

    def __init__(
        self,
        name: str,
        *,
        pool: asyncpg.Pool,
        owners: Owners,
        space: DatabaseSpace | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        segment_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._segments = Segments(max_bytes=segment_bytes)
        super().__init__(
            f"run {name}", max_commit_bytes=_MAX_COMMIT_BYTES, on_failure=on_failure, clock=clock
        )
        self._run_name = name
        self._pool = pool
        self._owners = owners
        self._space = space or DatabaseSpace()
        self._serial = 0
        """Of the last transaction."""

    async def _load(self) -> SavedRun:
        """Also raises `OwnedElsewhere`."""
        started_s = time.perf_counter()
        try:
            self._term = await self._owners.claim(self._run_name)
            loaded = await self._on_connection(
                lambda connection: rows.load(connection, self._term.run_id)
            )
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as e:
            raise StoreBroken(f"{self._name} cannot be opened: {e}") from e
        self._serial = loaded.serial
        self._segments.load(loaded.segments, loaded.locations)
        if self._serial == 0:
            return loaded.saved
        found = (
            f"{len(loaded.saved.groups)} groups held ({self._segments.payload_bytes()} bytes),"
            f" term {self._term.number}, in {time.perf_counter() - started_s:.2f} s"
        )
        return replace(loaded.saved, found=found)

    async def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        return await work(*args)

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        wanted = {number: self._segments.places[number] for number in numbers}
        found = await self._fetch(wanted)
        damaged = sorted(wanted.keys() - found)
        if not damaged:
            return [found[number] for number in numbers]
        if any(self._segments.places.get(number) != wanted[number] for number in damaged):
            return await self.read(numbers)  # they moved, or ended, while they were read
        raise CorruptGroups(damaged)

    def usage(self) -> StoreUsage:
        return StoreUsage(
            payload_bytes=self._segments.payload_bytes(),
            stored_bytes=sum(self._segments.sizes.values()),
            free_bytes=self._space.room_bytes,
            refusal=self._space.refusal(),
        )

    async def _fetch(self, wanted: Mapping[int, Location]) -> dict[int, bytes]:
        """Return the payloads that are at these places, undamaged."""
        found = await self._on_connection(lambda connection: self._read(connection, wanted))
        if len(found) < len(wanted):
            # A later owner may have dropped their segment.
            await self._on_connection(self._check_term)
        return found

    async def _read(self, connection: Any, wanted: Mapping[int, Location]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for segment in {location.segment for location in wanted.values()}:
            inside = [n for n, location in wanted.items() if location.segment == segment]
            payloads = await rows.read_payloads(connection, self._term.run_id, segment, inside)
            found |= {n: each for n, each in payloads.items() if crc32(each) == wanted[n].crc}
        return found

    async def _finish(self) -> None:
        """Every transaction is durable."""

    def _release(self) -> None:
        """The run stays this replica's, until `Owners.release`."""

    # The writer.

    async def _commit(self, jobs: Sequence[Job]) -> None:
        """Do the jobs in one transaction.

        If there is no room, refuse the appends: changes that end groups free room, and must be written.
        """
        for job in jobs:
            try:
                if job.refusal is not None:
                    raise job.refusal
                self._space.take(sum(len(group.payload) for group in job.groups))
            except StoreFull as e:
                job.answer = e if job.change is None else None
        admitted = [job for job in jobs if job.answer is None]
        try:
            if admitted:
                await self._transact(lambda connection: self._apply(connection, admitted))
        except asyncpg.InsufficientResourcesError as e:
            logger.warning("groups cannot be stored in the database now: %s", e)
            changes = [job for job in admitted if job.change is not None]
            await self._transact(lambda connection: self._apply(connection, changes))
            for job in admitted:
                if job.change is None:
                    job.answer = StoreFull(f"the database cannot store groups now: {e}")
        for job in jobs:
            if isinstance(job.answer, StoreFull):
                known = await self._on_connection(partial(self._known, groups=job.groups))
                with contextlib.suppress(StoreFull):
                    job.answer, _ = known_and_new(job.groups, known.get, refusal=job.answer)

    async def _known(self, connection: Any, groups: Sequence[NewGroup]) -> dict[str, bytes]:
        return await rows.known_digests(connection, self._term.run_id, groups)

    async def _apply(self, connection: Any, jobs: Sequence[Job]) -> Effects:
        effects = Effects(self._segments)
        for batch in _batched(jobs):
            groups = [group for job in batch if job.change is None for group in job.groups]
            known = await self._known(connection, groups) if groups else {}
            outcomes, new = known_and_new(groups, known.get, refusal=None)
            if new:
                segment = await self._current_segment(connection, effects)
                effects.located |= await rows.insert_groups(
                    connection, self._term.run_id, new, segment=segment
                )
            merged = Change()
            for job in batch:
                if job.change is not None:
                    try:
                        effects.end(job.change)
                        job.answer = None
                    except KeyError as e:
                        job.answer = e
                    else:
                        rows.merge(merged, job.change)
                else:
                    job.answer = outcomes[: len(job.groups)]
                    del outcomes[: len(job.groups)]
            await rows.apply(connection, self._term.run_id, merged)
            if merged.document is not None:
                effects.document = merged.document
        return effects

    async def _current_segment(self, connection: Any, effects: Effects) -> int:
        """Return the segment that payloads go to; create one if there is none."""
        if self._segments.current is not None:
            return self._segments.current
        if effects.segment is None:
            effects.segment = self._segments.last + 1
            await rows.create_segment(connection, self._term.run_id, effects.segment)
        return effects.segment

    # Transactions.

    async def _transact(self, write: Callable[[Any], Awaitable[Effects]]) -> None:
        """Run one transaction within this term, exactly once, and take over its effects. Raises `TermLost`."""
        doubtful: Effects | None = None
        """Of an attempt that may have been committed."""

        async def attempt(connection: Any) -> Effects:
            nonlocal doubtful
            if doubtful is not None and await self._is_committed(connection):
                return doubtful
            begin = f"begin; {self._fence} for share"
            if await connection.execute(begin) != "SELECT 1":
                raise self._lost()
            effects = await write(connection)
            status = await connection.execute(
                "update states set serial = serial + 1, next_number = greatest(next_number, $3),"
                " document = coalesce($4, document), changed_at = clock_timestamp()"
                " where run_id = $1 and serial = $2",
                self._term.run_id,
                self._serial,
                max(effects.located, default=-1) + 1,
                effects.document,
            )
            if status != "UPDATE 1":
                raise StoreBroken(f"transaction {self._serial + 1} was committed by someone else")
            doubtful = effects
            await connection.execute("commit")
            return effects

        effects = await self._on_connection(attempt)
        self._serial += 1
        self._segments.take_over(effects)

    @property
    def _fence(self) -> str:
        return f"select 1 from runs where id = {self._term.run_id} and term = {self._term.number}"

    def _lost(self) -> TermLost:
        return TermLost(f"term {self._term.number} has ended, another hub has taken the run over")

    async def _check_term(self, connection: Any) -> None:
        if await connection.fetchval(self._fence) is None:
            raise self._lost()

    async def _is_committed(self, connection: Any) -> bool:
        """Whether the last attempt was committed; waits for its end if the server has not noticed that it was lost."""
        async with connection.transaction():
            serial = await connection.fetchval(
                "select serial from states where run_id = $1 for update", self._term.run_id
            )
            await self._check_term(connection)
        return bool(serial == self._serial + 1)

    async def _on_connection(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Call `work` with a connection; see `sessions.on_connection`."""
        return await on_connection(self._pool, work, who=self._name)

    # Segments.

    async def _look_after(self, now_s: float) -> None:
        """Move the last groups of segments that nearly all have left, and drop those without held groups."""
        if self._space.refusal():
            self._segments.close_empty()  # it takes room that groups wait for
        for number in self._segments.sparse(now_s):
            await self._move_last_groups(number)
        await self._drop_empty_segments()

    async def _drop_empty_segments(self) -> None:
        empty = self._segments.empty()[:MAX_DROPS]

        async def drop(connection: Any) -> Effects:
            await rows.drop_segments(connection, self._term.run_id, empty)
            return Effects(self._segments)

        if empty:
            try:
                await self._transact(drop)
            except asyncpg.LockNotAvailableError:
                logger.info("%s: segments are being read, and dropped later", self._name)
                self._next_look_s += _LOCKED_S
                return
            for number in empty:
                del self._segments.sizes[number]

    async def _move_last_groups(self, source: int) -> None:
        places = {n: each for n, each in self._segments.places.items() if each.segment == source}

        async def move(connection: Any) -> Effects:
            effects = Effects(self._segments)
            target = await self._current_segment(connection, effects)
            await rows.move_payloads(
                connection, self._term.run_id, list(places), source=source, target=target
            )
            effects.located = {n: place._replace(segment=target) for n, place in places.items()}
            return effects

        try:
            await self._transact(move)
            num_groups = len(places)
            logger.debug("%s: %d groups left segment %d", self._name, num_groups, source)
        except (asyncpg.InsufficientResourcesError, asyncpg.InternalServerError) as e:
            logger.warning("%s: segment %d stays: %s", self._name, source, e)

    async def _clear(self) -> None:
        async def erase(connection: Any) -> Effects:
            await rows.erase(connection, self._term.run_id)
            effects = Effects(self._segments)
            effects.ended = set(self._segments.places)
            return effects

        await self._transact(erase)
        self._segments.close_empty()
        await self._drop_empty_segments()


def _batched(jobs: Sequence[Job]) -> list[list[Job]]:
    """Divide jobs so that in each part the appends may take effect first: none follows a change that ends groups.

    The id of a group that ended may be free for the next.
    """
    batches: list[list[Job]] = [[]]
    has_ends = False
    for job in jobs:
        if job.change is None and has_ends:
            batches.append([])
            has_ends = False
        batches[-1].append(job)
        has_ends |= job.change is not None and bool(job.change.ends)
    return batches
