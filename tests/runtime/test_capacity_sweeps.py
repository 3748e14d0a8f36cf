"""The demand for items beside the best fixed number of items in flight, and over many random settings."""

from __future__ import annotations

import math
import random
import statistics
from typing import NamedTuple

import pytest
from helpers_pace import Environment, Outcome, simulate, try_setting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH_SIZE, MEAN_S, MAX_STALENESS = 64, 2.0, 4
SWEEP = (4, 8, 12, 16, 24, 32, 48)
"""More are never in flight here: three batches of groups of four are 48."""
MAY_WAIT = 0.05
"""Of the fixed numbers, the best is the least stale that waits no longer than this, else the one that waits least."""
MAY_THROW_AWAY = 0.4
"""A fixed number that throws away more of its groups may wait less: three environments with all useful items at short
steps, each of which counts its own items alone."""
NUM_SETTINGS = 1000


class Case(NamedTuple):
    shape: str
    """Distribution of the duration of an answer; an item takes as long as the slowest of its group."""
    step_s: float
    group_size: int
    useful: float
    """Share of the items that give a group."""
    num_environments: int

    def item_s(self, rng: random.Random) -> float:
        if self.shape == "exponential":
            return max(rng.expovariate(1 / MEAN_S) for _ in range(self.group_size))
        return max(rng.lognormvariate(math.log(MEAN_S) - 0.5, 1) for _ in range(self.group_size))

    def simulate(self, num_workers: int | None) -> Outcome:
        environments = [
            Environment(
                duration_s=self.item_s,
                groups_per_item=self.useful,
                group_size=self.group_size,
                weight=1 / self.num_environments,
                num_workers=num_workers,
            )
            for _ in range(self.num_environments)
        ]
        return simulate(
            environments,
            batch_size=BATCH_SIZE,
            step_s=lambda _: self.step_s,
            max_staleness=MAX_STALENESS,
        )


@pytest.mark.parametrize("num_environments", [1, 3])
@pytest.mark.parametrize("useful", [1.0, 0.3])
@pytest.mark.parametrize("group_size", [4, 16])
@pytest.mark.parametrize("step_s", [5.0, 1.0, 0.2])
@pytest.mark.parametrize("shape", ["exponential", "log-normal"])
def test_the_demand_feeds_a_trainer_as_well_as_the_best_fixed_number(
    shape: str, step_s: float, group_size: int, useful: float, num_environments: int
) -> None:
    case = Case(shape, step_s, group_size, useful, num_environments)
    best = min(
        map(case.simulate, SWEEP),
        key=lambda found: (round(max(0.0, found.waits - MAY_WAIT), 2), found.staleness),
    )
    demand = case.simulate(None)
    if best.thrown_away <= MAY_THROW_AWAY:
        assert demand.waits <= max(MAY_WAIT, best.waits) + 0.01
    else:
        assert demand.thrown_away <= 0.6 * best.thrown_away
    if best.waits <= MAY_WAIT:
        assert demand.staleness <= best.staleness
        assert demand.thrown_away <= best.thrown_away + 0.01


def test_trainers_are_fed_and_shares_kept_in_random_settings() -> None:
    found = [try_setting(seed, num_steps=80) for seed in range(NUM_SETTINGS)]
    assert statistics.fmean(each.waits <= MAY_WAIT for each in found) > 0.98
    assert statistics.fmean(each.drift < 1 for each in found) > 0.91
    assert statistics.fmean(each.staleness for each in found) < 1.7
    assert max(each.waits for each in found) < 0.25
