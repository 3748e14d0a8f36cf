"""The demand for items beside the best fixed number of items in flight, and over many random settings."""

from __future__ import annotations

import math
import statistics

import pytest
from helpers_pace import CASES, Case, Sample, exponential, random_case, slowest, try_setting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MEAN_S = 2.0
SWEEP = (4, 8, 12, 16, 24, 32, 48)
"""More are never in flight here: three batches of groups of four are 48."""
MAY_WAIT = 0.05
"""Of the fixed numbers, the best is the least stale that waits no longer than this, else the one that waits least."""
MAY_THROW_AWAY = 0.4
"""A fixed number that throws away more of its groups may wait less: three environments with all useful items at short
steps, each of which counts its own items alone."""
NUM_SETTINGS = 1000


ANSWERS: dict[str, Sample] = {
    "exponential": exponential(MEAN_S),
    "log-normal": lambda rng: rng.lognormvariate(math.log(MEAN_S) - 0.5, 1),
}
"""How long an answer takes; an item takes as long as the slowest of its group."""


@pytest.mark.parametrize("num_environments", [1, 3])
@pytest.mark.parametrize("useful", [1.0, 0.3])
@pytest.mark.parametrize("group_size", [4, 16])
@pytest.mark.parametrize("step_s", [5.0, 1.0, 0.2])
@pytest.mark.parametrize("shape", ["exponential", "log-normal"])
def test_the_demand_feeds_a_trainer_as_well_as_the_best_fixed_number(
    shape: str, step_s: float, group_size: int, useful: float, num_environments: int
) -> None:
    items_s = [slowest(ANSWERS[shape], group_size)] * num_environments
    case = Case(items_s, lambda _: step_s, group_size, useful)
    best = case.best_fixed(SWEEP, num_steps=300)
    demand = case.simulate(None, num_steps=300)
    if best.thrown_away <= MAY_THROW_AWAY:
        assert demand.waits <= max(MAY_WAIT, best.waits) + 0.01
    else:
        assert demand.thrown_away <= 0.8 * best.thrown_away
    if best.waits <= MAY_WAIT:
        assert demand.staleness <= best.staleness
        assert demand.thrown_away <= best.thrown_away + 0.01


@pytest.mark.parametrize("name", CASES)
def test_long_tails_and_changing_steps_are_fed_as_by_the_best_fixed_number(name: str) -> None:
    best, demand = CASES[name].best_fixed(SWEEP), CASES[name].simulate(None)
    assert demand.waits <= best.waits + 0.05
    if best.waits <= MAY_WAIT:
        assert demand.staleness <= best.staleness + 0.5


def test_trainers_are_fed_in_random_settings_with_heavy_tails_and_changing_steps() -> None:
    found = [random_case(seed).simulate(None, seed=seed, num_steps=30) for seed in range(10_000)]
    assert statistics.fmean(each.waits <= MAY_WAIT for each in found) > 0.97
    assert max(each.waits for each in found) < 0.25


def test_trainers_are_fed_and_shares_kept_in_random_settings() -> None:
    found = [try_setting(seed, num_steps=80) for seed in range(NUM_SETTINGS)]
    assert statistics.fmean(each.waits <= MAY_WAIT for each in found) > 0.98
    assert statistics.fmean(each.drift < 1 for each in found) > 0.91
    assert statistics.fmean(each.staleness for each in found) < 1.7
    assert max(each.waits for each in found) < 0.25
