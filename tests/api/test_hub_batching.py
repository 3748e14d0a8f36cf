"""The batching policy: the original's golden vectors, and properties against brute force."""

from __future__ import annotations

import doctest
import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api import batching
from atroposlib.api.batching import (
    GroupHeader,
    NoBatch,
    Plan,
    oldest_subset,
    plan_batch,
    sequence_floors,
)
from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)


def queue_of(sizes: list[int], env_ids: list[int | None] | None = None) -> list[GroupHeader]:
    env_ids = env_ids or [0] * len(sizes)
    return [
        GroupHeader(number=n, env_id=env_id, num_sequences=size)
        for n, (size, env_id) in enumerate(zip(sizes, env_ids, strict=True))
    ]


def picked(plan: Plan | NoBatch) -> list[int] | None:
    return None if isinstance(plan, NoBatch) else [group.number for group in plan.groups]


# CONTRACT.md 2.9 B; where the original found a batch, the same groups.
GOLDEN = [
    ([4, 4], 8, [0, 1]),
    ([2, 2, 4], 4, [0, 1]),
    ([2, 4, 2], 4, [1]),
    ([4, 2, 2], 4, [0]),
    ([4, 2, 4], 8, [0, 2]),
    ([2, 4, 4], 8, [1, 2]),
    ([3, 3, 3], 9, [0, 1, 2]),
    ([3, 4, 4], 8, [1, 2]),
    ([2, 2, 2, 2, 8], 4, [0, 1]),
    ([2, 2, 2, 2, 8], 8, [0, 1, 2, 3]),
    ([1, 1, 1, 1, 2], 4, [0, 1, 2, 3]),
    ([1, 2, 1, 2], 4, [0, 1, 2]),
    ([0, 4], 4, [1]),
    ([6, 3, 3], 6, [0]),
    # The original finds none here; the last two exist.
    ([3, 3, 3], 8, None),
    ([8], 4, None),
    ([4, 4, 2, 2], 6, [0, 2]),
    ([3, 3, 3, 3, 4], 12, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("sizes", "batch_size", "expected"), GOLDEN)
def test_plan_reproduces_the_golden_vectors(
    sizes: list[int], batch_size: int, expected: list[int] | None
) -> None:
    assert picked(plan_batch(queue_of(sizes), batch_size=batch_size)) == expected


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


@pytest.mark.parametrize(
    ("batch_size", "shares", "expected"),
    [(4, {1: 0.5}, [0, 4]), (8, {0: 0.25, 1: 0.5}, [0, 1, 4, 5])],
)
def test_minimums_reproduce_the_golden_vectors(
    batch_size: int, shares: dict[int, float], expected: list[int]
) -> None:
    queue = queue_of([2] * 6, [0, 0, 0, 0, 1, 1])
    floors = sequence_floors(batch_size, shares)
    assert picked(plan_batch(queue, batch_size=batch_size, floors=floors)) == expected


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
    assert not plan.is_stuck


def test_floors_that_whole_groups_cannot_honour_together_are_waived_last_first() -> None:
    queue = queue_of([3, 3, 4, 4], [0, 0, 1, 1])
    plan = plan_batch(queue, batch_size=8, floors={1: 4, 0: 4})
    assert isinstance(plan, Plan)
    assert plan.waived == (0,)
    assert [group.number for group in plan.groups] == [2, 3]


def test_sizes_that_never_sum_are_reported_as_stuck() -> None:
    plan = plan_batch(queue_of([3, 3, 3]), batch_size=8)
    assert isinstance(plan, NoBatch)
    assert plan.is_stuck
    assert "{3: 2}" in plan.reason
    assert not isinstance(plan_batch(queue_of([3]), batch_size=8), Plan)


def test_scaled_floors_never_exceed_the_batch_and_keep_everyone() -> None:
    assert sequence_floors(8, {0: 0.75, 1: 0.75}) == {0: 4, 1: 4}
    assert sequence_floors(4, {0: 1.0, 1: 0.25}) == {0: 3, 1: 1}
    assert sequence_floors(100, {0: 0.29, 1: 0.0}) == {0: 29}


sizes_st = st.lists(st.integers(0, 7), max_size=9)
envs_st = st.lists(st.sampled_from([None, 0, 1, 2]), min_size=9, max_size=9)
floors_st = st.dictionaries(st.sampled_from([0, 1]), st.integers(1, 4), max_size=2)


def exact_batches(
    queue: list[GroupHeader], batch_size: int, floors: dict[int, int]
) -> list[list[int]]:
    """Every exact batch that honours the floors, by brute force."""
    usable = [group for group in queue if group.num_sequences > 0]
    found = []
    for count in range(1, len(usable) + 1):
        for chosen in itertools.combinations(usable, count):
            share: Counter[int | None] = Counter()
            for group in chosen:
                share[group.env_id] += group.num_sequences
            if share.total() == batch_size and all(share[e] >= n for e, n in floors.items()):
                found.append([group.number for group in chosen])
    return found


@settings(deadline=None, max_examples=300)
@given(sizes_st, envs_st, st.integers(1, 14), floors_st)
def test_plan_is_the_earliest_then_oldest_exact_batch(
    sizes: list[int], env_ids: list[int | None], batch_size: int, floors: dict[int, int]
) -> None:
    queue = queue_of(sizes, env_ids[: len(sizes)])
    plan = plan_batch(queue, batch_size=batch_size, floors=floors)
    possible = exact_batches(queue, batch_size, floors)
    if possible:
        # Complete earliest; among those, the oldest group first, then the next oldest, and so on.
        earliest = min(batch[-1] for batch in possible)
        oldest = min(batch for batch in possible if batch[-1] == earliest)
        assert picked(plan) == oldest
        assert isinstance(plan, Plan)
        assert plan.waived == ()
    elif isinstance(plan, Plan):
        # Only by waiving floors of environments that had supplied enough.
        assert plan.waived
        assert sum(group.num_sequences for group in plan.groups) == batch_size
        queued: Counter[int | None] = Counter()
        for group in queue:
            queued[group.env_id] += group.num_sequences
        assert all(queued[env_id] >= floor for env_id, floor in floors.items())


@settings(deadline=None, max_examples=200)
@given(sizes_st, envs_st, st.integers(1, 14), floors_st, st.integers(1, 7))
def test_adding_a_group_never_takes_a_batch_away(
    sizes: list[int],
    env_ids: list[int | None],
    batch_size: int,
    floors: dict[int, int],
    added: int,
) -> None:
    queue = queue_of(sizes, env_ids[: len(sizes)])
    if isinstance(plan_batch(queue, batch_size=batch_size, floors=floors), Plan):
        more = [*queue, GroupHeader(number=len(queue), env_id=0, num_sequences=added)]
        assert isinstance(plan_batch(more, batch_size=batch_size, floors=floors), Plan)


@settings(deadline=None, max_examples=200)
@given(sizes_st, envs_st, st.integers(1, 14))
def test_one_size_of_one_environment_leaves_in_arrival_order(
    sizes: list[int], env_ids: list[int | None], batch_size: int
) -> None:
    queue = queue_of(sizes, env_ids[: len(sizes)])
    plan = plan_batch(queue, batch_size=batch_size)
    taken = {group.number for group in plan.groups} if isinstance(plan, Plan) else set()
    for _, kind in itertools.groupby(
        sorted(queue, key=lambda g: (str(g.env_id), g.num_sequences, g.number)),
        key=lambda g: (g.env_id, g.num_sequences),
    ):
        left = [group.number in taken for group in kind]
        assert left == sorted(left, reverse=True)


@settings(deadline=None, max_examples=200)
@given(sizes_st, st.integers(0, 20))
def test_oldest_subset_is_the_first_in_lexicographic_order(sizes: list[int], target: int) -> None:
    indices = [index for index, size in enumerate(sizes) if size > 0]
    possible = [
        list(chosen)
        for count in range(1, len(indices) + 1)
        for chosen in itertools.combinations(indices, count)
        if sum(sizes[index] for index in chosen) == target
    ]
    assert oldest_subset(sizes, target) == min(possible, default=[])


def test_planning_is_polynomial_in_hostile_queues() -> None:
    # Only even sizes for an odd batch: exponential for naive subset sum, and no early exit.
    queue = queue_of([2, 4, 6, 8, 10, 12] * 400, [0, 1, 2, 3, 4] * 480)
    began = time.process_time()
    plan = plan_batch(queue, batch_size=1025, floors={0: 100, 1: 100, 2: 200, 3: 300})
    assert isinstance(plan, NoBatch)
    mixed = queue_of([7, 11, 13, 8] * 1250, [0, 1, 2, 3, 4] * 1000)
    plan = plan_batch(mixed, batch_size=1024, floors={0: 100, 1: 100, 2: 100})
    assert isinstance(plan, Plan)
    assert time.process_time() - began < 2.0


def test_examples_in_docstrings_hold() -> None:
    results = doctest.testmod(batching)
    assert results.attempted > 0
    assert results.failed == 0
