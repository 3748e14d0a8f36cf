"""What the disk store does with its directory: who may use it, how its file grows and shrinks; what damage costs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import shutil
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.stores import disk, run_file, space
from atroposlib.api.stores.base import (
    Appended,
    Change,
    CorruptGroups,
    Durability,
    Fate,
    Move,
    NewGroup,
    Place,
    StoreBroken,
    StoreFull,
    UnreadableRun,
)
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.run_file import PAGE_BYTES, RunFile
from atroposlib.api.stores.space import file_system_of
from tests.faults.conftest import Open
from tests.faults.sqlite_vfs import SqliteFiles, interposed, require_interposable
from tests.faults.store_faults import copy_run, new_group, open_store, small_steps


def make_groups(count: int, *, num_bytes: int = 4000, first: int = 0) -> list[NewGroup]:
    rng = random.Random(first)
    return [new_group(first + n, rng, num_bytes=num_bytes) for n in range(count)]


def end(*numbers: int, is_durable: bool = True) -> Change:
    return Change(ends=dict.fromkeys(numbers, Fate.TRAINED), is_durable=is_durable)


async def fill(store: DiskStore, count: int) -> list[NewGroup]:
    """Append groups one by one."""
    groups = make_groups(count)
    for group in groups:
        await store.append([group])
    return groups


async def test_other_users_cannot_read_the_directory(tmp_path: Path, opened: Open) -> None:
    store, _ = await opened()
    await store.append(make_groups(1))
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "run").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


async def test_a_caller_who_gives_up_does_not_undo_an_append(opened: Open) -> None:
    store, _ = await opened()
    groups = make_groups(2)
    task = asyncio.create_task(store.append([groups[0]]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.append([groups[0], groups[1]]) == [Appended.DUPLICATE, Appended.STORED]


async def test_opening_says_what_was_found(tmp_path: Path, opened: Open) -> None:
    store, saved = await opened()
    assert saved.found == ""
    await store.append(make_groups(2, num_bytes=1000))
    copy_run(tmp_path / "run", tmp_path / "crashed")
    _, saved = await opened("crashed")
    assert saved.found.startswith("2 groups held (2000 bytes), in ")


async def test_freed_space_is_used_again_and_returned(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "_KEPT_FREE_BYTES", 2 << 20)
    monkeypatch.setattr(disk, "TIGHT_BYTES", 0)
    store, _ = await opened()
    payload_bytes = 200_000
    for first in range(0, 200, 20):
        await store.append(make_groups(20, num_bytes=payload_bytes, first=first))
        await store.commit(end(*range(first, first + 20)))
        assert store.usage().stored_bytes < 30 * payload_bytes + (40 << 20)
    await store.append(make_groups(80, num_bytes=payload_bytes, first=200))
    await store.commit(end(*range(200, 279)))
    for _ in range(100):  # the file is looked after between changes
        await store.commit(Change())
    size = (store._directory / "run.db").stat().st_size
    assert size < 4 << 20, "one group, and the free pages that are kept"
    assert await store.read([279]) == [
        make_groups(80, num_bytes=payload_bytes, first=200)[79].payload
    ]


def overwrite(store: DiskStore, payload: bytes, at: int, by: bytes) -> None:
    """Spoil the page of a closed store's file that holds this part of a payload."""
    path = store._directory / "run.db"
    content = path.read_bytes()
    start = content.index(payload[at : at + 64]) // PAGE_BYTES * PAGE_BYTES
    path.write_bytes(content[:start] + by + content[start + len(by) :])


@pytest.mark.parametrize("how", ["a byte", "a page"])
async def test_a_damaged_payload_is_named_when_it_is_read_and_costs_only_itself(
    opened: Open, how: str
) -> None:
    """A page that is lost takes the number of the next one with it, so that not all can be freed."""
    store, _ = await opened()
    groups = make_groups(9, num_bytes=100_000)
    await store.append(groups)
    await store.close()
    for number in (1, 5):
        payload = groups[number].payload
        if how == "a byte":
            path = store._directory / "run.db"
            at = path.read_bytes().index(payload[50_000:50_064])
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([payload[50_000] ^ 1]))
        else:
            overwrite(store, payload, 50_000, bytes(PAGE_BYTES))
    store, saved = await opened()
    assert len(saved.groups) == 9
    with pytest.raises(CorruptGroups) as caught:
        await store.read([8, 5, 4, 3, 1, 0])
    assert caught.value.numbers == [1, 5]
    assert await store.read([8, 0]) == [groups[8].payload, groups[0].payload]
    await store.commit(end(1, 0))
    await store.commit(end(*range(2, 9)))
    assert await store.append(make_groups(2, first=20)) == [Appended.STORED] * 2
    assert store.usage().payload_bytes == 8000


async def test_a_group_that_the_disk_cannot_read_is_named(tmp_path: Path) -> None:
    require_interposable(tmp_path)

    class Bad(SqliteFiles):
        page = -1

        def read(self, path: str, size: int, offset: int) -> int:
            is_bad = path.endswith("run.db") and offset == self.page * PAGE_BYTES
            return sqlite3.SQLITE_IOERR_READ if is_bad else 0

    files = Bad()
    groups = make_groups(3, num_bytes=100_000)
    with interposed(files):
        store = open_store(tmp_path / "run")
        await store.open()
        await store.append(groups)
        await store.close()
        content = (tmp_path / "run" / "run.db").read_bytes()
        store = open_store(tmp_path / "run")
        await store.open()
        files.page = content.index(groups[1].payload[50_000:50_064]) // PAGE_BYTES
        with pytest.raises(CorruptGroups) as caught:
            await store.read([0, 1, 2])
        assert caught.value.numbers == [1]
        await store.close()


@pytest.mark.parametrize("loss", ["overwritten", "torn page"])
async def test_a_damaged_file_is_named_and_left_as_it_is(
    tmp_path: Path, opened: Open, loss: str
) -> None:
    store, _ = await opened()
    await store.append(make_groups(12))
    await store.close()
    path = tmp_path / "run" / "run.db"
    content = bytearray(path.read_bytes())
    at = (
        0 if loss == "overwritten" else content.index(make_groups(1)[0].header.digest) // PAGE_BYTES
    )
    size = len(content) if loss == "overwritten" else PAGE_BYTES
    content[at * PAGE_BYTES : at * PAGE_BYTES + size] = b"not a database  " * (size // 16)
    path.write_bytes(content)
    for _ in range(2):  # the first attempt let go of the directory
        with pytest.raises(UnreadableRun, match=f"{path} is damaged and was left as it is"):
            await open_store(tmp_path / "run").open()
    assert path.read_bytes() == content


async def test_reading_goes_on_while_groups_come_and_go(opened: Open) -> None:
    store, _ = await opened()
    groups = make_groups(200)
    kept = [n for n in range(200) if n % 10 == 0]
    stored = -1

    async def churn() -> None:
        nonlocal stored
        for group in groups:
            await store.append([group])
            stored = group.header.number
            if stored % 10:
                await store.commit(end(stored))

    with small_steps():
        churning = asyncio.create_task(churn())
        num_reads = 0
        while not churning.done():
            known = [n for n in kept if n <= stored]
            assert await store.read(known) == [groups[n].payload for n in known]
            num_reads += 1
        await churning
    assert await store.read(kept) == [groups[n].payload for n in kept]
    assert num_reads > 10


async def test_a_long_reader_in_another_process_delays_only_the_wal(
    tmp_path: Path, opened: Open
) -> None:
    """Such as a backup, or an operator's `sqlite3`."""
    store, _ = await opened()
    await store.append(make_groups(1))
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "run.db")) as reader:
        reader.execute("begin")
        assert reader.execute("select count(*) from held").fetchall() == [(1,)]
        with small_steps():
            for number in range(1, 30):
                assert await store.append(make_groups(1, first=number)) == [Appended.STORED]
        assert reader.execute("select count(*) from held").fetchall() == [(1,)]
    assert len(await store.read(list(range(30)))) == 30


async def test_the_view_for_people_names_ids_and_places(tmp_path: Path, opened: Open) -> None:
    store, _ = await opened()
    first, second = make_groups(2)
    await store.append(
        [
            replace(group, header=replace(group.header, group_id=group_id))
            for group, group_id in ((first, "ab" * 16), (second, "x"))
        ]
    )
    await store.commit(Change(moves={1: Move(place=Place.DEAD, reason="odd")}))
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "run.db")) as reader:
        rows = reader.execute("select number, id, place, reason from held").fetchall()
    assert rows[1] == (1, "x", "dead", "odd")
    assert rows[0][:2] == (0, "ab" * 16)


async def test_a_caller_who_gives_up_closing_does_not_close_files_under_the_writer(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_insert = threading.Event()
    insert = RunFile.insert

    def wait_and_insert(self: RunFile, group: NewGroup) -> None:
        assert may_insert.wait(30)
        insert(self, group)

    monkeypatch.setattr(RunFile, "insert", wait_and_insert)
    store, _ = await opened()
    append = asyncio.create_task(store.append(make_groups(1)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    may_insert.set()
    assert await append == [Appended.STORED]
    await store.close()
    _, saved = await opened()
    assert len(saved.groups) == 1


async def test_closing_says_when_it_could_not_make_everything_durable(tmp_path: Path) -> None:
    require_interposable(tmp_path)

    class BreaksLater(SqliteFiles):
        is_broken = False

        def synced(self, path: str) -> int:
            return sqlite3.SQLITE_IOERR_FSYNC if self.is_broken else 0

    files = BreaksLater()
    failures: list[BaseException] = []
    with interposed(files):
        store = open_store(tmp_path / "run", on_failure=failures.append)
        await store.open()
        await store.append(make_groups(1))
        files.is_broken = True
        with pytest.raises(StoreBroken):
            await store.close()
    assert len(failures) == 1
    again = open_store(tmp_path / "run")
    assert len((await again.open()).groups) == 1
    await again.close()


async def test_a_run_whose_first_commit_fails_lets_go_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(RunFile, "apply", fail)
        with pytest.raises(StoreBroken, match="injected"):
            await Coordinator(open_store(tmp_path / "run")).open()
    again = Coordinator(open_store(tmp_path / "run"))
    await again.open()
    await again.close()


async def test_500_mb_are_open_again_after_a_second_of_cpu_time_after_a_crash(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path / "run", durability=Durability.PROCESS, min_free_bytes=0)
    await store.open()
    payload = random.Random(0).randbytes(200_000)
    groups = [
        replace(group, payload=payload, place=Place.QUEUED)
        for group in make_groups(2500, num_bytes=1)
    ]
    for start in range(0, 2500, 100):
        await store.append(groups[start : start + 100])
    copy_run(tmp_path / "run", tmp_path / "crashed")
    await store.close()
    again = DiskStore(tmp_path / "crashed", min_free_bytes=0)
    started_s = time.process_time()
    saved = await again.open()
    seconds = time.process_time() - started_s
    assert len(saved.groups) == 2500
    assert await again.read([2499]) == [payload]
    assert seconds < 1.0
    await again.close()


async def test_appends_that_come_together_share_a_transaction(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_transactions = 0
    all_have_come = threading.Event()
    transaction = RunFile.transaction

    def counted(self: RunFile, *, is_durable: bool) -> contextlib.AbstractContextManager[None]:
        nonlocal num_transactions
        assert all_have_come.wait(30)
        num_transactions += 1
        return transaction(self, is_durable=is_durable)

    store, _ = await opened()
    monkeypatch.setattr(RunFile, "transaction", counted)
    appends = [asyncio.create_task(store.append([group])) for group in make_groups(200)]
    await asyncio.sleep(0)
    all_have_come.set()
    assert await asyncio.gather(*appends) == [[Appended.STORED]] * 200
    # The first may be alone.
    assert num_transactions <= 20


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "is_room"),
    [(100, 2.2, True), (100, 1.9, False), (10, 1.2, True), (10, 0.9, False)],
)
async def test_two_percent_of_the_disk_and_at_least_one_gib_stay_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total_gib: int, free_gib: float, is_room: bool
) -> None:
    usage = SimpleNamespace(total=total_gib << 30, free=int(free_gib * (1 << 30)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(space, "_allocate", lambda path, num_bytes: path.touch())
    store = DiskStore(tmp_path / "run")
    await store.open()
    if is_room:
        assert await store.append(make_groups(1)) == [Appended.STORED]
    else:
        with pytest.raises(StoreFull):
            await store.append(make_groups(1))
    await store.close()


async def test_a_quota_that_takes_no_ballast_is_named(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(path: Path, num_bytes: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(space, "_allocate", allocate)
    store, _ = await opened()
    with pytest.raises(StoreFull, match="ballast cannot be written: Disk quota exceeded") as caught:
        await store.append(make_groups(1))
    assert store.usage().refusal == str(caught.value)


async def test_a_network_file_system_is_warned_of(
    opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    monkeypatch.setattr(disk, "file_system_of", lambda directory: "nfs4")
    store, _ = await opened()
    await store.close()
    assert "is on nfs4" in caplog.text
