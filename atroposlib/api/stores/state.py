"""The SQLite half of the disk store: where every group is, what ended, the batches, the coordinator's document, facts.

One connection holds the file exclusively. What survives a crash is a prefix of the committed transactions. `DiskStore`
calls it from its writer thread; it holds no payloads and decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec

from atroposlib.api.stores.base import (
    Change,
    Fate,
    SavedRun,
    StoredBatch,
    StoredGroup,
    UnreadableRun,
)
from atroposlib.api.stores.segments import Mark, RecordMeta
from atroposlib.api.stores.writing import Location

logger = logging.getLogger(__name__)

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
_DAMAGED: Final = ("SQLITE_NOTADB", "SQLITE_CORRUPT")


class DamagedState(Exception):
    """The file is not the database that was written."""


def is_full(error: sqlite3.Error) -> bool:
    """Whether the error is a full disk."""
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"


class StateDb:
    """The database. Rows change only inside `transaction`."""

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        """Open or create the file. Raises `DamagedState`, `UnreadableRun` if a newer version wrote it."""
        self._is_synced = is_synced
        # Created here, since SQLite would use the umask for its permissions; the WAL gets the same ones.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        self._db.row_factory = sqlite3.Row
        try:
            self._set_up(path)
        except BaseException as e:
            self._db.close()
            if getattr(e, "sqlite_errorname", "").startswith(_DAMAGED):
                raise DamagedState(f"{path}: {e}") from e
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
        (self._next_number,) = self._db.execute("select next_number from run").fetchone()

    def load(self) -> tuple[SavedRun, dict[int, Location]]:
        """Read all rows; return the run, and the payload locations by group number."""
        rows = self._db.execute("select *, length as num_bytes from groups order by number")
        groups: list[StoredGroup] = []
        locations: dict[int, Location] = {}
        for row in map(dict, rows):
            fields = row | {"header": row | {"group_id": _group_id(row["group_id"])}}
            groups.append(msgspec.convert(fields, StoredGroup))
            locations[row["number"]] = Location(
                row["segment"], row["offset"], row["length"], row["crc"]
            )
        (document,) = self._db.execute("select document from run").fetchone()
        saved = SavedRun(
            document=document,
            facts=dict(self._db.execute("select name, value from facts order by name").fetchall()),
            groups=groups,
            batches=[
                msgspec.convert(dict(row), StoredBatch, strict=False)
                for row in self._db.execute("select * from batches order by number")
            ],
            ended=Counter(
                {Fate(fate): num for fate, num in self._db.execute("select * from ended")}
            ),
            next_number=self._next_number,
        )
        return saved, locations

    @contextlib.contextmanager
    def transaction(self, *, is_durable: bool) -> Iterator[None]:
        """Commit the block as a whole; if `is_durable` in a synced store, force it and all before to the disk."""
        is_full_sync = is_durable and self._is_synced
        if is_full_sync != self._is_full_sync:
            self._db.execute(f"pragma synchronous = {'FULL' if is_full_sync else 'NORMAL'}")
            self._is_full_sync = is_full_sync
        self._db.execute("begin immediate")
        try:
            yield
            if is_full_sync:
                # SQLite neither writes nor syncs a transaction that changes no row, and would leave earlier ones
                # unsynced, too.
                self._db.execute("update run set num_forced = num_forced + 1")
            self._db.execute("commit")
        except BaseException:
            # SQLite has rolled back by itself after some errors.
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    def digest_of(self, group_id: str) -> bytes | None:
        """Return the digest stored for an id; None for an unknown id."""
        key = _key(group_id)
        row = self._db.execute(
            "select digest from groups where group_id = ?1"
            " union all select digest from done where group_id = ?1",
            (key,),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def insert(self, meta: RecordMeta, location: Location) -> bool:
        """Insert a group; False if its number or id exists already."""
        number, group_id, *rest = msgspec.structs.astuple(meta)
        self._next_number = max(self._next_number, number + 1)
        inserted = self._db.execute(
            "insert or ignore into groups values (?, ?, ?, ?, ?, ?, ?, ?, ?, null, 0, null, ?, ?, ?, ?)",
            (number, _key(group_id), *rest, *location),
        )
        return inserted.rowcount == 1

    def relocate(self, number: int, location: Location) -> None:
        """Update the location of a group's payload."""
        self._db.execute(
            "update groups set segment = ?, offset = ?, length = ?, crc = ? where number = ?",
            (*location, number),
        )

    def apply(self, change: Change) -> None:
        """Apply `change`, which names stored groups."""
        alter = self._db.executemany
        alter(
            "update groups set place = ?, batch = ?, deliveries = ?, reason = ? where number = ?",
            [(m.place, m.batch, m.deliveries, m.reason, m.number) for m in change.moves],
        )
        if change.ends:
            ended = [(end.number,) for end in change.ends]
            alter(
                "insert or ignore into done select group_id, digest from groups"
                " where number = ? and digest != x''",
                ended,
            )
            alter("delete from groups where number = ?", ended)
            alter(
                "insert into ended values (?, ?) on conflict do"
                " update set num_groups = num_groups + excluded.num_groups",
                list(Counter(end.fate for end in change.ends).items()),
            )
        alter(
            "insert or replace into batches values"
            " (:number, :state, :step, :epoch, :lease_id, :ttl_s, :request_id, :is_plain)",
            [asdict(batch) for batch in change.batches],
        )
        alter("delete from batches where number = ?", [(n,) for n in change.closed_batches])
        if change.document is not None:
            self._db.execute("update run set document = ?", (change.document,))
        alter("insert or replace into facts values (?, ?)", list(change.facts.items()))

    def mark(self) -> Mark:
        """The position up to which the records of the log are in the database."""
        return Mark(*self._db.execute("select mark_segment, mark_offset from run").fetchone())

    def set_mark(self, mark: Mark) -> None:
        """Record `mark`, and the next group number."""
        self._db.execute(
            "update run set mark_segment = ?, mark_offset = ?, next_number = ?",
            (*mark, self._next_number),
        )

    def clear(self) -> None:
        """Delete all rows."""
        for table in ("groups", "done", "ended", "batches", "facts"):
            self._db.execute(f"delete from {table}")
        self._db.execute("update run set document = null")
        self._next_number = 0

    def checkpoint(self) -> None:
        """Move everything from the WAL into the database file, and force it to the disk."""
        self._db.execute("pragma wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        try:
            self._db.close()
        except sqlite3.Error:
            logger.exception("the database did not close cleanly")


def _key(group_id: str) -> bytes | str:
    """Return the stored form of an id: 32 hexadecimal digits, as native clients and the hub make, take 16 bytes."""
    return bytes.fromhex(group_id) if _IS_HEX(group_id) else group_id


def _group_id(key: bytes | str) -> str:
    return key.hex() if isinstance(key, bytes) else key
