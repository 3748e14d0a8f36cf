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
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atroposlib.api.stores.base import (
    Appended,
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
from atroposlib.api.stores.writing import Effects, Job, JobStore, Location, Segments
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
    store alone, with `min_free_bytes`).
    """

    _state: StateDb
    """Set by `open`."""
    _remedy = "; restart the hub to recover"

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
        self._directory = Path(directory)
        self.durability = durability
        self._files = files or Files()
        self._is_synced = durability is Durability.POWER
        self._log = SegmentLog(
            self._directory,
            files=self._files,
            segment_bytes=segment_bytes,
            is_synced=self._is_synced,
        )
        super().__init__(
            str(directory),
            sizes=self._log.sizes,
            max_commit_bytes=_MAX_COMMIT_BYTES,
            on_failure=on_failure,
            clock=clock,
        )
        self._space = space or DiskSpace(
            self._directory, min_free_bytes=min_free_bytes, files=self._files, clock=clock
        )
        self._held = contextlib.ExitStack()
        """Resources held while the store is open."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-store")
        """Writes; alone uses the database and the log."""
        self._unlinker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-unlink")
        self._is_listed_safely = True
        """Whether all transactions so far would survive a loss of power."""

    # On the event loop.

    async def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _fetch(self, wanted: Mapping[int, Location]) -> dict[int, bytes]:
        num_bytes = sum(location.length for location in wanted.values())
        if _CAN_READ_CACHED and num_bytes <= _INLINE_READ_BYTES:
            # Measured for 4 payloads of 133 KB: 0.24 ms, and 0.40 ms in another thread.
            with contextlib.suppress(OSError):
                return self._read(wanted, read_cached_payload)
        try:
            return await asyncio.to_thread(self._read, wanted, read_payload)
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise
            raise StoreFull(f"{self._directory} cannot be read now: {e.strerror}") from e

    def usage(self) -> StoreUsage:
        space = self._space
        return replace(super().usage(), free_bytes=space.room_bytes, refusal=space.refusal)

    def _release(self) -> None:
        self._thread.shutdown()
        self._held.close()

    # Reading, in any thread.

    def _read(
        self, wanted: Mapping[int, Location], read_one: Callable[[int, Location], bytes]
    ) -> dict[int, bytes]:
        payloads: dict[int, bytes] = {}
        for segment in {location.segment for location in wanted.values()}:
            try:
                with opened(segment_path(self._directory, segment)) as fd:
                    for number, location in wanted.items():
                        if location.segment != segment:
                            continue
                        try:
                            payloads[number] = read_one(fd, location)
                        except (DamagedPayload, OSError) as e:
                            # EIO is taken as permanent damage: retrying it would block the whole batch.
                            if isinstance(e, OSError) and e.errno != errno.EIO:
                                raise
                            logger.error("group %d is damaged: %s", number, e)
            except FileNotFoundError:
                # Damage, unless compaction has moved its groups since their places were looked up.
                logger.info("segment %d of %s is missing", segment, self._directory)
        return payloads

    # Opening.

    def _load(self) -> SavedRun:
        """Also raises `ConfigError` when another hub uses the directory."""
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

    # Committing.

    def _commit(self, jobs: Sequence[Job], refusal: StoreFull | None = None) -> None:
        """Do the jobs in one transaction; with `refusal`, refuse the appends with it.

        If there is no room, refuse the appends: changes that end groups free room, and must be written.
        """
        try:
            self._transact(jobs, refusal)
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise
            self._commit(jobs, self._refusal(e.strerror))
        except sqlite3.Error as e:
            if not is_full(e):
                raise
            with self._space.without_ballast():
                self._transact(jobs, self._refusal("the disk is full"))
        self._drop_empty_segments()

    def _refusal(self, reason: str | None) -> StoreFull:
        refusal = StoreFull(f"{self._directory} cannot be written now: {reason}")
        logger.warning("groups are refused: %s", refusal)
        return refusal

    def _transact(self, jobs: Sequence[Job], refusal: StoreFull | None) -> None:
        effects = Effects(self._segments)
        is_durable = any(job.change is not None and job.change.is_durable for job in jobs)
        with self._transaction(is_durable=is_durable):
            for job in jobs:
                try:
                    if job.change is not None:
                        effects.end(job.change)
                        self._state.apply(job.change)
                        job.answer = None
                    elif refusal is not None:
                        job.answer = refusal
                    else:
                        job.answer = self._append(job.groups, effects)
                except (KeyError, StoreFull) as e:
                    job.answer = e
        self._segments.take_over(effects)

    def _append(self, groups: Sequence[NewGroup], effects: Effects) -> list[Appended]:
        """Insert the new groups into the database and the log; raises `StoreFull` if there is no room."""
        outcomes = []
        new: dict[str, NewGroup] = {}
        for group in groups:
            twin = new.get(group.header.group_id)
            known = twin.header.digest if twin else self._state.digest_of(group.header.group_id)
            if known is None:
                new[group.header.group_id] = group
                outcomes.append(Appended.STORED)
            else:
                is_same = known == group.header.digest
                outcomes.append(Appended.DUPLICATE if is_same else Appended.CONFLICT)
        if new:
            self._space.take(sum(len(group.payload) for group in new.values()))
        for group in new.values():
            meta = RecordMeta.of(group)
            location = effects.located[meta.number] = self._log.add(meta, group.payload)
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

    def _look_after_segments(self, now_s: float) -> None:
        self._space.measure()
        for number in self._segments.sparse(now_s, current=self._log.current):
            self._compact(number)
        self._drop_empty_segments()

    def _drop_empty_segments(self) -> None:
        empty = self._segments.empty(current=self._log.current)
        if empty and not self._is_listed_safely:
            # Otherwise a loss of power could bring back rows whose bytes are gone.
            self._sync_state()
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
        effects = Effects(self._segments)
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
                    location = effects.located[meta.number] = self._log.add(meta, payload)
                    self._state.relocate(meta.number, location)
        except (OSError, sqlite3.Error) as e:
            if not _may_work_later(e):
                raise
            logger.warning("there is no room to compact segment %d: %s", number, e)
            return
        self._segments.take_over(effects)

    # Clearing and closing.

    def _clear(self) -> None:
        self._log.end_segment()
        with self._transaction(is_durable=True):
            self._state.clear()
        for number in list(self._log.sizes):
            self._files.unlink(self._log.forget(number))
        self._files.sync_directory(self._directory)
        self._segments = Segments(self._log.sizes)

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
