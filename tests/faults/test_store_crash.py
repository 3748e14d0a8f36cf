"""The disk store after a crash and after every single failure of a file operation.

Torn tails: the log is cut at every seventh byte, and a byte before the cut flipped, with the database of an earlier
moment and with none. Faults: each file operation in turn, of the segments and of SQLite, fails once with an I/O error,
with "disk full", or takes only half of what it was given.
"""

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from atroposlib.api.stores.base import (
    Appended,
    Change,
    NewGroup,
    StoreBroken,
    StoreFull,
)
from atroposlib.api.stores.segments import LATER_ERRNOS, Files, ScannedRecord, SegmentLog
from tests.faults.conftest import Open
from tests.faults.sqlite_vfs import SqliteFiles, interposed, require_interposable
from tests.faults.store_faults import (
    FailingFiles,
    Judge,
    Sent,
    SmallDisk,
    Workload,
    copy_run,
    new_group,
    open_store,
    ram_directory,
)
from tests.processes import ROOT

# Torn tails.


@dataclass(frozen=True, slots=True)
class Tail:
    """A log and where its records begin and end."""

    directory: Path
    segment: Path
    groups: dict[int, NewGroup]
    records: list[tuple[int, ScannedRecord]]
    """Start of each record, and the record."""


async def make_log(directory: Path) -> Tail:
    """Four groups that the database lists, and five that were appended after the database was copied."""
    rng = random.Random(7)
    groups = {n: new_group(n, rng, num_bytes=rng.randint(1, 300)) for n in range(9)}
    source = directory / "source"
    store = open_store(source)
    await store.open()
    await store.append([groups[n] for n in range(4)])
    await store.commit(Change(document=b"0"))
    copy_run(source, directory / "log")
    await store.append([groups[n] for n in range(4, 9)])
    segment = source / "0000000000.seg"
    shutil.copy(segment, directory / "log" / segment.name)
    log = SegmentLog(source, files=Files(), segment_bytes=1 << 20, is_synced=False)
    scan = log.scan(0, start=0)
    await store.close()
    assert scan.end == segment.stat().st_size
    assert [record.meta.number for record in scan.records] == list(range(9))
    starts = [20, *(record.location.end for record in scan.records)]
    return Tail(
        directory / "log",
        directory / "log" / segment.name,
        groups,
        list(zip(starts, scan.records, strict=False)),
    )


def states_of(tail: Tail, start: int, seed: int) -> list[tuple[int, int | None]]:
    """Every seventh place to cut at, each once as it is and once with a byte flipped before it."""
    rng = random.Random(seed)
    size = tail.segment.stat().st_size
    cuts = range(start + 1, size + 1, 7)
    return [(cut, None) for cut in cuts] + [(cut, rng.randrange(start, cut)) for cut in cuts]


async def judge_state(
    tail: Tail, target: Path, *, cut: int, flipped: int | None, num_listed: int
) -> None:
    content = bytearray(tail.segment.read_bytes()[:cut])
    if flipped is not None:
        content[flipped] ^= 0x10
    (target / tail.segment.name).write_bytes(content)
    whole = {
        record.meta.number
        for start, record in tail.records
        if record.location.end <= cut
        and (flipped is None or not start <= flipped < record.location.end)
    }
    expected = set(range(num_listed)) | whole
    store = open_store(target)
    saved = await store.open()
    where = f"cut at {cut}, flipped {flipped}: {saved.found}"
    assert {group.header.number for group in saved.groups} == expected, where
    judge = Judge({number: Sent(group) for number, group in tail.groups.items()})
    await judge.check_payloads(store, saved)
    await judge.check_ids(store, known=expected, next_number=100)
    await store.close()


@pytest.mark.parametrize("has_database", [True, False])
async def test_a_torn_or_damaged_tail_costs_only_the_records_it_hits(
    tmp_path: Path, has_database: bool
) -> None:
    with ram_directory(tmp_path) as directory:
        tail = await make_log(directory)
        num_listed = 4 if has_database else 0
        states = states_of(tail, tail.records[num_listed][0] if has_database else 20, seed=1)
        target = directory / "state"
        for cut, flipped in states:
            shutil.rmtree(target, ignore_errors=True)
            if has_database:
                copy_run(tail.directory, target)
            else:
                target.mkdir()
            await judge_state(tail, target, cut=cut, flipped=flipped, num_listed=num_listed)
    assert len(states) > (350 if has_database else 650)


async def test_a_damaged_segment_head_does_not_cost_the_segment(tmp_path: Path) -> None:
    tail = await make_log(tmp_path)
    for flipped in range(20):
        target = tmp_path / f"state-{flipped}"
        target.mkdir()
        size = tail.segment.stat().st_size
        await judge_state(tail, target, cut=size, flipped=flipped, num_listed=0)


async def test_after_a_torn_tail_new_groups_survive_the_next_crash(
    tmp_path: Path, opened: Open
) -> None:
    tail = await make_log(tmp_path)
    with tail.segment.open("r+b") as file:
        file.truncate(tail.records[6][1].location.end - 1)
    rng = random.Random(3)
    fresh = new_group(20, rng)
    store, _ = await opened("log")
    await store.append([fresh])
    copy_run(tail.directory, tmp_path / "crashed")
    await store.close()
    again, saved = await opened("crashed")
    assert [group.header.number for group in saved.groups] == [0, 1, 2, 3, 4, 5, 20]
    assert await again.read([20]) == [fresh.payload]


# Single failures.


async def run_until_it_breaks(
    directory: Path, files: Files, judge: Judge, *, seed: int = 5, num_steps: int = 40
) -> list[BaseException]:
    """Run a workload, close the store and return what `on_failure` was given."""
    failures: list[BaseException] = []
    store = open_store(directory, files=files, on_failure=failures.append, segment_bytes=12_000)
    try:
        await store.open()
    except StoreBroken as e:
        return [e]
    try:
        await Workload(store, random.Random(seed), judge).run(num_steps)
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


async def count_calls(directory: Path) -> int:
    files = FailingFiles(fail_at=-1, error=errno.EIO)
    assert await run_until_it_breaks(directory, files, Judge()) == []
    return files.num_calls


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, None])
async def test_any_failing_file_operation_costs_nothing_that_was_answered(
    tmp_path: Path, error: int | None
) -> None:
    with ram_directory(tmp_path) as directory:
        num_calls = await count_calls(directory / "count")
        failed = set()
        for fail_at in range(num_calls):
            files = FailingFiles(fail_at=fail_at, error=error)
            judge = Judge()
            run = directory / str(fail_at)
            failures = await run_until_it_breaks(run, files, judge)
            failed.add(files.failed)
            if error is None or files.failed == "unlink":
                # Taking half is no failure; a file that cannot be removed is removed by the next opening.
                assert failures == []
            elif error == errno.EMFILE and files.failed == "sync_directory":
                # The directory is opened for it, before anything is written.
                num_refused = sum(sent.is_refused for sent in judge.sent.values())
                is_opening = not judge.sent
                assert (len(failures), num_refused > 0) == (int(is_opening), not is_opening)
            elif error in LATER_ERRNOS and files.failed in ("write", "create", "allocate"):
                assert failures == []
                num_refused = sum(sent.is_refused for sent in judge.sent.values())
                assert num_refused > 0 or files.failed == "allocate"
            elif files.failed is not None:
                assert len(failures) == 1, files.failed
            await judge_what_is_left(run, judge)
            shutil.rmtree(run)
    expected = {"create", "write", "sync", "sync_directory", "unlink", "allocate"}
    assert failed - {None} == ({"write"} if error is None else expected)


async def test_a_full_disk_that_cannot_take_back_breaks_the_store(tmp_path: Path) -> None:
    class Stubborn(FailingFiles):
        def truncate(self, fd: int, size: int) -> None:
            raise OSError(errno.EIO, "injected")

    num_broken = 0
    for fail_at in range(3, 12):
        judge = Judge()
        files = Stubborn(fail_at=fail_at, error=errno.ENOSPC)
        failures = await run_until_it_breaks(tmp_path / str(fail_at), files, judge)
        num_broken += len(failures)
        await judge_what_is_left(tmp_path / str(fail_at), judge)
    assert num_broken >= 5


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
    with ram_directory(tmp_path) as directory:
        counter = FailingSqlite(fail_at=-1, code=0, only=only)
        with interposed(counter):
            await run_until_it_breaks(directory / "count", SmallDisk(), Judge())
        num_broken = num_states = 0
        for fail_at in range(0, counter.num_calls, 1 if only == "sync" else 5):
            judge = Judge()
            run = directory / str(fail_at)
            with interposed(FailingSqlite(fail_at=fail_at, code=code, only=only)):
                num_broken += len(await run_until_it_breaks(run, SmallDisk(), judge))
            await judge_what_is_left(run, judge)
            num_states += 1
            shutil.rmtree(run)
    assert num_states > 20
    if code == sqlite3.SQLITE_FULL:
        # The ballast saves every commit but those of the opening.
        assert num_broken <= 10
    else:
        assert num_broken > num_states // 2


# The end of the process.

_CHILD = """
import asyncio, random, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.faults.store_faults import new_group, open_store

async def main():
    store = open_store(Path(sys.argv[1]), segment_bytes=100_000)
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
            [sys.executable, "-c", _CHILD, str(run), str(ROOT)],
            stdout=subprocess.PIPE,
            text=True,
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
    opened: Open,
) -> None:
    class Gated(SmallDisk):
        """Lets the first record wait until the gate opens, and takes no other."""

        def __init__(self) -> None:
            self.has_begun = threading.Event()
            self.gate = threading.Event()
            self.num_records = 0

        def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> int:
            if len(buffers) > 1:
                self.num_records += 1
                if self.num_records > 1:
                    raise OSError(errno.ENOSPC, "injected")
                self.has_begun.set()
                assert self.gate.wait(10)
            return super().write(fd, buffers, offset)

    files = Gated()
    rng = random.Random(0)
    first, second = new_group(0, rng), new_group(1, rng)
    store, _ = await opened(files=files)
    calls = [asyncio.create_task(store.append([first]))]
    assert await asyncio.to_thread(files.has_begun.wait, 10)
    # While the writer is busy these two come together and share a commit.
    calls += [asyncio.create_task(store.append([second])) for _ in range(2)]
    await asyncio.sleep(0)
    files.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[0] == [Appended.STORED]
    assert [type(answer) for answer in answers[1:]] == [StoreFull, StoreFull]
