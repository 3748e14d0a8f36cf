"""The room that the stores of one hub share, and when groups are refused for want of it.

One rule for memory, disk and database (`postgres.space`): each measure of space is a `Bound`, an append must fit into
all of them, and a change is never refused. Ending groups frees space but must be written, so a reserve stays for
changes: what the bounds keep free and, if another program takes that too, a ballast that is deleted, and restored when
there is room.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atroposlib.api.stores.base import StoreFull

logger = logging.getLogger(__name__)

BALLAST: Final = "ballast"
"""Name of the file."""
_BALLAST_BYTES: Final = 64 << 20
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "9p", "ceph", "beegfs", "fuse.sshfs"}
)
_FREE_SPACE_AGE_S: Final = 0.1
"""Maximum age of the free-space measurement when an append is admitted."""
_REFUSED_S: Final = 10.0
"""A client tries again sooner."""
_WARNING_PAUSE_S: Final = 60.0
"""Between warnings that the disk is full."""
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LATER_ERRNOS: Final = _FULL_ERRNOS | {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Temporary lack of space, files or memory."""
_PROBE: Final = "ballast.probe"
_PROBE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How much room one measure of space leaves to groups."""

    text: str
    """What was measured: "the disk has 5 MiB left"."""
    left_bytes: int
    """Negative: so many are missing."""
    flag: str
    """What changes it, with its value."""

    def refusal(self, num_bytes: int) -> str | None:
        """Return why there is no room for `num_bytes`; None: there is.

        >>> Bound(text="the disk has 5 MiB left", left_bytes=5 << 20, flag="--min-free-bytes (now 0)").refusal(7 << 20)
        'groups are refused: the disk has 5 MiB left; 2 MiB are missing. Make room, or change --min-free-bytes (now 0)'
        """
        missing = num_bytes - self.left_bytes
        if missing <= 0:
            return None
        return (
            f"groups are refused: {self.text}; {mib(missing)} MiB are missing."
            f" Make room, or change {self.flag}"
        )


class Space:
    """Room for groups, which any number of stores share; their threads may call it."""

    def __init__(self, bounds: Sequence[Bound] = ()) -> None:
        """Without bounds, there is always room."""
        self._lock = threading.RLock()
        """Protects what `take` reads and changes: each store may have its own writer thread."""
        self._bounds = bounds
        """As measured last."""
        self._taken_bytes = 0
        """Since then."""
        self._refused_bytes = 0
        """Size of the append that was refused last."""
        self._refused_s = self._warned_s = float("-inf")

    @property
    def room_bytes(self) -> int | None:
        """Bytes that appends may still use; None: not bounded."""
        left = min((bound.left_bytes for bound in self._bounds), default=None)
        return None if left is None else max(0, left - self._taken_bytes)

    def refusal(self, num_bytes: int = 0) -> str | None:
        """Why groups are refused now by a store that needs `num_bytes` for those it has; None: they are not.

        An append that was refused a moment ago, and would be now, counts even if there is room for smaller ones.
        """
        is_recent = time.monotonic() - self._refused_s < _REFUSED_S
        return self._refusal(max(num_bytes + 1, self._refused_bytes if is_recent else 0))

    def take(self, num_bytes: int) -> None:
        """Reserve room for an append. Raises `StoreFull` if there is too little."""
        with self._lock:
            if (refusal := self._refusal(num_bytes)) is not None:
                self._refused_bytes, self._refused_s = num_bytes, time.monotonic()
                raise StoreFull(refusal)
            self._taken_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Undo `take`, where no measurement does."""
        with self._lock:
            self._taken_bytes -= num_bytes

    def _refusal(self, num_bytes: int) -> str | None:
        refusals = (bound.refusal(num_bytes + self._taken_bytes) for bound in self._bounds)
        return next(filter(None, refusals), None)

    def note(self, bounds: Sequence[Bound]) -> None:
        """Take over a measurement; log, now and then, that groups are refused."""
        with self._lock:
            self._bounds, self._taken_bytes = bounds, 0
        refusal, now_s = self.refusal(), time.monotonic()
        if refusal is not None and now_s - self._warned_s >= _WARNING_PAUSE_S:
            self._warned_s = now_s
            logger.warning("%s", refusal)


def free_bound(directory: Path, *, min_free_bytes: int | None, ballast_bytes: int = 0) -> Bound:
    """Measure the disk of `directory`: `min_free_bytes` (None: 2 %, at least 1 GiB) and `ballast_bytes` stay free.

    Raises `OSError` if it is not there.
    """
    disk = shutil.disk_usage(directory)
    min_free = max(disk.total // 50, 1 << 30) if min_free_bytes is None else min_free_bytes
    kept = min_free + ballast_bytes
    return Bound(
        text=f"the disk of {directory} has {disk.free >> 20} MiB left and {mib(kept)} MiB must stay free",
        left_bytes=disk.free - kept,
        flag=f"--min-free-bytes (now {min_free})",
    )


def used_bound(user: str, *, used_bytes: int, max_bytes: int, flag: str) -> Bound:
    """Return the bound of something that uses `used_bytes` of `max_bytes`."""
    return Bound(
        text=f"{user} uses {mib(used_bytes)} of {mib(max_bytes)} MiB",
        left_bytes=max_bytes - used_bytes,
        flag=f"{flag} (now {max_bytes})",
    )


class DiskSpace(Space):
    """Free space on the disk of `directory`, which holds the ballast.

    `min_free_bytes` stay free (None: see `free_bound`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        min_free_bytes: int | None = None,
        ballast_bytes: int = _BALLAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.directory = directory
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._ballast_path = directory / BALLAST
        self._ballast_bytes = ballast_bytes
        self._has_ballast = False
        self._ballast_fault = ""
        """Why the ballast could not be written last."""
        self._measured_s = float("-inf")

    def prepare(self) -> None:
        """Look for the ballast; if the disk is full, release it for recovery."""
        path = self._ballast_path
        with self._lock:
            disk = shutil.disk_usage(self.directory)
            self._ballast_bytes = min(self._ballast_bytes, disk.total // 8)
            self._has_ballast = path.exists() and path.stat().st_size == self._ballast_bytes
            if disk.free < self._ballast_bytes:
                self._release_ballast()

    def take(self, num_bytes: int) -> None:
        with self._lock:
            if self._clock() - self._measured_s >= _FREE_SPACE_AGE_S:
                self.measure()
            super().take(num_bytes)

    def measure(self) -> None:
        """Measure the free space, and restore the ballast if there is room for it."""
        with self._lock:
            self._measured_s = self._clock()
            bound = self._bound()
            if not self._has_ballast and bound.left_bytes >= 0:
                self._take_ballast()
                bound = self._bound()
                if not self._has_ballast and bound.left_bytes >= 0:
                    text = f"{self._ballast_path} cannot be written: {self._ballast_fault}"
                    flag = "the quota of the disk"
                    bound = Bound(text=text, left_bytes=-self._ballast_bytes, flag=flag)
            self.note([bound])

    def _bound(self) -> Bound:
        return free_bound(
            self.directory,
            min_free_bytes=self._min_free_bytes,
            ballast_bytes=0 if self._has_ballast else self._ballast_bytes,
        )

    @contextlib.contextmanager
    def without_ballast(self) -> Iterator[None]:
        """Release the ballast for SQLite; no other store restores it before the block ends."""
        with self._lock:
            self._release_ballast()
            self._measured_s = float("-inf")  # `take` must not rely on the ballast
            yield

    def is_exhausted(self) -> bool:
        """Whether the disk, or a quota, takes no more files now."""
        path = self.directory / _PROBE
        try:
            _allocate(path, _PROBE_BYTES)
        except OSError as e:
            return e.errno in _FULL_ERRNOS
        finally:
            path.unlink(missing_ok=True)
        return False

    def _take_ballast(self) -> None:
        try:
            _allocate(self._ballast_path, self._ballast_bytes)
            self._has_ballast = True
        except OSError as e:
            if e.errno not in _LATER_ERRNOS:
                raise
            self._ballast_fault = e.strerror or str(e)
            self._release_ballast()

    def _release_ballast(self) -> None:
        self._ballast_path.unlink(missing_ok=True)
        self._has_ballast = False


def _allocate(path: Path, num_bytes: int) -> None:
    """Create a file with `num_bytes` allocated on disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.pwrite(fd, bytes(num_bytes), 0)
    finally:
        os.close(fd)


def mib(num_bytes: int) -> int:
    """Return mebibytes, rounded up."""
    return -(-num_bytes >> 20)


def file_system_of(directory: Path) -> str:
    """Type of the file system that holds `directory`; empty if unknown."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    path, kinds = directory.resolve(), {}
    for _, mount_point, kind, *_ in map(str.split, lines):
        kinds[Path(mount_point.replace("\\040", " "))] = kind  # the last one hides the others
    return next((kinds[each] for each in (path, *path.parents) if each in kinds), "")
