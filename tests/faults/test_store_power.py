"""Loss of power, modelled: what the disk store answered is there in every state that a power cut may leave behind.

Each write, sync, truncation, creation and deletion of SQLite's files is recorded in order. For many moments the
directory is built anew as a power cut at that moment could leave it: what a sync covered is there; of what came later
any 4 KiB blocks may be there or not, and so may entries of the directory that no sync of it covered. This is a model
of files, not of one file system's journal, and allows more than any real one does. Defects planted on purpose show
that the test can fail.
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from atroposlib.api.stores import run_file
from atroposlib.api.stores.base import Appended, Change, CorruptGroups, StoreBroken, UnreadableRun
from atroposlib.api.stores.run_file import RunFile
from tests.faults.sqlite_vfs import SqliteFiles, interposed, require_interposable
from tests.faults.store_faults import (
    Judge,
    Sent,
    Workload,
    copy_run,
    new_group,
    open_store,
    ram_directory,
    small_steps,
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
    """Everything that happened to the SQLite files of one run."""

    events: list[Event] = field(default_factory=list)
    left_out: str = ""
    """A sync that is left out: a defect."""
    num_good_syncs: float = math.inf
    """So many syncs succeed; the later ones fail."""
    _known: set[str] = field(default_factory=set)
    _unlisted: set[str] = field(default_factory=set)
    """Journals not synced since they were created."""

    def add(self, kind: Kind, path: str, offset: int = 0, data: bytes = b"") -> int:
        if kind is Kind.SYNC_DIRECTORY or Path(path).name.startswith("run.db"):
            self.events.append(Event(kind, path, offset, data))
        return 0

    def opened(self, path: str) -> int:
        if path not in self._known:
            self._known.add(path)
            self._unlisted.add(path)
            self.add(Kind.CREATE, path)
        return 0

    def wrote(self, path: str, data: bytes, offset: int) -> int:
        return self.add(Kind.WRITE, path, offset, data)

    def truncated(self, path: str, size: int) -> int:
        return self.add(Kind.TRUNCATE, path, size)

    def synced(self, path: str) -> int:
        self.num_good_syncs -= 1
        if self.num_good_syncs < 0:
            self.add(Kind.FAILED_SYNC, path)
            return sqlite3.SQLITE_IOERR_FSYNC
        if self.left_out == "file":
            return 0
        if path in self._unlisted and path.endswith(("-wal", "-journal")):
            # SQLite syncs the directory with the first sync of a journal, out of sight of its file layer.
            self._unlisted.discard(path)
            self.add(Kind.SYNC_DIRECTORY, str(Path(path).parent))
        return self.add(Kind.SYNC, path)

    def deleted(self, path: str) -> int:
        self._known.discard(path)
        return self.add(Kind.UNLINK, path)

    def write_again(self, path: Path) -> None:
        if path.exists() and self.left_out != "write again":
            self.add(Kind.WRITE, str(path), 0, path.read_bytes())
            self.add(Kind.SYNC, str(path))


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Let `recorder` see what stores do that are opened in the block."""
    with pytest.MonkeyPatch.context() as patch, small_steps(), interposed(recorder):
        patch.setattr(run_file, "_write_again", recorder.write_again)
        yield


@dataclass(frozen=True, slots=True)
class Answered:
    """What was known after so many events."""

    num_events: int
    judge: Judge


async def record(directory: Path, recorder: Recorder, *, seed: int) -> list[Answered]:
    """Drive a workload; return what was answered when. The first entry is the empty directory."""
    judge = Judge()
    answered = [Answered(0, Judge())]

    def note() -> None:
        answered.append(Answered(len(recorder.events), judge.snapshot()))

    with recorded(recorder):
        store = open_store(directory)
        await store.open()
        workload = Workload(store, random.Random(seed), judge)
        workload.on_answer = note
        await workload.run(45)
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
        content = _content_after_cut([(i, events[i]) for i in indices], directory_synced, rng)
        if content is not None:
            (target / Path(path).name).write_bytes(content)


def _content_after_cut(
    events: list[tuple[int, Event]], directory_synced: int, rng: random.Random
) -> bytes | None:
    life = [pair for pair in events if pair[1].kind in (Kind.CREATE, Kind.UNLINK)]
    while life and life[-1][1].kind is Kind.UNLINK:
        if life[-1][0] < directory_synced or rng.random() < 0.5:
            return None
        life.pop()  # the deletion is undone
    created = life[-1][0] if life else -1
    events = [pair for pair in events if pair[0] > created and pair[1].kind is not Kind.UNLINK]
    events = _without_dropped_writes(events)
    last_sync = max((i for i, event in events if event.kind is Kind.SYNC), default=-1)
    if created > directory_synced and rng.random() < 0.5:
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
    directory: Path, *, seeds: Iterable[int], cuts_per_workload: int, left_out: str = ""
) -> tuple[int, list[str]]:
    """Return how many groups were found that had not been answered, and the violations of all states."""
    violations = []
    num_redelivered = 0
    for seed in seeds:
        source = directory / f"source-{seed}"
        recorder = Recorder(left_out=left_out)
        answered = await record(source, recorder, seed=seed)
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
            except (AssertionError, CorruptGroups, StoreBroken, UnreadableRun) as e:
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
        range(6),
        pytest.param(range(1000, 1400), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=str,
)
async def test_nothing_answered_is_lost_in_modelled_power_cuts(
    tmp_path: Path, seeds: range
) -> None:
    """600 cuts each, and 40,000; 100 show a sync that is left out."""
    with ram_directory(tmp_path) as directory:
        num_redelivered, violations = await judge_power_cuts(
            directory, seeds=seeds, cuts_per_workload=100
        )
    assert violations == []
    assert num_redelivered > 100, "no cut fell between a write and its answer"


async def test_a_durable_change_that_alters_nothing_still_secures_those_before_it(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    with recorded(recorder):
        store = open_store(tmp_path / "source")
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


@pytest.mark.parametrize("left_out", ["", "write again"])
async def test_what_a_failed_sync_left_in_the_cache_is_written_again(
    tmp_path: Path, left_out: str
) -> None:
    """It can be read after a restart and is not on the disk; answered as a duplicate, it must be.

    The power may also be cut while the restarted store moves it into the file.
    """
    recorder = Recorder(left_out=left_out)
    groups = [new_group(number, random.Random(number)) for number in range(6)]
    with recorded(recorder):
        store = open_store(tmp_path / "run")
        await store.open()
        await store.append(groups[:1])
        await store.append(groups[1:2])
        await store.commit(Change(document=b"so many that the WAL begins anew"))
        recorder.num_good_syncs = 1  # of the WAL's head
        with pytest.raises(StoreBroken):
            await store.append(groups[2:])
        num_broken, known = len(recorder.events), set(recorder._known)
        copy_run(tmp_path / "run", tmp_path / "killed")
        await store.close()  # would discard what was not answered; the process was killed before
        copy_run(tmp_path / "killed", tmp_path / "run")
        del recorder.events[num_broken:]
        recorder._known = known
        recorder.num_good_syncs = math.inf
        restarted = open_store(tmp_path / "run")
        await restarted.open()
        assert await restarted.append(groups) == [Appended.DUPLICATE] * 6
        num_answered = len(recorder.events)
        await restarted.close()
    violations = []
    for seed, num_events in itertools.product(range(8), range(num_broken, num_answered + 1)):
        cut_power(recorder.events[:num_events], tmp_path / "cut", random.Random(seed))
        cut = open_store(tmp_path / "cut")
        try:
            num_groups = len((await cut.open()).groups)
            assert num_groups in (6,) if num_events == num_answered else (2, 6)
            numbers = list(range(num_groups))
            assert await cut.read(numbers) == [group.payload for group in groups[:num_groups]]
            await cut.close()
        except (AssertionError, CorruptGroups, UnreadableRun) as e:
            violations.append(e)
    assert bool(violations) == bool(left_out), violations


@pytest.mark.parametrize("left_out", ["file", "durable changes"])
async def test_the_model_catches_a_sync_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    if left_out == "durable changes":
        honest = RunFile.transaction
        monkeypatch.setattr(
            RunFile, "transaction", lambda self, *, is_durable: honest(self, is_durable=False)
        )
    with ram_directory(tmp_path) as directory:
        _, violations = await judge_power_cuts(
            directory, seeds=[0], cuts_per_workload=100, left_out=left_out
        )
    assert violations
