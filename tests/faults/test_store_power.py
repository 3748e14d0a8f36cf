"""Loss of power, modelled: what the disk store answered is there in every state that a power cut may leave behind.

Each write, sync, truncation, creation and deletion, of segments and of SQLite's files, is recorded in order. For many
moments the directory is built anew as a power cut at that moment could leave it: what a sync covered is there; of what
came later any 4 KiB blocks may be there or not, and so may entries of the directory that no sync of it covered. This
is a model of files, not of one file system's journal, and allows more than any real one does. Defects planted on
purpose show that the test can fail.
"""

from __future__ import annotations

import errno
import random
import shutil
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from atroposlib.api.stores.base import Appended, Change, CorruptGroups, StoreBroken
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.state import StateDb
from tests.faults.sqlite_vfs import SqliteFiles, interposed, require_interposable
from tests.faults.store_faults import (
    Judge,
    Sent,
    SmallDisk,
    Workload,
    new_group,
    open_store,
    ram_directory,
)

BLOCK_BYTES = 4096


@pytest.fixture(autouse=True)
def interposable(tmp_path: Path) -> None:
    require_interposable(tmp_path)


class Kind(Enum):
    CREATE = "create"
    WRITE = "write"
    TRUNCATE = "truncate"
    SYNC = "sync"
    FAILED_SYNC = "failed sync"
    """The kernel forgets that what was written since the last sync is not on the disk."""
    UNLINK = "unlink"
    SYNC_DIRECTORY = "sync directory"


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    path: str
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Recorder(SqliteFiles):
    """Everything that happened to the files of one directory. Told by SQLite, and by `RecordingFiles`."""

    events: list[Event] = field(default_factory=list)
    has_sqlite_syncs: bool = True
    """False plants a defect."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The unlinker of the store is a thread of its own."""
    _known: set[str] = field(default_factory=set)

    def add(self, kind: Kind, path: str, offset: int = 0, data: bytes = b"") -> int:
        with self.lock:
            self.events.append(Event(kind, path, offset, data))
        return 0

    def opened(self, path: str) -> int:
        if path not in self._known:
            self._known.add(path)
            self.add(Kind.CREATE, path)
        return 0

    def wrote(self, path: str, data: bytes, offset: int) -> int:
        return self.add(Kind.WRITE, path, offset, data)

    def truncated(self, path: str, size: int) -> int:
        return self.add(Kind.TRUNCATE, path, size)

    def synced(self, path: str) -> int:
        return self.add(Kind.SYNC, path) if self.has_sqlite_syncs else 0

    def deleted(self, path: str) -> int:
        self._known.discard(path)
        return self.add(Kind.UNLINK, path)


class RecordingFiles(SmallDisk):
    fails = False

    def __init__(self, recorder: Recorder, *, syncs: bool = True) -> None:
        self._recorder = recorder
        self._syncs = syncs
        self._paths: dict[int, str] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._paths[fd] = str(path)
        self._recorder.add(Kind.CREATE, str(path))
        return fd

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._paths[fd] = str(path)
        return fd

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> int:
        written = super().write(fd, buffers, offset)
        self._recorder.add(Kind.WRITE, self._paths[fd], offset, b"".join(buffers)[:written])
        return written

    def sync(self, fd: int) -> None:
        if self.fails:
            self._recorder.add(Kind.FAILED_SYNC, self._paths[fd])
            raise OSError(errno.EIO, "injected")
        if self._syncs:
            self._recorder.add(Kind.SYNC, self._paths[fd])

    def sync_directory(self, path: Path) -> None:
        self._recorder.add(Kind.SYNC_DIRECTORY, str(path))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._recorder.add(Kind.TRUNCATE, self._paths[fd], size)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._recorder.add(Kind.UNLINK, str(path))


Drive = Callable[[Workload], Awaitable[None]]


async def mixed(workload: Workload) -> None:
    await workload.run(45)


async def expiring(workload: Workload) -> None:
    await workload.fill_and_expire(3)


@dataclass(frozen=True, slots=True)
class Answered:
    """What was known after so many events."""

    num_events: int
    judge: Judge


async def record(
    directory: Path, recorder: Recorder, files: RecordingFiles, *, seed: int, drive: Drive
) -> list[Answered]:
    """Drive a workload; return what was answered when. The first entry is the empty directory."""
    rng = random.Random(seed)
    judge = Judge()
    store = open_store(directory, files=files, segment_bytes=24_000)
    answered = [Answered(0, Judge())]

    def note() -> None:
        answered.append(Answered(len(recorder.events), judge.snapshot()))

    await store.open()
    workload = Workload(store, rng, judge)
    workload.on_answer = note
    await drive(workload)
    await store.close()
    return answered


def cut_power(events: Sequence[Event], target: Path, rng: random.Random) -> None:
    """Build in `target` what a power cut right after `events` may leave."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    directory_synced = max(
        (i for i, event in enumerate(events) if event.kind is Kind.SYNC_DIRECTORY), default=-1
    )
    by_path: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        if event.kind is not Kind.SYNC_DIRECTORY:
            by_path.setdefault(event.path, []).append(i)
    for path, indices in by_path.items():
        content = _content_after_cut(
            [(i, events[i]) for i in indices], Path(path).name, directory_synced, rng
        )
        if content is not None:
            (target / Path(path).name).write_bytes(content)


def _content_after_cut(
    events: list[tuple[int, Event]], name: str, directory_synced: int, rng: random.Random
) -> bytes | None:
    is_sqlite = name.startswith("state.db")
    life = [pair for pair in events if pair[1].kind in (Kind.CREATE, Kind.UNLINK)]
    while life and life[-1][1].kind is Kind.UNLINK:
        # SQLite has its deletions synced where it depends on them; the others may be undone.
        if is_sqlite or life[-1][0] < directory_synced or rng.random() < 0.5:
            return None
        life.pop()
    created = life[-1][0] if life else -1
    events = [pair for pair in events if pair[0] > created and pair[1].kind is not Kind.UNLINK]
    events = _without_dropped_writes(events)
    last_sync = max((i for i, event in events if event.kind is Kind.SYNC), default=-1)
    # SQLite syncs the directory together with the first sync of a file, out of sight of its file layer.
    is_entered = created < directory_synced or (is_sqlite and last_sync >= 0)
    if not is_entered and rng.random() < 0.5:
        return None
    content = bytearray()
    late = [pair for pair in events if pair[0] > last_sync]
    for _, event in events[: len(events) - len(late)]:
        _apply(content, event)
    mode = rng.choice(["none", "prefix", "blocks", "blocks", "all"])
    num_kept = {"none": 0, "prefix": rng.randint(0, len(late))}.get(mode, len(late))
    for _, event in late[:num_kept]:
        if mode != "blocks":
            _apply(content, event)
        elif event.kind is Kind.TRUNCATE:
            if rng.random() < 0.5:
                _apply(content, event)
        else:
            for piece in _blocks(event):
                if rng.random() < 0.5:
                    _apply(content, piece)
    return bytes(content)


def _without_dropped_writes(events: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
    kept: list[tuple[int, Event]] = []
    for i, event in events:
        if event.kind is Kind.FAILED_SYNC:
            while kept and kept[-1][1].kind is Kind.WRITE:
                kept.pop()
        else:
            kept.append((i, event))
    return kept


def _apply(content: bytearray, event: Event) -> None:
    if event.kind is Kind.TRUNCATE:
        del content[event.offset :]
    elif event.kind is Kind.WRITE:
        end = event.offset + len(event.data)
        content.extend(bytes(max(0, end - len(content))))
        content[event.offset : end] = event.data


def _blocks(event: Event) -> Iterator[Event]:
    at = 0
    while at < len(event.data):
        size = BLOCK_BYTES - (event.offset + at) % BLOCK_BYTES
        yield Event(Kind.WRITE, event.path, event.offset + at, event.data[at : at + size])
        at += size


async def judge_power_cuts(
    directory: Path,
    *,
    seeds: Iterable[int],
    cuts_per_workload: int,
    segments_are_synced: bool = True,
    sqlite_is_synced: bool = True,
    drive: Drive = mixed,
) -> tuple[int, list[str]]:
    """Return how many groups were rolled forward, and the violations of all states."""
    violations = []
    num_redelivered = 0
    for seed in seeds:
        source = directory / f"source-{seed}"
        recorder = Recorder(has_sqlite_syncs=sqlite_is_synced)
        files = RecordingFiles(recorder, syncs=segments_are_synced)
        with interposed(recorder):
            answered = await record(source, recorder, files, seed=seed, drive=drive)
        shutil.rmtree(source)
        rng = random.Random(seed)
        for _ in range(cuts_per_workload):
            num_events = rng.randint(0, len(recorder.events))
            judge = max(
                (a for a in answered if a.num_events <= num_events), key=lambda a: a.num_events
            ).judge.snapshot()
            _admit_unanswered(judge, answered[-1].judge)
            target = directory / "cut"
            cut_power(recorder.events[:num_events], target, rng)
            try:
                num_redelivered += await _judge_one(target, judge)
            except (AssertionError, CorruptGroups, KeyError, StoreBroken, sqlite3.Error) as e:
                violations.append(f"workload {seed}, {num_events} events: {e!r}")
    return num_redelivered, violations


def _admit_unanswered(judge: Judge, final: Judge) -> None:
    """What was under way at the cut may be found, too."""
    judge.changes += final.changes[len(judge.changes) :]
    for number, sent in final.sent.items():
        judge.sent.setdefault(number, Sent(sent.group))


async def _judge_one(target: Path, judge: Judge) -> int:
    store = open_store(target)
    try:
        saved = await store.open()
        await judge.check(store, saved)
    finally:
        await store.close()
    return judge.num_redelivered


@pytest.mark.parametrize(
    "seeds",
    [
        *[range(first, first + 9) for first in (0, 100, 200, 300)],
        pytest.param(range(1000, 1400), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=str,
)
async def test_nothing_answered_is_lost_in_modelled_power_cuts(
    tmp_path: Path, seeds: range
) -> None:
    """1000 cuts each, and 40,000."""
    with ram_directory(tmp_path) as directory:
        num_redelivered, violations = await judge_power_cuts(
            directory, seeds=seeds, cuts_per_workload=100
        )
        _, more_violations = await judge_power_cuts(
            directory, seeds=seeds[:1], cuts_per_workload=100, drive=expiring
        )
    assert violations + more_violations == []
    assert num_redelivered > 100, "no cut fell between a write and its answer"


async def test_a_durable_change_that_alters_nothing_still_secures_those_before_it(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    with interposed(recorder):
        store = open_store(tmp_path / "source", files=RecordingFiles(recorder))
        await store.open()
        await store.commit(Change(document=b"kept", is_durable=False))
        await store.commit(Change())
        num_events = len(recorder.events)
        await store.close()
    for seed in range(10):
        cut_power(recorder.events[:num_events], tmp_path / "cut", random.Random(seed))
        cut = open_store(tmp_path / "cut")
        assert (await cut.open()).document == b"kept"
        await cut.close()


async def test_what_a_failed_sync_left_in_the_cache_is_written_again(tmp_path: Path) -> None:
    """It can be read after a restart and is not on the disk; answered as a duplicate, it must be."""
    recorder = Recorder()
    files = RecordingFiles(recorder)
    groups = [new_group(number, random.Random(number)) for number in range(6)]
    failures: list[BaseException] = []
    with interposed(recorder):
        store = open_store(tmp_path / "run", files=files, on_failure=failures.append)
        await store.open()
        await store.append(groups[:2])
        files.fails = True
        with pytest.raises(StoreBroken):
            await store.append(groups[2:])
        files.fails = False
        await store.close()
        restarted = open_store(tmp_path / "run", files=files)
        await restarted.open()
        assert await restarted.append(groups) == [Appended.DUPLICATE] * 6
        num_events = len(recorder.events)
        await restarted.close()
    for seed in range(20):
        cut_power(recorder.events[:num_events], tmp_path / "cut", random.Random(seed))
        cut = open_store(tmp_path / "cut")
        assert len((await cut.open()).groups) == 6
        assert await cut.read(list(range(6))) == [group.payload for group in groups]
        await cut.close()


@pytest.mark.parametrize(
    "defect",
    ["segments are not synced", "the database is not synced", "durable changes are not forced"],
)
async def test_the_model_catches_what_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    if defect == "durable changes are not forced":
        honest = StateDb.transaction
        monkeypatch.setattr(
            StateDb, "transaction", lambda self, *, is_durable: honest(self, is_durable=False)
        )
    with ram_directory(tmp_path) as directory:
        _, violations = await judge_power_cuts(
            directory,
            seeds=[0],
            cuts_per_workload=40,
            segments_are_synced=defect != "segments are not synced",
            sqlite_is_synced=defect != "the database is not synced",
        )
    assert len(violations) > 10


@pytest.mark.parametrize(
    ("owner", "left_out", "drive"),
    [
        (DiskStore, "_sync_state", expiring),  # bytes are dropped before their rows
        (RecordingFiles, "sync_directory", mixed),
    ],
)
async def test_the_model_catches_a_sync_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, left_out: str, drive: Drive
) -> None:
    monkeypatch.setattr(owner, left_out, lambda *_: None)
    with ram_directory(tmp_path) as directory:
        _, violations = await judge_power_cuts(
            directory, seeds=[0], cuts_per_workload=40, drive=drive
        )
    assert violations
