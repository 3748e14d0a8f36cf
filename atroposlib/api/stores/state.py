"""The SQLite half of the disk store: where every group is, what ended, the batches, the coordinator's document, facts.

One connection holds the file exclusively. Transactions are chained: whatever survives a crash is a prefix of what was
committed. `DiskStore` calls it from its writer thread; it holds no payload and takes no decision.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from atroposlib.api.run.types import GroupHeader
from atroposlib.api.stores.base import (
    BatchState,
    Change,
    Fate,
    Place,
    StoredBatch,
    StoredGroup,
    UnreadableRun,
)
from atroposlib.api.stores.segments import Location, Mark, RecordMeta
from atroposlib.errors import ConfigError

_FORMAT: Final = 2
_FACTS: Final = "create table facts (name text primary key, value blob not null) without rowid"
_DONE: Final = "create table done (group_id primary key, digest blob not null) without rowid"
"""Ids of ended groups that may come again. Measured: 45 bytes of the file each, for ids of 32 random digits."""
_SCHEMA: Final = f"""
begin exclusive;
create table groups (
    number integer primary key,
    group_id not null unique,
    env_id integer,
    num_sequences integer not null,
    num_tokens integer not null,
    policy_version integer,
    arrival_step integer not null,
    digest blob not null,
    place integer not null,
    batch integer,
    deliveries integer not null default 0,
    reason text,
    segment integer not null,
    offset integer not null,
    length integer not null,
    crc integer not null
);
{_DONE};
create table ended (fate text primary key, num_groups integer not null) without rowid;
create table batches (
    number integer primary key,
    state integer not null,
    step integer not null,
    epoch integer not null,
    lease_id text not null,
    ttl_s real not null,
    request_id text,
    is_plain integer not null
);
{_FACTS};
create table run (
    one integer primary key check (one = 1),
    document blob,
    next_number integer not null,
    mark_segment integer not null,
    mark_offset integer not null,
    num_forced integer not null
);
insert into run values (1, null, 0, 0, 0, 0);
pragma user_version = {_FORMAT};
commit;
"""
_FROM_FORMAT_1: Final = f"""
begin exclusive;
{_FACTS};
update groups set group_id = key_of(group_id);
alter table done rename to done_1;
{_DONE};
insert into done select key_of(group_id), digest from done_1 where digest != x'';
drop table done_1;
pragma user_version = {_FORMAT};
commit;
"""
_IS_HEX: Final = re.compile("[0-9a-f]{32}").fullmatch
_DAMAGED: Final = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})


class DamagedState(Exception):
    """The file is not the database that was written."""


class LocatedGroup(NamedTuple):
    """A held group and where its payload lies."""

    group: StoredGroup
    location: Location


class LoadedState(NamedTuple):
    """All rows, as they were found."""

    groups: list[LocatedGroup]
    """By number, ascending."""
    batches: list[StoredBatch]
    ended: Counter[Fate]
    document: bytes | None
    facts: dict[str, bytes]
    next_number: int
    mark: Mark


def is_full(error: sqlite3.Error) -> bool:
    """The disk, and nothing else, is in the way."""
    return _primary_code(error) == sqlite3.SQLITE_FULL


def _primary_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


class StateDb:
    """Rows. Everything that changes them happens inside `transaction`."""

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        """Open or make the file.

        Raises `DamagedState`, `ConfigError` if another process holds it, `UnreadableRun` if a newer version wrote it.
        """
        self._is_synced = is_synced
        # Made here, because SQLite would give it the permissions that the umask leaves; its WAL gets the same.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            self._set_up(path)
        except sqlite3.Error as e:
            self._db.close()
            if _primary_code(e) in _DAMAGED:
                raise DamagedState(f"{path}: {e}") from e
            if _primary_code(e) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ConfigError(f"another hub uses {path.parent}") from e
            raise
        except (DamagedState, ConfigError):
            self._db.close()
            raise

    def _set_up(self, path: Path) -> None:
        for pragma in (
            # Without other connections WAL needs no shared memory, so it works where mmap does not.
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "secure_delete = OFF",
            "temp_store = MEMORY",
            "synchronous = FULL",
        ):
            self._db.execute(f"pragma {pragma}")
        self._is_full_sync = True
        (version,) = self._db.execute("pragma user_version").fetchone()
        if version > _FORMAT:
            raise UnreadableRun(
                f"{path} has format {version}, and this version reads formats up to {_FORMAT};"
                " a newer version of atroposlib wrote it"
            )
        if version == 0:
            self._db.executescript(_SCHEMA)
        (verdict,) = self._db.execute("pragma quick_check(1)").fetchone()
        if verdict != "ok":
            raise DamagedState(f"{path}: {verdict}")
        if version == 1:
            # Format 1 stored ids of 36 characters in 16 bytes, and those of 32 as text.
            self._db.create_function(
                "key_of",
                1,
                lambda old: str(uuid.UUID(bytes=old)) if isinstance(old, bytes) else _key(old),
            )
            self._db.executescript(_FROM_FORMAT_1)

    def load(self) -> LoadedState:
        """Read all rows."""
        document, next_number, segment, offset = self._db.execute(
            "select document, next_number, mark_segment, mark_offset from run"
        ).fetchone()
        batches = [
            StoredBatch(
                number=row[0],
                state=BatchState(row[1]),
                step=row[2],
                epoch=row[3],
                lease_id=row[4],
                ttl_s=row[5],
                request_id=row[6],
                is_plain=bool(row[7]),
            )
            for row in self._db.execute("select * from batches order by number")
        ]
        ended = Counter({Fate(fate): num for fate, num in self._db.execute("select * from ended")})
        return LoadedState(
            groups=[_located_group(row) for row in self._db.execute(_SELECT_GROUPS)],
            batches=batches,
            ended=ended,
            document=document,
            facts=dict(self._db.execute("select name, value from facts order by name")),
            next_number=next_number,
            mark=Mark(segment, offset),
        )

    @contextlib.contextmanager
    def transaction(self, *, is_durable: bool) -> Iterator[None]:
        """Commit the block as a whole; when `is_durable`, and the store is, force it and all before to the disk."""
        is_full_sync = is_durable and self._is_synced
        if is_full_sync != self._is_full_sync:
            self._db.execute(f"pragma synchronous = {'FULL' if is_full_sync else 'NORMAL'}")
            self._is_full_sync = is_full_sync
        self._db.execute("begin immediate")
        try:
            yield
            if is_full_sync:
                # SQLite neither writes nor syncs a transaction whose rows stay as they are, and would leave those
                # before it unsynced, too.
                self._db.execute("update run set num_forced = num_forced + 1")
            self._db.execute("commit")
        except BaseException:
            # SQLite has rolled back by itself after some errors.
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    def digest_of(self, group_id: str) -> bytes | None:
        """The digest under which an id is known; None for an unknown id."""
        key = _key(group_id)
        row = self._db.execute(
            "select digest from groups where group_id = ?1"
            " union all select digest from done where group_id = ?1",
            (key,),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def insert(self, meta: RecordMeta, location: Location) -> None:
        """List a group."""
        self._db.execute(
            "insert into groups values (?, ?, ?, ?, ?, ?, ?, ?, ?, null, 0, null, ?, ?, ?, ?)",
            (
                meta.number,
                _key(meta.group_id),
                meta.env_id,
                meta.num_sequences,
                meta.num_tokens,
                meta.policy_version,
                meta.arrival_step,
                meta.digest,
                meta.place,
                *location,
            ),
        )

    def relocate(self, moved: Iterable[tuple[int, Location]]) -> None:
        """Note that the payloads of groups, by number, lie elsewhere now."""
        self._db.executemany(
            "update groups set segment = ?, offset = ?, length = ?, crc = ? where number = ?",
            [(*location, number) for number, location in moved],
        )

    def records_in(self, segment: int) -> list[RecordMeta]:
        """What the records of the held groups in a segment would say today. Looks at all groups."""
        rows = self._db.execute(
            "select number, group_id, env_id, num_sequences, num_tokens, policy_version,"
            " arrival_step, digest, place from groups where segment = ? order by number",
            (segment,),
        )
        return [
            RecordMeta(
                number=row[0],
                group_id=_group_id(row[1]),
                env_id=row[2],
                num_sequences=row[3],
                num_tokens=row[4],
                policy_version=row[5],
                arrival_step=row[6],
                digest=row[7],
                # A record knows no batches, nor does what is rebuilt from records.
                place=Place.BUFFERED if row[8] == Place.BUFFERED else Place.QUEUED,
            )
            for row in rows
        ]

    def apply(self, change: Change) -> None:
        """Apply all of `change`, whose groups and closed batches exist."""
        run = self._db.executemany
        if change.moves:
            run(
                "update groups set place = ?, batch = ?, deliveries = ?, reason = ? where number = ?",
                [(m.place, m.batch, m.deliveries, m.reason, m.number) for m in change.moves],
            )
        if change.ends:
            run(
                "insert into done select group_id, digest from groups"
                " where number = ? and digest != x''",
                [(end.number,) for end in change.ends],
            )
            run("delete from groups where number = ?", [(end.number,) for end in change.ends])
            run(
                "insert into ended values (?, ?) on conflict do"
                " update set num_groups = num_groups + excluded.num_groups",
                list(Counter(end.fate for end in change.ends).items()),
            )
        if change.batches:
            run(
                "insert or replace into batches values (?, ?, ?, ?, ?, ?, ?, ?)",
                [_batch_row(batch) for batch in change.batches],
            )
        if change.closed_batches:
            run("delete from batches where number = ?", [(n,) for n in change.closed_batches])
        if change.document is not None:
            self._db.execute("update run set document = ?", (change.document,))
        if change.facts:
            run("insert or replace into facts values (?, ?)", list(change.facts.items()))

    def set_mark(self, mark: Mark, *, next_number: int) -> None:
        """Note that the log is listed up to `mark`."""
        self._db.execute(
            "update run set mark_segment = ?, mark_offset = ?, next_number = ?",
            (*mark, next_number),
        )

    def clear(self, mark: Mark) -> None:
        """Forget all rows; the log before `mark` holds nothing."""
        for table in ("groups", "done", "ended", "batches", "facts"):
            self._db.execute(f"delete from {table}")
        self._db.execute("update run set document = null")
        self.set_mark(mark, next_number=0)

    def checkpoint(self) -> None:
        """Move everything from the WAL into the database file, and force it to the disk."""
        self._db.execute("pragma wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        self._db.close()


_SELECT_GROUPS: Final = (
    "select number, group_id, env_id, num_sequences, num_tokens, policy_version, arrival_step,"
    " place, batch, deliveries, reason, segment, offset, length, crc from groups order by number"
)


def _located_group(row: Sequence[Any]) -> LocatedGroup:
    number, group_id, env_id, num_sequences, num_tokens, policy_version, arrival_step = row[:7]
    place, batch, deliveries, reason, *position = row[7:]
    location = Location(*position)
    header = GroupHeader(
        number=number,
        env_id=env_id,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_bytes=location.length,
        policy_version=policy_version,
        arrival_step=arrival_step,
    )
    group = StoredGroup(
        header=header,
        group_id=_group_id(group_id),
        place=Place(place),
        batch=batch,
        deliveries=deliveries,
        reason=reason,
    )
    return LocatedGroup(group, location)


def _batch_row(batch: StoredBatch) -> tuple[object, ...]:
    return (
        batch.number,
        batch.state,
        batch.step,
        batch.epoch,
        batch.lease_id,
        batch.ttl_s,
        batch.request_id,
        batch.is_plain,
    )


def _key(group_id: str) -> bytes | str:
    """How an id is stored: 32 hexadecimal digits, such as our clients and the hub make, take 16 bytes."""
    return bytes.fromhex(group_id) if _IS_HEX(group_id) else group_id


def _group_id(key: bytes | str) -> str:
    return key.hex() if isinstance(key, bytes) else key
