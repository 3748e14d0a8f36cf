"""Free space on a disk of stores: a watermark for appends, and a ballast file that keeps SQLite writable.

Ending groups frees space but must be written to SQLite, so SQLite must not stay without space. Appends are refused
while `min_free_bytes` are still left; if another program takes those too, the ballast file is deleted, and restored
when there is room. The stores of one disk share one `DiskSpace`; their writer threads call it.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from atroposlib.api.stores.base import StoreFull

logger = logging.getLogger(__name__)

BALLAST: Final = "ballast"
"""Name of the file."""
_BALLAST_BYTES: Final = 64 << 20
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "9p", "ceph", "beegfs", "fuse.sshfs"}
)
_FREE_SPACE_AGE_S: Final = 0.1
"""Maximum age of the free-space measurement when an append is admitted."""
_WARNING_PAUSE_S: Final = 60.0
"""Between warnings that the disk is full."""
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LATER_ERRNOS: Final = _FULL_ERRNOS | {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Temporary lack of space, files or memory."""
_PROBE: Final = "ballast.probe"
_PROBE_BYTES: Final = 1 << 20


class DiskSpace:
    """Free space on the disk of `directory`, which holds the ballast.

    `min_free_bytes` stay free (None: 2 % of the disk, at least 1 GiB).
    """

    def __init__(
        self,
        directory: Path,
        *,
        min_free_bytes: int | None = None,
        ballast_bytes: int = _BALLAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._asked_min_free_bytes = min_free_bytes
        self._clock = clock
        self._lock = threading.RLock()
        """Protects the ballast and the free-space count: each store has its own writer thread."""
        self._ballast_path = directory / BALLAST
        self._ballast_bytes = ballast_bytes
        self._has_ballast = False
        self._ballast_fault = ""
        """Why the ballast could not be written last."""
        self._min_free_bytes = 0
        self._free_bytes = 0
        self._measured_s = self._warned_s = float("-inf")

    @property
    def room_bytes(self) -> int:
        """Bytes that appends may still use."""
        return max(0, self._free_bytes - self._kept_bytes)

    def refusal(self, num_bytes: int = 0) -> str | None:
        """Why groups are refused now by a store that needs `num_bytes` for those it has; None: they are not."""
        is_open = self._has_ballast and self.room_bytes > num_bytes
        return None if is_open else str(self._refused(num_bytes + 1))

    @property
    def _kept_bytes(self) -> int:
        return self._min_free_bytes + (0 if self._has_ballast else self._ballast_bytes)

    def prepare(self) -> None:
        """Measure the disk; if it is full, release the ballast for recovery."""
        total = shutil.disk_usage(self.directory).total
        path = self._ballast_path
        with self._lock:
            asked = self._asked_min_free_bytes
            self._min_free_bytes = max(total // 50, 1 << 30) if asked is None else asked
            self._ballast_bytes = min(self._ballast_bytes, total // 8)
            self._has_ballast = path.exists() and path.stat().st_size == self._ballast_bytes
            if free_bytes(self.directory) < self._ballast_bytes:
                self._release_ballast()

    def take(self, num_bytes: int) -> None:
        """Reserve room for an append. Raises `StoreFull` if too little would stay free."""
        with self._lock:
            if self._clock() - self._measured_s >= _FREE_SPACE_AGE_S:
                self.measure()
            if not self._has_ballast or self._free_bytes - num_bytes < self._min_free_bytes:
                raise self._refused(num_bytes)
            self._free_bytes -= num_bytes

    def _refused(self, num_bytes: int) -> StoreFull:
        left, kept = self._free_bytes, self._kept_bytes
        missing = kept + num_bytes - left
        if missing <= 0:
            fault = f"{self._ballast_path} cannot be written: {self._ballast_fault}"
            return StoreFull(f"groups are refused: {fault}")
        return StoreFull(
            f"groups are refused: the disk of {self.directory} has {left >> 20} MiB left and"
            f" {_mib(kept)} MiB must stay free; {_mib(missing)} MiB are missing."
            f" Make room, or change --min-free-bytes (now {self._min_free_bytes})"
        )

    def measure(self) -> None:
        """Measure the free space, restore the ballast if there is room for it, and log that the disk is full."""
        with self._lock:
            self._measured_s = self._clock()
            self._free_bytes = free_bytes(self.directory)
            if not self._has_ballast and self._free_bytes >= self._kept_bytes:
                self._take_ballast()
                self._free_bytes = free_bytes(self.directory)
            refusal = self.refusal()
            if refusal is not None and self._measured_s - self._warned_s >= _WARNING_PAUSE_S:
                self._warned_s = self._measured_s
                logger.warning("%s", refusal)

    @contextlib.contextmanager
    def without_ballast(self) -> Iterator[None]:
        """Release the ballast for SQLite; no other store restores it before the block ends."""
        with self._lock:
            self._release_ballast()
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


def free_bytes(directory: Path) -> int:
    """Bytes free on the disk of `directory`."""
    return shutil.disk_usage(directory).free


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


def _mib(num_bytes: int) -> int:
    """Return mebibytes, rounded up."""
    return -(-num_bytes >> 20)


def warn_of_network_file_system(directory: Path) -> None:
    """Warn if the directory is on a network file system, whose locks and syncs may be unreliable."""
    kind = file_system_of(directory)
    if kind in _NETWORK_FILE_SYSTEMS:
        logger.warning(
            "%s is on %s: locks and syncs there may not hold what they promise; use a local disk",
            directory,
            kind,
        )


def file_system_of(directory: Path) -> str:
    """Type of the file system that holds `directory`; empty if unknown."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    path = directory.resolve()
    best, kind = -1, ""
    for line in lines:
        fields = line.split()
        mount_point = Path(fields[1].replace("\\040", " "))
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            best, kind = len(mount_point.parts), fields[2]
    return kind
