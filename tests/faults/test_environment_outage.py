"""A hub that is away for an hour, or an engine, costs nothing: the runtime's own intervals, and a clock that skips.

Environment, hub and engine share one event loop and talk over loopback. Whenever the loop would sleep, the clock jumps
to the next timer instead; an hour of waiting takes as long as its attempts do.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.inference.scripted_engine import ScriptedEngine
from atroposlib.runtime import hub_link
from atroposlib.runtime.pace import Pace
from atroposlib.runtime.timings import Timings
from tests.faults.answers import script
from tests.faults.faulty_env import FaultyEnv, FaultyEnvConfig
from tests.runtime.helpers_runtime import LoopbackHub, produced, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HOUR_S = 3600.0
PATIENCE_S = 100.0
"""How long a request waits for its engine, and how long an item may take."""
BACK_S = 8.0
"""Both that send and those that ask have noticed a hub that is back: the longest pause, and turns to wait for."""
TIMINGS = Timings(tick_s=1.0)
"""An hour has too many of the usual ticks, in which the loop only looks at the environment; the rest is as always."""


class SkippingClock:
    """`time.monotonic` of the whole process, which the running loop advances instead of waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = time.monotonic
        self._skipped_s = 0.0
        self.grace_s = 0.01
        """How long the clock waits for answers from loopback and threads."""
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        self._select = selector.select
        monkeypatch.setattr(time, "monotonic", self.now)
        monkeypatch.setattr(selector, "select", self._select_or_skip)
        monkeypatch.setattr(hub_link, "Pace", functools.partial(Pace, clock=self.now))

    def now(self) -> float:
        return self._real() + self._skipped_s

    def _select_or_skip(self, timeout: float | None) -> Any:
        if timeout is None or timeout <= 0:
            return self._select(timeout)
        events = self._select(min(timeout, self.grace_s))
        if not events:
            self._skipped_s += timeout
        return events

    @asynccontextmanager
    async def without_grace(self) -> AsyncIterator[None]:
        """For times in which nothing answers: they have tens of thousands of timers."""
        before, self.grace_s = self.grace_s, 0.0
        try:
            yield
        finally:
            self.grace_s = before

    async def until(self, claim: Callable[[], bool], *, within_s: float) -> None:
        """Wait until `claim` holds, on this clock."""
        began = self.now()
        while not claim():
            assert self.now() - began < within_s, f"not within {within_s} s"
            await asyncio.sleep(0.2)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    return SkippingClock(monkeypatch)


def environment(hub: LoopbackHub, engine: ScriptedEngine) -> FaultyEnv:
    config = FaultyEnvConfig(
        has_faults=False,
        group_size=4,
        max_num_workers=6,
        max_token_length=64,
        use_wandb=False,
        steps_per_eval=0,
        worker_timeout=PATIENCE_S,
        rollout_server_url=hub.url,
        total_steps=1_000_000,
    )
    server = APIServerConfig(
        server_type="vllm",
        model_name="scripted",
        base_url=f"{engine.url}/v1",
        health_wait_s=PATIENCE_S,
    )
    return FaultyEnv(config, [server])


async def take(hub: LoopbackHub, num_batches: int) -> None:
    await hub.train(hub.coordinator.status().current_step + num_batches)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def items_of(log: pytest.LogCaptureFixture) -> Counter[str]:
    found = re.findall(
        r"(\d+) items started: (\d+) gave groups, .*, (\d+) unfinished; (.*)", log.text
    )
    started, with_groups, unfinished, rest = found[-1]
    assert rest.startswith("failed attempts: none;"), rest
    return Counter(
        {"started": int(started), "gave groups": int(with_groups), "unfinished": int(unfinished)}
    )


@pytest.mark.parametrize(("duration_s", "comes_back"), [(HOUR_S, "as it was"), (600.0, "empty")])
async def test_hub_away_for_an_hour_costs_no_group(
    duration_s: float, comes_back: str, clock: SkippingClock, log: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedEngine(script()) as engine,
        LoopbackHub(batch_size=16) as hub,
        serving(environment(hub, engine), timings=TIMINGS) as env,
    ):
        await clock.until(lambda: produced(hub) >= 4, within_s=60)
        engine.set_script(script(delay_s=5.0))
        await take(hub, 2)
        await clock.until(lambda: len(env.running_items) >= 4, within_s=60)
        await hub.stop()
        before = produced(hub)
        num_started = env.num_given
        if comes_back == "empty":
            await hub.coordinator.reset()
        hub.calls.clear()
        left_at = clock.now()
        await asyncio.sleep(30)  # the engine answers
        async with clock.without_grace():
            await asyncio.sleep(duration_s - 30)
        away_s = clock.now() - left_at
        outbox: Any = env.group_sink
        held = outbox.num_held
        # What was under way is finished and held; nothing new is started without knowing the hub's state.
        assert env.num_given - num_started <= 6
        assert held >= 4
        assert not env.running_items
        assert hub.calls == {}
        engine.set_script(script())
        await hub.start()
        if comes_back == "empty":
            await hub.start_trainer()
            assert produced(hub) == 0
            before = 0
        await clock.until(
            lambda: (
                produced(hub) >= before + held
                and "the hub answers again" in log.text
                and hub.coordinator.state.environments.num_active == 1
            ),
            within_s=BACK_S,
        )
        # One state change each way is one line each; an hour of attempts is none.
        assert log.text.count("the hub is unavailable; starting no new work") == 1
        assert log.text.count("the hub is unavailable; holding") == 1
        assert log.text.count("the hub answers again") == 1
        assert log.text.count("the hub is available again") == 1
        assert log.text.count("registering again") == (comes_back == "empty")
        await take(hub, 6)
    ledger = hub.coordinator.ledger()
    state = hub.coordinator.explain().environments
    assert outbox.num_accepted == outbox.num_stored
    assert (outbox.num_held, outbox.dropped) == (0, {})
    sent_before = 0 if comes_back == "as it was" else outbox.num_stored - ledger.produced
    assert ledger.produced == outbox.num_stored - sent_before == ledger.trained + ledger.queued
    assert (ledger.duplicates, ledger.rejected) == (0, {})
    assert [each.state for each in state] == ["disconnected"]
    items = items_of(log)
    assert items["started"] == items["gave groups"] + items["unfinished"]
    assert items["gave groups"] == outbox.num_accepted
    assert away_s >= duration_s


async def test_engine_away_for_longer_than_any_wait_costs_no_item(
    clock: SkippingClock, log: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedEngine(script()) as engine,
        LoopbackHub(batch_size=16) as hub,
        serving(environment(hub, engine), timings=TIMINGS) as env,
    ):
        await clock.until(lambda: produced(hub) >= 8, within_s=60)  # two batches
        await engine.stop()
        await take(hub, 2)
        await asyncio.sleep(30)
        num_started, before = env.num_given, produced(hub)
        async with clock.without_grace():
            await asyncio.sleep(2.5 * PATIENCE_S)
        assert produced(hub) == before
        assert env.num_given == num_started
        assert hub.coordinator.explain().environments[0].state == "active"
        await engine.start()
        await clock.until(lambda: produced(hub) >= before + 6, within_s=60)
        assert log.text.count("the engine answers again") == 1
        await take(hub, 4)
    outbox: Any = env.group_sink
    ledger = hub.coordinator.ledger()
    items = items_of(log)
    assert items["started"] == items["gave groups"] + items["unfinished"]
    assert items["gave groups"] == outbox.num_accepted == outbox.num_stored == ledger.produced
    assert (outbox.num_held, outbox.dropped, ledger.duplicates) == (0, {}, 0)
