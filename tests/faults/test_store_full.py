"""The disk store on a disk that is really full: a file system in memory of 32 MiB, mounted for the test."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atroposlib.api.stores.base import Appended, Change, Fate, Move, NewGroup, Place, StoreFull
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.space import DiskSpace
from tests.conftest import require_postgres
from tests.faults.conftest import Open
from tests.faults.drivers import HubProcess, LeaseTrainer, eventually, hub_process, traffic
from tests.faults.store_faults import copy_run, new_group
from tests.postgres import running_cluster

DISK_BYTES = 32 << 20
GROUP_BYTES = 200_000


@contextmanager
def mounted(num_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes, which any user may read."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with tempfile.TemporaryDirectory(prefix="atropos-full-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with mounted(DISK_BYTES) as directory:
        yield directory


ON_DISK = {"min_free_bytes": 2 << 20}
NO_WATERMARK = {"min_free_bytes": 0}


def large_group(number: int) -> NewGroup:
    return new_group(number, random.Random(number), num_bytes=GROUP_BYTES)


async def fill(store: DiskStore, *, first: int = 0) -> int:
    """Append until the store is full; return the number of the first group that was refused."""
    number = first
    while True:
        try:
            await store.append([large_group(number)])
        except StoreFull:
            return number
        number += 1
        assert number - first < 1000


async def append_when_there_is_room(store: DiskStore, group: NewGroup) -> None:
    """The disk is looked at ten times a second."""
    async with asyncio.timeout(10):
        while True:
            try:
                assert await store.append([group]) == [Appended.STORED]
                return
            except StoreFull:
                await asyncio.sleep(0.02)


async def end_one_by_one(store: DiskStore, numbers: range) -> None:
    for number in numbers:
        await store.commit(
            Change(moves={number: Move(place=Place.LEASED, batch=number)}, document=bytes(2000))
        )
        await store.commit(Change(ends={number: Fate.TRAINED}))


def fill_up(disk: Path) -> Path:
    """Take all space that is left, as another program might."""
    hog = disk / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    return hog


async def test_a_full_disk_refuses_groups_while_every_commit_works(
    small_disk: Path, opened: Open
) -> None:
    store, _ = await opened(small_disk / "run", **ON_DISK)
    refused = await fill(store)
    assert refused > 80, "less than half of the disk was used"
    usage = store.usage()
    assert usage.free_bytes is not None
    assert usage.free_bytes < 2 * GROUP_BYTES
    await end_one_by_one(store, range(refused))
    late = new_group(refused, random.Random(0), num_bytes=10 << 20)
    await append_when_there_is_room(store, late)
    assert await store.read([refused]) == [late.payload]


async def test_runs_that_share_a_ballast_go_on_when_another_program_takes_the_last_byte(
    small_disk: Path,
) -> None:
    space = DiskSpace(small_disk, min_free_bytes=0)
    stores = [DiskStore(small_disk / name, space=space) for name in ("a", "b")]
    for store in stores:
        await store.open()
        rng = random.Random(0)
        await store.append([new_group(number, rng, num_bytes=1000) for number in range(20)])
        assert not (store._directory / "ballast").exists()
    assert (small_disk / "ballast").exists()
    hog = await asyncio.to_thread(fill_up, small_disk)

    async def move_all(store: DiskStore) -> None:
        for number in range(20):
            move = Move(place=Place.LEASED, batch=1)
            await store.commit(Change(moves={number: move}, document=bytes([number]) * 50_000))

    # More than the WAL has room for without the ballast; nothing ends, so nothing else makes room.
    await asyncio.gather(*(move_all(store) for store in stores))
    assert not (small_disk / "ballast").exists()
    for store in stores:
        with pytest.raises(StoreFull):
            await store.append([new_group(1000, random.Random(1), num_bytes=8 << 20)])
    await asyncio.to_thread(hog.unlink)
    for store in stores:
        await end_one_by_one(store, range(20))
        late = new_group(1000, random.Random(1))
        await append_when_there_is_room(store, late)
        assert await store.read([1000]) == [late.payload]
        await store.close()
    assert (small_disk / "ballast").exists()


async def test_a_watermark_of_nothing_loses_nothing_on_a_full_disk(
    small_disk: Path, opened: Open
) -> None:
    """`append` meets a real "no space left on device" in the middle of a record."""
    store, _ = await opened(small_disk / "run", **NO_WATERMARK)
    refused = await fill(store)
    refused = await fill(store, first=refused)
    await end_one_by_one(store, range(10))
    await store.close()
    again, saved = await opened(small_disk / "run", **NO_WATERMARK)
    assert [group.header.number for group in saved.groups] == list(range(10, refused))
    numbers = list(range(10, refused))
    assert await again.read(numbers) == [large_group(number).payload for number in numbers]


@contextmanager
def no_file_to_spare() -> Iterator[None]:
    """As if clients held every file and connection that the process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_without_a_file_to_spare_stores_and_reads(opened: Open) -> None:
    store, _ = await opened()
    rng = random.Random(0)
    groups = [new_group(number, rng, num_bytes=6000) for number in range(6)]
    await store.append(groups[:2])
    with no_file_to_spare():
        assert await store.append(groups[2:]) == [Appended.STORED] * 4
        assert await store.read([0, 5]) == [groups[0].payload, groups[5].payload]
        await store.commit(Change(ends={0: Fate.TRAINED}))
    await store.close()
    _, saved = await opened()
    assert [group.header.number for group in saved.groups] == [1, 2, 3, 4, 5]
    assert saved.ended == {Fate.TRAINED: 1}


async def test_a_crashed_run_recovers_on_a_disk_that_is_full(
    tmp_path: Path, small_disk: Path, opened: Open
) -> None:
    """What the WAL holds has no room in the file: it stays in the WAL."""
    store, _ = await opened(min_free_bytes=0)
    rng = random.Random(0)
    for number in range(21):
        await store.append([new_group(number, rng, num_bytes=100_000)])
    copy_run(tmp_path / "run", small_disk / "run")
    await store.close()
    hog = await asyncio.to_thread(fill_up, small_disk)
    again, saved = await opened(small_disk / "run", **ON_DISK)
    assert [group.header.number for group in saved.groups] == list(range(21))
    with pytest.raises(StoreFull):
        await again.append([new_group(1000, rng)])
    await asyncio.to_thread(hog.unlink)
    await end_one_by_one(again, range(21))


async def test_a_restart_just_above_the_watermark_goes_on_taking_groups(
    small_disk: Path, opened: Open
) -> None:
    store, _ = await opened(small_disk / "run", **ON_DISK)
    refused = await fill(store)
    await store.commit(Change(ends={0: Fate.TRAINED}))
    await store.close()
    again, _ = await opened(small_disk / "run", **ON_DISK)
    assert await again.append([new_group(refused, random.Random(1))]) == [Appended.STORED]


# A hub whose disk, or whose database with its log, is full while a trainer drains the queue.


async def drain_a_full_hub(hub: HubProcess, *, flag: str) -> None:
    """Fill the hub, whose trainer is slow, then fast: groups are accepted again, and each is trained once."""
    trainer = LeaseTrainer(hub.url, checkpoint_every=1, pause_s=0.3)

    def is_full() -> bool:
        refusal = hub.get("/explain")["refusal"] or ""
        return f"change {flag}" in refusal and hub.get("/readyz")["status"] == "degraded"

    async with traffic(
        hub.url, trainer=trainer, num_producers=3, num_tokens=16_000, max_ahead=10_000
    ) as load:
        await eventually(is_full, timeout_s=20, what="a full store", interval_s=0.1)
        trainer.pause_s = 0.0
        await load.progress(load.num_acknowledged + 100)
        await load.finish()
    assert trainer.num_failed == 0, "the full hub refused a call of its trainer"
    assert trainer.num_fenced == trainer.num_crashes == 0


async def test_a_trainer_drains_a_hub_whose_disk_is_full(tmp_path: Path) -> None:
    with mounted(64 << 20) as disk:
        flags = ["--min-free-bytes", str(8 << 20), "--data-dir", str(disk / "data")]
        with hub_process(tmp_path, *flags) as hub:
            await drain_a_full_hub(hub, flag="--min-free-bytes")


@pytest.mark.parametrize("flag", ["--min-free-bytes", "--max-database-bytes"])
async def test_a_trainer_drains_a_hub_whose_database_is_full(tmp_path: Path, flag: str) -> None:
    """Tables and log of the server are on one disk."""
    require_postgres()
    num_bytes = (64 if flag == "--min-free-bytes" else 120) << 20
    with (
        mounted(256 << 20) as disk,
        running_cluster(directory=disk, max_wal_mib=64) as cluster,
        hub_process(
            tmp_path, "--database", cluster.url(), "--min-free-bytes", "1", flag, str(num_bytes)
        ) as hub,
    ):
        await drain_a_full_hub(hub, flag=flag)
        assert cluster.is_running
