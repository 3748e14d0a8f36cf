"""Every store against a dict: random programs of appends, changes, restarts and crashes must agree with it."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    Change,
    Durability,
    Fate,
    GroupStore,
    Move,
    NewGroup,
    Place,
    SavedRun,
    StoredBatch,
    StoredGroup,
)
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.scored_data import GroupHeader
from tests.faults.store_faults import copy_run, new_group, open_store, ram_directory, small_steps


class StoreMachine(RuleBasedStateMachine):
    """Does everything to a store and to a few dicts. A subclass says which store."""

    kind: ClassVar[str]
    directory: ClassVar[Path]
    num_operations = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rng = random.Random(0)
        self.home = Path(tempfile.mkdtemp(dir=self.directory))
        self.num_lives = 0
        self.num_sent = 0
        self.store: GroupStore = self.make()
        self.forget()
        self.open()

    def forget(self) -> None:
        self.groups: dict[int, StoredGroup] = {}
        self.payloads: dict[int, bytes] = {}
        self.known: dict[str, GroupHeader] = {}
        self.batches: dict[int, StoredBatch] = {}
        self.ended: Counter[Fate] = Counter()
        self.document: bytes | None = None
        self.facts: dict[str, bytes] = {}
        self.next_number = 0

    def make(self) -> GroupStore:
        if self.kind == "memory":
            return MemoryStore()
        return open_store(self.home / str(self.num_lives), durability=Durability(self.kind))

    def wait(self, *calls: Any) -> list[Any]:
        """Make the calls at the same moment and return what each returned or raised."""

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*calls, return_exceptions=True)

        type(self).num_operations += len(calls)
        return self.loop.run_until_complete(all_of_them())

    def open(self) -> None:
        (saved,) = self.wait(self.store.open())
        assert isinstance(saved, SavedRun), saved
        assert list(saved.groups) == [self.groups[number] for number in sorted(self.groups)]
        assert list(saved.batches) == [self.batches[number] for number in sorted(self.batches)]
        assert (saved.document, saved.next_number) == (self.document, self.next_number)
        assert saved.ended == self.ended
        assert list(saved.facts.items()) == sorted(self.facts.items())

    # What is done to both.

    def plan_append(self, data: st.DataObject) -> tuple[list[NewGroup], list[Appended]]:
        """Draw groups and tell what becomes of them, in the dicts too."""
        groups, expected = [], []
        for _ in range(data.draw(st.integers(1, 3))):
            group = new_group(self.num_sent, self.rng, num_bytes=data.draw(st.integers(0, 2000)))
            self.num_sent += 1
            if self.known and data.draw(st.integers(0, 3)) == 0:
                first = self.known[data.draw(st.sampled_from(list(self.known)))]
                is_same = data.draw(st.booleans())
                digest = first.digest if is_same else self.rng.randbytes(16)
                header = replace(group.header, group_id=first.group_id, digest=digest)
                group = replace(group, header=header)
                expected.append(Appended.DUPLICATE if is_same else Appended.CONFLICT)
            else:
                number = group.header.number
                self.known[group.header.group_id] = group.header
                self.payloads[number] = group.payload
                self.groups[number] = StoredGroup(header=group.header, move=Move(place=group.place))
                self.next_number = number + 1
                expected.append(Appended.STORED)
            groups.append(group)
        return groups, expected

    def plan_change(self, data: st.DataObject) -> Change:
        """Draw a change and make it in the dicts."""
        picked = self.pick(data)
        num_moved = data.draw(st.integers(0, len(picked)))
        moves = {
            number: Move(
                place=data.draw(st.sampled_from(Place)),
                batch=data.draw(st.none() | st.integers(0, 5)),
                deliveries=data.draw(st.integers(0, 9)),
                reason=data.draw(st.none() | st.just("why")),
            )
            for number in picked[:num_moved]
        }
        ends = {number: data.draw(st.sampled_from(Fate)) for number in picked[num_moved:]}
        batches: dict[int, StoredBatch | None] = {
            number: StoredBatch(
                number=number,
                state=data.draw(st.sampled_from(BatchState)),
                step=data.draw(st.integers(0, 99)),
                epoch=1,
                lease_id="lease",
                ttl_s=1.5,
                request_id=data.draw(st.none() | st.just("request")),
                is_plain=data.draw(st.booleans()),
            )
            for number in data.draw(st.lists(st.integers(0, 5), unique=True, max_size=2))
        }
        closed = self.batches.keys() | batches.keys()
        if closed and data.draw(st.booleans()):
            batches[data.draw(st.sampled_from(sorted(closed)))] = None
        batches_after = self.batches | batches
        self.batches = {n: batch for n, batch in batches_after.items() if batch is not None}
        for number, move in moves.items():
            self.groups[number] = replace(self.groups[number], move=move)
        for number, fate in ends.items():
            group_id = self.groups.pop(number).header.group_id
            if not self.known[group_id].digest:
                del self.known[group_id]
            del self.payloads[number]
            self.ended[fate] += 1
        document = data.draw(st.none() | st.binary(max_size=50))
        self.document = self.document if document is None else document
        facts = data.draw(
            st.dictionaries(st.sampled_from("abc"), st.binary(max_size=50), max_size=2)
        )
        self.facts |= facts
        return Change(
            moves=moves,
            ends=ends,
            batches=batches,
            document=document,
            facts=facts,
            is_durable=data.draw(st.booleans()),
        )

    def pick(self, data: st.DataObject) -> list[int]:
        if not self.groups:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(self.groups)), unique=True, max_size=4))

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        groups, expected = self.plan_append(data)
        assert self.wait(self.store.append(groups)) == [expected]

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.wait(self.store.commit(self.plan_change(data))) == [None]

    @rule(data=st.data())
    def several_at_once(self, data: st.DataObject) -> None:
        calls: list[Any] = []
        answers: list[Any] = []
        for _ in range(data.draw(st.integers(2, 4))):
            if data.draw(st.booleans()):
                groups, expected = self.plan_append(data)
                calls.append(partial(self.store.append, groups))
                answers.append(expected)
            else:
                calls.append(partial(self.store.commit, self.plan_change(data)))
                answers.append(None)
        assert self.wait(*(call() for call in calls)) == answers

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        numbers = self.pick(data)
        assert self.wait(self.store.read(numbers)) == [[self.payloads[n] for n in numbers]]

    @rule()
    def name_what_is_absent(self) -> None:
        absent = 10**6
        answers = self.wait(
            self.store.read([*self.groups, absent]),
            self.store.commit(Change(moves={absent: Move(place=Place.QUEUED)})),
        )
        assert [type(answer) for answer in answers] == [KeyError, KeyError]

    @rule(is_meant=st.integers(0, 4))
    def clear(self, is_meant: int) -> None:
        if is_meant:
            return
        assert self.wait(self.store.clear()) == [None]
        self.forget()

    @rule(is_meant=st.integers(0, 2))
    def restart(self, is_meant: int) -> None:
        if is_meant:
            return
        assert self.wait(self.store.close()) == [None]
        if self.kind != "memory":
            self.store = self.make()
        self.open()

    @rule(is_meant=st.integers(0, 2))
    def crash(self, is_meant: int) -> None:
        """The files as they are now are all that is left."""
        if is_meant or self.kind == "memory":
            return
        copy_run(self.home / str(self.num_lives), self.home / str(self.num_lives + 1))
        assert self.wait(self.store.close()) == [None]
        self.num_lives += 1
        self.store = self.make()
        self.open()

    @invariant()
    def usage_is_exact(self) -> None:
        assert self.store.usage().payload_bytes == sum(map(len, self.payloads.values()))

    def teardown(self) -> None:
        self.wait(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.home)


def run_machine(machine: type[StoreMachine], *, num_programs: int) -> int:
    """Return how many operations were done."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_programs,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.num_operations


@pytest.mark.parametrize(
    ("kind", "num_programs", "num_operations"),
    [
        *[("memory", 15, 500), ("power", 20, 700), ("process", 15, 500)],
        pytest.param("power", 4500, 200_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_a_store_agrees_with_a_dict(
    tmp_path: Path, kind: str, num_programs: int, num_operations: int
) -> None:
    with small_steps(), ram_directory(tmp_path) as directory:
        machine = type("Machine", (StoreMachine,), {"kind": kind, "directory": directory})
        assert run_machine(machine, num_programs=num_programs) >= num_operations
