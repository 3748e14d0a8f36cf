"""The arithmetic of reachable sums against sets of integers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.sums import Sums, add, suffix_sums, sums_of

LIMIT = 60

num_groups_st = st.dictionaries(st.integers(1, 13), st.integers(0, 5), max_size=3)


def as_set(sums: Sums, limit: int = LIMIT) -> set[int]:
    return {n for n in range(limit + 1) if sums.bits >> n & 1}


def every_sum(sizes: list[int], limit: int) -> set[int]:
    found = {0}
    for size in sizes:
        found |= {each + size for each in found}
    return {each for each in found if each <= limit}


@settings(deadline=None, max_examples=300)
@given(num_groups_st)
def test_sums_of_are_those_of_every_choice(num_groups: dict[int, int]) -> None:
    sizes = [size for size, count in num_groups.items() for _ in range(count)]
    assert as_set(sums_of(num_groups, LIMIT)) == every_sum(sizes, LIMIT)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(num_groups_st, st.integers(0, 8)), min_size=1, max_size=4))
def test_added_sets_hold_every_sum_of_one_of_each(
    lanes: list[tuple[dict[int, int], int]],
) -> None:
    """Sets as lanes make them: sums beyond a floor, counted from the floor; added from either side."""
    sets = []
    for num_groups, floor in lanes:
        sums = sums_of(num_groups, LIMIT + floor)
        sets.append(Sums(sums.bits >> floor, sums.step))
    expected = {0}
    for each in map(as_set, sets):
        expected = {left + right for left in expected for right in each if left + right <= LIMIT}
    left_to_right = sets[0]
    for other in sets[1:]:
        left_to_right = add(left_to_right, other, LIMIT)
    assert as_set(left_to_right) == expected
    while len(sets) > 1:
        sets = [*sets[1:-1], add(sets[0], sets[-1], LIMIT)]
    assert as_set(sets[0]) == expected


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 40))
def test_suffix_sums_are_those_of_the_groups_from_there_on(sizes: list[int], limit: int) -> None:
    sums = suffix_sums(sizes, limit)
    assert len(sums) == len(sizes) + 1
    for index, bits in enumerate(sums):
        usable = [size for size in sizes[index:] if size <= limit]
        assert as_set(Sums(bits, 0), limit) == every_sum(usable, limit)


def test_sets_with_gaps_of_different_widths_add_up() -> None:
    even_and_triple = add(sums_of({2: 2}, LIMIT), sums_of({3: 2}, LIMIT), LIMIT)
    assert as_set(even_and_triple) == {0, 2, 3, 4, 5, 6, 7, 8, 10}
    wide = sums_of({20: 1, 27: 1}, LIMIT)
    expected = {a + b for a in as_set(wide) for b in as_set(even_and_triple)}
    assert as_set(add(wide, even_and_triple, LIMIT)) == expected
    assert as_set(add(even_and_triple, wide, LIMIT)) == expected
