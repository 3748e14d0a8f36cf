"""What the looks at a blocked event loop add up to, on a machine that has no CPU to spare."""

import asyncio
import itertools
from typing import NamedTuple

import pytest

from atroposlib.utils.loop_watch import LoopWatch, _Look

LOOK_S = 0.05


class Interval(NamedTuple):
    """The time before one look, in seconds."""

    passed: float = LOOK_S
    used: float = 0.0
    """CPU time of the process."""
    loop_waited: float = 0.0
    own_waited: float = 0.0
    """For a CPU."""
    is_runnable: bool = False
    """Whether the loop's thread was, at the look."""


def blocked_s(*intervals: Interval) -> float:
    """Return for how long a function blocked the loop that these looks saw in it; 0 for less than 0.1 s."""
    watch = LoopWatch({__file__}, patience_s=9.0, look_s=LOOK_S)
    watch._loop = asyncio.new_event_loop()  # does not run, so it answers no look
    watch._look = lambda: _Look("f", is_innermost=True, callback=1)  # type: ignore[method-assign]
    stops = iter([False] * len(intervals) + [True])
    watch._stop.wait = lambda timeout=None: next(stops)  # type: ignore[method-assign]
    states = iter(each.is_runnable for each in intervals)
    totals = [[0.0, *itertools.accumulate(row)] for row in zip(*intervals, strict=True)][:4]
    clocks = [iter(total).__next__ for total in totals]
    watch._look_until_stopped(*clocks, is_runnable=lambda: next(states))
    watch._loop.close()
    return watch.stalls["f"].longest_s


@pytest.mark.parametrize(
    ("intervals", "expected_s"),
    [
        ([Interval()] * 3, 0.15),  # it sleeps
        ([Interval(used=LOOK_S)] * 3, 0.15),  # it computes
        ([Interval(), Interval(passed=0.12, own_waited=0.07)], 0.17),  # a look without a CPU
        ([Interval(passed=0.3, own_waited=0.25)], 0.0),  # the first one says nothing of before
        # C code kept the GIL, or a signal stopped it, again and again.
        ([Interval(), *[Interval(passed=0.3)] * 3], 0.0),
        # Code without the GIL waits for a CPU; the kernel counts the wait at its end.
        ([*[Interval(is_runnable=True)] * 5, Interval(loop_waited=0.25)], 0.0),
        ([Interval(used=0.03, loop_waited=0.02)] * 5, 0.15),
    ],
)
def test_only_time_in_which_the_loop_sleeps_or_computes_counts(
    intervals: list[Interval], expected_s: float
) -> None:
    assert blocked_s(*intervals) == pytest.approx(expected_s)
