"""The disk store after `kill -9`, and after every single failure of a write or sync: an I/O error, or "disk full"."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atroposlib.api.stores import space
from atroposlib.api.stores.base import Appended, Change, NewGroup, StoreBroken, StoreFull
from atroposlib.api.stores.run_file import RunFile
from tests.faults.conftest import Open
from tests.faults.sqlite_vfs import SqliteFiles, interposed, require_interposable
from tests.faults.store_faults import (
    Judge,
    Workload,
    new_group,
    open_store,
    ram_directory,
    small_steps,
)
from tests.processes import ROOT

# Single failures.


async def run_until_it_breaks(directory: Path, judge: Judge) -> list[BaseException]:
    """Run a workload, close the store and return what `on_failure` was given."""
    failures: list[BaseException] = []
    store = open_store(directory, on_failure=failures.append)
    try:
        await store.open()
    except StoreBroken as e:
        return [e]
    try:
        await Workload(store, random.Random(5), judge).run(40)
    except StoreBroken:
        with pytest.raises(StoreBroken, match="restart the hub"):
            await store.append([new_group(10_000, random.Random(0))])
        with pytest.raises(StoreBroken):
            await store.commit(Change())
        with pytest.raises(StoreBroken):
            await store.clear()
    try:
        await store.close()
    except StoreBroken:
        assert len(failures) == 1
    return failures


async def judge_what_is_left(directory: Path, judge: Judge) -> None:
    store = open_store(directory)
    saved = await store.open()
    await judge.check(store, saved)
    await store.close()


class FailingSqlite(SqliteFiles):
    """Lets write or sync number `fail_at`, from 0, end in `code`."""

    def __init__(self, *, fail_at: int, code: int, only: str) -> None:
        self.num_calls = 0
        self.has_failed = False
        self._fail_at = fail_at
        self._code = code
        self._only = only

    def _count(self, name: str) -> int:
        if name != self._only:
            return 0
        self.num_calls += 1
        if self.num_calls - 1 != self._fail_at:
            return 0
        self.has_failed = True
        return self._code

    def wrote(self, path: str, data: bytes, offset: int) -> int:
        return self._count("write")

    def synced(self, path: str) -> int:
        return self._count("sync")


@pytest.mark.parametrize(
    ("only", "code"),
    [
        ("write", sqlite3.SQLITE_IOERR_WRITE),
        ("write", sqlite3.SQLITE_FULL),
        ("sync", sqlite3.SQLITE_IOERR_FSYNC),
    ],
)
async def test_any_failing_operation_of_sqlite_costs_nothing_that_was_answered(
    tmp_path: Path, only: str, code: int
) -> None:
    require_interposable(tmp_path)
    with small_steps(), ram_directory(tmp_path) as directory:
        counter = FailingSqlite(fail_at=-1, code=0, only=only)
        with interposed(counter):
            await run_until_it_breaks(directory / "count", Judge())
        num_broken = num_states = num_refused = 0
        for fail_at in range(0, counter.num_calls, 2 if only == "sync" else 15):
            judge = Judge()
            run = directory / str(fail_at)
            with interposed(FailingSqlite(fail_at=fail_at, code=code, only=only)):
                num_broken += len(await run_until_it_breaks(run, judge))
            num_refused += sum(sent.is_refused for sent in judge.sent.values())
            await judge_what_is_left(run, judge)
            num_states += 1
            shutil.rmtree(run)
    assert num_states > 20
    if code == sqlite3.SQLITE_FULL:
        # The ballast saves every commit but those of the opening.
        assert num_broken <= 10
        assert num_refused > 5
    else:
        assert num_broken > num_states // 2


async def test_a_quota_refuses_groups_as_a_full_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reports it as an I/O error, which would break the store."""
    require_interposable(tmp_path)

    class Quota(SqliteFiles):
        is_used_up = False

        def wrote(self, path: str, data: bytes, offset: int) -> int:
            return sqlite3.SQLITE_IOERR_WRITE if self.is_used_up else 0

    def allocate(path: Path, num_bytes: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    files, rng = Quota(), random.Random(0)
    with interposed(files):
        store = open_store(tmp_path / "run")
        await store.open()
        await store.append([new_group(0, rng)])
        monkeypatch.setattr(space, "_allocate", allocate)
        files.is_used_up = True

        def release() -> None:
            files.is_used_up = False

        monkeypatch.setattr(store._space, "_release_ballast", release)
        group = new_group(1, rng)
        answers = await asyncio.gather(
            store.append([group]), store.commit(Change(document=b"kept")), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [StoreFull, type(None)]
        assert await store.append([group]) == [Appended.STORED]
        await store.close()


# The end of the process.

_CHILD = """
import asyncio, random, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.faults.store_faults import new_group, open_store

async def main():
    store = open_store(Path(sys.argv[1]))
    saved = await store.open()
    number = saved.next_number
    print("open", flush=True)
    async def produce():
        nonlocal number
        while True:
            rng = random.Random(number)
            group = new_group(number, rng)
            number += 1
            await store.append([group])
            print(group.header.number, flush=True)
    await asyncio.gather(*(produce() for _ in range(4)))

asyncio.run(main())
"""


def kill_producers(run: Path) -> set[int]:
    """Let a process append until it is killed, twice; return what it said was stored."""
    acknowledged: set[int] = set()
    for cycle in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(run), str(ROOT)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        for _ in range(50 + 13 * cycle):
            acknowledged.add(int(child.stdout.readline()))
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        acknowledged |= {int(number) for number in rest[:-1]}
        assert child.wait(10) == -signal.SIGKILL
        child.stdout.close()
    return acknowledged


async def test_kill_9_loses_no_acknowledged_group(tmp_path: Path) -> None:
    run = tmp_path / "run"
    acknowledged = await asyncio.to_thread(kill_producers, run)
    store = open_store(run)
    saved = await store.open()
    found = [group.header.number for group in saved.groups]
    assert acknowledged <= set(found)
    payloads = await store.read(found)
    for number, payload in zip(found, payloads, strict=True):
        assert payload == new_group(number, random.Random(number)).payload
    await store.close()


async def test_a_repeat_of_a_group_that_found_no_room_is_not_called_a_duplicate(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, gate = threading.Event(), threading.Event()
    rng = random.Random(0)
    first, second = new_group(0, rng), new_group(1, rng)
    insert = RunFile.insert

    def insert_if_first(self: RunFile, group: NewGroup) -> None:
        if group is second:
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        has_begun.set()
        assert gate.wait(10)
        insert(self, group)

    store, _ = await opened()
    monkeypatch.setattr(RunFile, "insert", insert_if_first)
    calls = [asyncio.create_task(store.append([first]))]
    assert await asyncio.to_thread(has_begun.wait, 10)
    # While the writer is busy these two come together and share a commit.
    calls += [asyncio.create_task(store.append([second])) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[0] == [Appended.STORED]
    assert [type(answer) for answer in answers[1:]] == [StoreFull, StoreFull]
