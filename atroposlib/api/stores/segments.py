"""Append-only segment files: the payloads of a run, in self-describing records.

A record is never changed; whole files are deleted when nothing in them is needed. CRCs cover every byte, so a scan can
tell complete records from unfinished ones. Each record carries the random marker of its file, so that no payload can be
mistaken for a record. `DiskStore` writes from its writer thread and reads from any thread. Independent of SQLite.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from isal.isal_zlib import crc32

from atroposlib.api.stores.base import NewGroup, Place
from atroposlib.api.stores.writing import Location
from atroposlib.utils.files import sync_to_disk

_FILE_MAGIC: Final = b"ATROSEG1"
_FILE_HEAD: Final = struct.Struct("<8s8sI")
"""Magic, marker, CRC32 of both."""
_RECORD_HEAD: Final = struct.Struct("<8sIQII")
"""Marker, bytes of meta, bytes of payload, CRC32 of payload, CRC32 of the four fields before it and of meta."""
_HEAD_CRC_AT: Final = _RECORD_HEAD.size - 4
_MAX_BUFFERS: Final = 1024  # IOV_MAX of Linux
_CHUNK_BYTES: Final = 8 << 20
_SUFFIX: Final = ".seg"

FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_FILE_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE})
LATER_ERRNOS: Final = FULL_ERRNOS | _NO_FILE_ERRNOS | {errno.ENOMEM}
"""Temporary lack of space, files or memory. The call may be retried later, unless it was a sync."""


class Files:
    """Every operation that changes a file of the log; tests replace it to inject faults and to record."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> int:
        """Return the bytes written, which may be fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_directory(self, path: Path) -> None:
        sync_to_disk(path)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def allocate(self, fd: int, size: int) -> None:
        """Allocate `size` bytes on disk."""
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, size)
        else:
            for start in range(0, size, _CHUNK_BYTES):
                os.pwrite(fd, bytes(min(_CHUNK_BYTES, size - start)), start)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free

    def total_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).total


class RecordMeta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Metadata of a record's group: enough to rebuild its database row."""

    number: int
    group_id: str
    env_id: int | None
    num_sequences: int
    num_tokens: int = 0
    policy_version: int | None = None
    arrival_step: int = 0
    digest: bytes = b""
    place: int = Place.QUEUED

    @classmethod
    def of(cls, group: NewGroup) -> RecordMeta:
        header = group.header
        return cls(
            number=header.number,
            group_id=header.group_id,
            env_id=header.env_id,
            num_sequences=header.num_sequences,
            num_tokens=header.num_tokens,
            policy_version=header.policy_version,
            arrival_step=header.arrival_step,
            digest=header.digest,
            place=group.place,
        )


_meta_encoder = msgspec.json.Encoder()
_meta_decoder = msgspec.json.Decoder(RecordMeta)


class Mark(NamedTuple):
    """A position in the log: the records before it are in the database, those after it are not."""

    segment: int
    offset: int


class ScannedRecord(NamedTuple):
    """An intact record found by a scan."""

    meta: RecordMeta
    location: Location


class Scan(NamedTuple):
    """Result of scanning a segment."""

    records: list[ScannedRecord]
    end: int
    """End of the last intact record, or the start of the scan if there is none. Later bytes are unfinished."""
    num_damaged: int
    """Damaged stretches with an intact record after them."""


class LogBroken(Exception):
    """The content of the log is unknown; nothing may be appended before it is scanned."""


class DamagedPayload(Exception):
    """The bytes at a location are not those that were written there."""


def segment_path(directory: Path, number: int) -> Path:
    """The file of a segment."""
    return directory / f"{number:010d}{_SUFFIX}"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file or directory for reading."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def read_payload(fd: int, location: Location) -> bytes:
    """Read and verify one payload; raise `DamagedPayload`."""
    payload = os.pread(fd, location.length, location.offset)
    if len(payload) < location.length:
        raise DamagedPayload(f"{location}: the file ends early")
    if crc32(payload) != location.crc:
        raise DamagedPayload(f"{location}: the checksum disagrees")
    return payload


def read_cached_payload(fd: int, location: Location) -> bytes:
    """Read one payload from the page cache; raise BlockingIOError if it is not there, or is damaged."""
    buffer = bytearray(location.length)
    num_read = os.preadv(fd, [buffer], location.offset, os.RWF_NOWAIT)
    if num_read < location.length or crc32(buffer) != location.crc:
        raise BlockingIOError("only a read that waits for the disk can tell what is there")
    return bytes(buffer)


class SegmentLog:
    """The segment files of one directory, the last of which is open for appending."""

    def __init__(
        self, directory: Path, *, files: Files, segment_bytes: int, is_synced: bool
    ) -> None:
        self._directory = directory
        self._files = files
        self._segment_bytes = segment_bytes
        self._is_synced = is_synced
        self._fd: int | None = None
        self._number = -1
        self._marker = b""
        self._end = 0
        """End of the written bytes in the open segment."""
        self._unwritten: list[bytes] = []
        self.sizes: dict[int, int] = {}
        """Bytes of each segment file, the open one and its unwritten records included."""

    @property
    def mark(self) -> Mark:
        """The end of everything written."""
        return Mark(self._number + 1, 0) if self._fd is None else Mark(self._number, self._end)

    def load(self, mark: Mark) -> None:
        """Find the segment files. Nothing is ever appended before `mark`, even if files are missing."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if path.stem.isdigit():
                self.sizes[int(path.stem)] = path.stat().st_size
        self._number = max([*self.sizes, mark.segment if mark.offset else mark.segment - 1])

    def scan(self, number: int, *, start: int) -> Scan:
        """Scan segment `number` from the offset `start`."""
        with opened(segment_path(self._directory, number)) as fd:
            return _scan(fd, number, start)

    def secure(self, number: int, *, start: int, end: int) -> None:
        """Truncate segment `number` at `end` and force its bytes from `start` on to the disk.

        They are rewritten unchanged: after a failed sync, the kernel may treat pages as clean that never reached the
        disk, and only rewriting makes it write them out.
        """
        fd = self._files.open(segment_path(self._directory, number))
        try:
            if self.sizes[number] > end:
                self._files.truncate(fd, end)
                self.sizes[number] = end
            if self._is_synced:
                for at in range(start, end, _CHUNK_BYTES):
                    self._write_all(fd, [os.pread(fd, min(_CHUNK_BYTES, end - at), at)], at)
                self._files.sync(fd)
        finally:
            self._files.close(fd)

    # Appending. After an OSError of `LATER_ERRNOS`, undo it with `cut`; a retry may succeed later. After any other
    # error the log must be scanned.

    def add(self, meta: RecordMeta, payload: bytes) -> Location:
        """Buffer a record for the next `write`; return where its payload will be."""
        if self._fd is None or (self._end >= self._segment_bytes and not self._unwritten):
            self._begin_segment()
        encoded = _meta_encoder.encode(meta)
        crc = crc32(payload)
        head = _RECORD_HEAD.pack(self._marker, len(encoded), len(payload), crc, 0)[:_HEAD_CRC_AT]
        head_crc = crc32(encoded, crc32(head)).to_bytes(4, "little")
        self._unwritten += [b"".join((head, head_crc, encoded)), payload]
        offset = self.sizes[self._number] + _RECORD_HEAD.size + len(encoded)
        location = Location(self._number, offset, len(payload), crc)
        self.sizes[self._number] = location.end
        return location

    def write(self) -> None:
        """Write the records that were added; sync them if the log is synced."""
        if not self._unwritten:
            return
        assert self._fd is not None
        self._write_all(self._fd, self._unwritten, self._end)
        if self._is_synced:
            try:
                self._files.sync(self._fd)
            except OSError as e:
                # Never retried, not even for a full disk: the kernel may have dropped the pages that it could not
                # write, and would report success (https://wiki.postgresql.org/wiki/Fsync_Errors).
                raise LogBroken(f"segment {self._number} could not be synced: {e}") from e
        self._unwritten = []
        self._end = self.sizes[self._number]

    def cut(self, mark: Mark) -> None:
        """Undo what was added or written since `mark`."""
        self._unwritten = []
        if self._fd is None:
            return
        try:
            if mark.segment == self._number and mark.offset > 0:
                self._files.truncate(self._fd, mark.offset)
                self._end = self.sizes[self._number] = mark.offset
            else:  # the segment was started since
                self.end_segment()
                self._files.unlink(self.forget(self._number))
        except OSError as e:
            raise LogBroken(f"segment {self._number} could not be cut at {mark}: {e}") from e

    def _begin_segment(self) -> None:
        self.end_segment()
        # The number is used up even if the attempt fails, so that a leftover file cannot collide.
        self._number += 1
        self._fd = self._files.create(segment_path(self._directory, self._number))
        self._marker = os.urandom(8)
        head = _FILE_MAGIC + self._marker
        self._unwritten = [head + crc32(head).to_bytes(4, "little")]
        self._end = 0
        self.sizes[self._number] = _FILE_HEAD.size
        if self._is_synced:
            try:
                self._files.sync_directory(self._directory)
            except OSError as e:
                # Without a free descriptor the directory was not opened; after a failed sync its state is unknown.
                if e.errno not in _NO_FILE_ERRNOS:
                    raise LogBroken(f"{self._directory} could not be synced: {e}") from e
                raise

    def _write_all(self, fd: int, buffers: Sequence[bytes], offset: int) -> None:
        left = list(buffers)
        first = 0
        while first < len(left):
            written = self._files.write(fd, left[first : first + _MAX_BUFFERS], offset)
            if written <= 0:
                raise OSError(errno.EIO, f"wrote {written} bytes")
            offset += written
            while first < len(left) and written >= len(left[first]):
                written -= len(left[first])
                first += 1
            if written:
                left[first] = left[first][written:]

    def forget(self, number: int) -> Path:
        """Stop counting a segment that is not open, and return its file, which the caller deletes."""
        assert number != self.current
        self.sizes.pop(number, None)
        return segment_path(self._directory, number)

    @property
    def current(self) -> int | None:
        """The segment to which records may still be appended."""
        return None if self._fd is None else self._number

    def end_segment(self) -> None:
        """Close the open segment as it is; the next record begins another."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)

    def sync(self) -> None:
        """Force the open segment to the disk, also where `write` does not."""
        if self._fd is not None:
            self._files.sync(self._fd)


def _scan(fd: int, number: int, start: int) -> Scan:
    size = os.fstat(fd).st_size
    marker = _read_marker(fd, number, size)
    if marker is None or size <= start:
        return Scan([], start, 0)
    records: list[ScannedRecord] = []
    num_damaged = 0
    at: int | None = max(start, _FILE_HEAD.size)
    end = max(start, _FILE_HEAD.size)
    while at is not None and at < size:
        record = _read_record(fd, number, at, marker, size)
        if record is None:
            at = _find(fd, marker, at + 1, size)
            continue
        num_damaged += at > end
        records.append(record)
        at = end = record.location.end
    return Scan(records, end, num_damaged)


def _read_marker(fd: int, number: int, size: int) -> bytes | None:
    head = os.pread(fd, _FILE_HEAD.size + 8, 0)
    if len(head) >= _FILE_HEAD.size:
        magic, marker, crc = _FILE_HEAD.unpack_from(head)
        if magic == _FILE_MAGIC and crc == crc32(head[:16]):
            return bytes(marker)
    # A damaged file head does not lose the whole file: the first record repeats the marker.
    marker = head[_FILE_HEAD.size :]
    return marker if _read_record(fd, number, _FILE_HEAD.size, marker, size) else None


def _read_record(fd: int, number: int, at: int, marker: bytes, size: int) -> ScannedRecord | None:
    head = os.pread(fd, _RECORD_HEAD.size, at)
    if len(head) < _RECORD_HEAD.size:
        return None
    found, num_meta, num_payload, payload_crc, head_crc = _RECORD_HEAD.unpack(head)
    payload_at = at + _RECORD_HEAD.size + num_meta
    if found != marker or payload_at + num_payload > size:
        return None
    meta = os.pread(fd, num_meta, at + _RECORD_HEAD.size)
    if crc32(meta, crc32(head[:_HEAD_CRC_AT])) != head_crc:
        return None
    location = Location(number, payload_at, num_payload, payload_crc)
    try:
        read_payload(fd, location)
        return ScannedRecord(_meta_decoder.decode(meta), location)
    except (DamagedPayload, msgspec.MsgspecError):
        return None


def _find(fd: int, marker: bytes, start: int, size: int) -> int | None:
    for at in range(start, size, _CHUNK_BYTES):
        # Overlap, so that a marker across two chunks is found.
        index = os.pread(fd, _CHUNK_BYTES + len(marker) - 1, at).find(marker)
        if index >= 0:
            return at + index
    return None
