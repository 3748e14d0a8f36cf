"""Shares of batches: kept over many batches, covered where one environment supplies less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.run.environments import GAIN, NUM_BATCHES, Shares, fair_shares

amounts = st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 2.0)), min_size=1, max_size=6)


@given(amounts)
def test_fair_shares_fill_a_batch_and_exceed_nothing_queued(
    each: list[tuple[float, float]],
) -> None:
    own, queued = np.array(each).T
    shares = fair_shares(own, queued)
    assert shares.sum() == pytest.approx(min(1.0, queued.sum()))
    assert (shares <= queued + 1e-9).all()


def delivered(
    *, taken: dict[int | None, int], left: dict[int | None, int], times: int = 1
) -> Shares:
    shares = Shares()
    for number in range(times):
        shares.deliver(number, np.array([0.5, 0.5]), taken=taken, left=left, batch_size=16)
    return shares


def test_own_share_is_wanted_at_first_and_while_all_supply_theirs() -> None:
    assert Shares().wanted(0, own=0.25) == 0.25
    assert delivered(taken={0: 8, 1: 8}, left={0: 0, 1: 4}).wanted(0, own=0.5) == 0.5


def test_what_one_does_not_supply_is_wanted_from_the_other_as_well() -> None:
    shares = delivered(taken={0: 4, 1: 12}, left={0: 0, 1: 0}, times=NUM_BATCHES)
    assert (shares.wanted(0, own=0.5), shares.wanted(1, own=0.5)) == (0.5, 0.75)


def test_an_environment_that_queued_enough_but_was_passed_over_catches_up() -> None:
    shares = delivered(taken={0: 7, 1: 9}, left={0: 4, 1: 0}, times=NUM_BATCHES)
    lag = 1 / 16
    assert shares.wanted(0, own=0.5) == 0.5 + GAIN * lag
    assert shares.wanted(1, own=0.5) == 0.5 - GAIN * lag


def test_only_recent_batches_count() -> None:
    shares = delivered(taken={0: 0, 1: 16}, left={0: 0, 1: 0}, times=NUM_BATCHES)
    for number in range(NUM_BATCHES, 2 * NUM_BATCHES):
        taken = {0: 8, 1: 8}
        shares.deliver(number, np.array([0.5, 0.5]), taken=taken, left={0: 0, 1: 0}, batch_size=16)
    assert (shares.wanted(0, own=0.5), shares.wanted(1, own=0.5)) == (0.5, 0.5)
