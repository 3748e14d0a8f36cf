"""The arithmetic of reachable sums against sets of integers."""

from __future__ import annotations

from math import gcd

from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.run.batching import add, positions, sums_of

LIMIT = 60

num_groups_st = st.dictionaries(st.integers(1, 13), st.integers(0, 5), max_size=3)


def as_set(sums: int, limit: int = LIMIT) -> set[int]:
    return {n for n in range(limit + 1) if sums >> n & 1}


def every_sum(sizes: list[int], limit: int) -> set[int]:
    found = {0}
    for size in sizes:
        found |= {each + size for each in found}
    return {each for each in found if each <= limit}


@settings(deadline=None, max_examples=300)
@given(num_groups_st, st.integers(0, LIMIT))
def test_sums_of_are_those_of_every_choice(num_groups: dict[int, int], limit: int) -> None:
    sizes = [size for size, count in num_groups.items() for _ in range(count)]
    assert as_set(sums_of(num_groups, limit)) == every_sum(sizes, limit)
    assert set(positions(sums_of(num_groups, limit))) == every_sum(sizes, limit)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(num_groups_st, st.integers(1, 8)), min_size=1, max_size=4))
def test_added_sets_hold_every_sum_of_one_of_each(parts: list[tuple[dict[int, int], int]]) -> None:
    """Sets as environments with floors make them: sums from the floor on."""
    together = 1
    expected = {0}
    for num_groups, floor in parts:
        sums = sums_of(num_groups, LIMIT) >> floor << floor
        together = add(together, sums, step=gcd(*num_groups), limit=LIMIT)
        expected = {a + b for a in expected for b in as_set(sums) if a + b <= LIMIT}
        assert as_set(together) == expected


def test_sets_with_gaps_of_different_widths_add_up() -> None:
    evens, triples = sums_of({2: 2}, LIMIT), sums_of({3: 2}, LIMIT)
    even_and_triple = add(evens, triples, step=3, limit=LIMIT)
    assert as_set(even_and_triple) == {0, 2, 3, 4, 5, 6, 7, 8, 10}
    wide = sums_of({20: 1, 27: 1}, LIMIT)
    expected = {a + b for a in as_set(wide) for b in as_set(even_and_triple)}
    assert as_set(add(wide, even_and_triple, step=1, limit=LIMIT)) == expected
    assert as_set(add(even_and_triple, wide, step=1, limit=LIMIT)) == expected
