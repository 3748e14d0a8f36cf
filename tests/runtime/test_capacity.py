"""How many items to start: tables, properties over random loads, and trainers in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_pace import CASES, Environment, simulate, try_setting
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.env_config import BaseEnvConfig, max_workers
from atroposlib.runtime.capacity import MIN_YIELD, Demand, History, Load, num_to_start, stock

BASE: dict[str, Any] = {
    "max_workers": 8, "running": 0, "group_size": 4, "batch_size": 16, "max_batches_offpolicy": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 8),
        ({"running": 3}, 5),
        ({"queue_size": 5}, 3),
        ({"queue_size": 5, "held": 2}, 1),
        ({"queue_size": 8}, 0),
        ({"queue_size": 5, "running": 6}, 0),
        ({"max_batches_offpolicy": 0, "queue_size": 99}, 8),
        ({"batch_size": -1, "queue_size": 99}, 8),
        ({"queue_size": 8, "unallocated_fraction": 0.5, "min_batch_allocation": 0.5}, 4),
        ({"queue_size": 8, "unallocated_fraction": 0.5, "min_batch_allocation": 0.5,
          "self_queue_size": 4}, 0),
    ],
)  # fmt: skip
def test_table(change: dict[str, Any], expected: int) -> None:
    assert num_to_start(Load(**BASE | change)) == expected


loads = st.builds(
    Load,
    max_workers=st.integers(1, 64),
    running=st.integers(0, 80),
    held=st.integers(0, 40),
    group_size=st.integers(1, 16),
    batch_size=st.integers(16, 256),
    max_batches_offpolicy=st.integers(1, 8),
    queue_size=st.integers(0, 200),
)


@given(loads)
def test_queued_held_and_running_stay_within_the_bound(load: Load) -> None:
    started = num_to_start(load)
    assert started >= 0
    if started:
        ahead = (started + load.running + load.held + load.queue_size) * load.group_size
        assert ahead <= load.max_batches_offpolicy * load.batch_size
        assert started + load.running <= load.max_workers


@given(loads)
def test_idle_environment_with_an_empty_queue_always_works(load: Load) -> None:
    idle = Load(
        max_workers=load.max_workers,
        running=0,
        group_size=load.group_size,
        batch_size=load.batch_size,
        max_batches_offpolicy=load.max_batches_offpolicy,
    )
    assert num_to_start(idle) >= 1


def test_workers_follow_the_servers_unless_set() -> None:
    assert max_workers(BaseEnvConfig(), num_servers=3) == 24
    assert max_workers(BaseEnvConfig(max_num_workers=5), num_servers=3) == 5


# Without a set number of workers


def demanding(**changes: Any) -> Load:
    demand = {"step_s": 2.0, "durations_s": [1.0] * 10, "groups_per_item": 1.0}
    demand |= changes.pop("demand", {})
    return Load(**BASE | {"max_workers": 100, "demand": Demand(**demand)} | changes)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (demanding(), 4),  # one batch
        (demanding(self_queue_size=3, queue_size=3), 1),
        (demanding(running=4), 0),
        (demanding(wanted_share=0.5), 2),
        # All late by one step, so two batches are on their way; half late: 1.5, and sqrt(4 / 4) / 2 for safety.
        (demanding(demand={"durations_s": [3.0] * 10}), 8),
        (demanding(demand={"durations_s": [1.0, 3.0] * 5}), 7),
        (demanding(demand={"durations_s": [3.0] * 10}, max_batches_offpolicy=1), 4),
        # Half of the items give no group: (4 + sqrt(4 / 2) / 2) * 2; half of a batch: (2 + sqrt(2 / 2 / 2) / 2) * 2.
        (demanding(demand={"groups_per_item": 0.5}), 10),
        (demanding(demand={"groups_per_item": 0.5}, wanted_share=0.5), 5),
        (demanding(self_queue_size=4, queue_size=4, demand={"missing_sequences": 8}), 2),
        (demanding(batch_size=-1), 100),
        # Older than two steps: no slot of the stock, nor of the 8 groups of the bound, but one of the servers'.
        (demanding(running=10, demand={"durations_s": [5.0] * 10, "ages_s": [4.1] * 10}), 8),
        (demanding(running=10, demand={"durations_s": [5.0], "ages_s": [4.0] * 6 + [4.1] * 4}), 2),
        (demanding(running=10, queue_size=8, demand={"ages_s": [9.0] * 10}), 0),
        (demanding(running=10, max_workers=11, demand={"ages_s": [4.1] * 10}), 1),
    ],
)  # fmt: skip
def test_items_follow_the_demand(load: Load, expected: int) -> None:
    assert num_to_start(load) == expected


def test_history_waits_for_evidence_and_bounds_a_yield_of_nothing() -> None:
    history = History()
    known = {"step_s": 1.0, "missing_sequences": 5, "ages_s": [0.5, 7.0]}
    assert history.demand(**known, trainer_waits_s=None) is None
    history.add(2.0, num_accepted=0)
    demand = history.demand(**known, trainer_waits_s=1.9)
    assert demand is not None
    assert (list(demand.durations_s), demand.ages_s) == ([2.0], [0.5, 7.0])
    assert (demand.groups_per_item, demand.missing_sequences) == (0.5, 0)
    for _ in range(100):
        history.add(2.0, num_accepted=0)
    waited = history.demand(**known, trainer_waits_s=2.1)
    assert waited is not None
    assert (waited.groups_per_item, waited.missing_sequences) == (MIN_YIELD, 5)


def test_an_item_in_flight_counts_as_far_as_it_has_come() -> None:
    """Items that all take 2.5 steps: one of 1.5 steps says nothing about whether 2 steps are enough."""
    durations = {"step_s": 2.0, "durations_s": [5.0] * 10, "groups_per_item": 1.0}
    load = demanding(max_batches_offpolicy=8)
    assert stock(load, Demand(**durations)) == 12.0
    assert stock(load, Demand(**durations, ages_s=[3.0] * 10)) == 12.0
    assert stock(load, Demand(**durations, ages_s=[7.0] * 10)) > 14.0


@pytest.mark.parametrize("seed", range(25))
def test_no_trainer_starves_no_number_oscillates_and_shares_are_kept(seed: int) -> None:
    found = try_setting(seed, num_steps=80)
    assert found.waits < 0.12
    assert found.amplitude < 2.5
    assert found.drift < 6.0


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_is_fed_by_long_tails_and_at_steps_of_two_kinds(name: str) -> None:
    assert CASES[name].simulate(num_steps=90).waits < 0.05


def test_the_pace_follows_a_trainer_that_changes_its_step() -> None:
    env = Environment(duration_s=lambda rng: rng.expovariate(1 / 2.0))
    found = simulate(
        [env], batch_size=64, step_s=lambda step: 3.0 if 150 <= step < 220 else 1.0, num_steps=300
    )
    assert found.waits < 0.05
    fast, slow = env.in_flight[100:150], env.in_flight[156:220]
    assert sum(slow) / len(slow) < 0.6 * sum(fast) / len(fast)
    assert sum(env.in_flight[228:]) / 72 > 0.8 * sum(fast) / len(fast)


def test_another_environment_covers_for_one_that_gives_nothing() -> None:
    barren = Environment(duration_s=lambda _: 5.0, groups_per_item=0.0, weight=0.5)
    able = Environment(duration_s=lambda _: 0.5, weight=0.5)
    found = simulate([barren, able], batch_size=64, step_s=lambda _: 2.0, num_steps=70)
    assert found.waits < 0.05
    assert found.shares == [0.0, 1.0]


@pytest.mark.parametrize(
    "change",
    [
        {
            "slowness": lambda step: 2.0 if 150 <= step < 220 else 1.0
        },  # as when one engine of two dies
        {"max_workers": lambda step: 20 if 150 <= step < 220 else 512},  # during evaluations
        {"max_workers": lambda step: 0 if step == 150 else 512},
    ],
)
def test_the_pace_settles_within_ten_steps_of_a_change(change: dict[str, Any]) -> None:
    env = Environment(duration_s=lambda rng: rng.expovariate(1 / 2.0), **change)
    found = simulate([env], batch_size=64, step_s=lambda _: 2.0, max_batches_offpolicy=8)
    for first, end in ((50, 150), (160, 220), (230, 300)):
        assert sum(found.waits_s[first:end]) < 0.03 * 2.0 * (end - first)
    before, after = env.in_flight[50:150], env.in_flight[230:]
    assert sum(after) / len(after) == pytest.approx(sum(before) / len(before), rel=0.25)


def test_another_environment_covers_while_one_stalls() -> None:
    steady, stalling = (
        Environment(duration_s=lambda rng: rng.expovariate(1 / 2.0), weight=0.5, max_workers=most)
        for most in (lambda step: 512, lambda step: 0 if 150 <= step < 220 else 512)
    )
    found = simulate(
        [steady, stalling], batch_size=64, step_s=lambda _: 2.0, max_batches_offpolicy=8
    )
    for first, end in ((50, 150), (165, 220), (220, 300)):
        assert sum(found.waits_s[first:end]) < 0.03 * 2.0 * (end - first)
    ratio = sum(steady.in_flight[240:]) / sum(stalling.in_flight[240:])
    assert ratio == pytest.approx(1.0, abs=0.25)
