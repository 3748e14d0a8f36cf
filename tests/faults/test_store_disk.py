"""What the disk store does with its directory: who may use it, what is dropped, moved, rebuilt; what damage costs."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.stores import space
from atroposlib.api.stores.base import (
    Appended,
    Change,
    CorruptGroups,
    Durability,
    End,
    Fate,
    Move,
    NewGroup,
    Place,
    StoreBroken,
    StoreFull,
)
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.space import file_system_of
from atroposlib.api.stores.state import StateDb
from atroposlib.api.stores.writing import Location
from atroposlib.errors import ConfigError
from tests.faults.conftest import Open
from tests.faults.store_faults import SmallDisk, copy_run, new_group, open_store


def make_groups(count: int, *, num_bytes: int = 4000, first: int = 0) -> list[NewGroup]:
    rng = random.Random(first)
    return [new_group(first + n, rng, num_bytes=num_bytes) for n in range(count)]


def end(*numbers: int, is_durable: bool = True) -> Change:
    return Change(
        ends=[End(number=number, fate=Fate.TRAINED) for number in numbers], is_durable=is_durable
    )


def segment_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.seg"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def find(path: Path, payload: bytes) -> int:
    return path.read_bytes().index(payload)


async def fill(store: DiskStore, count: int) -> list[NewGroup]:
    """Append groups one by one."""
    groups = make_groups(count)
    for group in groups:
        await store.append([group])
    return groups


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def let_time_pass(store: DiskStore, clock: Clock, *times_s: float) -> None:
    """Let the writer look after the disk at these times."""
    for clock.now_s in times_s:
        await settle(store)


async def settle(store: DiskStore) -> None:
    """Return when the writer has looked after the disk and the files that it dropped are gone."""
    await store.commit(Change())
    await store.commit(Change())
    await asyncio.to_thread(store._unlinker.submit(int).result)


async def test_a_second_hub_on_the_directory_is_told_so(tmp_path: Path, opened: Open) -> None:
    first, _ = await opened()
    second = open_store(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"another hub uses {tmp_path / 'run'}"):
        await second.open()
    await first.append(make_groups(1))
    await first.close()
    _, saved = await opened()
    assert len(saved.groups) == 1


async def test_other_users_cannot_read_the_directory(tmp_path: Path, opened: Open) -> None:
    store, _ = await opened()
    await store.append(make_groups(1))
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "run").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


async def test_opening_says_what_was_found(tmp_path: Path, opened: Open) -> None:
    store, saved = await opened()
    assert saved.found == ""
    await store.append(make_groups(2, num_bytes=1000))
    copy_run(tmp_path / "run", tmp_path / "crashed")
    await store.append(make_groups(3, num_bytes=1000, first=2))
    await store.close()
    segment = segment_names(tmp_path / "run")[0]
    content = (tmp_path / "run" / segment).read_bytes()
    (tmp_path / "crashed" / segment).write_bytes(content[:-10])
    _, saved = await opened("crashed")
    assert saved.found.startswith("4 groups held (4000 bytes), 2 of them rolled forward, ")
    assert "unfinished bytes cut off" in saved.found


async def test_a_segment_is_dropped_when_nothing_in_it_is_held(
    tmp_path: Path, opened: Open
) -> None:
    store, _ = await opened(segment_bytes=10_000)
    await fill(store, 9)
    full = segment_names(tmp_path / "run")
    assert len(full) == 3
    await store.commit(end(0, 1))
    await settle(store)
    assert segment_names(tmp_path / "run") == full
    await store.commit(end(2, is_durable=False))
    await settle(store)
    assert segment_names(tmp_path / "run") == full[1:]
    assert store.usage().stored_bytes < 7 * 4000


async def test_a_sparse_segment_is_copied_forward_and_dropped_and_no_group_is_absent_meanwhile(
    tmp_path: Path, opened: Open
) -> None:
    taken_out: list[int] = []

    class Watched(dict[int, Location]):
        def pop(self, number: int, *default: Any) -> Any:
            taken_out.append(number)
            return super().pop(number, *default)

    clock = Clock()
    store, _ = await opened(segment_bytes=40_000, clock=clock)
    store._segments.places = Watched()
    groups = await fill(store, 21)
    await store.commit(Change(moves=[Move(number=7, place=Place.DEAD, reason="odd")]))
    first = segment_names(tmp_path / "run")[0]
    await store.commit(end(*(n for n in range(10) if n != 7)))
    taken_out.clear()
    await let_time_pass(store, clock, 0.0, 5.0, 599.0)
    assert first in segment_names(tmp_path / "run")
    await let_time_pass(store, clock, 700.0)
    assert first not in segment_names(tmp_path / "run")
    assert taken_out == []
    assert store.usage().payload_bytes == 12 * 4000
    assert await store.read([7, 15]) == [groups[7].payload, groups[15].payload]
    copy_run(tmp_path / "run", tmp_path / "crashed")
    await store.close()
    crashed, saved = await opened("crashed")
    assert [group.header.number for group in saved.groups] == [7, *range(10, 21)]
    assert (saved.groups[0].place, saved.groups[0].reason) == (Place.DEAD, "odd")
    assert await crashed.read([7]) == [groups[7].payload]


async def test_a_segment_that_cannot_be_read_is_not_copied_forward_and_breaks_nothing(
    tmp_path: Path, opened: Open
) -> None:
    clock = Clock()
    store, _ = await opened(segment_bytes=40_000, clock=clock)
    await fill(store, 11)
    await store.commit(end(*(n for n in range(10) if n != 7)))
    await let_time_pass(store, clock, 0.0, 5.0)
    (tmp_path / "run" / segment_names(tmp_path / "run")[0]).unlink()
    await let_time_pass(store, clock, 700.0)
    with pytest.raises(CorruptGroups):
        await store.read([7])
    assert await store.append(make_groups(1, first=11)) == [Appended.STORED]


async def test_a_damaged_group_stays_where_it_is_when_others_are_copied_forward(
    tmp_path: Path, opened: Open
) -> None:
    clock = Clock()
    store, _ = await opened(segment_bytes=60_000, clock=clock)
    groups = await fill(store, 17)
    first = tmp_path / "run" / segment_names(tmp_path / "run")[0]
    flip(first, find(first, groups[3].payload))
    await store.commit(end(*(n for n in range(15) if n not in (3, 4))))
    await let_time_pass(store, clock, 5.0, 700.0)
    assert first.exists()
    assert await store.read([4, 16]) == [groups[4].payload, groups[16].payload]
    with pytest.raises(CorruptGroups):
        await store.read([3])
    await store.commit(end(3))
    await settle(store)
    assert not first.exists()


async def test_damage_is_found_on_reading_not_on_opening_and_all_of_it_is_named(
    tmp_path: Path, opened: Open
) -> None:
    store, _ = await opened(segment_bytes=10_000)
    groups = await fill(store, 9)
    await store.close()
    names = segment_names(tmp_path / "run")
    first = tmp_path / "run" / names[0]
    flip(first, find(first, groups[1].payload) + 100)
    (tmp_path / "run" / names[1]).unlink()
    store, saved = await opened(segment_bytes=10_000)
    assert len(saved.groups) == 9
    with pytest.raises(CorruptGroups) as caught:
        await store.read([8, 5, 4, 3, 1, 0])
    assert caught.value.numbers == [1, 3, 4, 5]
    assert await store.read([8, 0]) == [groups[8].payload, groups[0].payload]
    await store.commit(end(*range(9)))
    await settle(store)


@pytest.mark.parametrize("loss", ["missing", "overwritten", "torn page"])
async def test_a_lost_database_is_rebuilt_from_the_segments(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    store, _ = await opened()
    groups = await fill(store, 12)
    await store.commit(end(11))
    await store.close()
    state = tmp_path / "run" / "state.db"
    if loss == "missing":
        state.unlink()
    elif loss == "overwritten":
        state.write_bytes(b"not a database" * 1000)
    else:
        content = bytearray(state.read_bytes())
        content[4096:8192] = bytes(4096)
        state.write_bytes(content)
    again, saved = await opened()
    assert [group.header for group in saved.groups] == [group.header for group in groups]
    assert [group.header for group in saved.groups] == [group.header for group in groups]
    assert "12 of them rebuilt" in saved.found
    assert any(
        record.levelno == logging.ERROR and "state was lost" in record.getMessage()
        for record in caplog.records
    )
    assert await again.read([11]) == [groups[11].payload]
    assert await again.append([groups[0]]) == [Appended.DUPLICATE]
    await again.close()
    set_aside = list((tmp_path / "run").glob("damaged-*"))
    assert bool(set_aside) == (loss != "missing")


async def test_what_was_cleared_does_not_come_back_after_a_crash(
    tmp_path: Path, opened: Open
) -> None:
    store, _ = await opened()
    await store.append(make_groups(5))
    copy_run(tmp_path / "run", tmp_path / "before")
    await store.clear()
    copy_run(tmp_path / "run", tmp_path / "crashed")
    # As if the crash had come between the transaction and the removal of the files.
    for name in segment_names(tmp_path / "before"):
        (tmp_path / "crashed" / name).write_bytes((tmp_path / "before" / name).read_bytes())
    await store.close()
    crashed, saved = await opened("crashed")
    assert (saved.groups, saved.next_number) == ([], 0)
    assert await crashed.append(make_groups(5)) == [Appended.STORED] * 5


async def test_a_caller_who_gives_up_does_not_undo_an_append(opened: Open) -> None:
    store, _ = await opened()
    groups = make_groups(2)
    task = asyncio.create_task(store.append([groups[0]]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.append([groups[0], groups[1]]) == [Appended.DUPLICATE, Appended.STORED]


async def test_reading_goes_on_while_segments_are_dropped_and_moved(opened: Open) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 400.0
        return now_s

    store, _ = await opened(segment_bytes=20_000, clock=clock)
    groups = make_groups(200)
    kept = [n for n in range(200) if n % 10 == 0]
    await store.append(groups[:1])

    async def churn() -> None:
        for group in groups[1:]:
            await store.append([group])
            if group.header.number % 10:
                await store.commit(end(group.header.number))

    churning = asyncio.create_task(churn())
    num_reads = 0
    while not churning.done():
        known = [n for n in kept if n in store._segments.places]
        assert await store.read(known) == [groups[n].payload for n in known]
        num_reads += 1
        await asyncio.sleep(0)  # what the system holds in memory is read without a wait
    await churning
    await settle(store)
    assert await store.read(kept) == [groups[n].payload for n in kept]
    assert num_reads > 10
    # Each of the groups that are left was alone in its segment of 20,000 bytes.
    assert store.usage().stored_bytes < 300_000


async def test_a_caller_who_gives_up_closing_does_not_close_files_under_the_writer(
    opened: Open,
) -> None:
    class Waiting(SmallDisk):
        may_sync = threading.Event()

        def sync(self, fd: int) -> None:
            assert self.may_sync.wait(30)
            super().sync(fd)

    store, _ = await opened(files=Waiting())
    group = make_groups(1)
    append = asyncio.create_task(store.append(group))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    Waiting.may_sync.set()
    assert await append == [Appended.STORED]
    await store.close()
    _, saved = await opened()
    assert len(saved.groups) == 1


async def test_closing_says_when_it_could_not_make_everything_durable(
    tmp_path: Path, opened: Open
) -> None:
    class BreaksLater(SmallDisk):
        is_broken = False

        def sync(self, fd: int) -> None:
            if self.is_broken:
                raise OSError(5, "injected")

    files = BreaksLater()
    failures: list[BaseException] = []
    store, _ = await opened(files=files, on_failure=failures.append)
    await store.append(make_groups(1))
    files.is_broken = True
    with pytest.raises(StoreBroken):
        await store.close()
    assert len(failures) == 1
    _, saved = await opened()
    assert len(saved.groups) == 1


async def test_a_run_whose_first_commit_fails_lets_go_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(StateDb, "apply", fail)
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
    # The last 160 are in the segments and not in the database, as after a loss of power.
    for start in range(0, 2340, 180):
        await store.append(groups[start : start + 180])
    for name in ("state.db", "state.db-wal"):
        (tmp_path / name).write_bytes((tmp_path / "run" / name).read_bytes())
    await store.append(groups[2340:])
    copied = {name: (tmp_path / name).read_bytes() for name in ("state.db", "state.db-wal")}
    store._log.end_segment()
    await store.close()
    for name, content in copied.items():
        (tmp_path / "run" / name).write_bytes(content)
    again = DiskStore(tmp_path / "run", min_free_bytes=0)
    started_s = time.process_time()
    saved = await again.open()
    seconds = time.process_time() - started_s
    assert len(saved.groups) == 2500
    assert "160 of them rolled forward" in saved.found
    assert await again.read([2499]) == [payload]
    assert seconds < 1.0
    await again.close()


async def test_appends_that_come_together_share_a_sync(opened: Open) -> None:
    class Counting(SmallDisk):
        num_syncs = 0
        all_have_come = threading.Event()

        def sync(self, fd: int) -> None:
            assert self.all_have_come.wait(30)
            self.num_syncs += 1
            super().sync(fd)

    files = Counting()
    store, _ = await opened(files=files)
    appends = [asyncio.create_task(store.append([group])) for group in make_groups(200)]
    await asyncio.sleep(0)
    files.all_have_come.set()
    assert await asyncio.gather(*appends) == [[Appended.STORED]] * 200
    # The first may be alone.
    assert files.num_syncs <= 20


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "is_room"),
    [(100, 2.2, True), (100, 1.9, False), (10, 1.2, True), (10, 0.9, False)],
)
async def test_two_percent_of_the_disk_and_at_least_one_gib_stay_free(
    tmp_path: Path, total_gib: int, free_gib: float, is_room: bool
) -> None:
    class Disk(SmallDisk):
        def total_bytes(self, path: Path) -> int:
            return total_gib << 30

        def free_bytes(self, path: Path) -> int:
            return int(free_gib * (1 << 30))

        def allocate(self, fd: int, size: int) -> None:
            pass

    store = DiskStore(tmp_path / "run", files=Disk())
    await store.open()
    if is_room:
        assert await store.append(make_groups(1)) == [Appended.STORED]
    else:
        with pytest.raises(StoreFull):
            await store.append(make_groups(1))
    await store.close()


async def test_a_quota_that_takes_no_ballast_is_named(opened: Open) -> None:
    class Quota(SmallDisk):
        def allocate(self, fd: int, size: int) -> None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    store, _ = await opened(files=Quota())
    with pytest.raises(StoreFull, match="ballast cannot be written: Disk quota exceeded") as caught:
        await store.append(make_groups(1))
    assert store.usage().refusal == str(caught.value)


async def test_a_network_file_system_is_warned_of(
    opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    monkeypatch.setattr(space, "file_system_of", lambda directory: "nfs4")
    store, _ = await opened()
    await store.close()
    assert "is on nfs4" in caplog.text
