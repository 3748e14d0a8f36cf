"""A run on a local disk: payloads in append-only segments, everything else in SQLite.

One thread writes. Calls that arrive while it is busy become one write, one sync of the segment and one transaction. A
record is on disk before its row, and a row is durably deleted before its bytes, so the store can be reopened after a
crash at any moment. After a failed sync, or a failed write that a lack of space, files or memory does not explain, the
store is broken until it is reopened. The coordinator calls it; it never parses a payload.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atroposlib.api.stores.base import (
    Appended,
    CorruptGroups,
    Durability,
    NewGroup,
    SavedRun,
    StoreBroken,
    StoreFull,
    StoreUsage,
)
from atroposlib.api.stores.segments import (
    LATER_ERRNOS,
    DamagedPayload,
    Files,
    Location,
    Mark,
    RecordMeta,
    SegmentLog,
    opened,
    read_cached_payload,
    read_payload,
    segment_path,
)
from atroposlib.api.stores.space import BALLAST, DiskSpace, warn_of_network_file_system
from atroposlib.api.stores.state import DamagedState, StateDb, is_full
from atroposlib.api.stores.writing import IDLE_S, Job, JobStore, Segments, answer
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_COMMIT_BYTES: Final = 32 << 20
"""Payload bytes per write, sync and transaction."""
_INLINE_READ_BYTES: Final = 2 << 20
"""Read on the event loop, in less than 2 ms, if it is in the page cache."""
_CAN_READ_CACHED: Final = hasattr(os, "RWF_NOWAIT")


class DiskStore(JobStore):
    """One directory. Implements `GroupStore`.

    `append` raises `StoreFull` rather than use what `space` keeps free; stores on one disk share it (None: one for this
    store alone, with `min_free_bytes`). `on_failure` is called once, on the event loop, with the error that broke the
    store.
    """

    _loop: asyncio.AbstractEventLoop
    _state: StateDb
    """Both are set by `open`."""

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
        super().__init__()
        self._directory = Path(directory)
        self.durability = durability
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
        self._space = space or DiskSpace(
            self._directory, min_free_bytes=min_free_bytes, files=self._files, clock=clock
        )
        self._held = contextlib.ExitStack()
        """Resources held while the store is open."""
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unlinker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-unlink")
        # Written by the writer thread only; read by any thread.
        self._segments = Segments[Location]()
        self._is_listed_safely = True
        """Whether all transactions so far would survive a loss of power."""
        self._next_look_s = float("-inf")

    # On the event loop.

    async def open(self) -> SavedRun:
        """See `GroupStore`. Also raises `ConfigError` when another hub uses the directory."""
        assert self._thread is None, "a store is opened once"
        self._loop = asyncio.get_running_loop()
        saved = await asyncio.to_thread(self._open)
        self._thread = threading.Thread(target=self._write, name="hub-store", daemon=True)
        self._thread.start()
        self._is_open = True
        return saved

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        num_bytes = sum(self._segments.places[number].length for number in numbers)
        if _CAN_READ_CACHED and num_bytes <= _INLINE_READ_BYTES:
            # Measured for 4 payloads of 133 KB: 0.24 ms, and 0.40 ms in another thread.
            with contextlib.suppress(OSError):
                return self._read(numbers, read_cached_payload)
        try:
            return await asyncio.to_thread(self._read, numbers, read_payload)
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise
            raise StoreFull(f"{self._directory} cannot be read now: {e.strerror}") from e

    def usage(self) -> StoreUsage:
        return StoreUsage(
            payload_bytes=self._segments.payload_bytes(),
            stored_bytes=sum(list(self._log.sizes.values())),
            free_bytes=self._space.room_bytes,
            refusal=self._space.refusal,
        )

    async def close(self) -> None:
        """See `GroupStore`. A store that is already broken only closes its files.

        Raises `StoreBroken` if it breaks now; then changes that were not durable may be lost.
        """
        if not self._is_open:
            return
        self._is_open = False
        was_broken = self._failure is not None
        try:
            if self._thread is not None:
                job = Job(alone=self._finish)
                self._put(job)
                await asyncio.to_thread(self._thread.join)
                await job.future
        except StoreBroken:
            if not was_broken:
                raise
        finally:
            self._held.close()

    def _put(self, job: Job) -> None:
        self._jobs.put(job)

    def _broken(self) -> StoreBroken:
        error = StoreBroken(f"{self._directory}: {self._failure}; restart the hub to recover")
        error.__cause__ = self._failure
        return error

    # Reading, in any thread.

    def _read(
        self, numbers: Sequence[int], read_one: Callable[[int, Location], bytes]
    ) -> list[bytes]:
        payloads: dict[int, bytes] = {}
        damaged: list[int] = []
        by_segment: dict[int, dict[int, Location]] = {}
        for number in numbers:
            location = self._segments.places[number]
            by_segment.setdefault(location.segment, {})[number] = location
        for segment, wanted in by_segment.items():
            try:
                with opened(segment_path(self._directory, segment)) as fd:
                    for number, location in wanted.items():
                        try:
                            payloads[number] = read_one(fd, location)
                        except (DamagedPayload, OSError) as e:
                            # EIO is taken as permanent damage: retrying it would block the whole batch.
                            if isinstance(e, OSError) and e.errno != errno.EIO:
                                raise
                            logger.error("group %d is damaged: %s", number, e)
                            damaged.append(number)
            except FileNotFoundError:
                # Compaction may have moved its groups since the locations were looked up.
                if any(self._segments.places[number].segment == segment for number in wanted):
                    logger.error("segment %d of %s is missing", segment, self._directory)
                    damaged += wanted
                else:
                    payloads |= zip(wanted, self._read(list(wanted), read_one), strict=True)
        if damaged:
            raise CorruptGroups(sorted(damaged))
        return [payloads[number] for number in numbers]

    # Opening.

    def _open(self) -> SavedRun:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._held.callback(self._unlinker.shutdown)
            self._held.callback(self._log.end_segment)
            warn_of_network_file_system(self._directory)
            if self._space.directory != self._directory:
                # Older versions kept a ballast file in each run.
                (self._directory / BALLAST).unlink(missing_ok=True)
            self._space.prepare()
            saved = self._recover()
            self._space.measure()
        except BaseException as e:
            self._held.close()
            if isinstance(e, OSError | sqlite3.Error):
                raise StoreBroken(f"{self._directory} cannot be opened: {e}") from e
            raise
        return saved

    def _take_lock(self) -> None:
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._held.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConfigError(
                f"another hub uses {self._directory}; stop it, or choose another directory"
            ) from e

    def _recover(self) -> SavedRun:
        """Open the database, insert records that only the log holds, and load everything."""
        started_s = time.perf_counter()
        state_path = self._directory / "state.db"
        has_state = is_readable = state_path.exists()
        try:
            self._state = StateDb(state_path, is_synced=self._is_synced)
        except DamagedState as e:
            logger.error("%s cannot be read, and is set aside: %s", state_path, e)
            _set_aside(state_path)
            is_readable = False
            self._state = StateDb(state_path, is_synced=self._is_synced)
        self._held.callback(self._state.close)
        mark = self._state.mark()
        self._log.load(mark)
        is_fresh = not has_state and not self._log.sizes
        rolled = self._roll_forward(mark, is_rebuilt=not is_readable)
        if not is_readable and not is_fresh:
            logger.error(
                "%s: the state was lost and is rebuilt from the payloads; groups that had been"
                " trained may come back, and ids of ended groups are forgotten",
                self._directory,
            )
        saved, locations = self._state.load()
        for number, location in locations.items():
            self._segments.note(number, location)
        self._state.checkpoint()
        self._files.sync_directory(self._directory)
        self._segments.add(self._log.sizes)
        self._drop_empty_segments()
        num_missing = sum(place.segment not in self._log.sizes for place in locations.values())
        num_bytes = self._segments.payload_bytes()
        found = [f"{len(saved.groups)} groups held ({num_bytes} bytes)", rolled]
        if num_missing:
            found.append(f"{num_missing} without payload")
        found.append(f"in {time.perf_counter() - started_s:.2f} s")
        return replace(saved, found="" if is_fresh else ", ".join(found))

    def _roll_forward(self, mark: Mark, *, is_rebuilt: bool) -> str:
        """Insert the records after `mark` into the database; return a summary in words."""
        num_rolled = num_cut = num_damaged = 0
        newest = max(self._log.sizes, default=0)
        for number in sorted(n for n in self._log.sizes if n >= mark.segment):
            start = mark.offset if number == mark.segment else 0
            scan = self._log.scan(number, start=start)
            size = self._log.sizes[number]
            if size == start:
                continue
            num_damaged += scan.num_damaged
            num_cut += max(0, size - scan.end)
            # Secured before the rows, which promise that their records are on disk. In a rebuild, only the newest
            # segment can hold bytes that were never synced.
            doubtful = scan.end if is_rebuilt and number != newest else start
            self._log.secure(number, start=doubtful, end=scan.end)
            with self._state.transaction(is_durable=True):
                for meta, location in scan.records:
                    # Copies made by `_compact` repeat their originals.
                    if self._state.digest_of(meta.group_id) is None:
                        num_rolled += self._state.insert(meta, location)
                self._state.set_mark(Mark(number, scan.end))
        rolled = f"{num_rolled} of them {'rebuilt' if is_rebuilt else 'rolled forward'}"
        damaged = f", {num_damaged} damaged stretches skipped" if num_damaged else ""
        return f"{rolled}, {num_cut} unfinished bytes cut off{damaged}"

    # The writer thread.

    def _write(self) -> None:
        is_last = False
        while not is_last:
            jobs = self._next_jobs()
            is_last = bool(jobs) and jobs[-1].alone == self._finish
            try:
                if self._failure is None:
                    self._do(jobs)
            except Exception as e:  # after any failure, nothing more may be written
                logger.error("the store in %s is broken", self._directory, exc_info=e)
                self._failure = e
                self._log.end_segment()
                if self._on_failure is not None:
                    self._call_on_loop(self._on_failure, e)
            if self._failure is not None:
                for job in jobs:
                    job.answer = self._broken()
            if jobs:
                self._call_on_loop(answer, jobs)

    def _next_jobs(self) -> list[Job]:
        """Wait for a job; return it and later ones, up to the size of a commit or one to do alone. Empty if idle."""
        jobs: list[Job] = []
        num_bytes = 0
        while num_bytes < _MAX_COMMIT_BYTES:
            try:
                job = self._jobs.get(block=not jobs, timeout=IDLE_S)
            except queue.Empty:
                break
            jobs.append(job)
            if job.alone is not None:
                break
            num_bytes += sum(len(group.payload) for group in job.groups)
        return jobs

    def _do(self, jobs: Sequence[Job]) -> None:
        together = [job for job in jobs if job.alone is None]
        if together:
            self._commit(together)
        if jobs and jobs[-1].alone is not None:
            jobs[-1].alone()
        else:
            self._look_after_disk()

    def _call_on_loop(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            logger.warning("the event loop closed before the store had answered")

    # Committing.

    def _commit(self, jobs: Sequence[Job], *, refusal: StoreFull | None = None) -> None:
        """Do the jobs in one transaction; with `refusal`, refuse the appends with it.

        If there is no room, refuse the appends: changes that end groups free room, and must be written.
        """
        try:
            self._transact(jobs, refusal)
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise
            self._commit(jobs, refusal=self._refusal(e.strerror))
        except sqlite3.Error as e:
            if not is_full(e):
                raise
            with self._space.without_ballast():
                self._transact(jobs, self._refusal("the disk is full"))

    def _refusal(self, reason: str | None) -> StoreFull:
        refusal = StoreFull(f"{self._directory} cannot be written now: {reason}")
        logger.warning("groups are refused: %s", refusal)
        return refusal

    def _transact(self, jobs: Sequence[Job], refusal: StoreFull | None) -> None:
        added: dict[int, Location] = {}
        ended: list[int] = []
        is_durable = any(job.change is not None and job.change.is_durable for job in jobs)
        with self._transaction(is_durable=is_durable):
            for job in jobs:
                try:
                    if job.change is not None:
                        job.answer = None
                        self._state.apply(job.change)
                        ended += [end.number for end in job.change.ends]
                    elif refusal is not None:
                        job.answer = refusal
                    else:
                        job.answer = self._append(job.groups, added)
                except (KeyError, StoreFull) as e:
                    job.answer = e
        for number, location in added.items():
            self._segments.note(number, location)
        for number in ended:
            self._segments.end(number)

    def _append(self, groups: Sequence[NewGroup], added: dict[int, Location]) -> list[Appended]:
        """Insert the new groups into the database, the log and `added`; raises `StoreFull` if there is no room."""
        outcomes = []
        new: dict[str, NewGroup] = {}
        for group in groups:
            twin = new.get(group.group_id)
            known = twin.digest if twin else self._state.digest_of(group.group_id)
            if known is None:
                new[group.group_id] = group
                outcomes.append(Appended.STORED)
            else:
                is_same = known == group.digest
                outcomes.append(Appended.DUPLICATE if is_same else Appended.CONFLICT)
        if new:
            self._space.take(sum(len(group.payload) for group in new.values()))
        for group in new.values():
            meta = RecordMeta.of(group)
            location = added[meta.number] = self._log.add(meta, group.payload)
            is_listed = self._state.insert(meta, location)
            assert is_listed, f"arrival number {meta.number} is in use"
        return outcomes

    @contextlib.contextmanager
    def _transaction(self, *, is_durable: bool) -> Iterator[None]:
        """Run one database transaction; records that the block adds to the log are written before it commits.

        If there is no room for either, nothing is changed.
        """
        mark = self._log.mark
        try:
            with self._state.transaction(is_durable=is_durable):
                yield
                self._log.write()
                self._state.set_mark(self._log.mark)
        except (OSError, sqlite3.Error) as e:
            # After any other failure, rows that promise these records may be on disk.
            if _may_work_later(e):
                self._log.cut(mark)
            raise
        self._is_listed_safely = is_durable or not self._is_synced

    # Disk space.

    def _look_after_disk(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + IDLE_S
            self._space.measure()
            sizes = self._log.sizes
            for number in self._segments.sparse(now_s, sizes=sizes, current=self._log.current):
                self._compact(number)
        self._drop_empty_segments()

    def _drop_empty_segments(self) -> None:
        empty = self._segments.empty(current=self._log.current)
        if empty and not self._is_listed_safely:
            # Otherwise a loss of power could bring back rows whose bytes are gone.
            self._sync_state()
        self._segments.forget(empty)
        for number in empty:
            # Unlinking 64 MiB can take tens of milliseconds.
            self._unlinker.submit(self._unlink, self._log.forget(number))

    def _sync_state(self) -> None:
        with self._transaction(is_durable=True):
            pass

    def _unlink(self, path: Path) -> None:
        try:
            self._files.unlink(path)
        except OSError:
            # The next opening deletes it.
            logger.exception("%s could not be removed", path)

    def _compact(self, number: int) -> None:
        """Copy the last groups of a segment to the end of the log, so that the segment can be deleted."""
        moved: dict[int, Location] = {}
        try:
            scan = self._log.scan(number, start=0)
            with opened(segment_path(self._directory, number)) as fd:
                copies = [
                    (record.meta, read_payload(fd, record.location))
                    for record in scan.records
                    if self._segments.places.get(record.meta.number) == record.location
                ]
        except (OSError, DamagedPayload) as e:
            logger.warning("segment %d cannot be read, and stays: %s", number, e)
            return
        try:
            with self._transaction(is_durable=True):
                for meta, payload in copies:
                    location = moved[meta.number] = self._log.add(meta, payload)
                    self._state.relocate(meta.number, location)
        except (OSError, sqlite3.Error) as e:
            if not _may_work_later(e):
                raise
            logger.warning("there is no room to compact segment %d: %s", number, e)
            return
        for held, location in moved.items():
            self._segments.note(held, location)

    # Clearing and closing.

    def _clear(self) -> None:
        self._log.end_segment()
        with self._transaction(is_durable=True):
            self._state.clear()
        for number in list(self._log.sizes):
            self._files.unlink(self._log.forget(number))
        self._files.sync_directory(self._directory)
        self._segments = Segments()

    def _finish(self) -> None:
        self._log.sync()
        self._sync_state()
        self._state.checkpoint()


def _may_work_later(error: OSError | sqlite3.Error) -> bool:
    return error.errno in LATER_ERRNOS if isinstance(error, OSError) else is_full(error)


def _set_aside(state_path: Path) -> None:
    """Rename a damaged database, to keep it for inspection."""
    # Its journals must not be applied to the new database.
    for suffix in ("", "-wal", "-journal"):
        path = state_path.with_name(state_path.name + suffix)
        if path.exists():
            path.replace(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
