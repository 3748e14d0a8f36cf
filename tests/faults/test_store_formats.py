"""Directories that earlier versions wrote: they open, and hold what they held."""

from __future__ import annotations

import random
import sqlite3
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.hub import Hub
from atroposlib.api.schemas import RegisterEnv
from atroposlib.api.server import create_app
from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    Change,
    End,
    Fate,
    Move,
    NewGroup,
    Place,
    StoredBatch,
    UnreadableRun,
)
from atroposlib.api.stores.runs import DirectoryRuns
from atroposlib.api.stores.state import _group_id
from tests.api.helpers_api import environment, registration
from tests.faults.conftest import Open
from tests.faults.store_faults import new_group, open_store

FORMAT_1 = """
create table groups (
    number integer primary key, group_id not null unique, env_id integer,
    num_sequences integer not null, num_tokens integer not null, policy_version integer,
    arrival_step integer not null, digest blob not null, place integer not null, batch integer,
    deliveries integer not null default 0, reason text, segment integer not null,
    offset integer not null, length integer not null, crc integer not null
);
create table done (group_id primary key, fate text not null, digest blob not null) without rowid;
create table ended (fate text primary key, num_groups integer not null) without rowid;
create table batches (
    number integer primary key, state integer not null, step integer not null,
    epoch integer not null, lease_id text not null, ttl_s real not null, request_id text,
    is_plain integer not null
);
create table run (
    one integer primary key check (one = 1), document blob, next_number integer not null,
    mark_segment integer not null, mark_offset integer not null, num_forced integer not null
);
pragma user_version = 1;
"""
"""`state.db` as it was written before facts were stored by name."""


def key_1(group_id: str) -> bytes | str:
    """How format 1 stores an id: in 16 bytes if it is a UUID of 36 characters."""
    return uuid.UUID(group_id).bytes if len(group_id) == 36 else group_id


def write_as_format_1(state: Path, *, ended: list[tuple[NewGroup, Fate]], document: bytes) -> None:
    """Replace the database of a closed store by what format 1 has in its place; `ended`: all groups that ended."""
    now = sqlite3.connect(state)
    groups = now.execute("select * from groups").fetchall()
    batches = now.execute("select * from batches").fetchall()
    counts = now.execute("select * from ended").fetchall()
    keys = now.execute("select number, group_id from groups").fetchall()
    (run,) = now.execute(
        "select next_number, mark_segment, mark_offset, num_forced from run"
    ).fetchall()
    now.close()
    state.unlink()
    then = sqlite3.connect(state)
    then.executescript(FORMAT_1)
    for row in groups:
        then.execute(f"insert into groups values ({','.join('?' * 16)})", row)
    then.executemany(
        "update groups set group_id = ? where number = ?",
        [(key_1(_group_id(key)), number) for number, key in keys],
    )
    then.executemany("insert into batches values (?, ?, ?, ?, ?, ?, ?, ?)", batches)
    then.executemany("insert into ended values (?, ?)", counts)
    then.executemany(
        "insert into done values (?, ?, ?)",
        [(key_1(group.header.group_id), fate, group.header.digest) for group, fate in ended],
    )
    then.execute("insert into run values (1, ?, ?, ?, ?, ?)", (document, *run))
    then.commit()
    then.close()


def with_header(group: NewGroup, **changes: Any) -> NewGroup:
    return replace(group, header=replace(group.header, **changes))


def groups_with_ids(*group_ids: str) -> list[NewGroup]:
    rng = random.Random(0)
    return [
        with_header(new_group(number, rng), group_id=group_id, digest=rng.randbytes(16))
        for number, group_id in enumerate(group_ids)
    ]


async def test_a_directory_of_format_1_opens_with_everything_that_it_held(
    tmp_path: Path, opened: Open
) -> None:
    rng = random.Random(1)
    ids = [uuid.UUID(int=rng.getrandbits(128)) for _ in range(8)]
    # Such as our clients send, such as others may, and any other.
    groups = groups_with_ids(*(i.hex for i in ids[:4]), *(str(i) for i in ids[4:]), "x", "a\x00b")
    batch = StoredBatch(
        number=3, state=BatchState.LEASED, step=1, epoch=2, lease_id="lease", ttl_s=9.5
    )
    ended = [(groups[0], Fate.TRAINED), (groups[4], Fate.EXPIRED), (groups[9], Fate.TRAINED)]
    store, _ = await opened()
    await store.append(groups)
    await store.commit(
        Change(
            moves=[Move(number=n, place=Place.LEASED, batch=3, deliveries=1) for n in (1, 5)],
            ends=[End(number=group.header.number, fate=fate) for group, fate in ended],
            batches=[batch],
            document=b"document",
        )
    )
    await store.close()
    store, saved = await opened()
    before = replace(saved, found="")
    await store.close()
    write_as_format_1(tmp_path / "run" / "state.db", ended=ended, document=b"document")

    for _ in range(2):  # it is changed once, and is then like any other
        store, saved = await opened()
        assert replace(saved, found="") == before
        again = [replace(group, header=replace(group.header, number=100)) for group in groups]
        assert await store.append(again) == [Appended.DUPLICATE] * 10
        other = [with_header(group, digest=bytes(16)) for group in again]
        assert await store.append(other) == [Appended.CONFLICT] * 10
        held = [group for group in groups if group not in [first for first, _ in ended]]
        numbers = [group.header.number for group in held]
        assert await store.read(numbers) == [group.payload for group in held]
        await store.close()
    connection = sqlite3.connect(tmp_path / "run" / "state.db")
    assert connection.execute("pragma user_version").fetchone() == (2,)
    connection.close()


async def test_a_run_of_format_1_keeps_its_trainer_and_its_environments(tmp_path: Path) -> None:
    coordinator = Coordinator(open_store(tmp_path / "run"))
    await coordinator.open()
    await coordinator.set_policy(7)
    document = msgspec.json.decode(coordinator.state.document())
    await coordinator.close()
    trainer = registration(batch_size=12, num_steps=34)
    names = ["short", "n" * 4000]  # longer than today's bound
    environments = [
        {
            "registration": environment(desired_name=name, env_uid=f"uid {name[:5]}"),
            "name": f"{name}_0",
            "is_connected": name == "short",
        }
        for name in names
    ]
    write_as_format_1(
        tmp_path / "run" / "state.db",
        ended=[],
        document=msgspec.json.encode(
            document | {"trainer": trainer, "environments": environments, "has_started": True}
        ),
    )

    for _ in range(2):
        coordinator = Coordinator(open_store(tmp_path / "run"))
        assert "2 environments" in await coordinator.open()
        assert coordinator.info().batch_size == 12
        assert coordinator.status_env(0, env_uid="uid short").policy_version == 7
        assert coordinator.state.environments.num_active == 1
        await coordinator.close()
    coordinator = Coordinator(open_store(tmp_path / "run"))
    await coordinator.open()
    back = await coordinator.register_env(
        RegisterEnv(**environment(desired_name="n", env_uid="uid nnnnn"))
    )
    assert back is not None
    assert (back.env_id, back.num_steps) == (1, 34)
    await coordinator.close()


def spoil(directory: Path, how: str) -> None:
    """Make a stored run one that this version cannot read."""
    connection = sqlite3.connect(directory / "state.db")
    if how == "newer format":
        connection.execute("pragma user_version = 99")
    else:
        (document,) = connection.execute("select document from run").fetchone()
        fields = msgspec.json.decode(document)
        del fields["epoch"]
        connection.execute("update run set document = ?", (msgspec.json.encode(fields),))
    connection.commit()
    connection.close()


def rows(state: Path) -> list[object]:
    """What a closed store says of its run."""
    connection = sqlite3.connect(state)
    found = [
        connection.execute(query).fetchall()
        for query in ("pragma user_version", "select document, next_number from run")
    ]
    connection.close()
    return found


async def two_runs(root: Path) -> DirectoryRuns:
    """Store something in the runs `default` and `other`."""
    runs = DirectoryRuns(root, open_store)
    hub = Hub(runs)
    await hub.open()
    await (await hub.run("other")).set_policy(3)
    await (await hub.run()).set_policy(4)
    await hub.close()
    return runs


@pytest.mark.parametrize(
    ("how", "words"), [("newer format", "has format 99"), ("no key", "KeyError('epoch')")]
)
async def test_a_run_that_cannot_be_read_is_left_alone_and_the_others_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, words: str
) -> None:
    runs = await two_runs(tmp_path)
    spoil(tmp_path / "other", how)
    before = rows(tmp_path / "other" / "state.db")
    hub = Hub(runs)
    await hub.open()
    assert list(hub.runs) == ["default"]
    assert hub.runs["default"].status().policy_version == 4
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("run 'other' is not served and left as it is: ")
    assert words in record.getMessage()
    transport = httpx.ASGITransport(create_app(hub))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/status")).status_code == 200
        answer = await http.get("/runs/other/status")
        assert (answer.status_code, answer.json()["detail"]["type"]) == (503, "run_unreadable")
    await hub.close()
    assert rows(tmp_path / "other" / "state.db") == before


@pytest.mark.parametrize(
    ("how", "words"), [("newer format", "has format 99"), ("no key", "KeyError\\('epoch'\\)")]
)
async def test_a_default_run_that_cannot_be_read_is_a_clear_error(
    tmp_path: Path, how: str, words: str
) -> None:
    runs = await two_runs(tmp_path)
    spoil(tmp_path / "default", how)
    for _ in range(2):  # the first attempt let go of the directory
        with pytest.raises(UnreadableRun, match=words):
            await Hub(runs).open()
