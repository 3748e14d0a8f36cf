"""The batching policy: the original's golden vectors, and properties against brute force."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.run.batching import (
    Blocker,
    NoBatch,
    Plan,
    oldest_subset,
    plan_lines,
    sequence_floors,
)
from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)
from atroposlib.scored_data import GroupHeader
from tests.api.helpers_api import plan_batch


def queue_of(sizes: list[int], env_ids: list[int | None] | None = None) -> list[GroupHeader]:
    env_ids = env_ids or [0] * len(sizes)
    return [
        GroupHeader(number=n, env_id=env_id, num_sequences=size)
        for n, (size, env_id) in enumerate(zip(sizes, env_ids, strict=True))
    ]


def picked(plan: Plan | NoBatch) -> list[int] | None:
    return None if isinstance(plan, NoBatch) else [group.number for group in plan.groups]


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [
        ([3, 2, 2], 4, [1, 2]),
        ([2, 3, 2], 5, [0, 1]),
        ([1, 4, 3], 4, [0, 2]),
        ([4, 1, 1, 2], 4, [0]),
        ([5], 4, []),
        ([], 4, []),
    ],
)
def test_odd_sizes_reproduce_the_golden_vectors(
    sizes: list[int], target: int, expected: list[int]
) -> None:
    assert oldest_subset(sizes, target) == expected
    groups = [{"tokens": [[]] * size} for size in sizes]
    assert find_groups_summing_to_target(groups, target) == expected


def test_original_function_names_return_groups_and_the_rest() -> None:
    queue = [{"tokens": [[1]] * size, "env_id": env} for size, env in [(3, 0), (4, 0), (4, 1)]]
    batch, rest = grab_exact_from_heterogeneous_queue(queue, 8)
    assert batch == queue[1:]
    assert rest == queue[:1]
    batch, rest = grab_exact_from_heterogeneous_queue(queue, 5)
    assert batch is None
    assert rest == queue
    config = {"registered_id": 1, "connected": True, "min_batch_allocation": 1.0}
    batch, _ = grab_batch_with_minimum_allocations(queue, 4, [config])
    assert batch == [queue[2]]
    gone = {**config, "connected": False}
    batch, _ = grab_batch_with_minimum_allocations(queue, 4, [gone])
    assert batch == [queue[1]]


def test_missing_environment_is_waited_for_and_named() -> None:
    plan = plan_batch(queue_of([2, 2, 2]), batch_size=4, floors={7: 2})
    assert isinstance(plan, NoBatch)
    assert "environment 7 must supply 2 of 4" in plan.reason
    assert (plan.blocker, plan.env_id, plan.have, plan.need) == (Blocker.MINIMUM, 7, 0, 2)


def test_too_few_sequences_are_counted_without_groups_that_fit_no_batch() -> None:
    plan = plan_batch(queue_of([2, 9, 3]), batch_size=8)
    assert isinstance(plan, NoBatch)
    assert (plan.blocker, plan.env_id, plan.have, plan.need) == (Blocker.TOO_FEW, None, 5, 8)
    assert plan.reason == "5 of 8 sequences are queued"


def test_floors_that_whole_groups_cannot_honour_together_are_waived_last_first() -> None:
    queue = queue_of([3, 3, 4, 4], [0, 0, 1, 1])
    plan = plan_batch(queue, batch_size=8, floors={1: 4, 0: 4})
    assert isinstance(plan, Plan)
    assert plan.waived == (0,)
    assert [group.number for group in plan.groups] == [2, 3]


def test_sizes_that_never_sum_are_reported_as_stuck() -> None:
    plan = plan_batch(queue_of([3, 3, 3]), batch_size=8)
    assert isinstance(plan, NoBatch)
    assert "{3: 2}" in plan.reason
    assert (plan.blocker, plan.env_id, plan.have, plan.need) == (Blocker.SIZES, None, 9, 8)
    assert not isinstance(plan_batch(queue_of([3]), batch_size=8), Plan)


def test_scaled_floors_never_exceed_the_batch_and_keep_everyone() -> None:
    assert sequence_floors(8, {0: 0.75, 1: 0.75}) == {0: 4, 1: 4}
    assert sequence_floors(4, {0: 1.0, 1: 0.25}) == {0: 3, 1: 1}
    assert sequence_floors(100, {0: 0.29, 1: 0.0}) == {0: 29}


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 7), max_size=9), st.integers(0, 20))
def test_oldest_subset_is_the_first_in_lexicographic_order(sizes: list[int], target: int) -> None:
    indices = [index for index, size in enumerate(sizes) if size > 0]
    possible = [
        list(chosen)
        for count in range(1, len(indices) + 1)
        for chosen in itertools.combinations(indices, count)
        if sum(sizes[index] for index in chosen) == target
    ]
    assert oldest_subset(sizes, target) == min(possible, default=[])


class Case(NamedTuple):
    queue: list[GroupHeader]
    batch_size: int
    floors: dict[int, int]


def random_case(rng: random.Random) -> Case:
    """Up to 10 groups of few sizes, zero and larger than the batch included, and floors for some environments."""
    env_ids: list[int | None] = rng.sample([None, 0, 1, 2, 3], rng.randint(1, 5))
    sizes = rng.sample(range(10), rng.randint(1, 4))
    num_groups = rng.randint(1, 10)
    queue = queue_of(
        [rng.choice(sizes) for _ in range(num_groups)],
        [rng.choice(env_ids) for _ in range(num_groups)],
    )
    batch_size = rng.randint(1, 24)
    with_floor = [env_id for env_id in env_ids if env_id is not None]
    floors = {
        env_id: rng.randint(1, max(1, batch_size // 2))
        for env_id in rng.sample(with_floor, rng.randint(0, len(with_floor)))
    }
    return Case(queue, batch_size, floors)


class Expected:
    """What the rules say about a small queue, by looking at every subset of it."""

    def __init__(self, queue: list[GroupHeader], batch_size: int, floors: dict[int, int]) -> None:
        usable = [group for group in queue if 0 < group.num_sequences <= batch_size]
        # Row m: the groups of subset m. The oldest group is the highest bit, so of two subsets the larger is the older.
        subsets = np.arange(1 << len(usable))
        member = subsets[:, None] >> np.arange(len(usable))[::-1] & 1
        sizes = np.array([group.num_sequences for group in usable], dtype=int)
        is_of = {e: np.array([g.env_id == e for g in usable], dtype=bool) for e in floors}
        exact = member @ sizes == batch_size
        supply = {e: member @ (sizes * is_of[e]) for e in floors}

        self.blocker: Blocker | None = None
        self.missing_env: int | None = None
        self.usable = [group.number for group in usable]
        self.possible: list[tuple[int, ...]] = []
        """Batches that honour all floors that can be honoured."""
        self.best_of_all: tuple[int, ...] = ()
        """Without any floors."""
        self.waived: tuple[int, ...] = ()
        lacking = [e for e, floor in floors.items() if (sizes * is_of[e]).sum() < floor]
        if sizes.sum() < batch_size:
            self.blocker = Blocker.TOO_FEW
        elif lacking:
            self.blocker, self.missing_env = Blocker.MINIMUM, lacking[0]
        elif not exact.any():
            self.blocker = Blocker.SIZES
        else:
            kept = list(floors)
            while True:
                allowed = exact.copy()
                for env_id in kept:
                    allowed &= supply[env_id] >= floors[env_id]
                if allowed.any():
                    break
                kept.pop()
            self.waived = tuple(floors)[len(kept) :]
            self.possible = self.as_numbers(subsets[allowed].tolist())
            # The lowest bit is the last group: highest possible, so complete earliest; then the oldest.
            best = max(subsets[exact].tolist(), key=lambda subset: (subset & -subset, subset))
            (self.best_of_all,) = self.as_numbers([best])

    def as_numbers(self, found: Iterable[int]) -> list[tuple[int, ...]]:
        places = list(enumerate(reversed(self.usable)))
        return [tuple(n for i, n in places if subset >> i & 1)[::-1] for subset in found]


def assert_order_of_arrival(queue: list[GroupHeader], taken: set[int]) -> None:
    """Of each environment and size, the oldest left."""
    kinds: dict[tuple[int | None, int], list[bool]] = defaultdict(list)
    for group in queue:
        kinds[group.env_id, group.num_sequences].append(group.number in taken)
    for is_taken in kinds.values():
        assert is_taken == sorted(is_taken, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_random_queues_give_what_brute_force_over_all_subsets_says(seed: int) -> None:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(500):
        queue, batch_size, floors = random_case(rng)
        plan = plan_batch(queue, batch_size=batch_size, floors=floors)
        expected = Expected(queue, batch_size, floors)
        if isinstance(plan, NoBatch):
            assert (plan.blocker, plan.env_id) == (expected.blocker, expected.missing_env)
            outcomes[plan.blocker] += 1
            continue
        numbers = tuple(group.number for group in plan.groups)
        assert numbers in expected.possible
        assert plan.waived == expected.waived
        assert_order_of_arrival(queue, set(numbers))
        if expected.best_of_all in expected.possible and not plan.waived:
            assert numbers == expected.best_of_all
            outcomes["floors" if floors else "free"] += 1
        else:
            outcomes["waived" if plan.waived else "binding"] += 1
    assert min(outcomes[kind] for kind in ("free", "floors", "binding", *Blocker)) >= 5, outcomes
    assert outcomes["waived"] > 0


def is_possible(case: Case) -> bool:
    """Whether a batch honours every floor, by sets of (sequences, supply of each floor, capped), group by group."""
    goal = (case.batch_size, *case.floors.values())
    states = {(0, *(0 for _ in case.floors))}
    for group in case.queue:
        for total, *supply in states.copy():
            if total + group.num_sequences <= case.batch_size:
                supplied = (
                    min(floor, have + group.num_sequences) if env_id == group.env_id else have
                    for have, (env_id, floor) in zip(supply, case.floors.items(), strict=True)
                )
                states.add((total + group.num_sequences, *supplied))
    return goal in states


@pytest.mark.parametrize("seed", range(8))
def test_longer_queues_give_what_a_search_group_by_group_says(seed: int) -> None:
    """Environments whose sizes have different common divisors, so that sums have gaps of many kinds."""
    rng = random.Random(seed)
    num_found = num_stuck = 0
    for index in range(60):
        if index % 3:
            # Two sizes for each floor: often a batch needs more than the floors and the sum let expect.
            sizes = {env_id: rng.sample(range(3, 12), 2) for env_id in range(3)}
        else:
            sizes = {0: [2, 4, 6], 1: [3, 6, 9], 2: [5, 10]}
        env_ids = rng.choices([0, 1, 2], [3, 8, 3], k=20)
        queue = queue_of([rng.choice(sizes[env_id]) for env_id in env_ids], list(env_ids))
        case = Case(queue, rng.randint(20, 36), {0: rng.randint(5, 9), 1: rng.randint(6, 12)})
        plan = plan_batch(case.queue, batch_size=case.batch_size, floors=case.floors)
        if not is_possible(case):
            assert isinstance(plan, NoBatch) or plan.waived, case
            num_stuck += 1
        else:
            assert isinstance(plan, Plan)
            assert not plan.waived
            supplied: Counter[int | None] = Counter()
            for group in plan.groups:
                supplied[group.env_id] += group.num_sequences
            assert supplied.total() == case.batch_size
            assert all(supplied[env_id] >= floor for env_id, floor in case.floors.items())
            assert_order_of_arrival(case.queue, {group.number for group in plan.groups})
            num_found += 1
    assert num_found >= 30
    assert num_stuck >= 1


@pytest.mark.parametrize("seed", range(10))
def test_an_overdue_group_is_part_of_the_batch_if_any_batch_contains_it(seed: int) -> None:
    rng = random.Random(1000 + seed)
    num_forced = 0
    for _ in range(500):
        small = random_case(rng)
        lines: dict[int, list[GroupHeader]] = defaultdict(list)
        own: dict[int | None, list[GroupHeader]] = defaultdict(list)
        for group in small.queue:
            if group.num_sequences:
                lines[group.num_sequences].append(group)
                own[group.env_id].append(group)
        kinds = {(g.env_id, g.num_sequences): g for g in reversed(small.queue) if g.num_sequences}
        overdue = rng.sample(list(kinds.values()), rng.randint(0, len(kinds)))
        plan = plan_lines(
            lines, own=own, batch_size=small.batch_size, floors=small.floors, overdue=overdue
        )
        expected = Expected(small.queue, small.batch_size, small.floors)
        if isinstance(plan, NoBatch):
            assert (plan.blocker, plan.env_id) == (expected.blocker, expected.missing_env)
            continue
        numbers = {group.number for group in plan.groups}
        assert tuple(sorted(numbers)) in expected.possible
        assert plan.waived == expected.waived
        assert_order_of_arrival(small.queue, numbers)
        can_be_served = [
            group.number
            for group in overdue
            if any(group.number in batch for batch in expected.possible)
        ]
        if can_be_served:
            assert can_be_served[0] in numbers
            num_forced += can_be_served[0] not in expected.best_of_all
    assert num_forced >= 5


@pytest.mark.parametrize("seed", range(4))
def test_a_group_waits_only_for_batches_from_before_its_own_companions(seed: int) -> None:
    """A group whose size divides the batch is due once it and later ones of its kind make up a batch.

    From then on every batch comes out of what was queued up to the last of these: S sequences make S // B batches.
    """
    rng = random.Random(seed)
    batch_size = 16
    queue: list[GroupHeader] = []
    due_by: dict[int, int] = {}
    num_cut = 0
    num_served = 0
    load = rng.choice([0.5, 1.0, 2.0])
    for number in range(1500):
        size = rng.choice([1, 2, 4, 8, 16])
        queue.append(GroupHeader(number=number, env_id=rng.randrange(3), num_sequences=size))
        newest = queue[-1]
        kind = [g for g in queue if (g.env_id, g.num_sequences) == (newest.env_id, size)]
        companions = kind[-(batch_size // size) :]
        if len(companions) == batch_size // size:
            num_ahead = sum(g.num_sequences for g in queue)
            due_by.setdefault(companions[0].number, num_cut + num_ahead // batch_size)
        if rng.random() < load * 6.2 / batch_size:
            plan = plan_batch(queue, batch_size=batch_size)
            if isinstance(plan, Plan):
                num_cut += 1
                taken = {group.number for group in plan.groups}
                queue = [group for group in queue if group.number not in taken]
                num_served += sum(number in due_by for number in taken)
                assert all(due_by.get(number, num_cut) >= num_cut for number in taken)
            else:
                assert not any(group.number in due_by for group in queue)
    assert all(due_by.get(group.number, num_cut + 1) > num_cut for group in queue)
    assert num_served > 100
