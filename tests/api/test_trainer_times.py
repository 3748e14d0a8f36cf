"""How long a trainer works and waits, for trainers with leases, without, and with a prefetched batch."""

from __future__ import annotations

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
    for step in range(6):
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
    assert times.wait_share(60.0, num_held=0) == 0.2
    assert times.staleness == (2 + 3 + 4 + 5) / 4
    times.ask(60.0)
    assert times.wait_share(70.0, num_held=0) == 18 / 50
