"""What the fault tests of the disk store share: a random workload, and its judge.

The judge knows what was asked of a store and what it answered, and tells whether what a later opening finds could be
the truth: nothing lost that was acknowledged, nothing half done, nothing invented. Every commit of the workload writes
its own number as the document and as one of three facts, so what was opened says itself how many commits survived.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from atroposlib.api.stores import run_file
from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    Change,
    Durability,
    Fate,
    Move,
    NewGroup,
    Place,
    SavedRun,
    StoredBatch,
    StoreFull,
)
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.space import DiskSpace
from atroposlib.scored_data import GroupHeader

BALLAST_BYTES = 4 << 20


@contextmanager
def ram_directory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory, where thousands of crash states cost no disk; `otherwise` where there is none."""
    if not os.access("/dev/shm", os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@contextmanager
def small_steps() -> Iterator[None]:
    """Let stores move the WAL into the file, and shrink it, every few transactions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_file, "_CHECKPOINT_BYTES", 3 * run_file._JOB_BYTES)
        patch.setattr(run_file, "_KEPT_FREE_BYTES", 0)
        patch.setattr(run_file, "_KEPT_FREE_SHARE", 0.05)
        yield


def open_store(
    directory: Path,
    *,
    durability: Durability = Durability.POWER,
    min_free_bytes: int = 0,
    on_failure: Callable[[BaseException], None] | None = None,
) -> DiskStore:
    """A store with a small ballast, which looks after its file all the time; not yet opened."""
    return DiskStore(
        directory,
        durability=durability,
        space=DiskSpace(directory, min_free_bytes=min_free_bytes, ballast_bytes=BALLAST_BYTES),
        on_failure=on_failure,
        clock=map(float, itertools.count()).__next__,
    )


def new_group(number: int, rng: random.Random, *, num_bytes: int | None = None) -> NewGroup:
    """A group with a payload of its own."""
    payload = rng.randbytes(rng.randint(1, 6000) if num_bytes is None else num_bytes)
    return NewGroup(
        header=GroupHeader(
            number=number,
            env_id=rng.choice([None, 0, 1]),
            num_sequences=rng.randint(1, 8),
            policy_version=rng.choice([None, 3]),
            arrival_step=rng.randint(0, 9),
            num_tokens=rng.randint(1, 1000),
            num_bytes=len(payload),
            group_id=uuid.UUID(int=rng.getrandbits(128)).hex,
            digest=rng.choice([b"", rng.randbytes(16), rng.randbytes(16)]),
        ),
        payload=payload,
        place=rng.choice([Place.QUEUED, Place.BUFFERED]),
    )


@dataclass(slots=True)
class Sent:
    """A group that was handed to `append`."""

    group: NewGroup
    is_acknowledged: bool = False
    is_refused: bool = False


@dataclass(slots=True)
class Judge:
    """What was asked and answered."""

    sent: dict[int, Sent] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    """Change n writes n as the document."""
    num_durable: int = 0
    """So many first changes are known to be durable."""
    num_redelivered: int = 0
    """Found on opening though their append was not acknowledged."""

    def snapshot(self) -> Judge:
        """The same knowledge, which later events do not alter."""
        sent = {n: Sent(s.group, s.is_acknowledged, s.is_refused) for n, s in self.sent.items()}
        return Judge(sent, list(self.changes), self.num_durable)

    async def check(self, store: DiskStore, saved: SavedRun) -> None:
        """Fail unless `saved`, opened by `store` after a crash, agrees with what was answered."""
        num_applied = 0 if saved.document is None else int(saved.document) + 1
        assert self.num_durable <= num_applied <= len(self.changes), "a durable change is lost"
        moves: dict[int, Move] = {}
        ended: dict[int, Fate] = {}
        batches: dict[int, StoredBatch | None] = {}
        facts: dict[str, bytes] = {}
        for change in self.changes[:num_applied]:
            moves |= change.moves
            ended |= change.ends
            batches |= change.batches
            facts |= change.facts
        assert saved.ended == Counter(ended.values())
        assert saved.facts == facts
        assert list(saved.batches) == [b for _, b in sorted(batches.items()) if b is not None]
        found = {group.header.number: group for group in saved.groups}
        assert list(found) == sorted(found)
        for number, sent in self.sent.items():
            if number in ended:
                assert number not in found, f"group {number} ended and is back"
            elif sent.is_acknowledged:
                assert number in found, f"group {number} was acknowledged and is lost"
        for number, group in found.items():
            sent = self.sent[number]
            self.num_redelivered += not sent.is_acknowledged
            assert group.header == sent.group.header
            assert group.move == moves.get(number, Move(place=sent.group.place))
        await self.check_payloads(store, saved)
        assert saved.next_number > max([-1, *found, *ended])
        known = set(found) | {number for number in ended if self.sent[number].group.header.digest}
        await self.check_ids(store, known=known, next_number=saved.next_number)

    async def check_payloads(self, store: DiskStore, saved: SavedRun) -> None:
        """Fail unless every group that was found can be read, and is what was sent."""
        numbers = [group.header.number for group in saved.groups]
        payloads = await store.read(numbers)
        for number, payload in zip(numbers, payloads, strict=True):
            assert payload == self.sent[number].group.payload, f"payload {number} differs"

    async def check_ids(self, store: DiskStore, *, known: set[int], next_number: int) -> None:
        """Fail unless sending everything once more stores exactly what is not `known`."""
        again = []
        for offset, sent in enumerate(self.sent.values()):
            header = replace(sent.group.header, number=next_number + offset)
            again.append(replace(sent.group, header=header, payload=b"again", place=Place.QUEUED))
        outcomes = await store.append(again)
        for number, outcome in zip(self.sent, outcomes, strict=True):
            expected = Appended.DUPLICATE if number in known else Appended.STORED
            assert outcome is expected, f"group {number} sent again: {outcome}"


class Workload:
    """A random run against a store: groups come, are leased, acknowledged, ended, set aside."""

    def __init__(self, store: DiskStore, rng: random.Random, judge: Judge) -> None:
        self._store = store
        self._rng = rng
        self._judge = judge
        self._next_number = 1 + max(judge.sent, default=-1)
        self._held: dict[int, Place] = {}
        self._batches: dict[int, list[int]] = {}
        self.on_answer: Callable[[], None] = lambda: None
        """Called after every answer."""

    async def run(self, num_steps: int) -> None:
        """Do `num_steps` things; raises `StoreBroken` when the store breaks."""
        for _ in range(num_steps):
            await self.step()

    async def step(self) -> None:
        """Do one thing."""
        roll = self._rng.random()
        queued = [n for n, place in self._held.items() if place <= Place.BUFFERED]
        if roll < 0.5 or not (queued or self._batches):
            sizes = self._rng.choice([[1], [1], [2], [1, 1, 3]])
            await asyncio.gather(*(self._append(size) for size in sizes))
        elif roll < 0.75 and queued:
            await self._lease(self._rng.sample(queued, min(len(queued), self._rng.randint(1, 4))))
        elif self._batches:
            await self._acknowledge(self._rng.choice(list(self._batches)))
        elif queued:
            number = self._rng.choice(queued)
            del self._held[number]
            await self._commit(Change(ends={number: Fate.EXPIRED}, is_durable=False))

    async def _append(self, num_groups: int) -> None:
        groups = []
        for _ in range(num_groups):
            groups.append(new_group(self._next_number, self._rng))
            self._next_number += 1
        sent = [Sent(group) for group in groups]
        self._judge.sent |= {one.group.header.number: one for one in sent}
        try:
            outcomes = await self._store.append(groups)
        except StoreFull:
            for one in sent:
                one.is_refused = True
            return
        assert outcomes == [Appended.STORED] * num_groups
        for one in sent:
            one.is_acknowledged = True
            self._held[one.group.header.number] = one.group.place
        self.on_answer()

    async def _lease(self, numbers: list[int]) -> None:
        batch = len(self._judge.changes)
        for number in numbers:
            self._held[number] = Place.LEASED
        self._batches[batch] = numbers
        await self._commit(
            Change(
                moves={n: Move(place=Place.LEASED, batch=batch, deliveries=1) for n in numbers},
                batches={
                    batch: StoredBatch(
                        number=batch,
                        state=BatchState.LEASED,
                        step=batch,
                        epoch=1,
                        lease_id=str(batch),
                        ttl_s=900.0,
                    )
                },
            )
        )

    async def _acknowledge(self, batch: int) -> None:
        numbers = self._batches.pop(batch)
        set_aside = numbers[:1] if self._rng.random() < 0.1 else []
        for number in numbers:
            del self._held[number]
        if set_aside:
            self._held[set_aside[0]] = Place.DEAD
        await self._commit(
            Change(
                moves={n: Move(place=Place.DEAD, reason="poison") for n in set_aside},
                ends={n: Fate.TRAINED for n in numbers if n not in set_aside},
                batches={batch: None},
                is_durable=self._rng.random() < 0.8,
            )
        )

    async def _commit(self, change: Change) -> None:
        number = len(self._judge.changes)
        said = str(number).encode()
        change = replace(change, document=said, facts={f"fact {number % 3}": said})
        self._judge.changes.append(change)
        await self._store.commit(change)
        if change.is_durable:
            self._judge.num_durable = number + 1
        self.on_answer()


def copy_run(source: Path, target: Path) -> None:
    """Copy a run directory as it is on the disk now."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
