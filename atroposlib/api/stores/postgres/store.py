"""One run in PostgreSQL. Implements `GroupStore`.

One task writes. Calls that arrive while it is busy become one transaction, which takes effect only in this owner's
term. If the connection is lost, the transaction is tried again (`sessions`), exactly once: its serial number says
whether an attempt without an answer was committed. After any other failure the store is broken until the run is opened
again, here or by another replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import ChainMap, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import asyncpg
from isal.isal_zlib import crc32

from atroposlib.api.stores.base import (
    Appended,
    Change,
    CorruptGroups,
    Durability,
    SavedRun,
    StoreBroken,
    StoreFull,
    StoreUsage,
    TermLost,
)
from atroposlib.api.stores.postgres import rows
from atroposlib.api.stores.postgres.owners import Owners, Term
from atroposlib.api.stores.postgres.rows import Merged, PayloadLocation
from atroposlib.api.stores.postgres.sessions import on_connection
from atroposlib.api.stores.writing import IDLE_S, Job, JobStore, Segments, answer

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_COMMIT_BYTES: Final = 16 << 20
"""Payload bytes per transaction."""
_LOCKED_S: Final = 60.0
"""When the writer looks after the segments next, if another session reads one of them."""
MAX_DROPS: Final = 50
"""Tables dropped in one transaction: each takes four of the server's locks."""


@dataclass(slots=True)
class _Effects:
    """What a transaction does to the memory of the store, once it is committed."""

    answers: list[Any] = field(default_factory=list)
    """Per job: a result, or an exception to raise."""
    segment: int | None = None
    """The segment that new payloads go to from now on; None: as before."""
    located: dict[int, PayloadLocation] = field(default_factory=dict)
    """Groups that were added or moved."""
    ended: set[int] = field(default_factory=set)
    next_number: int = 0
    document: bytes | None = None


class PostgresStore(JobStore):
    """One run of a database; `pool` and `owners` are shared by all runs of a replica.

    `on_failure` is called once, on the event loop, with the error that broke the store, `TermLost` included.
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
        on_failure: Callable[[BaseException], None] | None = None,
        segment_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._name = name
        self._pool = pool
        self._owners = owners
        self._on_failure = on_failure
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._jobs: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._serial = 0
        """Of the last transaction."""
        self._segments = Segments[PayloadLocation]()
        self._sizes: dict[int, int] = {}
        """Bytes of each segment."""
        self._open_segment: int | None = None
        self._last_segment = -1
        self._next_look_s = float("-inf")

    async def open(self) -> SavedRun:
        """See `GroupStore`. Raises `OwnedElsewhere`."""
        assert self._writer is None, "a store is opened once"
        started_s = time.perf_counter()
        try:
            self._term = await self._owners.claim(self._name)
            loaded = await self._on_connection(
                lambda connection: rows.load(connection, self._term.run_id)
            )
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as e:
            raise StoreBroken(f"run {self._name!r} cannot be opened: {e}") from e
        self._serial = loaded.serial
        self._sizes = loaded.segments
        self._segments.add(loaded.segments)
        self._last_segment = max(loaded.segments, default=-1)
        for number, location in loaded.locations.items():
            self._segments.note(number, location)
        self._is_open = True
        self._writer = asyncio.create_task(self._write(), name=f"store of run {self._name}")
        if self._serial == 0:
            return loaded.saved
        found = (
            f"{len(loaded.saved.groups)} groups held ({self._segments.payload_bytes()} bytes),"
            f" term {self._term.number}, in {time.perf_counter() - started_s:.2f} s"
        )
        return replace(loaded.saved, found=found)

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        wanted = {number: self._segments.places[number] for number in numbers}
        found = await self._on_connection(lambda connection: self._read(connection, wanted))
        damaged = [
            number
            for number, location in wanted.items()
            if number not in found or crc32(found[number]) != location.crc
        ]
        if not damaged:
            return [found[number] for number in numbers]
        if any(self._segments.places.get(number) != wanted[number] for number in damaged):
            return await self.read(numbers)  # they moved, or ended, while they were read
        # A later owner may have dropped their segment.
        await self._on_connection(self._check_term)
        raise CorruptGroups(sorted(damaged))

    async def _read(self, connection: Any, wanted: dict[int, PayloadLocation]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for segment in {location.segment for location in wanted.values()}:
            inside = [n for n, location in wanted.items() if location.segment == segment]
            found |= await rows.read_payloads(connection, self._term.run_id, segment, inside)
        return found

    def usage(self) -> StoreUsage:
        return StoreUsage(
            payload_bytes=self._segments.payload_bytes(), stored_bytes=sum(self._sizes.values())
        )

    async def close(self) -> None:
        """See `GroupStore`. The run stays this replica's, until `Owners.release`."""
        if self._is_open and self._writer is not None:
            self._is_open = False
            self._wake.set()
            await self._writer

    def _put(self, job: Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def _broken(self) -> StoreBroken:
        kind = TermLost if isinstance(self._failure, TermLost) else StoreBroken
        error = kind(f"run {self._name!r}: {self._failure}")
        error.__cause__ = self._failure
        return error

    # The writer.

    async def _write(self) -> None:
        while self._jobs or self._is_open:
            jobs = await self._next_jobs()
            try:
                if self._failure is None:
                    await self._do(jobs)
            except Exception as e:  # after any failure, nothing more may be written
                is_expected = isinstance(e, TermLost)
                logger.error(
                    "run %s: the store is broken: %s", self._name, e, exc_info=not is_expected
                )
                self._failure = e
                if self._on_failure is not None:
                    self._on_failure(e)
            if self._failure is not None:
                for job in jobs:
                    job.answer = self._broken()
            answer(jobs)

    async def _next_jobs(self) -> list[Job]:
        """Wait for a job; return it and later ones, up to the size of a commit or one to do alone. Empty if idle."""
        if not self._jobs and self._is_open:
            self._wake.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                return []
        jobs: list[Job] = []
        num_bytes = 0
        while self._jobs and num_bytes < _MAX_COMMIT_BYTES:
            if self._jobs[0].alone is not None and jobs:
                break
            jobs.append(self._jobs.popleft())
            if jobs[-1].alone is not None:
                break
            num_bytes += sum(len(group.payload) for group in jobs[-1].groups)
        return jobs

    async def _do(self, jobs: Sequence[Job]) -> None:
        if jobs and (alone := jobs[0].alone) is not None:
            await alone()
        elif jobs:
            await self._commit(jobs)
        await self._look_after_segments()

    async def _commit(self, jobs: Sequence[Job]) -> None:
        """Do the jobs in one transaction.

        If there is no room, refuse the appends: changes that end groups free room, and must be written.
        """
        try:
            effects = await self._transact(lambda connection: self._apply(connection, jobs, None))
        except asyncpg.InsufficientResourcesError as e:
            logger.warning("groups cannot be stored in the database now: %s", e)
            refusal = StoreFull(f"the database cannot store groups now: {e}")
            effects = await self._transact(
                lambda connection: self._apply(connection, jobs, refusal)
            )
        for job, outcome in zip(jobs, effects.answers, strict=True):
            job.answer = outcome

    async def _apply(
        self, connection: Any, jobs: Sequence[Job], refusal: StoreFull | None
    ) -> _Effects:
        effects = _Effects()
        segment = self._open_segment
        for batch in _batched(jobs):
            groups = [group for job in batch if job.change is None for group in job.groups]
            outcomes: list[Appended] = []
            if groups and refusal is None:
                if segment is None:
                    segment = effects.segment = self._last_segment + 1
                    await rows.create_segment(connection, self._term.run_id, segment)
                outcomes, added = await rows.insert_groups(
                    connection, self._term.run_id, groups, segment=segment
                )
                effects.located |= added
                effects.next_number = max([effects.next_number, *(n + 1 for n in added)])
            merged = Merged()
            for job in batch:
                if job.change is not None:
                    effects.answers.append(self._merge(job.change, merged, effects))
                elif refusal is not None:
                    effects.answers.append(refusal)
                else:
                    effects.answers.append(outcomes[: len(job.groups)])
                    del outcomes[: len(job.groups)]
            await rows.apply(connection, self._term.run_id, merged)
        return effects

    def _merge(self, change: Change, merged: Merged, effects: _Effects) -> KeyError | None:
        """Add a change to `merged` and `effects`, or return the error of one that names unknown groups."""
        named = [move.number for move in change.moves] + [end.number for end in change.ends]
        places = ChainMap(effects.located, self._segments.places)
        unknown = [n for n in named if n in effects.ended or n not in places]
        if unknown:
            return KeyError(f"groups {sorted(unknown)} are not stored")
        merged.add(change)
        effects.ended |= {end.number for end in change.ends}
        if change.document is not None:
            effects.document = change.document
        return None

    # Transactions.

    async def _transact(self, write: Callable[[Any], Awaitable[_Effects]]) -> _Effects:
        """Run one transaction within this term, exactly once, and take over its effects. Raises `TermLost`."""
        doubtful: _Effects | None = None
        """Of an attempt that may have been committed."""

        async def attempt(connection: Any) -> _Effects:
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
                effects.next_number,
                effects.document,
            )
            if status != "UPDATE 1":
                raise StoreBroken(f"transaction {self._serial + 1} was committed by someone else")
            doubtful = effects
            await connection.execute("commit")
            return effects

        effects = await self._on_connection(attempt)
        self._serial += 1
        self._take_over(effects)
        return effects

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
        return await on_connection(self._pool, work, who=f"run {self._name}")

    def _take_over(self, effects: _Effects) -> None:
        if effects.segment is not None:
            self._open_segment = self._last_segment = effects.segment
            self._segments.add([effects.segment])
            self._sizes[effects.segment] = 0
        for number, location in effects.located.items():
            self._sizes[location.segment] += location.length
            self._segments.note(number, location)
        for number in effects.ended:
            self._segments.end(number)
        current = self._open_segment
        if current is not None and self._sizes[current] >= self._segment_bytes:
            self._open_segment = None

    # Segments.

    async def _look_after_segments(self) -> None:
        """Drop the segments without held groups, and move the last groups of those that nearly all have left."""
        now_s = self._clock()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + IDLE_S
        sizes, current = self._sizes, self._open_segment
        for number in self._segments.sparse(now_s, sizes=sizes, current=current):
            await self._move_last_groups(number)
        await self._drop_empty_segments()

    async def _drop_empty_segments(self) -> None:
        empty = self._segments.empty(current=self._open_segment)[:MAX_DROPS]

        async def drop(connection: Any) -> _Effects:
            await rows.drop_segments(connection, self._term.run_id, empty)
            return _Effects()

        if empty:
            try:
                await self._transact(drop)
            except asyncpg.LockNotAvailableError:
                logger.info("run %s: segments are being read, and dropped later", self._name)
                self._next_look_s += _LOCKED_S
                return
            self._segments.forget(empty)
            for number in empty:
                del self._sizes[number]

    async def _move_last_groups(self, source: int) -> None:
        places = {n: each for n, each in self._segments.places.items() if each.segment == source}

        async def move(connection: Any) -> _Effects:
            effects = _Effects()
            target = self._open_segment
            if target is None:
                target = effects.segment = self._last_segment + 1
                await rows.create_segment(connection, self._term.run_id, target)
            await rows.move_payloads(
                connection, self._term.run_id, list(places), source=source, target=target
            )
            effects.located = {n: place._replace(segment=target) for n, place in places.items()}
            return effects

        try:
            await self._transact(move)
            num_groups = len(places)
            logger.debug("run %s: %d groups left segment %d", self._name, num_groups, source)
        except (asyncpg.InsufficientResourcesError, asyncpg.InternalServerError) as e:
            logger.warning("run %s: segment %d stays: %s", self._name, source, e)

    async def _clear(self) -> None:
        async def erase(connection: Any) -> _Effects:
            await rows.erase(connection, self._term.run_id)
            return _Effects(ended=set(self._segments.places))

        await self._transact(erase)
        self._open_segment = None
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
