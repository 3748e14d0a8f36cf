"""A run on a local disk, in one SQLite file.

One thread writes, another reads payloads. Calls that arrive while the writer is busy become one transaction, with one
sync. After a failed sync, or a failed write that a lack of space or memory does not explain, the store is broken until
it is reopened. The coordinator calls it; it never parses a payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
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
    UnreadableRun,
    known_and_new,
)
from atroposlib.api.stores.run_file import (
    NAME,
    TIGHT_BYTES,
    PayloadReader,
    RunFile,
    error_name,
    is_damage,
)
from atroposlib.api.stores.space import NETWORK_FILE_SYSTEMS, DiskSpace, file_system_of
from atroposlib.api.stores.writing import Job, JobStore
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_COMMIT_BYTES: Final = 32 << 20
"""Payload bytes per transaction."""
_SHRINK_BYTES: Final = 1 << 20
"""Given back to the disk in one step, which needs as much room in the WAL."""
_SHRINK_S: Final = 0.05
"""Time for such steps between two looks at the jobs."""


class DiskStore(JobStore):
    """One directory. Implements `GroupStore`.

    `append` raises `StoreFull` rather than use what `space` keeps free; stores on one disk share it (None: one for this
    store alone, with `min_free_bytes`).
    """

    _file: RunFile
    """Set by `open`."""
    _payloads: PayloadReader
    """Set by `open`; alone used by the reading thread."""
    _remedy = "; restart the hub to recover"

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = Durability.POWER,
        space: DiskSpace | None = None,
        min_free_bytes: int | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = Path(directory)
        self.durability = durability
        super().__init__(
            str(directory), max_commit_bytes=_MAX_COMMIT_BYTES, on_failure=on_failure, clock=clock
        )
        self._space = space or DiskSpace(
            self._directory, min_free_bytes=min_free_bytes, clock=clock
        )
        self._held = contextlib.ExitStack()
        """Resources held while the store is open."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-store")
        """Writes; alone uses the file."""
        self._reading_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-read")
        self._usage = StoreUsage(payload_bytes=0, stored_bytes=0)
        self._free_bytes = 0
        """Free pages inside the file."""
        self._growth_bytes = 0
        """What the file needs of the disk for groups that were stored."""

    # On the event loop.

    async def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        loop = asyncio.get_running_loop()
        try:
            found: dict[int, bytes] = await loop.run_in_executor(
                self._reading_thread, self._payloads.read, numbers
            )
        except MemoryError as e:
            raise StoreFull(f"{self._directory} cannot be read now: {e}") from e
        if damaged := sorted(set(numbers) - found.keys()):
            raise CorruptGroups(damaged)
        return [found[number] for number in numbers]

    def usage(self) -> StoreUsage:
        room_bytes = self._space.room_bytes or 0
        return replace(
            self._usage,
            free_bytes=max(0, room_bytes + self._free_bytes - self._growth_bytes),
            refusal=self._space.refusal(self._growth_bytes),
        )

    def _release(self) -> None:
        self._thread.shutdown()
        self._reading_thread.shutdown()
        self._held.close()

    # Opening.

    def _load(self) -> SavedRun:
        """Also raises `ConfigError` when another hub uses the directory."""
        started_s = time.perf_counter()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            if (kind := file_system_of(self._directory)) in NETWORK_FILE_SYSTEMS:
                logger.warning(
                    "%s is on %s: locks and syncs there may not hold what they promise; use a local disk",
                    *(self._directory, kind),
                )
            self._space.prepare()
            path = self._directory / NAME
            if not path.exists() and any(self._directory.glob("*.seg")):
                raise UnreadableRun(
                    f"{self._directory} was written by version 0.2; run-api converts it at its start"
                )
            self._file = RunFile(path, is_synced=self.durability is Durability.POWER)
            self._held.callback(self._file.close)
            saved = self._file.load()
            self._payloads = PayloadReader(path)
            self._held.callback(self._payloads.close)
            self._space.measure()
            self._note_usage()
        except BaseException as e:
            self._held.close()
            if isinstance(e, OSError | sqlite3.Error):
                raise StoreBroken(f"{self._directory} cannot be opened: {e}") from e
            raise
        if saved == SavedRun(groups=[], batches=[]):
            return saved
        num_groups, num_bytes = len(saved.groups), self._file.payload_bytes
        found = f"{num_groups} groups held ({num_bytes} bytes), in {time.perf_counter() - started_s:.2f} s"
        return replace(saved, found=found)

    def _take_lock(self) -> None:
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._held.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConfigError(
                f"another hub uses {self._directory}; stop it, or choose another directory"
            ) from e

    # Committing.

    def _commit(self, jobs: Sequence[Job]) -> None:
        """Do the jobs in one transaction.

        If there is no room, refuse the appends: changes that end groups free room, and must be written.
        """
        try:
            self._transact(jobs, None)
        except (sqlite3.Error, MemoryError) as e:
            if is_damage(e) and self._file.free_carefully():
                self._transact(jobs, None)
            elif self._is_full(e):
                refusal = StoreFull(f"{self._directory} cannot be written now: {e}")
                logger.warning("groups are refused: %s", refusal)
                with self._space.without_ballast():
                    self._transact(jobs, refusal)
            else:
                raise
        self._checkpoint_if_due()
        self._note_usage()

    def _is_full(self, error: BaseException) -> bool:
        """Whether a lack of space or memory explains the error. SQLite does not tell a quota from a broken disk."""
        name = error_name(error)
        return (
            isinstance(error, MemoryError)
            or name == "SQLITE_FULL"
            or (name == "SQLITE_IOERR_WRITE" and self._space.is_exhausted())
        )

    def _transact(self, jobs: Sequence[Job], refusal: StoreFull | None) -> None:
        is_durable = any(job.change is None or job.change.is_durable for job in jobs)
        with self._file.transaction(is_durable=is_durable):
            for job in jobs:
                try:
                    if job.change is not None:
                        self._file.apply(job.change)
                        job.answer = None
                    else:
                        job.answer = self._append(job.groups, refusal or job.refusal)
                except (KeyError, StoreFull) as e:
                    job.answer = e

    def _append(self, groups: Sequence[NewGroup], refusal: StoreFull | None) -> list[Appended]:
        """Insert the new groups; raises `StoreFull` if there is no room, or `refusal`."""
        outcomes, new = known_and_new(groups, self._file.digest_of, refusal=refusal)
        if new:
            num_bytes = sum(len(group.payload) for group in new)
            self._space.take(self._file.needed_bytes(num_bytes))
        for group in new:
            self._file.insert(group)
        return outcomes

    def _clear(self) -> None:
        with self._file.transaction(is_durable=True):
            self._file.clear()
        self._note_usage()

    # Disk space.

    def _note_usage(self) -> None:
        self._usage = StoreUsage(
            payload_bytes=self._file.payload_bytes, stored_bytes=self._file.stored_bytes
        )
        self._free_bytes = self._file.free_bytes
        self._growth_bytes = self._file.growth_bytes

    @property
    def _is_tight(self) -> bool:
        return (self._space.room_bytes or 0) < TIGHT_BYTES  # None: not measured yet

    def _checkpoint_if_due(self) -> None:
        """Move what the WAL holds into the file, unless that would take the space that later changes need."""
        if not self._file.is_checkpoint_due(is_tight=self._is_tight):
            return
        if self._file.growth_bytes <= shutil.disk_usage(self._directory).free:
            self._if_there_is_room(self._file.checkpoint)

    def _if_there_is_room(self, work: Callable[[], bool]) -> bool:
        """Do what can as well be done later; False if the disk is full."""
        try:
            return work()
        except sqlite3.Error as e:
            if not self._is_full(e):
                raise
            logger.warning("%s: its files cannot be tidied up now: %s", self._directory, e)
            return False

    def _look_after(self, now_s: float) -> None:
        """Give free pages back to the disk."""
        self._space.measure()
        until_s = time.perf_counter() + _SHRINK_S
        is_more = True
        while is_more and time.perf_counter() < until_s:
            shrink = functools.partial(self._file.shrink, _SHRINK_BYTES, is_tight=self._is_tight)
            is_more = self._if_there_is_room(shrink)
            self._checkpoint_if_due()
        self._note_usage()

    def _finish(self) -> None:
        """The last connection to be closed moves what the WAL holds into the file."""
        with self._file.transaction(is_durable=True):
            pass
