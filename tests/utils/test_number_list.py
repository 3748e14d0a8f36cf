from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from atroposlib.errors import GroupError
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.number_list import NumberList, array_of, first, grow, joined, repeated


def test_authors_see_a_list() -> None:
    tokens = joined([5], [6, 7])
    assert isinstance(tokens, list)
    assert tokens == [5, 6, 7]
    assert (tokens[1], tokens[1:], tokens + [8]) == (6, [6, 7], [5, 6, 7, 8])
    assert type(tokens[1:]) is type(tokens + [8]) is type(copy.deepcopy(tokens)) is list
    assert json.dumps(tokens) == msgspec.json.encode(tokens).decode().replace(",", ", ")
    assert copy.copy(tokens) == copy.deepcopy(tokens) == tokens


CHANGES: list[Callable[[list[int]], object]] = [
    lambda row: row.append(9),
    lambda row: row.pop(),
    lambda row: row.reverse(),
    lambda row: row.__setitem__(0, 8),
    lambda row: list.__setitem__(row, slice(0, 2), [8, 8]),
    lambda row: random.Random(1).shuffle(row),
    lambda row: row.clear(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_list_is_converted_again(change: Callable[[list[int]], object]) -> None:
    row = joined([5, 6], [7])
    change(row)
    assert list(array_of(row)) == list(row)
    assert list(array_of(first(row, 2))) == list(row)[:2]
    masks = [-100] * len(row)
    group = {"tokens": [row], "masks": [masks], "scores": [1.0]}
    assert check_group(group, strictness=Strictness.MEANING).tokens.tolist() == list(row)


def test_a_number_that_is_no_token_is_found_after_a_change() -> None:
    row = joined([5, 6])
    row[1] = 2**31
    group = {"tokens": [row], "masks": [[-100, -100]], "scores": [1.0]}
    with pytest.raises(GroupError, match=r"sequences\[0\].tokens\[1\]"):
        check_group(group, strictness=Strictness.MEANING)


def test_parts_of_lists_keep_their_arrays() -> None:
    whole = joined(first(joined([1, 2, 3]), 2), repeated(-100, 2), [4])
    assert isinstance(whole, NumberList)
    assert whole.array is not None
    assert whole.array.tolist() == whole == [1, 2, -100, -100, 4]


@pytest.mark.parametrize("parts", [([1], [0.5]), ([True],), ([2**63],), (["a"],), ([None], [1])])
def test_other_values_stay_as_they_are_for_the_check_to_refuse(
    parts: tuple[list[int], ...],
) -> None:
    found = joined(*parts)
    assert type(found) is list
    assert found == [value for part in parts for value in part]
    assert type(first(found, 1)) is list
    assert np.array_equal(array_of([1, 2]), [1, 2])


def test_a_list_grows_with_its_array() -> None:
    row = joined([5, 6])
    grow(row, [], [7], repeated(8, 2))
    assert isinstance(row, NumberList)
    assert row.array is not None
    assert row == row.array.tolist() == [5, 6, 7, 8, 8]
    grow(row, [0.5])
    assert row == [5, 6, 7, 8, 8, 0.5]
    assert row.array is None  # one array cannot hold both kinds


def test_a_plain_list_grows() -> None:
    row = [5, 6]
    grow(row, [7], repeated(8, 1))
    assert row == [5, 6, 7, 8]
