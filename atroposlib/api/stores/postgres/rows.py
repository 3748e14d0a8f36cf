"""The statements of a store: groups, ids, batches, facts and payloads as rows of one run.

Each function is a part of a transaction that `store` begins and commits. Payloads are in one table per segment, dropped
as a whole once none of its groups is held: rows are never deleted from it, and no space is left to vacuum.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec
from isal.isal_zlib import crc32

from atroposlib.api.stores.base import (
    Change,
    Fate,
    NewGroup,
    SavedRun,
    StoredBatch,
    StoredGroup,
)
from atroposlib.api.stores.postgres.segments import Location

_IS_HEX: Final = re.compile("[0-9a-f]{32}").fullmatch

_INSERT_GROUPS: Final = """
with new as (
    insert into ids select $1, t.* from unnest($2::bytea[], $3::bytea[]) as t
)
insert into groups
    (run_id, key, number, env_id, num_sequences, num_tokens, policy_version, arrival_step, place, segment,
    num_bytes, crc)
select $1, t.*
from unnest($2::bytea[], $4::bigint[], $5::bigint[], $6::int[], $7::bigint[], $8::bigint[], $9::bigint[],
    $10::smallint[], $11::int[], $12::int[], $13::bigint[]) as t
"""
_MOVE_GROUPS: Final = """
update groups set place = t.place, batch = t.batch, deliveries = t.deliveries, reason = t.reason
from unnest($2::bigint[], $3::smallint[], $4::bigint[], $5::int[], $6::bytea[])
    as t (number, place, batch, deliveries, reason)
where groups.run_id = $1 and groups.number = t.number
"""
_END_GROUPS: Final = """
with gone as (
    delete from groups where run_id = $1 and number = any($2::bigint[]) returning key
), forgotten as (
    delete from ids using gone where ids.run_id = $1 and ids.key = gone.key and ids.digest = ''
)
insert into ended select $1, t.* from unnest($3::text[], $4::bigint[]) as t (fate, num_groups)
on conflict (run_id, fate) do update set num_groups = ended.num_groups + excluded.num_groups
"""
_PUT_BATCHES: Final = """
insert into batches select $1, t.*
from unnest($2::bigint[], $3::smallint[], $4::bigint[], $5::bigint[], $6::bytea[], $7::float8[], $8::bytea[],
    $9::bool[]) as t
on conflict (run_id, number) do update set state = excluded.state, step = excluded.step, epoch = excluded.epoch,
    lease_id = excluded.lease_id, ttl_s = excluded.ttl_s, request_id = excluded.request_id,
    is_plain = excluded.is_plain
"""
_PUT_FACTS: Final = """
insert into facts select $1, t.* from unnest($2::bytea[], $3::bytea[]) as t (name, value)
on conflict (run_id, name) do update set value = excluded.value
"""


def merge(earlier: Change, later: Change) -> None:
    """Make `earlier` both changes as one."""
    earlier.moves |= later.moves
    earlier.ends |= later.ends
    earlier.batches |= later.batches
    earlier.facts |= later.facts
    if later.document is not None:
        earlier.document = later.document


def key_of(group_id: str) -> bytes:
    """Return the stored form of an id: 32 hexadecimal digits, as native clients and the hub make, take 17 bytes."""
    if _IS_HEX(group_id):
        return b"\x00" + bytes.fromhex(group_id)
    return b"\x01" + _bytes(group_id)


def _id_of(key: bytes) -> str:
    return key[1:].hex() if key[0] == 0 else _str(key[1:])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _str(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def table_of(run_id: int, segment: int) -> str:
    """Name the table of a segment's payloads."""
    return f"payloads_{run_id}_{segment}"


async def known_digests(
    connection: Any, run_id: int, groups: Sequence[NewGroup]
) -> dict[str, bytes]:
    """Return the digests stored for those ids of `groups` that are known."""
    ids = {key_of(group.header.group_id): group.header.group_id for group in groups}
    query = "select key, digest from ids where run_id = $1 and key = any($2::bytea[])"
    return {ids[key]: digest for key, digest in await connection.fetch(query, run_id, list(ids))}


async def insert_groups(
    connection: Any, run_id: int, groups: Sequence[NewGroup], *, segment: int
) -> dict[int, Location]:
    """Insert groups with unknown ids, and their payloads; return where they are."""
    headers = [group.header for group in groups]
    located = {
        group.header.number: Location(segment, len(group.payload), crc32(group.payload))
        for group in groups
    }
    await connection.execute(
        _INSERT_GROUPS,
        run_id,
        [key_of(header.group_id) for header in headers],
        [header.digest for header in headers],
        [header.number for header in headers],
        [header.env_id for header in headers],
        [header.num_sequences for header in headers],
        [header.num_tokens for header in headers],
        [header.policy_version for header in headers],
        [header.arrival_step for header in headers],
        [group.place for group in groups],
        [segment] * len(groups),
        [location.length for location in located.values()],
        [location.crc for location in located.values()],
    )
    await connection.executemany(
        f"insert into {table_of(run_id, segment)} values ($1, $2)",
        [(group.header.number, group.payload) for group in groups],
    )
    return located


async def apply(connection: Any, run_id: int, change: Change) -> None:
    """Apply a change whose groups and batches are known to exist; but not its document."""
    if change.moves:
        moves = change.moves.values()
        status = await connection.execute(
            _MOVE_GROUPS,
            run_id,
            list(change.moves),
            [move.place for move in moves],
            [move.batch for move in moves],
            [move.deliveries for move in moves],
            [None if move.reason is None else _bytes(move.reason) for move in moves],
        )
        assert status == f"UPDATE {len(moves)}", f"{status} of {len(moves)} groups"
    if change.ends:
        fates = Counter(change.ends.values())
        numbers = list(change.ends)
        await connection.execute(_END_GROUPS, run_id, numbers, list(fates), list(fates.values()))
    if batches := [batch for batch in change.batches.values() if batch is not None]:
        await connection.execute(
            _PUT_BATCHES,
            run_id,
            [batch.number for batch in batches],
            [batch.state for batch in batches],
            [batch.step for batch in batches],
            [batch.epoch for batch in batches],
            [_bytes(batch.lease_id) for batch in batches],
            [batch.ttl_s for batch in batches],
            [None if batch.request_id is None else _bytes(batch.request_id) for batch in batches],
            [batch.is_plain for batch in batches],
        )
    if closed := [number for number, batch in change.batches.items() if batch is None]:
        await connection.execute(
            "delete from batches where run_id = $1 and number = any($2::bigint[])", run_id, closed
        )
    if change.facts:
        names = [_bytes(name) for name in change.facts]
        await connection.execute(_PUT_FACTS, run_id, names, list(change.facts.values()))


class LoadedRun(NamedTuple):
    """What the rows of a run say."""

    saved: SavedRun
    locations: dict[int, Location]
    segments: dict[int, int]
    """Bytes that each segment occupies."""
    serial: int


async def load(connection: Any, run_id: int) -> LoadedRun:
    """Read all rows of a run but the payloads."""
    await connection.execute(
        "insert into states (run_id) values ($1) on conflict do nothing", run_id
    )
    state = await connection.fetchrow("select * from states where run_id = $1", run_id)
    groups: list[StoredGroup] = []
    locations: dict[int, Location] = {}
    rows = await connection.fetch(
        "select groups.*, digest from groups join ids using (run_id, key) where run_id = $1 order by number",
        run_id,
    )
    for index, row in enumerate(map(dict, rows)):
        if index % 1000 == 0:
            await asyncio.sleep(0)  # other runs are served meanwhile
        reason = None if row["reason"] is None else _str(row["reason"])
        fields = {
            "header": row | {"group_id": _id_of(row["key"])},
            "move": row | {"reason": reason},
        }
        groups.append(msgspec.convert(fields, StoredGroup))
        locations[row["number"]] = Location(row["segment"], row["num_bytes"], row["crc"])
    batches = []
    rows = await connection.fetch("select * from batches where run_id = $1 order by number", run_id)
    for row in map(dict, rows):
        texts = {
            name: None if row[name] is None else _str(row[name])
            for name in ("lease_id", "request_id")
        }
        batches.append(msgspec.convert(row | texts, StoredBatch))
    ended = await connection.fetch("select fate, num_groups from ended where run_id = $1", run_id)
    facts = await connection.fetch("select name, value from facts where run_id = $1", run_id)
    saved = SavedRun(
        document=state["document"],
        facts=dict(sorted((_str(name), value) for name, value in facts)),
        groups=groups,
        batches=batches,
        ended=Counter({Fate(fate): num_groups for fate, num_groups in ended}),
        next_number=state["next_number"],
    )
    return LoadedRun(saved, locations, await segment_sizes(connection, run_id), state["serial"])


async def erase(connection: Any, run_id: int) -> None:
    """Delete all rows of a run but its payloads, and empty its state."""
    for table in ("groups", "ids", "ended", "batches", "facts"):
        await connection.execute(f"delete from {table} where run_id = $1", run_id)
    await connection.execute(
        "update states set document = null, next_number = 0 where run_id = $1", run_id
    )


# Payload tables.


async def create_segment(connection: Any, run_id: int, segment: int) -> None:
    """Create the table of a segment. Payloads are not compressed, as they would be again and again on their way."""
    table = table_of(run_id, segment)
    await connection.execute(
        f"create table {table} (number bigint primary key, payload bytea not null)"
        " with (autovacuum_enabled = false, toast.autovacuum_enabled = false);"
        f"alter table {table} alter column payload set storage external"
    )


async def segment_sizes(connection: Any, run_id: int) -> dict[int, int]:
    """Return the bytes that each segment occupies."""
    rows = await connection.fetch(
        "select relname, pg_total_relation_size(oid) from pg_class"
        " where relnamespace = current_schema()::regnamespace and relkind = 'r'"
        " and relname like $1",
        f"payloads\\_{run_id}\\_%",
    )
    return {int(name.rpartition("_")[2]): num_bytes for name, num_bytes in rows}


async def drop_segments(connection: Any, run_id: int, segments: Iterable[int]) -> None:
    """Drop the tables of segments, or none of them, with an error, if another session reads one."""
    await connection.execute("set local lock_timeout = '100ms'")
    names = ", ".join(table_of(run_id, segment) for segment in segments)
    await connection.execute(f"drop table if exists {names}")


async def move_payloads(
    connection: Any, run_id: int, numbers: Sequence[int], *, source: int, target: int
) -> None:
    """Copy payloads to another segment, where their groups find them from then on."""
    await connection.execute(
        f"insert into {table_of(run_id, target)}"
        f" select * from {table_of(run_id, source)} where number = any($1::bigint[])",
        numbers,
    )
    await connection.execute(
        "update groups set segment = $3 where run_id = $1 and number = any($2::bigint[])",
        run_id,
        numbers,
        target,
    )


async def read_payloads(
    connection: Any, run_id: int, segment: int, numbers: Sequence[int]
) -> dict[int, bytes]:
    """Return those payloads that are stored in the segment; none if it was dropped."""
    try:
        rows = await connection.fetch(
            f"select number, payload from {table_of(run_id, segment)} where number = any($1::bigint[])",
            numbers,
        )
    except asyncpg.UndefinedTableError:
        return {}
    return dict(rows)
