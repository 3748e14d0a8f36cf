"""Control calls: never more than the promise over any stretch of time, never later than needed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.runtime.pace import Pace


def calls_at(arrivals: list[float], *, burst: int, refill_s: float) -> list[float]:
    """Return when calls that arrive at these times are made."""
    now = iter([0.0, *arrivals])
    pace = Pace(burst=burst, refill_s=refill_s, clock=lambda: next(now))
    return [at + pace.reserve() for at in arrivals]


gaps = st.lists(st.floats(0, 3), min_size=1, max_size=60)


@given(gaps, st.integers(1, 4), st.sampled_from([0.1, 1.0, 2.5]))
def test_no_stretch_of_time_holds_more_calls_than_promised(
    pauses: list[float], burst: int, refill_s: float
) -> None:
    arrivals = [sum(pauses[: i + 1]) for i in range(len(pauses))]
    made = calls_at(arrivals, burst=burst, refill_s=refill_s)
    assert made == sorted(made)
    for first in range(len(made)):
        for last in range(first, len(made)):
            stretch_s = made[last] - made[first]
            assert last - first + 1 <= burst + stretch_s / refill_s + 1e-6


@given(gaps)
def test_slow_callers_never_wait(pauses: list[float]) -> None:
    arrivals = [sum(1.0 + pause for pause in pauses[: i + 1]) for i in range(len(pauses))]
    assert calls_at(arrivals, burst=1, refill_s=1.0) == pytest.approx(arrivals)


def test_burst_passes_at_once_and_comes_back_after_a_pause() -> None:
    made = calls_at([0, 0, 0, 0, 0, 60, 60, 60, 60], burst=3, refill_s=1.0)
    assert made == [0, 0, 0, 1, 2, 60, 60, 60, 61]


async def test_turn_sleeps_as_long_as_the_reservation_says() -> None:
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        await asyncio.sleep(0)

    pace = Pace(burst=1, refill_s=2.0, clock=lambda: 5.0, sleep=sleep)
    await asyncio.gather(pace.wait(), pace.wait(), pace.wait())
    assert naps == [2.0, 4.0]
