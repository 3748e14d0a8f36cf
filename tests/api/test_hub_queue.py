"""The queue index against a plain list, and what planning costs when the queue is long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pydantic import ValidationError

from atroposlib.api.run.batching import Blocker, NoBatch, Plan
from atroposlib.api.run.queue import GroupQueue, rounded
from atroposlib.api.schemas import MAX_BATCH_SIZE, Registration
from atroposlib.scored_data import GroupHeader
from tests.api.helpers_api import plan_batch, plan_counted


def header(number: int, size: int = 4, env_id: int | None = 0, **fields: int) -> GroupHeader:
    return GroupHeader(number=number, num_sequences=size, env_id=env_id, **fields)


def filled(num_groups: int, *, num_envs: int, sizes: Sequence[int]) -> GroupQueue:
    rng = random.Random(0)
    queue = GroupQueue()
    for number in range(num_groups):
        queue.add(header(number, rng.choice(sizes), rng.randrange(num_envs)))
    return queue


def num_lines(
    queue: GroupQueue, batch_size: int, floors: Mapping[int, int], *, num_waived: int = 0
) -> int:
    """Lines of Python that one plan runs."""
    plan, num_lines = plan_counted(queue, batch_size=batch_size, floors=floors, overdue_before=1)
    assert isinstance(plan, Plan)
    assert len(plan.waived) == num_waived
    return num_lines


env_ids_st = st.sampled_from([None, 0, 1, 2])


class QueueAgainstList(RuleBasedStateMachine):
    """`GroupQueue` answers every question as a sorted list of headers would."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = GroupQueue()
        self.model: dict[int, GroupHeader] = {}
        self.gone: dict[int, GroupHeader] = {}
        self.next_number = 0

    def in_order(self) -> list[GroupHeader]:
        return [self.model[number] for number in sorted(self.model)]

    @rule(
        sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
        env_id=env_ids_st,
        version=st.one_of(st.none(), st.integers(0, 5)),
        arrival_step=st.integers(0, 5),
    )
    def arrive(
        self, sizes: list[int], env_id: int | None, version: int | None, arrival_step: int
    ) -> None:
        for size in sizes:
            new = GroupHeader(
                number=self.next_number,
                env_id=env_id,
                num_sequences=size,
                policy_version=version,
                arrival_step=arrival_step,
                num_bytes=10 * size + self.next_number,
            )
            self.next_number += 1
            self.queue.add(new)
            self.model[new.number] = new

    def take(self, numbers: list[int]) -> None:
        self.queue.remove([self.model[number] for number in numbers])
        for number in numbers:
            self.gone[number] = self.model.pop(number)

    @precondition(lambda self: self.model)
    @rule(choice=st.data())
    def leave(self, choice: st.DataObject) -> None:
        numbers = st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=8)
        self.take(choice.draw(numbers))

    @precondition(lambda self: self.gone)
    @rule(choice=st.data())
    def come_back(self, choice: st.DataObject) -> None:
        numbers = st.lists(st.sampled_from(sorted(self.gone)), unique=True, max_size=8)
        for number in choice.draw(numbers):
            self.queue.add(self.gone[number])
            self.model[number] = self.gone.pop(number)

    @rule(
        batch_size=st.integers(1, 20),
        floors=st.dictionaries(st.sampled_from([0, 1, 2]), st.integers(1, 6), max_size=3),
        is_taken=st.booleans(),
    )
    def plan(self, batch_size: int, floors: dict[int, int], is_taken: bool) -> None:
        plan = self.queue.plan(batch_size=batch_size, floors=floors)
        assert plan == plan_batch(self.in_order(), batch_size=batch_size, floors=floors)
        if is_taken and isinstance(plan, Plan):
            self.take([group.number for group in plan.groups])

    @rule(oldest_version=st.integers(0, 6))
    def find_stale(self, oldest_version: int) -> None:
        assert self.queue.stale(oldest_version) == [
            group for group in self.in_order() if version_of(group) < oldest_version
        ]

    @invariant()
    def the_order_is_that_of_arrival(self) -> None:
        assert list(self.queue) == self.in_order()
        assert len(self.queue) == len(self.model)

    @invariant()
    def counts_agree(self) -> None:
        groups = list(self.model.values())
        assert self.queue.total_sequences == sum(g.num_sequences for g in groups)
        assert self.queue.total_bytes == sum(g.num_bytes for g in groups)
        assert self.queue.largest_of_all() == max((g.num_sequences for g in groups), default=0)
        assert self.queue.versions() == Counter(map(version_of, groups))
        supplies = {each: self.queue.num_sequences(each) for each in {g.env_id for g in groups}}
        assert self.queue.supplies == supplies
        for multiple in (1, 3, 8):
            sums = [rounded(supply, multiple) for supply in supplies.values()]
            assert self.queue.num_rounded(multiple) == sum(sums)
        for env_id in (None, 0, 1, 2, 99):
            of_env = [g for g in groups if g.env_id == env_id]
            assert self.queue.num_sequences(env_id) == sum(g.num_sequences for g in of_env)
            assert self.queue.largest(env_id) == max((g.num_sequences for g in of_env), default=0)


def version_of(group: GroupHeader) -> int:
    return group.arrival_step if group.policy_version is None else group.policy_version


TestQueueAgainstList = QueueAgainstList.TestCase
TestQueueAgainstList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("patience", "served_in_step"), [(3, 3), (7, 7), (None, None)])
def test_a_group_that_is_passed_over_is_served_once_it_is_overdue(
    patience: int | None, served_in_step: int | None
) -> None:
    queue = GroupQueue()
    queue.add(header(0, 5))
    for number, size in enumerate([2, 6, 1, 7] * 20, start=1):
        queue.add(header(number, size, arrival_step=number // 2))
    served = None
    for step in range(12):
        overdue_before = None if patience is None else step - patience + 1
        plan = queue.plan(batch_size=8, floors={}, overdue_before=overdue_before)
        assert isinstance(plan, Plan)
        queue.remove(plan.groups)
        if any(group.number == 0 for group in plan.groups):
            served = step
    assert served == served_in_step


def test_a_group_that_fits_no_batch_does_not_hold_up_the_others_when_overdue() -> None:
    queue = GroupQueue()
    for number, size in enumerate([3, 9, 4, 8, 4]):
        queue.add(header(number, size))
    plan = queue.plan(batch_size=8, floors={}, overdue_before=10)
    assert isinstance(plan, Plan)
    assert [group.number for group in plan.groups] == [2, 4]


def test_no_group_is_passed_over_for_long_where_floors_bind_and_sizes_are_mixed() -> None:
    """Environments 0 and 1 owe half of each batch, and environment 2 brings more than its half."""
    patience, batch_size = 8, 32
    rng = random.Random(0)
    queue = GroupQueue()
    number = num_cut = num_binding = 0
    longest = 0
    for step in range(400):
        for env_id, rate in ((0, 8), (1, 8), (2, 17)):
            while queue.num_sequences(env_id) < 3 * rate:
                queue.add(header(number, rng.choice([3, 4, 5, 8]), env_id, arrival_step=step))
                number += 1
        plan = queue.plan(
            batch_size=batch_size, floors={0: 8, 1: 8}, overdue_before=step - patience
        )
        num_binding += plan != queue.plan(batch_size=batch_size, floors={})
        assert isinstance(plan, Plan)
        assert plan.waived == ()
        queue.remove(plan.groups)
        num_cut += 1
        longest = max(longest, *(step - group.arrival_step for group in plan.groups))
        longest = max(longest, *(step - group.arrival_step for group in queue))
    assert num_cut == 400
    assert num_binding >= 100
    assert longest <= patience + 4


def test_removal_of_an_absent_group_changes_nothing() -> None:
    queue = GroupQueue()
    queue.add(header(1))
    with pytest.raises(KeyError):
        queue.remove([header(2)])
    assert list(queue) == [header(1)]
    assert queue.total_sequences == 4


# What a plan costs, in lines of Python that run. The limits are about twice what was counted.


class Load(NamedTuple):
    """A queue, a batch and its floors."""

    num_groups: int
    num_envs: int
    sizes: Sequence[int]
    batch_size: int
    floors: Mapping[int, int]


EIGHT, FEW, MANY = (8,), range(4, 17), range(1, 17)
QUARTER = MAX_BATCH_SIZE // 4


@pytest.mark.parametrize(
    ("load", "limit"),
    [
        (Load(20_000, 4, EIGHT, 256, {}), 1_000),
        (Load(20_000, 4, EIGHT, 256, dict.fromkeys(range(4), 64)), 4_000),
        (Load(20_000, 4, MANY, 4096, {}), 30_000),
        (Load(20_000, 4, MANY, 4096, dict.fromkeys(range(4), 1024)), 70_000),
        (Load(20_000, 4, MANY, MAX_BATCH_SIZE, {}), 100_000),
        (Load(20_000, 4, MANY, MAX_BATCH_SIZE, dict.fromkeys(range(4), QUARTER)), 200_000),
        # Hundreds of environments with floors.
        (Load(20_000, 300, EIGHT, 2400, dict.fromkeys(range(300), 8)), 150_000),
        *[
            (Load(20_000, 300, FEW, 4096, dict.fromkeys(range(300), floor)), 350_000)
            for floor in (5, 8, 13)
        ],
        # Nearly every group is from another environment.
        (Load(20_000, 20_000, EIGHT, 256, {}), 1_000),
        (Load(20_000, 20_000, MANY, 256, {}), 5_000),
    ],
)
def test_a_plan_costs_the_same_however_long_the_queue_is(load: Load, limit: int) -> None:
    short, long = (
        num_lines(
            filled(num_groups, num_envs=load.num_envs, sizes=load.sizes),
            load.batch_size,
            load.floors,
        )
        for num_groups in (load.num_groups // 4, load.num_groups)
    )
    assert long < limit
    assert long <= 1.05 * short


def test_floors_among_hundreds_are_waived_at_a_bounded_cost() -> None:
    queue = filled(20_000, num_envs=300, sizes=range(4, 17, 4))
    for number in range(20_000, 20_020):
        queue.add(header(number, 12, 300))
    # 301 times 8 is the batch, and the last environment has groups of 12 alone.
    assert num_lines(queue, 2408, dict.fromkeys(range(301), 8), num_waived=1) < 450_000


def test_a_batch_size_beyond_what_can_be_planned_is_refused_with_the_bound() -> None:
    fields = dict.fromkeys(Registration.model_fields, 1)
    fields |= {"wandb_group": "", "wandb_project": "", "checkpoint_dir": ""}
    with pytest.raises(
        ValidationError, match=f"batch_size\n.*less than or equal to {MAX_BATCH_SIZE}"
    ):
        Registration.model_validate(fields | {"batch_size": MAX_BATCH_SIZE + 1})


def test_a_long_queue_without_a_batch_is_found_out_cheaply() -> None:
    queue = filled(20_000, num_envs=4, sizes=range(2, 17, 2))
    plan, num_lines = plan_counted(queue, batch_size=4095, floors={0: 100, 1: 100})
    assert isinstance(plan, NoBatch)
    assert plan.blocker is Blocker.SIZES
    assert num_lines < 2_000
