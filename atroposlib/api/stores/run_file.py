"""The SQLite file of a run, payloads included: its schema and its statements.

`DiskStore` calls it from its writer thread; it decides nothing. What survives a crash is a prefix of the committed
transactions. Other processes may read the file meanwhile (`run-api --backup`, the `sqlite3` shell).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec
from isal.isal_zlib import crc32

from atroposlib.api.stores.base import (
    Change,
    Fate,
    NewGroup,
    Place,
    SavedRun,
    StoreBroken,
    StoredBatch,
    StoredGroup,
    UnreadableRun,
)

logger = logging.getLogger(__name__)

NAME: Final = "run.db"
FORMAT: Final = 3
"""Formats 1 and 2 kept payloads in files of their own (`cli.upgrade_runs`)."""
PAGE_BYTES: Final = 16384
_CHECKPOINT_BYTES: Final = 8 << 20
"""Written to the WAL between two checkpoints."""
_JOB_BYTES: Final = 8 * PAGE_BYTES
"""About what a change writes to the WAL."""
_KEPT_FREE_BYTES: Final = 64 << 20
_KEPT_FREE_SHARE: Final = 0.25
"""Free pages up to this size, or this share of the file, are kept for groups to come."""
TIGHT_BYTES: Final = 64 << 20
"""With less room on the disk, free pages are given back, and the WAL is kept short."""
_COPY_BYTES: Final = 8 << 20
_BUSY_S: Final = 5.0
_TABLES: Final = ("groups", "payloads", "done", "ended", "batches", "facts")
_PLACES: Final = " ".join(f"when {place.value} then '{place.name.lower()}'" for place in Place)
SCHEMA: Final = f"""
pragma page_size = {PAGE_BYTES};
pragma auto_vacuum = incremental;
begin exclusive;
create table groups (
    number integer primary key,
    group_id not null unique,
    env_id integer,
    num_sequences integer not null,
    num_tokens integer not null,
    policy_version integer,
    arrival_step integer not null,
    num_bytes integer not null,
    crc integer not null,
    digest blob not null,
    place integer not null,
    batch integer,
    deliveries integer not null default 0,
    reason text
);
create table payloads (number integer primary key, payload blob not null);
create table done (group_id primary key, digest blob not null) without rowid;
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
create table facts (name text primary key, value blob not null) without rowid;
create table run (
    one integer primary key check (one = 1),
    document blob,
    next_number integer not null,
    num_forced integer not null
);
insert into run values (1, null, 0, 0);
create view held as
    select number, case typeof(group_id) when 'blob' then lower(hex(group_id)) else group_id end as id,
        case place {_PLACES} end as place, env_id, num_sequences, num_tokens, policy_version, num_bytes, batch,
        deliveries, reason
    from groups;
pragma user_version = {FORMAT};
commit;
"""
"""`done`: ids of ended groups that may come again. `held`: for people, who read it with the `sqlite3` shell."""
_IS_HEX: Final = re.compile("[0-9a-f]{32}").fullmatch
_LISTED: Final = "(select value from json_each(?))"


class RunFile:
    """The file, open for writing. Rows change only inside `transaction`."""

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        """Open or create the file. Raises `UnreadableRun`, `StoreBroken`."""
        self.path = path
        self._wal_path = path.with_name(path.name + "-wal")
        self._is_synced = is_synced
        self._is_full_sync: bool | None = None
        self._has_damaged_payloads = False
        """Whether a payload could not be freed."""
        self._wal_bytes = 0
        """About how much of the WAL is not in the file."""
        self.payload_bytes = 0
        """Payloads of held groups."""
        if is_synced:
            _write_again(self._wal_path)
        self._db = connect(path, creates=True)
        with _said_of(path):
            try:
                self._set_up()
            except BaseException:
                self._db.close()
                raise

    def _set_up(self) -> None:
        self._db.execute("pragma secure_delete = off")
        self._db.execute("pragma temp_store = memory")
        (version,) = self._db.execute("pragma user_version").fetchone()
        if version > FORMAT:
            raise UnreadableRun(
                f"{self.path} has format {version}, and this version reads formats up to {FORMAT};"
                " a newer version of atroposlib wrote it"
            )
        if version == 0:
            self._db.executescript(SCHEMA)
        for table in _TABLES:
            # Payloads have checksums of their own, and reading them all would take minutes.
            if table != "payloads":
                (verdict,) = self._db.execute(f"pragma quick_check({table})").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict)
        self._db.execute("pragma journal_mode = wal").fetchall()
        self._db.execute("pragma wal_autocheckpoint = 0")
        self._db.execute(f"pragma journal_size_limit = {4 * _CHECKPOINT_BYTES}")
        self._wal_bytes = self._wal_size()

    def load(self) -> SavedRun:
        """Read all rows but the payloads."""
        with _said_of(self.path):
            groups = [
                msgspec.convert(
                    {"header": row | {"group_id": _group_id(row["group_id"])}, "move": row},
                    StoredGroup,
                )
                for row in map(dict, self._db.execute("select * from groups order by number"))
            ]
            self.payload_bytes = sum(group.header.num_bytes for group in groups)
            batches = self._db.execute("select * from batches order by number")
            facts = self._db.execute("select name, value from facts order by name")
            ended = self._db.execute("select fate, num_groups from ended")
            document, next_number = self._db.execute(
                "select document, next_number from run"
            ).fetchone()
            return SavedRun(
                document=document,
                facts=dict(map(tuple, facts)),
                groups=groups,
                batches=[msgspec.convert(dict(row), StoredBatch, strict=False) for row in batches],
                ended=Counter({Fate(fate): num_groups for fate, num_groups in ended}),
                next_number=next_number,
            )

    # Transactions.

    @contextlib.contextmanager
    def transaction(self, *, is_durable: bool) -> Iterator[None]:
        """Commit the block as a whole; if `is_durable` in a synced file, force it and all before to the disk."""
        is_full_sync = is_durable and self._is_synced
        if is_full_sync != self._is_full_sync:
            self._db.execute(f"pragma synchronous = {'full' if is_full_sync else 'normal'}")
            self._is_full_sync = is_full_sync
        payload_bytes = self.payload_bytes
        self._db.execute("begin immediate")
        try:
            yield
            if is_full_sync:
                # SQLite neither writes nor syncs a transaction that changes no row, and would leave earlier ones
                # unsynced, too.
                self._db.execute("update run set num_forced = num_forced + 1")
            self._db.execute("commit")
        except BaseException:
            self.payload_bytes = payload_bytes
            # SQLite has rolled back by itself after some errors.
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise
        self._wal_bytes += max(0, self.payload_bytes - payload_bytes) + _JOB_BYTES

    def digest_of(self, group_id: str) -> bytes | None:
        """Return the digest stored for an id; None for an unknown id."""
        row = self._db.execute(
            "select digest from groups where group_id = ?1"
            " union all select digest from done where group_id = ?1",
            (key_of(group_id),),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def insert(self, group: NewGroup) -> None:
        """Insert a group whose number and id are unknown."""
        header, payload = group.header, group.payload
        self._db.execute(
            "insert into groups values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, null, 0, null)",
            (
                header.number,
                key_of(header.group_id),
                header.env_id,
                header.num_sequences,
                header.num_tokens,
                header.policy_version,
                header.arrival_step,
                len(payload),
                crc32(payload),
                header.digest,
                group.place,
            ),
        )
        self._db.execute("insert into payloads values (?, ?)", (header.number, payload))
        self._db.execute("update run set next_number = max(next_number, ?)", (header.number + 1,))
        self.payload_bytes += len(payload)

    def apply(self, change: Change) -> None:
        """Apply `change`. Raises KeyError, with nothing done, if it names unknown groups."""
        named = _json([*change.moves, *change.ends])
        held = self._db.execute(f"select number from groups where number in {_LISTED}", named)
        change.check({number for (number,) in held})
        alter = self._db.executemany
        alter(
            "update groups set place = ?, batch = ?, deliveries = ?, reason = ? where number = ?",
            [(m.place, m.batch, m.deliveries, m.reason, n) for n, m in change.moves.items()],
        )
        if change.ends:
            self._end(list(change.ends))
            alter(
                "insert into ended values (?, ?) on conflict do"
                " update set num_groups = num_groups + excluded.num_groups",
                list(Counter(change.ends.values()).items()),
            )
        alter(
            "insert or replace into batches values"
            " (:number, :state, :step, :epoch, :lease_id, :ttl_s, :request_id, :is_plain)",
            [asdict(batch) for batch in change.batches.values() if batch is not None],
        )
        closed = [(number,) for number, batch in change.batches.items() if batch is None]
        alter("delete from batches where number = ?", closed)
        if change.document is not None:
            self._db.execute("update run set document = ?", (change.document,))
        alter("insert or replace into facts values (?, ?)", list(change.facts.items()))

    def _end(self, numbers: Sequence[int]) -> None:
        listed = _json(numbers)
        self._db.execute(
            "insert or ignore into done select group_id, digest from groups"
            f" where number in {_LISTED} and digest != x''",
            listed,
        )
        gone = self._db.execute(
            f"delete from groups where number in {_LISTED} returning num_bytes", listed
        )
        self.payload_bytes -= sum(num_bytes for (num_bytes,) in gone.fetchall())
        if self._has_damaged_payloads:
            for number in numbers:
                self._free_or_leave(number)
        else:
            self._db.execute(f"delete from payloads where number in {_LISTED}", listed)

    def _free_or_leave(self, number: int) -> None:
        """Free a payload, or leave its pages if one of them is so damaged that the next cannot be found."""
        self._db.execute("savepoint one")
        try:
            self._db.execute("delete from payloads where number = ?", (number,))
        except sqlite3.DatabaseError as e:
            if not is_damage(e):
                raise
            self._db.execute("rollback to one")
            logger.error("%s: the space of group %d cannot be freed: %s", self.path, number, e)
        self._db.execute("release one")

    def free_carefully(self) -> bool:
        """Free payloads one by one from now on, so that a damaged one costs only itself; False if that is so now."""
        was_careful, self._has_damaged_payloads = self._has_damaged_payloads, True
        return not was_careful

    def clear(self) -> None:
        """Delete all rows."""
        for table in _TABLES:
            self._db.execute(f"delete from {table}")
        self._db.execute("update run set document = null, next_number = 0")
        self.payload_bytes = 0

    # Space.

    def _pragma(self, name: str) -> int:
        (value,) = self._db.execute(f"pragma {name}").fetchone()
        return int(value)

    @property
    def free_bytes(self) -> int:
        """Free pages inside the file."""
        return PAGE_BYTES * self._pragma("freelist_count")

    @property
    def stored_bytes(self) -> int:
        return PAGE_BYTES * self._pragma("page_count") + self._wal_size()

    def _wal_size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._wal_path.stat().st_size
        return 0

    @property
    def growth_bytes(self) -> int:
        """What the file grows by when the WAL is moved into it."""
        return max(0, PAGE_BYTES * self._pragma("page_count") - self.path.stat().st_size)

    def needed_bytes(self, num_bytes: int) -> int:
        """What the files need of the disk for payloads of `num_bytes`: in the WAL, and later in the file."""
        unused = max(0, self._wal_size() - self._wal_bytes)
        in_file = self.growth_bytes + max(0, num_bytes - self.free_bytes)
        return in_file + max(0, num_bytes - unused)

    def is_checkpoint_due(self, *, is_tight: bool) -> bool:
        return self._wal_bytes >= (1 if is_tight else _CHECKPOINT_BYTES)

    def checkpoint(self) -> bool:
        """Copy the WAL into the file, and force it to the disk, as far as no reader needs the earlier content."""
        self._db.execute("pragma wal_checkpoint(passive)").fetchone()
        self._wal_bytes = 0
        return True

    def shrink(self, num_bytes: int, *, is_tight: bool) -> bool:
        """Return up to `num_bytes` of free pages to the disk; whether more are left than should be kept."""
        kept = max(_KEPT_FREE_BYTES, int(_KEPT_FREE_SHARE * self.path.stat().st_size))
        surplus = self.free_bytes - (0 if is_tight else kept)
        if surplus > 0:
            num_pages = min(num_bytes, surplus) // PAGE_BYTES
            self._db.execute(f"pragma incremental_vacuum({num_pages})").fetchall()
            self._wal_bytes += num_bytes
        return surplus > num_bytes

    def close(self) -> None:
        try:
            self._db.close()
        except sqlite3.Error:
            logger.exception("%s did not close cleanly", self.path)


class PayloadReader:
    """A connection that reads payloads in a thread of its own while another writes."""

    def __init__(self, path: Path) -> None:
        self._db = connect(path)
        self._db.execute("pragma query_only = on")
        self._db.execute("select one from run").fetchall()  # opens the WAL, too
        self.close = self._db.close

    def read(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Return the payloads that are undamaged. Raises KeyError for groups that are not held."""
        return {n: payload for n in numbers if (payload := self._read_one(n)) is not None}

    def _read_one(self, number: int) -> bytes | None:
        row = self._db.execute("select crc from groups where number = ?", (number,)).fetchone()
        if row is None:
            raise KeyError(f"group {number} is not stored")
        try:
            found = self._db.execute(
                "select payload from payloads where number = ?", (number,)
            ).fetchone()
            payload: bytes | None = None if found is None else found[0]
        except sqlite3.Error as e:
            # A read error is taken as permanent damage: retrying it would block the whole batch.
            if not is_damage(e) and not error_name(e).startswith("SQLITE_IOERR"):
                raise
            logger.error("group %d is damaged: %s", number, e)
            return None
        if payload is None or crc32(payload) != row["crc"]:
            logger.error("group %d is damaged: the checksum of its payload disagrees", number)
            return None
        return payload


def connect(path: Path, *, creates: bool = False) -> sqlite3.Connection:
    """Open a file, for any one thread."""
    if creates:
        # SQLite would use the umask for its permissions; the WAL gets the same ones.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=_BUSY_S,
    )
    db.row_factory = sqlite3.Row
    return db


def error_name(error: BaseException) -> str:
    """Return the name of SQLite's extended error code; empty for other errors."""
    return str(getattr(error, "sqlite_errorname", ""))


def is_damage(error: BaseException) -> bool:
    """Whether SQLite found that the file is not what was written."""
    return error_name(error).startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT"))


@contextlib.contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """Raise `UnreadableRun` or `StoreBroken`, which name the file, for errors of SQLite and of conversion."""
    try:
        yield
    except (sqlite3.Error, msgspec.ValidationError, ValueError) as e:
        if isinstance(e, UnreadableRun):
            raise
        if isinstance(e, sqlite3.Error) and error_name(e) and not is_damage(e):
            raise StoreBroken(f"{path} cannot be opened: {e}") from e
        raise UnreadableRun(
            f"{path} is damaged and was left as it is: {e}; restore a backup, or save what is left"
            " with the .recover command of the sqlite3 shell"
        ) from e


def _write_again(path: Path) -> None:
    """Rewrite a file unchanged and force it to the disk.

    After a failed sync, the kernel may treat pages as clean that never reached the disk, and only rewriting makes it
    write them out (https://wiki.postgresql.org/wiki/Fsync_Errors).
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        while chunk := os.pread(file.fileno(), _COPY_BYTES, file.tell()):
            file.write(chunk)
            file.flush()
        os.fsync(file.fileno())


def _json(numbers: Sequence[int]) -> tuple[str]:
    return (msgspec.json.encode(numbers).decode(),)


def key_of(group_id: str) -> bytes | str:
    """Return the stored form of an id: 32 hexadecimal digits, as native clients and the hub make, take 16 bytes."""
    return bytes.fromhex(group_id) if _IS_HEX(group_id) else group_id


def _group_id(key: bytes | str) -> str:
    return key.hex() if isinstance(key, bytes) else key
