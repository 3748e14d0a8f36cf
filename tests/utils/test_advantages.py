"""Returns and advantages against slow references written from the definitions."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.utils.advantages import (
    allclose_to_first,
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)

rewards_of_steps = st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=1, max_size=6)


def test_allclose_to_first_compares_with_the_first_entry_only() -> None:
    assert allclose_to_first([1.0, 1.0 + 1e-9, 1.0])
    assert not allclose_to_first([1.0, 1.1])
    assert allclose_to_first([[1, 2], [1, 2]])


def test_allclose_to_first_treats_nan_as_asked() -> None:
    assert not allclose_to_first([math.nan, math.nan])
    assert allclose_to_first([math.nan, math.nan], equal_nan=True)


# 1.0 and 1.2 differ by more than a tolerance of 0.15, 1.1 is near both.
@pytest.mark.parametrize("values", [[[1, 2], [1, 2], [1, 3]], [1.0, 1.1, 1.2]])
def test_allclose_vector_has_one_entry_per_row(values: list[object]) -> None:
    vector = allclose_to_first(values, atol=0.15, rtol=0, return_vector=True)
    assert isinstance(vector, np.ndarray)
    assert vector.tolist() == [True, True, False]


@given(st.lists(rewards_of_steps, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_stats_are_those_of_all_numbers_however_nested(data: list[list[float]]) -> None:
    flat = [value for row in data for value in row]
    stats = compute_stats([*data, [[flat[0]]]])
    assert stats["mean"] == pytest.approx(statistics.fmean([*flat, flat[0]]))
    assert stats["var"] == pytest.approx(statistics.pvariance([*flat, flat[0]]), abs=1e-9)


@pytest.mark.parametrize("empty", [[], [[], [[]]]])
def test_stats_of_nothing_are_an_error(empty: list[object]) -> None:
    with pytest.raises(ValueError, match="at least one number"):
        compute_stats(empty)


@given(rewards_of_steps, st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_discounted_returns_are_the_defining_sum(rewards: list[float], gamma: float) -> None:
    expected = [
        sum(gamma ** (later - t) * rewards[later] for later in range(t, len(rewards)))
        for t in range(len(rewards))
    ]
    returns = compute_discounted_returns(rewards, gamma)
    assert returns.dtype == np.float32
    assert returns == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_discounted_returns_of_integer_arrays_keep_their_fractions() -> None:
    assert compute_discounted_returns(np.array([1, 1, 1]), 0.5).tolist() == [1.75, 1.5, 1.0]


@pytest.mark.parametrize("gamma", [None, 0.5])
def test_process_advantages_normalise_over_the_group_then_sum(gamma: float | None) -> None:
    rewards = [[1.0, 0.0, 2.0], [4.0]]
    mean, std = 7 / 4, statistics.pstdev([1.0, 0.0, 2.0, 4.0])
    discount = 1.0 if gamma is None else gamma
    advantages = compute_grpo_process_supervision_advantages(rewards, gamma)
    for got, row in zip(advantages, rewards, strict=True):
        scaled = [(reward - mean) / std for reward in row]
        expected = [
            sum(discount ** (k - t) * scaled[k] for k in range(t, len(row)))
            for t in range(len(row))
        ]
        assert got.tolist() == pytest.approx(expected, rel=1e-5)


def test_equal_rewards_have_no_advantages() -> None:
    with pytest.raises(ValueError, match="standard deviation of 0"):
        compute_grpo_process_supervision_advantages([[1.0, 1.0], [1.0]])
