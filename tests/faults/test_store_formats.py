"""Directories that earlier versions wrote: they open, and hold what they held."""

from __future__ import annotations

import logging
import re
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

from atroposlib.api.run.hub import Hub
from atroposlib.api.server import create_app
from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    CorruptGroups,
    Fate,
    Move,
    NewGroup,
    Place,
    SavedRun,
    StoreBroken,
    StoredBatch,
    StoredGroup,
    UnreadableRun,
)
from atroposlib.api.stores.runs import DirectoryRuns
from atroposlib.cli import upgrade_runs
from atroposlib.scored_data import GroupHeader
from tests.faults.conftest import Open
from tests.faults.store_faults import open_store


def old_run(directory: Path) -> Path:
    """Unpack a run of version 0.2 as it was after the loss of power: the last three groups are in segments and not in
    `state.db`."""
    with tarfile.open(Path(__file__).parent / "data" / "run_format_2.tar.gz") as archive:
        archive.extractall(directory, filter="data")
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


def expected() -> SavedRun:
    moves = dict.fromkeys((1, 5), Move(place=Place.LEASED, batch=3, deliveries=1))
    moves[2] = Move(place=Place.DEAD, reason="odd")
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
        StoredGroup(header=group(n).header, move=moves.get(n, Move(place=group(n).place)))
        for n in HELD
    ]
    return SavedRun(
        document=b"document",
        facts={"a": b"one", "b": b"two"},
        groups=groups,
        batches=[batch],
        ended=Counter({Fate.TRAINED: 3, Fate.EXPIRED: 1}),
        next_number=15,
    )


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.seg"))


async def check_converted(directory: Path) -> None:
    """Fail unless the run opens, twice, with everything that it held."""
    for _ in range(2):
        upgrade_runs.upgrade(directory.parent)
        store = open_store(directory)
        saved = await store.open()
        assert replace(saved, found="") == expected()
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


async def test_a_run_of_an_older_format_is_converted_with_everything_that_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = old_run(tmp_path / "run")
    with pytest.raises(UnreadableRun, match="run-api converts it"):
        await open_store(run).open()
    (run / "ballast").write_bytes(bytes(1000))
    with caplog.at_level(logging.INFO):
        upgrade_runs.upgrade(tmp_path)
        assert not (run / "ballast").exists()
        await check_converted(run)
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
            patch.setattr(upgrade_runs, name, counted(getattr(upgrade_runs, name)))
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            upgrade_runs.convert(run)
        except Killed:
            return True
    return False


async def test_a_conversion_that_is_killed_begins_again(tmp_path: Path) -> None:
    num_kills = 0
    while convert_until(run := old_run(tmp_path / str(num_kills) / "run"), num_kills):
        await check_converted(run)
        num_kills += 1
    assert num_kills > 20


@pytest.mark.parametrize("lack", ["room", "state.db", "bytes of state.db"])
async def test_a_run_that_cannot_be_converted_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    run = old_run(tmp_path / "run")
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
        upgrade_runs.convert(run)
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.name in before}
    assert after == before
    assert not (run / "run.db").exists()


async def test_damage_of_an_older_run_is_found_on_reading(tmp_path: Path, opened: Open) -> None:
    run = old_run(tmp_path / "run")
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
    upgrade_runs.upgrade(tmp_path)
    store, saved = await opened()
    assert len(saved.groups) == 11
    with pytest.raises(CorruptGroups) as caught:
        await store.read(HELD)
    assert caught.value.numbers == sorted([*inside, 8])


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
    # No hub without the default run.
    spoil(tmp_path / "default", how)
    for _ in range(2):  # the first attempt let go of the directory
        with pytest.raises(UnreadableRun, match=re.escape(words)):
            await Hub(runs).open()
