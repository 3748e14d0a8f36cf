"""Append-only segment files: the payload bytes of a run, each record saying what it is.

A record is written once and never changed; whole files are dropped when nothing in them is needed. Every byte is under
a CRC, so a scan tells what was written from what was only begun. Records carry a marker drawn at random for their file,
so no payload can pose as a record. Used by `DiskStore` from its writer thread (reading: from any thread). Knows nothing
of batches, places or SQLite.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from isal.isal_zlib import crc32

from atroposlib.api.run.types import GroupHeader
from atroposlib.api.stores.base import NewGroup, Place

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
"""The system lacks something now. Unless a sync ended so, the call may be repeated later."""


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
        if sys.platform == "linux":
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def allocate(self, fd: int, size: int) -> None:
        """Take `size` bytes of disk."""
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, size)
        else:
            for start in range(0, size, _CHUNK_BYTES):
                os.pwrite(fd, bytes(min(_CHUNK_BYTES, size - start)), start)

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def total_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize


class RecordMeta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What a record says of its group: enough to list it again when nothing else is left."""

    number: int
    group_id: str
    env_id: int | None
    num_sequences: int
    num_tokens: int = 0
    policy_version: int | None = None
    arrival_step: int = 0
    digest: bytes = b""
    place: int = Place.QUEUED

    def header(self, num_bytes: int) -> GroupHeader:
        """The header of the group, whose payload has `num_bytes`."""
        return GroupHeader(
            number=self.number,
            env_id=self.env_id,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
            num_bytes=num_bytes,
            policy_version=self.policy_version,
            arrival_step=self.arrival_step,
        )


_meta_encoder = msgspec.json.Encoder()
_meta_decoder = msgspec.json.Decoder(RecordMeta)


class Record(NamedTuple):
    """A record about to be written."""

    meta: bytes
    payload: bytes
    crc: int
    """Of the payload."""


class EncodedGroup(NamedTuple):
    """A new group, ready to be written."""

    meta: RecordMeta
    record: Record


class Location(NamedTuple):
    """Where a payload lies."""

    segment: int
    offset: int
    length: int
    crc: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Mark(NamedTuple):
    """A position in the log. Everything before it is listed elsewhere; what lies behind it is not."""

    segment: int
    offset: int


class Written(NamedTuple):
    """What one `append` wrote."""

    start: int
    """Where the segment ended before."""
    locations: list[Location]


class ScannedRecord(NamedTuple):
    """An intact record that a scan came upon."""

    meta: RecordMeta
    location: Location


class Scan(NamedTuple):
    """What a stretch of one segment holds."""

    records: list[ScannedRecord]
    end: int
    """Behind the last intact record; where the scan began if there is none."""
    size: int
    """Of the file. What lies between `end` and here was begun and never finished."""
    num_damaged: int
    """Damaged stretches with an intact record behind them."""


class LogBroken(Exception):
    """What the log holds is unknown now; nothing may be appended until it was scanned."""


class DamagedPayload(Exception):
    """The bytes at a location are not those that were written there."""


def encode_record(group: NewGroup) -> EncodedGroup:
    """Make the record of a new group."""
    header = group.header
    meta = RecordMeta(
        number=header.number,
        group_id=group.group_id,
        env_id=header.env_id,
        num_sequences=header.num_sequences,
        num_tokens=header.num_tokens,
        policy_version=header.policy_version,
        arrival_step=header.arrival_step,
        digest=group.digest,
        place=group.place,
    )
    crc = crc32(group.payload)
    return EncodedGroup(meta, Record(_meta_encoder.encode(meta), group.payload, crc))


def copy_record(meta: RecordMeta, payload: bytes, crc: int) -> Record:
    """Make the record of a group that moves to another segment."""
    return Record(_meta_encoder.encode(meta), payload, crc)


def segment_path(directory: Path, number: int) -> Path:
    """The file of a segment."""
    return directory / f"{number:010d}{_SUFFIX}"


def read_payload(fd: int, location: Location) -> bytes:
    """Read and verify one payload; raise `DamagedPayload`."""
    payload = os.pread(fd, location.length, location.offset)
    while len(payload) < location.length:  # one pread stops at 2 GiB or at a signal
        more = os.pread(fd, location.length - len(payload), location.offset + len(payload))
        if not more:
            raise DamagedPayload(f"{location}: the file ends early")
        payload += more
    if crc32(payload) != location.crc:
        raise DamagedPayload(f"{location}: the checksum disagrees")
    return payload


def read_cached_payload(fd: int, location: Location, buffer: memoryview) -> bytes | None:
    """Read and verify one payload that the operating system holds in memory; None for any other.

    `buffer` is for the bytes on their way, and at least as long as they are.
    """
    view = buffer[: location.length]
    try:
        if os.preadv(fd, [view], location.offset, os.RWF_NOWAIT) < location.length:
            return None
    except OSError:
        return None
    return bytes(view) if crc32(view) == location.crc else None


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
        self._size = 0
        self._marker = b""
        self.sizes: dict[int, int] = {}
        """Bytes of each segment file, the one open for appending included."""

    @property
    def mark(self) -> Mark:
        """Behind everything that was appended."""
        if self._fd is None:
            return Mark(self._number + 1, 0)
        return Mark(self._number, self._size)

    def load(self) -> None:
        """Find the segment files."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if path.stem.isdigit():
                self.sizes[int(path.stem)] = path.stat().st_size
        self._number = max(self.sizes, default=-1)

    def begin_behind(self, mark: Mark) -> None:
        """Never append before `mark`, even if files have gone missing."""
        self._number = max(self._number, mark.segment if mark.offset else mark.segment - 1)

    def scan(self, number: int, *, start: int) -> Scan:
        """Read what segment `number` holds from `start` on (0: from its beginning)."""
        fd = os.open(segment_path(self._directory, number), os.O_RDONLY)
        try:
            return _scan(fd, number, start)
        finally:
            os.close(fd)

    def secure(self, number: int, *, start: int, end: int) -> None:
        """Cut segment `number` at `end` and make sure that its bytes from `start` on are on the disk.

        They are written once more, as they are: after a failed sync the kernel holds pages that it believes to be on
        the disk and are not, and only a page that is written again is written out again.
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

    def append(self, records: Sequence[Record]) -> Written:
        """Write records, synced if the log is, and say where their payloads are.

        Raises OSError (`LATER_ERRNOS`) when the system has no room, file or memory to spare; then nothing was written.
        Raises `LogBroken` when anything else fails.
        """
        if self._fd is None or self._size >= self._segment_bytes:
            self._begin_segment()
        assert self._fd is not None
        start = self._size
        buffers: list[bytes] = []
        locations = []
        at = start
        for record in records:
            head = self._head(record)
            buffers += [head, record.payload]
            at += len(head)
            locations.append(Location(self._number, at, len(record.payload), record.crc))
            at += len(record.payload)
        try:
            self._write_all(self._fd, buffers, start)
        except OSError as e:
            if e.errno not in LATER_ERRNOS:
                raise LogBroken(f"segment {self._number}: {e}") from e
            self._cut(start)
            raise
        if self._is_synced:
            try:
                self._files.sync(self._fd)
            except OSError as e:
                # Not even "disk full" may be tried again: the kernel may have dropped the pages that it could not
                # write, and would report success (https://wiki.postgresql.org/wiki/Fsync_Errors).
                raise LogBroken(f"segment {self._number} could not be synced: {e}") from e
        self._size = self.sizes[self._number] = at
        return Written(start, locations)

    def take_back(self, written: Written) -> None:
        """Undo the last `append`."""
        self._cut(written.start)

    def _cut(self, size: int) -> None:
        assert self._fd is not None
        try:
            self._files.truncate(self._fd, size)
        except OSError as e:
            raise LogBroken(f"segment {self._number} could not be cut at {size}: {e}") from e
        self._size = self.sizes[self._number] = size

    def _head(self, record: Record) -> bytes:
        head = _RECORD_HEAD.pack(
            self._marker, len(record.meta), len(record.payload), record.crc, 0
        )[:_HEAD_CRC_AT]
        crc = crc32(record.meta, crc32(head))
        return b"".join((head, crc.to_bytes(4, "little"), record.meta))

    def _begin_segment(self) -> None:
        # The number is used up even if the attempt fails: a leftover file is never in the way.
        self._number += 1
        path = segment_path(self._directory, self._number)
        marker = os.urandom(8)
        head = _FILE_MAGIC + marker
        self._close_fd()
        try:
            fd = self._files.create(path)
            try:
                self._write_all(fd, [head + crc32(head).to_bytes(4, "little")], 0)
            except OSError:
                self._files.close(fd)
                self._files.unlink(path)
                raise
        except OSError as e:
            if e.errno in LATER_ERRNOS:
                raise
            raise LogBroken(f"segment {self._number} could not be begun: {e}") from e
        self._fd, self._size, self._marker = fd, _FILE_HEAD.size, marker
        self.sizes[self._number] = self._size
        if self._is_synced:
            try:
                self._files.sync_directory(self._directory)
            except OSError as e:
                if e.errno not in _NO_FILE_ERRNOS:
                    raise LogBroken(f"{self._directory} could not be synced: {e}") from e
                # The directory could not even be opened, and nothing relies on the empty segment yet.
                self._close_fd()
                self.forget(self._number)
                self._files.unlink(path)
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

    def forget(self, number: int) -> int:
        """Stop counting a segment whose file is to be dropped; return its bytes."""
        assert number != self._number or self._fd is None
        return self.sizes.pop(number, 0)

    def end_segment(self) -> None:
        """Begin a new segment with the next record."""
        self._close_fd()

    def is_active(self, number: int) -> bool:
        """Records may still be appended to it."""
        return number == self._number and self._fd is not None

    def close(self) -> None:
        """Sync and close the segment that is open for appending."""
        if self._fd is not None:
            try:
                self._files.sync(self._fd)
            finally:
                self._close_fd()

    def abandon(self) -> None:
        """Close it as it is: after a failure nothing may be written any more."""
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)


def _scan(fd: int, number: int, start: int) -> Scan:
    size = os.fstat(fd).st_size
    marker = _read_marker(fd, number, size)
    if marker is None or size <= start:
        return Scan([], start, size, 0)
    records: list[ScannedRecord] = []
    at = end = max(start, _FILE_HEAD.size)
    num_damaged = 0
    is_damaged = False
    while at < size:
        record = _read_record(fd, number, at, marker, size)
        if record is None:
            is_damaged = True
            found = _find(fd, marker, at + 1, size)
            if found is None:
                break
            at = found
            continue
        if is_damaged:
            num_damaged += 1
            is_damaged = False
        records.append(record)
        at = end = record.location.end
    return Scan(records, end, size, num_damaged)


def _read_marker(fd: int, number: int, size: int) -> bytes | None:
    head = os.pread(fd, _FILE_HEAD.size + 8, 0)
    if len(head) >= _FILE_HEAD.size:
        magic, marker, crc = _FILE_HEAD.unpack_from(head)
        if magic == _FILE_MAGIC and crc == crc32(head[:16]):
            return bytes(marker)
    # A damaged beginning does not take the whole file along: the first record repeats the marker.
    marker = head[_FILE_HEAD.size :]
    if _read_record(fd, number, _FILE_HEAD.size, marker, size) is not None:
        return marker
    return None


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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
