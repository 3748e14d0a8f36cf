"""Room on a disk of stores: the watermark that appends respect, and the ballast that lets everything else go on.

SQLite must never meet a full disk for long, because what ends groups, and so makes room, is written through it. Appends
are refused while `min_free_bytes` are still left; should another program take those too, a file kept for this is given
up, and taken back when there is room. The stores of one disk share one `DiskSpace`; their writer threads call it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from atroposlib.api.stores.base import StoreFull
from atroposlib.api.stores.segments import LATER_ERRNOS, Files

logger = logging.getLogger(__name__)

BALLAST: Final = "ballast"
"""Name of the file."""
_BALLAST_BYTES: Final = 64 << 20
_FREE_SPACE_AGE_S: Final = 0.1
"""How old a look at the free space may be when an append is admitted."""


class DiskSpace:
    """What is left of the disk under `directory`, which holds the ballast.

    `min_free_bytes` stay free (None: 2 % of the disk, at least 1 GiB).
    """

    def __init__(
        self,
        directory: Path,
        *,
        min_free_bytes: int | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._min_free_bytes = min_free_bytes
        self._files = files or Files()
        self._clock = clock
        self._lock = threading.RLock()
        """Held while the ballast or the account of the free space changes; stores write in threads of their own."""
        self._ballast_path = directory / BALLAST
        self._ballast_bytes = 0
        self._has_ballast = False
        self._min_free = 0
        self._free_bytes = 0
        self._measured_s = float("-inf")

    @property
    def room_bytes(self) -> int:
        """What appends may still use."""
        return max(0, self._free_bytes - self._min_free)

    def prepare(self) -> None:
        """Learn the size of the disk; on one that is full, make room for recovery."""
        total = self._files.total_bytes(self._directory)
        path = self._ballast_path
        with self._lock:
            self._min_free = (
                max(total // 50, 1 << 30) if self._min_free_bytes is None else self._min_free_bytes
            )
            self._ballast_bytes = min(_BALLAST_BYTES, total // 8)
            self._free_bytes = self._files.free_bytes(self._directory)
            self._has_ballast = path.exists() and path.stat().st_size == self._ballast_bytes
            if self._free_bytes < self._ballast_bytes:
                self._release_ballast()

    def warn_if_full(self) -> None:
        """Log that appends are refused, if they are."""
        if not self._has_ballast:
            logger.warning(
                "%s: %d bytes are free and %d must stay free; no group is taken until there is room",
                self._directory,
                self._free_bytes,
                self._min_free + self._ballast_bytes,
            )

    def take(self, num_bytes: int) -> bool:
        """Reserve room for an append; False when the watermark would be crossed."""
        with self._lock:
            if self._clock() - self._measured_s >= _FREE_SPACE_AGE_S:
                self.measure()
            if not self._has_ballast or self._free_bytes - num_bytes < self._min_free:
                return False
            self._free_bytes -= num_bytes
            return True

    def refusal(self) -> StoreFull:
        """Say why an append was refused."""
        return StoreFull(
            f"the disk of {self._directory} is full: {self._free_bytes} bytes are left,"
            f" of which {self._min_free} are kept for the hub itself"
        )

    def expire(self) -> None:
        """What was measured is no longer true."""
        self._measured_s = float("-inf")

    def measure(self) -> None:
        """Look at the disk, and take the ballast back if there is room for it."""
        with self._lock:
            self._free_bytes = self._files.free_bytes(self._directory)
            self._measured_s = self._clock()
            if not self._has_ballast and self._free_bytes >= self._min_free + self._ballast_bytes:
                self._take_ballast()
                self._free_bytes = self._files.free_bytes(self._directory)

    def _take_ballast(self) -> None:
        try:
            exists = self._ballast_path.exists()
            fd = (self._files.open if exists else self._files.create)(self._ballast_path)
            try:
                self._files.allocate(fd, self._ballast_bytes)
            finally:
                self._files.close(fd)
            self._has_ballast = True
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise
            self._release_ballast()

    @contextlib.contextmanager
    def without_ballast(self) -> Iterator[None]:
        """Give up the ballast: SQLite needs it now. No other store takes it back before the block ends."""
        with self._lock:
            self._release_ballast()
            yield

    def _release_ballast(self) -> None:
        self._files.unlink(self._ballast_path)
        self._has_ballast = False


def file_system_of(directory: Path) -> str:
    """Type of the file system that holds `directory`; empty when it cannot be told."""
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
