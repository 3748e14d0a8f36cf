"""A run on a local disk: payloads in append-only segments, everything else in SQLite.

One thread writes. What has come in while it was busy becomes one write, one sync of the segment and one transaction,
and then all callers are answered. A record is on the disk before its row, and a row is gone for good before its bytes
are, so at every instant what survives a crash can be opened again. A failed write or sync is never repeated: the store
is broken until it is opened anew. The coordinator calls it; it never looks into a payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atroposlib.api.stores.base import (
    Appended,
    Change,
    CorruptGroups,
    Durability,
    NewGroup,
    Place,
    SavedRun,
    StoreBroken,
    StoredGroup,
    StoreFull,
    StoreUsage,
)
from atroposlib.api.stores.segments import (
    FULL_ERRNOS,
    LATER_ERRNOS,
    DamagedPayload,
    Files,
    Location,
    Mark,
    RecordMeta,
    SegmentLog,
    Written,
    copy_record,
    encode_record,
    opened,
    read_cached_payload,
    read_payload,
    segment_path,
)
from atroposlib.api.stores.space import BALLAST, DiskSpace, file_system_of
from atroposlib.api.stores.state import DamagedState, LoadedState, StateDb, is_full
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_DRAIN_BYTES: Final = 32 << 20
_MAX_DRAIN_GROUPS: Final = 256
_INLINE_READ_BYTES: Final = 2 << 20
"""Read on the event loop, in less than 2 ms, if the operating system holds it in memory."""
_CAN_READ_CACHED: Final = hasattr(os, "RWF_NOWAIT")
_IDLE_S: Final = 1.0
"""How long the writer waits for work before it looks after the disk."""
_SPARSE_SHARE: Final = 0.2
_SPARSE_S: Final = 600.0
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "9p", "ceph", "beegfs", "fuse.sshfs"}
)


@dataclass(slots=True, kw_only=True)
class _Job:
    """Something for the writer; `future` takes what became of it."""

    future: asyncio.Future[Any]
    groups: Sequence[NewGroup] = ()
    change: Change | None = None
    barrier: Callable[[], None] | None = None
    """Done alone, after everything before it and before everything behind it."""
    is_last: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(len(group.payload) for group in self.groups)


@dataclass(slots=True)
class _Plan:
    """What one job is about to change."""

    job: _Job
    outcomes: list[Appended] = field(default_factory=list)
    new: list[NewGroup] = field(default_factory=list)
    """Groups to store."""
    repeats_new: bool = False
    """Some of its groups repeat what the same commit stores."""
    located: list[tuple[RecordMeta, Location]] = field(default_factory=list)
    """What became of `new` once it was written."""
    refusal: BaseException | None = None
    """Raised to the caller; the job changes nothing."""


@dataclass(slots=True)
class _Segment:
    """What the writer knows of one segment."""

    num_groups: int = 0
    """Held."""
    live_bytes: int = 0
    sparse_since_s: float | None = None


class DiskStore:
    """One directory. Implements `GroupStore`.

    `append` raises `StoreFull` rather than use what `space` keeps free; stores on one disk share it (None: one for this
    store alone, with `min_free_bytes`). `on_failure` is called once, on the event loop, with the error that broke the
    store.
    """

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = Durability.POWER,
        space: DiskSpace | None = None,
        min_free_bytes: int | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        segment_bytes: int = 64 << 20,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if durability is Durability.MEMORY:
            raise ConfigError("a disk store cannot have the durability of memory")
        self._directory = Path(directory)
        self._durability = durability
        self._on_failure = on_failure
        self._files = files or Files()
        self._clock = clock
        self._is_synced = durability is Durability.POWER
        self._log = SegmentLog(
            self._directory,
            files=self._files,
            segment_bytes=segment_bytes,
            is_synced=self._is_synced,
        )
        self._has_own_space = space is None
        self._space = space or DiskSpace(
            self._directory, min_free_bytes=min_free_bytes, files=self._files, clock=clock
        )
        self._lock_fd: int | None = None
        self._state: StateDb | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._held_back: _Job | None = None
        self._thread: threading.Thread | None = None
        self._unlinker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-unlink")
        self._failure: BaseException | None = None
        self._is_closed = False

        # Written by the writer alone; read by everybody.
        self._locations: dict[int, Location] = {}
        self._segments: dict[int, _Segment] = {}
        self._batches: set[int] = set()
        self._next_number = 0
        self._payload_bytes = 0
        self._stored_bytes = 0
        self._empty: set[int] = set()
        """Segments with no held group, to be dropped once nothing is appended to them."""
        self._is_listed_safely = True
        """All transactions so far would survive a loss of power."""
        self._next_look_s = float("-inf")

    @property
    def durability(self) -> Durability:
        return self._durability

    # The event loop's side.

    async def open(self) -> SavedRun:
        """See `GroupStore`. Also raises `ConfigError` when another hub uses the directory."""
        assert self._thread is None, "a store is opened once"
        self._loop = asyncio.get_running_loop()
        saved = await asyncio.to_thread(self._open)
        self._thread = threading.Thread(target=self._write, name="hub-store", daemon=True)
        self._thread.start()
        return saved

    async def append(self, groups: Sequence[NewGroup]) -> list[Appended]:
        outcomes: list[Appended] = await self._submit(groups=groups)
        return outcomes

    async def commit(self, change: Change) -> None:
        await self._submit(change=change)

    async def clear(self) -> None:
        await self._submit(barrier=self._clear)

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        wanted = {number: self._locations[number] for number in numbers}
        if sum(location.length for location in wanted.values()) <= _INLINE_READ_BYTES:
            payloads = self._read_cached([wanted[number] for number in numbers])
            if payloads is not None:
                return payloads
        try:
            return await asyncio.to_thread(self._read, list(numbers), wanted)
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise
            raise StoreFull(f"{self._directory} cannot be read now: {e.strerror}") from e

    def usage(self) -> StoreUsage:
        return StoreUsage(
            payload_bytes=self._payload_bytes,
            stored_bytes=self._stored_bytes,
            free_bytes=self._space.room_bytes,
        )

    async def close(self) -> None:
        """See `GroupStore`. A store that broke before lets go of its files as they are.

        Raises `StoreBroken` if it breaks now; then changes that were not durable may be lost.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._thread is not None:
                await self._enqueue(barrier=self._finish, is_last=True)
                await asyncio.to_thread(self._thread.join)
        finally:
            self._let_go()

    async def _submit(
        self,
        *,
        groups: Sequence[NewGroup] = (),
        change: Change | None = None,
        barrier: Callable[[], None] | None = None,
    ) -> Any:
        if self._failure is not None:
            raise self._broken()
        assert not self._is_closed, "the store is closed"
        # A caller who goes away cancels the future, not what the writer does.
        return await self._enqueue(groups=groups, change=change, barrier=barrier)

    def _enqueue(
        self,
        *,
        groups: Sequence[NewGroup] = (),
        change: Change | None = None,
        barrier: Callable[[], None] | None = None,
        is_last: bool = False,
    ) -> asyncio.Future[Any]:
        assert self._loop is not None, "the store is not open"
        future = self._loop.create_future()
        self._jobs.put(
            _Job(future=future, groups=groups, change=change, barrier=barrier, is_last=is_last)
        )
        return future

    def _broken(self) -> StoreBroken:
        error = StoreBroken(f"{self._directory}: {self._failure}; restart the hub to recover")
        error.__cause__ = self._failure
        return error

    # Reading, in any thread.

    def _read_cached(self, wanted: Sequence[Location]) -> list[bytes] | None:
        """Read what takes no wait for the disk; None if anything does, or is not as it should be.

        Measured for 4 payloads of 133 KB: 0.24 ms, and 0.40 ms in another thread.
        """
        if not _CAN_READ_CACHED:
            return None
        payloads = []
        buffer = memoryview(bytearray(max((each.length for each in wanted), default=0)))
        with contextlib.ExitStack() as files:
            fds: dict[int, int] = {}
            for location in wanted:
                if location.segment not in fds:
                    path = segment_path(self._directory, location.segment)
                    try:
                        fds[location.segment] = files.enter_context(opened(path))
                    except OSError:
                        return None
                payload = read_cached_payload(fds[location.segment], location, buffer)
                if payload is None:
                    return None
                payloads.append(payload)
        return payloads

    def _read(self, numbers: Sequence[int], wanted: dict[int, Location]) -> list[bytes]:
        payloads: dict[int, bytes] = {}
        damaged = []
        by_segment: dict[int, list[int]] = {}
        for number, location in wanted.items():
            by_segment.setdefault(location.segment, []).append(number)
        for segment, members in by_segment.items():
            try:
                with opened(segment_path(self._directory, segment)) as fd:
                    for number in members:
                        try:
                            payloads[number] = read_payload(fd, wanted[number])
                        except (DamagedPayload, OSError) as e:
                            # What the disk cannot read it will not read later, and would keep a whole batch back.
                            if isinstance(e, OSError) and e.errno != errno.EIO:
                                raise
                            logger.error("group %d is damaged: %s", number, e)
                            damaged.append(number)
            except FileNotFoundError:
                # Its groups may have been moved together since the locations were looked up.
                moved = {number: self._locations[number] for number in members}
                if any(location.segment == segment for location in moved.values()):
                    logger.error("segment %d of %s is missing", segment, self._directory)
                    damaged += members
                else:
                    payloads |= zip(members, self._read(members, moved), strict=True)
        if damaged:
            raise CorruptGroups(sorted(damaged))
        return [payloads[number] for number in numbers]

    # Opening.

    def _open(self) -> SavedRun:
        started_s = time.perf_counter()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._warn_of_network_file_system()
            if not self._has_own_space:
                # Earlier versions kept one in each run.
                (self._directory / BALLAST).unlink(missing_ok=True)
            self._space.prepare()
            saved = self._recover(started_s)
            self._space.measure()
            self._space.warn_if_full()
        except (OSError, sqlite3.Error) as e:
            self._let_go()
            raise StoreBroken(f"{self._directory} cannot be opened: {e}") from e
        except BaseException:
            self._let_go()
            raise
        return saved

    def _take_lock(self) -> None:
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            raise ConfigError(
                f"another hub uses {self._directory}; stop it, or choose another directory"
            ) from e
        self._lock_fd = fd

    def _warn_of_network_file_system(self) -> None:
        kind = file_system_of(self._directory)
        if kind in _NETWORK_FILE_SYSTEMS:
            logger.warning(
                "%s is on %s: locks and syncs there may not hold what they promise;"
                " use a local disk",
                self._directory,
                kind,
            )

    def _recover(self, started_s: float) -> SavedRun:
        state_path = self._directory / "state.db"
        self._log.load()
        is_fresh = not state_path.exists() and not self._log.sizes
        is_rebuilt = bool(self._log.sizes) and not state_path.exists()
        try:
            state = StateDb(state_path, is_synced=self._is_synced)
            self._state = state
            loaded = state.load()
        except DamagedState as e:
            logger.error("%s cannot be read, and is set aside: %s", state_path, e)
            if self._state is not None:
                self._state.close()
            _set_aside(state_path)
            is_rebuilt = True
            self._state = state = StateDb(state_path, is_synced=self._is_synced)
            loaded = state.load()
        groups = self._adopt(loaded)
        found = self._roll_forward(state, loaded.mark, groups, is_rebuilt=is_rebuilt)
        if is_rebuilt:
            logger.error(
                "%s: the state was lost and is rebuilt from the payloads; groups that had been"
                " trained may come back, and ids of ended groups are forgotten",
                self._directory,
            )
        state.checkpoint()
        self._files.sync_directory(self._directory)
        self._empty |= {number for number in self._log.sizes if number not in self._segments}
        self._drop_empty_segments()
        num_missing = sum(
            segment.num_groups
            for number, segment in self._segments.items()
            if number not in self._log.sizes
        )
        seconds = time.perf_counter() - started_s
        line = f"{len(groups)} groups held ({self._payload_bytes} bytes), {found}" + (
            f", {num_missing} without payload" if num_missing else ""
        )
        return SavedRun(
            document=loaded.document,
            facts=loaded.facts,
            groups=[groups[number] for number in sorted(groups)],
            batches=loaded.batches,
            ended=loaded.ended,
            next_number=self._next_number,
            found="" if is_fresh else f"{line}, in {seconds:.2f} s",
        )

    def _adopt(self, loaded: LoadedState) -> dict[int, StoredGroup]:
        for group, location in loaded.groups:
            self._note(group.header.number, location)
        self._batches = {batch.number for batch in loaded.batches}
        self._next_number = loaded.next_number
        self._log.begin_behind(loaded.mark)
        return {located.group.header.number: located.group for located in loaded.groups}

    def _roll_forward(
        self,
        state: StateDb,
        mark: Mark,
        groups: dict[int, StoredGroup],
        *,
        is_rebuilt: bool,
    ) -> str:
        """List what lies behind `mark`, add it to `groups` and say in words what it was."""
        num_rolled = num_cut = num_damaged = 0
        newest = max(self._log.sizes, default=0)
        for number in sorted(n for n in self._log.sizes if n >= mark.segment):
            start = mark.offset if number == mark.segment else 0
            scan = self._log.scan(number, start=start)
            if scan.size == start and not scan.records:
                continue
            num_damaged += scan.num_damaged
            num_cut += max(0, scan.size - scan.end)
            # Before the rows are: a row promises that its record is on the disk.
            # Of a rebuilt log only the newest segment can hold bytes that were never synced.
            doubtful = scan.end if is_rebuilt and number != newest else start
            self._log.secure(number, start=doubtful, end=scan.end)
            with state.transaction(is_durable=True):
                for meta, location in scan.records:
                    # Copies made by `_compact` repeat their originals.
                    if meta.number in groups or state.digest_of(meta.group_id) is not None:
                        continue
                    state.insert(meta, location)
                    self._note(meta.number, location)
                    groups[meta.number] = StoredGroup(
                        header=meta.header(location.length),
                        group_id=meta.group_id,
                        place=Place(meta.place),
                    )
                    num_rolled += 1
                    self._next_number = max(self._next_number, meta.number + 1)
                state.set_mark(Mark(number, scan.end), next_number=self._next_number)
        rolled = f"{num_rolled} of them {'rebuilt' if is_rebuilt else 'rolled forward'}"
        damaged = f", {num_damaged} damaged stretches skipped" if num_damaged else ""
        return f"{rolled}, {num_cut} unfinished bytes cut off{damaged}"

    # The writer thread.

    def _write(self) -> None:
        while True:
            jobs = self._drain()
            if self._failure is None:
                try:
                    answers = self._do(jobs)
                except Exception as e:  # noqa: BLE001  whatever it was, nothing may be written after it
                    self._fail(e)
                    answers = [(job.future, self._broken()) for job in jobs]
            else:
                # Closing what is broken already has nothing to report.
                answers = [(job.future, None if job.is_last else self._broken()) for job in jobs]
            self._answer(answers)
            if any(job.is_last for job in jobs):
                return

    def _drain(self) -> list[_Job]:
        """Wait for a job; return it with those that came meanwhile, as much as one commit takes."""
        if self._held_back is not None:
            job, self._held_back = self._held_back, None
        else:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                return []
        jobs = [job]
        if job.barrier is not None:
            return jobs
        num_bytes, num_groups = job.num_bytes, len(job.groups)
        while num_bytes < _MAX_DRAIN_BYTES and num_groups < _MAX_DRAIN_GROUPS:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job.barrier is not None:
                self._held_back = job
                break
            jobs.append(job)
            num_bytes += job.num_bytes
            num_groups += max(1, len(job.groups))
        return jobs

    def _do(self, jobs: Sequence[_Job]) -> list[tuple[asyncio.Future[Any], Any]]:
        if jobs and jobs[0].barrier is not None:
            jobs[0].barrier()
            return [(jobs[0].future, None)]
        answers = self._commit(jobs) if jobs else []
        self._look_after_disk()
        return answers

    def _answer(self, answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
        if not answers:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_resolve, answers)
        except RuntimeError:
            logger.warning("the event loop closed before the store had answered")

    def _fail(self, error: BaseException) -> None:
        logger.error("the store in %s is broken", self._directory, exc_info=error)
        self._failure = error
        self._log.abandon()
        if self._on_failure is not None:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._on_failure, error)
            except RuntimeError:
                logger.warning("the event loop closed before it heard of the failure")

    # Committing.

    def _commit(self, jobs: Sequence[_Job]) -> list[tuple[asyncio.Future[Any], Any]]:
        digests: dict[str, bytes] = {}
        plans = [self._plan(job, digests) for job in jobs]
        written = self._append_records(plans)
        try:
            self._list(plans)
        except sqlite3.Error as e:
            if not is_full(e):
                raise
            self._list_on_full_disk(plans, written)
        return [(plan.job.future, plan.refusal or plan.outcomes) for plan in plans]

    def _plan(self, job: _Job, digests: dict[str, bytes]) -> _Plan:
        """Decide what becomes of each group; `digests` are those of the groups that this commit stores, by id."""
        assert self._state is not None
        plan = _Plan(job)
        own: dict[str, bytes] = {}
        for group in job.groups:
            known = own.get(group.group_id, digests.get(group.group_id))
            if known is not None:
                plan.repeats_new = True
            else:
                known = self._state.digest_of(group.group_id)
            if known is None:
                own[group.group_id] = group.digest
                plan.new.append(group)
                plan.outcomes.append(Appended.STORED)
            else:
                same = known == group.digest
                plan.outcomes.append(Appended.DUPLICATE if same else Appended.CONFLICT)
        num_bytes = sum(len(group.payload) for group in plan.new)
        if plan.new and not self._space.take(num_bytes):
            plan.new.clear()
            plan.refusal = self._space.refusal()
        else:
            digests |= own
        return plan

    def _append_records(self, plans: Sequence[_Plan]) -> Written | None:
        new = [(plan, group) for plan in plans for group in plan.new]
        if not new:
            return None
        encoded = [encode_record(group) for _, group in new]
        try:
            written = self._log.append([one.record for one in encoded])
        except OSError as e:
            logger.warning("no room for %d groups in %s: %s", len(new), self._directory, e)
            is_full = e.errno in FULL_ERRNOS
            why = f"{self._directory} cannot be written now: {e.strerror}"
            self._refuse_appends(plans, self._space.refusal() if is_full else StoreFull(why))
            return None
        for (plan, _), one, location in zip(new, encoded, written.locations, strict=True):
            plan.located.append((one.meta, location))
        return written

    def _refuse_appends(self, plans: Sequence[_Plan], refusal: StoreFull) -> None:
        self._space.expire()
        for plan in plans:
            if plan.new or plan.repeats_new:
                plan.new.clear()
                plan.located.clear()
                plan.refusal = plan.refusal or refusal

    def _list(self, plans: Sequence[_Plan]) -> None:
        """Enter everything into the database in one transaction, then into memory."""
        assert self._state is not None
        held = _Held(self._locations, self._batches)
        next_number = self._next_number
        todo = [plan for plan in plans if plan.located or plan.job.change is not None]
        if not todo:
            return
        is_durable = any(
            plan.job.change is not None and plan.job.change.is_durable for plan in todo
        )
        done = []
        with self._state.transaction(is_durable=is_durable):
            for plan in todo:
                change = plan.job.change
                try:
                    if change is not None:
                        held.apply(change)
                except KeyError as e:
                    plan.refusal = e
                    continue
                if change is not None:
                    self._state.apply(change)
                for meta, location in plan.located:
                    self._state.insert(meta, location)
                    held.add(meta.number)
                    next_number = max(next_number, meta.number + 1)
                done.append(plan)
            self._state.set_mark(self._log.mark, next_number=next_number)
        self._is_listed_safely = is_durable or not self._is_synced
        self._next_number = next_number
        for plan in done:
            for meta, location in plan.located:
                self._note(meta.number, location)
            if plan.job.change is not None:
                for end in plan.job.change.ends:
                    self._forget(end.number)
                self._batches |= {batch.number for batch in plan.job.change.batches}
                self._batches -= set(plan.job.change.closed_batches)

    def _list_on_full_disk(self, plans: Sequence[_Plan], written: Written | None) -> None:
        """Use the ballast, and if that is not enough, give up the appends: what ends groups has to go on."""
        logger.warning("the disk of %s is full; the ballast is given up", self._directory)
        with self._space.without_ballast():
            try:
                self._list(plans)
                return
            except sqlite3.Error as e:
                if not is_full(e) or written is None:
                    raise
            self._log.take_back(written)
            self._refuse_appends(plans, self._space.refusal())
            self._list(plans)

    def _note(self, number: int, location: Location) -> None:
        """Enter where a group lies. One that lay elsewhere before is found by readers at every moment."""
        before = self._locations.get(number)
        self._locations[number] = location
        segment = self._segments.setdefault(location.segment, _Segment())
        segment.num_groups += 1
        segment.live_bytes += location.length
        self._payload_bytes += location.length
        self._empty.discard(location.segment)
        if before is not None:
            self._leave(before)

    def _forget(self, number: int) -> None:
        self._leave(self._locations.pop(number))

    def _leave(self, location: Location) -> None:
        segment = self._segments[location.segment]
        segment.num_groups -= 1
        segment.live_bytes -= location.length
        self._payload_bytes -= location.length
        if not segment.num_groups:
            self._empty.add(location.segment)

    # Disk space.

    def _look_after_disk(self) -> None:
        self._drop_empty_segments()
        now_s = self._clock()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _IDLE_S
        self._space.measure()
        for number, segment in list(self._segments.items()):
            size = self._log.sizes.get(number, 0)
            if self._log.is_active(number) or segment.live_bytes >= _SPARSE_SHARE * size:
                segment.sparse_since_s = None
            elif segment.sparse_since_s is None:
                segment.sparse_since_s = now_s
            elif segment.num_groups and now_s - segment.sparse_since_s >= _SPARSE_S:
                self._compact(number, segment)
        self._drop_empty_segments()

    def _drop_empty_segments(self) -> None:
        empty = [number for number in self._empty if not self._log.is_active(number)]
        if empty and not self._is_listed_safely:
            # Otherwise a loss of power could bring back rows whose bytes are gone.
            self._sync_state()
        for number in empty:
            self._empty.remove(number)
            self._segments.pop(number, None)
            self._log.forget(number)
            # Unlinking 64 MiB can take tens of milliseconds.
            self._unlinker.submit(self._unlink, segment_path(self._directory, number))
        self._stored_bytes = sum(self._log.sizes.values())

    def _sync_state(self) -> None:
        assert self._state is not None
        with self._state.transaction(is_durable=True):
            pass
        self._is_listed_safely = True

    def _unlink(self, path: Path) -> None:
        try:
            self._files.unlink(path)
        except OSError:
            # Opening the store drops it again.
            logger.exception("%s could not be removed", path)
        self._space.expire()

    def _compact(self, number: int, segment: _Segment) -> None:
        """Copy the few groups that are left in a segment to the end of the log, so that it can be dropped."""
        assert self._state is not None
        # Whatever stays in it stays for another while: it is damaged, or the disk is full.
        segment.sparse_since_s = self._clock()
        numbers = []
        copies = []
        try:
            with opened(segment_path(self._directory, number)) as fd:
                for meta in self._state.records_in(number):
                    location = self._locations[meta.number]
                    try:
                        payload = read_payload(fd, location)
                    except (DamagedPayload, OSError) as e:
                        logger.error("group %d stays where it is: %s", meta.number, e)
                        continue
                    copies.append(copy_record(meta, payload, location.crc))
                    numbers.append(meta.number)
        except OSError as e:
            logger.warning("segment %d is not compacted: %s", number, e)
            return
        if not copies:
            return
        try:
            written = self._log.append(copies)
        except OSError as e:
            logger.warning("segment %d is not compacted: %s", number, e)
            return
        moved = dict(zip(numbers, written.locations, strict=True))
        try:
            with self._state.transaction(is_durable=True):
                self._state.relocate(moved.items())
                self._state.set_mark(self._log.mark, next_number=self._next_number)
        except sqlite3.Error as e:
            if not is_full(e):
                raise
            self._log.take_back(written)
            return
        self._is_listed_safely = True
        for held, location in moved.items():
            self._note(held, location)

    # The end.

    def _clear(self) -> None:
        assert self._state is not None
        mark = Mark(self._log.mark.segment + 1, 0)
        with self._state.transaction(is_durable=True):
            self._state.clear(mark)
        self._is_listed_safely = True
        self._log.end_segment()
        self._log.begin_behind(mark)
        for number in list(self._log.sizes):
            self._files.unlink(segment_path(self._directory, number))
            self._log.forget(number)
        self._files.sync_directory(self._directory)
        self._locations.clear()
        self._segments.clear()
        self._batches.clear()
        self._empty.clear()
        self._next_number = self._payload_bytes = self._stored_bytes = 0

    def _finish(self) -> None:
        assert self._state is not None
        self._log.close()
        self._sync_state()
        self._state.checkpoint()

    def _let_go(self) -> None:
        """Release everything that this process holds; idempotent."""
        self._unlinker.shutdown()
        self._log.abandon()
        if self._state is not None:
            state, self._state = self._state, None
            try:
                state.close()
            except sqlite3.Error:
                logger.exception("%s did not close cleanly", self._directory)
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            os.close(fd)


class _Held:
    """Which groups and batches exist, changes of an unfinished transaction included."""

    def __init__(self, numbers: Container[int], batches: Container[int]) -> None:
        self._numbers = numbers
        self._batches = batches
        self._numbers_now: dict[int, bool] = {}
        self._batches_now: dict[int, bool] = {}

    def add(self, number: int) -> None:
        self._numbers_now[number] = True

    def apply(self, change: Change) -> None:
        """Follow `change`; raise KeyError, having changed nothing, if it names what is not there."""
        numbers: dict[int, bool] = {}
        batches = {batch.number: True for batch in change.batches}
        for move in change.moves:
            self._need(move.number, numbers, self._numbers_now, self._numbers)
        for end in change.ends:
            self._need(end.number, numbers, self._numbers_now, self._numbers)
            numbers[end.number] = False
        for number in change.closed_batches:
            self._need(number, batches, self._batches_now, self._batches)
            batches[number] = False
        self._numbers_now |= numbers
        self._batches_now |= batches

    @staticmethod
    def _need(
        key: int, first: Mapping[int, bool], second: Mapping[int, bool], rest: Container[int]
    ) -> None:
        if not first.get(key, second.get(key, key in rest)):
            raise KeyError(key)


def _resolve(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _set_aside(state_path: Path) -> None:
    """Keep a damaged database for a person to look at."""
    # What is left of its journals must not be applied to the one that takes its place.
    for suffix in ("", "-wal", "-journal"):
        path = state_path.with_name(state_path.name + suffix)
        if path.exists():
            path.replace(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
