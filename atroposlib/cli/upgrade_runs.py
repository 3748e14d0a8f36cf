"""Convert the runs that version 0.2 stored, as payloads in segments beside `state.db`, into one SQLite file each.

`run-api` does so when it starts: a store reads only the present format. The older files stay until the new one is whole
and on the disk; after a crash the conversion begins again. `state.db` is then replaced by an empty database of the
present format, which makes version 0.2 refuse the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import operator
import shutil
import sqlite3
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from isal.isal_zlib import crc32

from atroposlib.api.stores import run_file
from atroposlib.api.stores.base import Place, StoreBroken, UnreadableRun
from atroposlib.api.stores.runs import stored_markers
from atroposlib.api.stores.space import BALLAST
from atroposlib.utils.files import sync_to_disk

logger = logging.getLogger(__name__)

_STATE: Final = "state.db"
_SEGMENTS: Final = "*.seg"
_FILE_HEAD: Final = struct.Struct("<8s8sI")
"""Magic, marker, CRC32 of both."""
_RECORD_HEAD: Final = struct.Struct("<8sIQII")
"""Marker, bytes of meta, bytes of payload, CRC32 of payload, CRC32 of the four fields before it and of meta."""
_SELECT_GROUPS: Final = (
    "select number, group_id, env_id, num_sequences, num_tokens, policy_version, arrival_step, length,"
    " crc, digest, place, batch, deliveries, reason, segment, offset from groups order by segment, offset"
)


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a record: enough to rebuild the row of its group."""

    number: int
    group_id: str
    env_id: int | None
    num_sequences: int
    num_tokens: int = 0
    policy_version: int | None = None
    arrival_step: int = 0
    digest: bytes = b""
    place: int = Place.QUEUED


class _Record(NamedTuple):
    meta: _Meta
    payload: bytes
    crc: int


def upgrade(data_dir: Path) -> None:
    """Convert the runs below `data_dir` that are of an older format; one that cannot be read is logged and left.

    Raises `StoreBroken` for one that cannot be written.
    """
    for name, _ in stored_markers(data_dir):
        with (data_dir / name / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as an open store does
                convert(data_dir / name)
                (data_dir / name / BALLAST).unlink(
                    missing_ok=True
                )  # older versions kept one in each run
            except BlockingIOError:
                continue  # a hub serves it, and its format is the present one
            except UnreadableRun as e:
                logger.error("run %r is left as it is: %s", name, e)


def convert(directory: Path) -> None:
    """Convert the run in `directory` if it is of the older format.

    Raises `UnreadableRun`, `StoreBroken`; the older files are then unchanged.
    """
    started_s = time.perf_counter()
    target, state = directory / run_file.NAME, directory / _STATE
    segments = sorted(directory.glob(_SEGMENTS))
    is_old = state.exists() and not _is_stub(state)
    if not target.exists() and (is_old or segments):
        if not is_old:
            raise UnreadableRun(f"{directory} holds segments and no {_STATE} that lists them")
        _check_room(directory, segments)
        partial = directory / f"{run_file.NAME}.partial"
        try:
            num_groups = _write(partial, state)
        except sqlite3.Error as e:
            if run_file.is_damage(e):
                raise UnreadableRun(f"{state} is damaged and was left as it is: {e}") from e
            raise StoreBroken(f"{state} cannot be converted: {e}; it is left as it was") from e
        partial.rename(target)
        sync_to_disk(directory)
        seconds = time.perf_counter() - started_s
        logger.info(
            "%s: %d groups of %d segments were converted to one file, %s, in %.1f s",
            *(directory, num_groups, len(segments), target.name, seconds),
        )
    if not _is_stub(state):
        _write_stub(state)
    for path in segments:
        path.unlink()


def _check_room(directory: Path, segments: list[Path]) -> None:
    needed = sum(path.stat().st_size for path in segments)
    if (free := shutil.disk_usage(directory).free) < needed:
        raise StoreBroken(
            f"{directory} cannot be converted to one file: that needs {needed >> 20} MiB, and"
            f" {free >> 20} MiB are free; nothing was changed"
        )


def _write(partial: Path, state: Path) -> int:
    """Write the new file whole and force it to the disk; return how many groups it holds."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        partial.with_name(partial.name + suffix).unlink(missing_ok=True)
    with (
        contextlib.closing(run_file.connect(partial, creates=True)) as new,
        _opened(state) as old,
    ):
        new.executescript(run_file.SCHEMA)
        (version,) = old.execute("pragma user_version").fetchone()
        if version == 0 and not any(state.parent.glob(_SEGMENTS)):
            return 0  # a crash came before its first transaction
        if version != 2:
            raise UnreadableRun(f"{state} has format {version}, and this version converts format 2")
        # The file counts only once it was synced as a whole.
        new.execute("pragma synchronous = off")
        new.execute("begin exclusive")
        _copy_rows(old, new)
        num_groups = _copy_groups(old, new, state.parent)
        num_groups += _copy_unlisted(old, new, state.parent)
        new.execute("commit")
    sync_to_disk(partial)
    return num_groups


@contextlib.contextmanager
def _opened(state: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(run_file.connect(state)) as old:
        # As the older version held it: so the WAL needs no shared memory.
        old.execute("pragma locking_mode = exclusive").fetchall()
        yield old


def _copy_rows(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Copy everything but the groups."""
    for table, columns in (
        ("done", "group_id, digest"),
        ("ended", "fate, num_groups"),
        ("batches", "number, state, step, epoch, lease_id, ttl_s, request_id, is_plain"),
        ("facts", "name, value"),
    ):
        where = " where digest != x''" if table == "done" else ""
        marks = ",".join("?" * (columns.count(",") + 1))
        new.executemany(
            f"insert into {table} values ({marks})",
            map(tuple, old.execute(f"select {columns} from {table}{where}")),
        )
    document, next_number = old.execute("select document, next_number from run").fetchone()
    new.execute("update run set document = ?, next_number = ?", (document, next_number))


def _copy_groups(old: sqlite3.Connection, new: sqlite3.Connection, directory: Path) -> int:
    """Copy the groups of the database, whose payloads are copied as they are: reading them finds damage."""
    rows = map(tuple, old.execute(_SELECT_GROUPS))
    num_groups = 0
    for segment, stored in itertools.groupby(rows, key=operator.itemgetter(-2)):
        path = directory / f"{segment:010d}.seg"
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            for *row, _, offset in stored:
                file.seek(offset)
                _insert(new, row, file.read(row[7]))
                num_groups += 1
    return num_groups


def _copy_unlisted(old: sqlite3.Connection, new: sqlite3.Connection, directory: Path) -> int:
    """Copy groups that were synced to the segments after the last transaction that reached the disk."""
    segment, offset = old.execute("select mark_segment, mark_offset from run").fetchone()
    num_groups = 0
    for path in sorted(directory.glob(_SEGMENTS)):
        number = int(path.stem)
        if number < segment:
            continue
        for meta, payload, crc in _records(path, offset if number == segment else 0):
            key = run_file.key_of(meta.group_id)
            known = new.execute(
                "select 1 from groups where group_id = ?1"
                " union all select 1 from done where group_id = ?1",
                (key,),
            )
            # Copies that were made when a segment was nearly empty repeat their originals.
            if known.fetchone() is None:
                header = (meta.env_id, meta.num_sequences, meta.num_tokens, meta.policy_version)
                rest = (meta.arrival_step, len(payload), crc, meta.digest, meta.place)
                _insert(new, (meta.number, key, *header, *rest, None, 0, None), payload)
                new.execute("update run set next_number = max(next_number, ?)", (meta.number + 1,))
                num_groups += 1
    return num_groups


def _insert(new: sqlite3.Connection, row: Sequence[Any], payload: bytes) -> None:
    new.execute(f"insert into groups values ({','.join('?' * len(row))})", row)
    new.execute("insert into payloads values (?, ?)", (row[0], payload))


def _records(path: Path, start: int) -> Iterator[_Record]:
    """Yield the intact records from `start` on; the first that is not ends them, as it was never acknowledged."""
    with path.open("rb") as file:
        marker = file.read(_FILE_HEAD.size)[8:16]
        file.seek(max(start, _FILE_HEAD.size))
        while len(head := file.read(_RECORD_HEAD.size)) == _RECORD_HEAD.size:
            found, num_meta, num_payload, crc, head_crc = _RECORD_HEAD.unpack(head)
            if found != marker or num_meta + num_payload > path.stat().st_size:
                return
            meta, payload = file.read(num_meta), file.read(num_payload)
            if crc32(meta, crc32(head[:-4])) != head_crc or crc32(payload) != crc:
                return
            yield _Record(msgspec.json.decode(meta, type=_Meta), payload, crc)


def _is_stub(state: Path) -> bool:
    """Whether `state.db` is what this version leaves there: SQLite keeps `user_version` in bytes 60 to 63."""
    with contextlib.suppress(FileNotFoundError), state.open("rb") as file:
        return int.from_bytes(file.read(64)[60:], "big") == run_file.FORMAT
    return False


def _write_stub(state: Path) -> None:
    partial = state.with_name(f"{state.name}.partial")
    partial.unlink(missing_ok=True)
    with contextlib.closing(run_file.connect(partial, creates=True)) as stub:
        stub.execute(f"pragma user_version = {run_file.FORMAT}")
    # Journals of the older database must not be applied to it.
    for suffix in ("-wal", "-shm", "-journal"):
        state.with_name(state.name + suffix).unlink(missing_ok=True)
    partial.replace(state)
    sync_to_disk(state.parent)
