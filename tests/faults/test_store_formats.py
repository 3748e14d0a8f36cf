"""Directories that earlier versions wrote: they open, and hold what they held."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tarfile
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import closing
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
from atroposlib.api.stores import migration
from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    CorruptGroups,
    Fate,
    NewGroup,
    Place,
    SavedRun,
    StoreBroken,
    StoredBatch,
    StoredGroup,
    UnreadableRun,
)
from atroposlib.api.stores.run_file import key_of
from atroposlib.api.stores.runs import DirectoryRuns
from atroposlib.scored_data import GroupHeader
from tests.api.helpers_api import environment, registration
from tests.faults.conftest import Open
from tests.faults.store_faults import open_store

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


def old_run(directory: Path, version: int) -> Path:
    """Unpack a run as it was after the loss of power: the last three groups are in segments and not in `state.db`.

    Version 0.2 wrote it, in format 2; the other formats are made of it.
    """
    with tarfile.open(Path(__file__).parent / "data" / "run_format_2.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    state = directory / "state.db"
    if version == 1:
        with closing(sqlite3.connect(state)) as now:
            tables = ("groups", "done", "ended", "batches", "run")
            rows = {table: now.execute(f"select * from {table}").fetchall() for table in tables}
        state.unlink()
        fates = {0: "trained", 4: "expired", 9: "trained"}
        keys = {
            key_of(group(n).header.group_id): key_1(group(n).header.group_id) for n in range(15)
        }
        rows["groups"] = [(row[0], keys[row[1]], *row[2:]) for row in rows["groups"]]
        rows["done"] = [(keys[key], fates[digest[0]], digest) for key, digest in rows["done"]]
        with closing(sqlite3.connect(state)) as then:
            then.executescript(FORMAT_1)
            for table, found in rows.items():
                marks = ",".join("?" * len(found[0]))
                then.executemany(f"insert into {table} values ({marks})", found)
            then.commit()
    elif version != 2:
        with closing(sqlite3.connect(state)) as now:
            now.execute(f"pragma user_version = {version}")
    return directory


def group(number: int) -> NewGroup:
    """A group of that run."""
    payload = f"payload {number} ".encode() * (20 + number)
    uid = uuid.UUID(int=number + 1)
    return NewGroup(
        header=GroupHeader(
            number=number,
            env_id=number % 3 or None,
            num_sequences=number + 1,
            num_tokens=100 * number,
            policy_version=number or None,
            arrival_step=number // 2,
            num_bytes=len(payload),
            # As our clients send, as others may, and any other.
            group_id=[uid.hex, str(uid), f"id {number}\x00"][number % 3],
            digest=b"" if number == 6 else bytes([number]) * 16,
        ),
        payload=payload,
        place=Place.BUFFERED if number == 7 else Place.QUEUED,
    )


HELD = (1, 2, 3, 5, 7, 8, 10, 11, 12, 13, 14)


def expected(version: int) -> SavedRun:
    moves = {n: {"place": Place.LEASED, "batch": 3, "deliveries": 1} for n in (1, 5)}
    moves[2] = {"place": Place.DEAD, "reason": "odd"}
    batch = StoredBatch(
        number=3,
        state=BatchState.LEASED,
        step=1,
        epoch=2,
        lease_id="lease",
        ttl_s=9.5,
        request_id="r",
        is_plain=True,
    )
    groups = [
        StoredGroup(
            header=group(n).header,
            **({"place": group(n).place} | moves.get(n, {})),  # type: ignore[arg-type]
        )
        for n in HELD
    ]
    return SavedRun(
        document=b"document",
        facts={} if version == 1 else {"a": b"one", "b": b"two"},
        groups=groups,
        batches=[batch],
        ended=Counter({Fate.TRAINED: 3, Fate.EXPIRED: 1}),
        next_number=15,
    )


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.seg"))


async def check_converted(directory: Path, version: int) -> None:
    """Fail unless the run opens, twice, with everything that it held."""
    for _ in range(2):
        store = open_store(directory)
        saved = await store.open()
        assert replace(saved, found="") == expected(version)
        assert await store.read(HELD) == [group(n).payload for n in HELD]
        again = [
            replace(group(n), header=replace(group(n).header, number=100))
            for n in range(15)
            if n != 6
        ]
        assert await store.append(again) == [Appended.DUPLICATE] * 14
        other = [replace(each, header=replace(each.header, digest=bytes(16))) for each in again[1:]]
        assert await store.append(other) == [Appended.CONFLICT] * 13
        await store.close()
    assert segments(directory) == []


@pytest.mark.parametrize("version", [1, 2])
async def test_a_run_of_an_older_format_is_converted_with_everything_that_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    run = old_run(tmp_path / "run", version)
    with caplog.at_level(logging.INFO):
        await check_converted(run, version)
    converted = [each.getMessage() for each in caplog.records if "converted" in each.getMessage()]
    assert len(converted) == 1
    assert "11 groups of 6 segments were converted to one file, run.db, in " in converted[0]
    with closing(sqlite3.connect(run / "state.db")) as stub:
        # An older version refuses the directory, rather than begin an empty run.
        assert stub.execute("pragma user_version").fetchone() == (3,)


class Killed(BaseException):
    """Ends a conversion where it is."""


def convert_until(run: Path, kill_at: int) -> bool:
    """Convert a run, killed at that call which changes a file or a row; whether there was one."""
    num_calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > kill_at:
                raise Killed
            return call(*args, **kwargs)

        return count_and_call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_insert", "_write_stub", "sync_to_disk"):
            patch.setattr(migration, name, counted(getattr(migration, name)))
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            migration.convert(run)
        except Killed:
            return True
    return False


async def test_a_conversion_that_is_killed_begins_again(tmp_path: Path) -> None:
    num_kills = 0
    while convert_until(run := old_run(tmp_path / str(num_kills), 2), num_kills):
        await check_converted(run, 2)
        num_kills += 1
    assert num_kills > 20


@pytest.mark.parametrize("lack", ["room", "state.db", "bytes of state.db"])
async def test_a_run_that_cannot_be_converted_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    run = old_run(tmp_path / "run", 2)
    error: type[Exception] = UnreadableRun
    if lack == "room":
        error = StoreBroken
        usage = shutil.disk_usage(run)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    elif lack == "state.db":
        (run / "state.db").unlink()
    else:
        (run / "state.db").write_bytes(b"not a database  " * 1000)
        (run / "state.db-wal").unlink()
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(error, match=r"converted|state\.db"):
        await open_store(run).open()
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.name in before}
    assert after == before
    assert not (run / "run.db").exists()


async def test_damage_of_an_older_run_is_found_on_reading(tmp_path: Path, opened: Open) -> None:
    run = old_run(tmp_path / "run", 2)
    with closing(sqlite3.connect(run / "state.db")) as state:
        places = "select segment, offset from groups where number = ?"
        segment, offset = state.execute(places, (8,)).fetchone()
        lost, _ = state.execute(places, (1,)).fetchone()
        inside = [
            n for (n,) in state.execute("select number from groups where segment = ?", (lost,))
        ]
    assert segment != lost
    with (run / f"{segment:010d}.seg").open("r+b") as file:
        file.seek(offset)
        file.write(b"P")
    (run / f"{lost:010d}.seg").unlink()
    store, saved = await opened()
    assert len(saved.groups) == 11
    with pytest.raises(CorruptGroups) as caught:
        await store.read(HELD)
    assert caught.value.numbers == sorted([*inside, 8])


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
    document |= {"trainer": trainer, "environments": environments, "has_started": True}
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as run:
        # The document was all that format 1 kept beside the groups.
        run.execute("delete from facts")
        run.execute("update run set document = ?", (msgspec.json.encode(document),))
        run.commit()

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
    connection = sqlite3.connect(directory / "run.db")
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
    before = rows(tmp_path / "other" / "run.db")
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
    assert rows(tmp_path / "other" / "run.db") == before


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
