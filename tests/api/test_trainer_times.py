"""How long a trainer works and waits, for trainers with leases, without, and with a prefetched batch."""

from __future__ import annotations

import pytest

from atroposlib.api.run.leases import TrainerTimes
from atroposlib.scored_data import GroupHeader


def test_a_trainer_with_leases_works_until_it_acknowledges() -> None:
    times = TrainerTimes()
    times.ask(0.0)
    assert times.waits_s(3.0, num_held=0) == 3.0
    times.deliver(4.0, [], version=0, is_plain=False, num_held=0)
    assert times.waits_s(5.0, num_held=1) is None
    times.acknowledge(6.0, leased_at=4.0)
    times.ask(6.5)
    assert (times.step_s, times.waited_s, times.waits_s(7.0, num_held=0)) == (2.0, 4.0, 0.5)


def test_a_trainer_without_leases_works_until_it_asks_again() -> None:
    times = TrainerTimes()
    times.ask(0.0)
    times.deliver(1.0, [], version=0, is_plain=True, num_held=0)
    for asked_at in (4.0, 5.0, 6.0):  # it polls until there is a batch
        times.ask(asked_at)
    assert (times.step_s, times.waits_s(7.0, num_held=0)) == (3.0, 3.0)


def test_a_prefetched_batch_is_worked_on_from_the_end_of_the_one_before() -> None:
    times = TrainerTimes()
    times.ask(0.0)
    times.deliver(0.0, [], version=0, is_plain=False, num_held=0)
    times.ask(0.1)
    assert times.waits_s(1.0, num_held=1) is None
    times.deliver(1.0, [], version=0, is_plain=False, num_held=1)
    times.acknowledge(5.0, leased_at=0.0)
    times.acknowledge(10.0, leased_at=1.0)
    assert (times.step_s, times.waited_s) == (5.0, 0.0)


def test_wait_share_and_staleness_are_those_of_recent_batches() -> None:
    times = TrainerTimes()
    assert (times.wait_share(0.0, num_held=0), times.staleness) == (None, None)
    for step in range(10):
        asked_at = step * 10.0
        times.ask(asked_at)
        waited_s = 8.0 if step == 0 else 2.0  # the start is forgotten
        times.deliver(
            asked_at + waited_s,
            [GroupHeader(number=0, env_id=0, num_sequences=1)] * 2,
            version=step,
            is_plain=False,
            num_held=0,
        )
        times.acknowledge(asked_at + 10.0, leased_at=asked_at + waited_s)
    assert times.wait_share(100.0, num_held=0) == 0.2
    assert times.staleness == (2 + 9) / 2
    times.ask(100.0)
    assert times.wait_share(110.0, num_held=0) == 26 / 90


def test_steps_of_two_kinds_are_planned_for_by_the_short_ones_but_not_by_a_single_one() -> None:
    times, now = TrainerTimes(), 0.0
    for step_s in (9.0, 0.1, 9.0, 9.0, 1.0, 9.0, 1.0, 9.0):
        times.acknowledge(now + step_s, leased_at=now)
        now += step_s
    assert times.step_s == pytest.approx(1.0)
