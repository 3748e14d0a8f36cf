"""A run ends, naming the engines, if they stay unavailable; it continues if they come back."""

import pytest

from atroposlib.errors import EngineUnavailable
from example_trainer.bridges import EngineWatch
from example_trainer.bridges.running import ReloadBridge
from tests.builders.clocks import Clock
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch_on(url: str, clock: Clock) -> EngineWatch:
    bridge = ReloadBridge(urls=[url], timeout_s=5.0)
    return EngineWatch(bridge, patience_s=60.0, clock=clock)  # type: ignore[arg-type] # asked for `check` alone


def test_a_run_whose_engine_stays_away_ends_with_its_address(clock: Clock) -> None:
    with recorded_engine() as engine:
        url = engine.url
    watch = watch_on(url, clock)
    for clock.now_s in (0.0, 30.0, 59.0):
        watch.look()
    clock.now_s = 70.0
    with pytest.raises(EngineUnavailable, match=f"no batch has come for 70 s.*{url}: /health"):
        watch.look()


def test_an_engine_that_comes_back_is_forgiven(clock: Clock, engine: RecordedEngine) -> None:
    watch = watch_on(engine.url, clock)
    engine.faults["/health"] = (503, b"asleep")
    for clock.now_s in (0.0, 55.0):
        watch.look()
    engine.faults.clear()
    clock.now_s = 66.0
    watch.look()
    engine.faults["/health"] = (503, b"asleep")
    clock.now_s = 120.0
    watch.look()


def test_an_absence_before_a_batch_came_does_not_count(
    clock: Clock, engine: RecordedEngine
) -> None:
    watch = watch_on(engine.url, clock)
    engine.faults["/health"] = (503, b"asleep")
    for clock.now_s in (0.0, 500.0, 550.0):  # a batch came and was trained before 500 s
        watch.look()


def test_the_engine_is_asked_now_and_then(clock: Clock, engine: RecordedEngine) -> None:
    watch = watch_on(engine.url, clock)
    for clock.now_s in (0.0, 1.0, 5.0, 9.0, 12.0):
        watch.look()
    assert engine.calls == ["/health", "/health"]
