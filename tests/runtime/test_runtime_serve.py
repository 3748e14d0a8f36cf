"""Serving: groups reach the hub exactly once, whatever goes away; work is bounded; the run ends as promised."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from atroposlib.envs.env_config import BaseEnvConfig
from atroposlib.errors import ConfigError, EngineUnavailable, EnvError, Suspicion
from atroposlib.runtime.serve import serve
from tests.runtime.helpers_runtime import (
    FAST,
    LoopbackHub,
    ScriptedEnv,
    make_group,
    produced,
    serving,
    until,
)


async def test_run_ends_when_the_trainer_is_done() -> None:
    async with LoopbackHub(batch_size=4) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, total_steps=3)
        run = asyncio.create_task(serve(env, timings=FAST))
        await hub.train(3)
        outbox = await run
        assert outbox.num_stored == produced(hub) >= 6
        assert hub.coordinator.ledger().duplicates == 0
        assert (env.config.batch_size, env.max_token_len, env.curr_step) == (4, 100, 3)


async def test_queue_never_exceeds_the_offpolicy_bound() -> None:
    async with (
        LoopbackHub(batch_size=4) as hub,
        hub.serve(max_batches_offpolicy=2, max_num_workers=16) as env,
    ):
        await until(lambda: produced(hub) >= 4)
        await asyncio.sleep(0.15)
    assert produced(hub) == len(env.started) == 4  # 2 batches of 4 sequences in groups of 2


@pytest.mark.parametrize(
    ("workers", "is_full", "most"),
    [({}, False, None), ({"max_num_workers_per_node": 8}, False, 8), ({}, True, 8)],
)
async def test_items_follow_the_demand_unless_the_author_set_their_number(
    workers: dict[str, int], is_full: bool, most: int | None
) -> None:
    async def answer(item: int) -> Any:
        in_flight.append(len(env.running_items))
        await asyncio.sleep(0.05)
        return make_group()

    in_flight: list[int] = []
    async with LoopbackHub(batch_size=64) as hub:
        config = BaseEnvConfig(group_size=2, use_wandb=False, rollout_server_url=hub.url, **workers)
        env = ScriptedEnv(config, answer=answer)
        if is_full:
            [server] = env.server.servers
            server.sem.update_limit(1)
            await server.sem.acquire()
        stop = asyncio.Event()
        run = asyncio.create_task(serve(env, timings=FAST, stop=stop))
        for _ in range(5):
            while not await hub.take_batch():
                await hub.coordinator.arrivals.wait(1.0)
            await asyncio.sleep(0.2)  # a step
        stop.set()
        await run
    assert max(in_flight[:8]) == 8
    if most is None:
        assert max(in_flight) >= 24  # a batch is 32 groups
    else:
        assert max(in_flight) == most


async def test_hub_that_goes_away_and_comes_back_loses_no_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()

    async def answer(item: int) -> Any:
        if item >= 2:
            await release.wait()
        return make_group()

    caplog.set_level(logging.INFO)
    async with (
        LoopbackHub(batch_size=4) as hub,
        hub.serve(answer=answer, max_batches_offpolicy=50) as env,
    ):
        await until(lambda: produced(hub) == 2 and len(env.running_items) == 4)
        await hub.stop()
        release.set()
        await until(lambda: not env.running_items)
        num_started = len(env.started)
        await asyncio.sleep(0.2)
        assert len(env.started) == num_started  # no new work while the hub is unavailable
        assert produced(hub) == 2
        await hub.start()
        await until(lambda: produced(hub) > num_started)
    outbox: Any = env.group_sink
    assert produced(hub) == outbox.num_accepted == outbox.num_stored
    assert hub.coordinator.ledger().duplicates == 0
    assert caplog.text.count("the hub is unavailable; starting no new work") == 1
    assert caplog.text.count("the hub answers again") == 1


async def test_environment_outlives_the_trainer_and_serves_the_next_experiment() -> None:
    async def stuck(item: int) -> Any:
        await asyncio.Event().wait()

    async with LoopbackHub(batch_size=4, num_steps=-1) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, total_steps=-1)
        await hub.start_trainer(experiment="first", num_steps=1000, checkpoint_dir="a")
        async with serving(env):
            await until(lambda: produced(hub) == 6 and not env.running_items)  # all that it may
            env.answer = stuck
            await hub.take_batch()
            await until(lambda: len(env.running_items) == 2)
            under_way = list(env.started[-2:])
            first, env_id = hub.coordinator, env.env_id
            await hub.start_trainer(experiment="second", num_steps=5, checkpoint_dir="b")
            assert hub.coordinator is not first
            late = make_group() | {"group_id": "late"}
            await env.handle_send_to_api(late)  # made before the environment could know
            env.answer = lambda _: make_group()
            await until(lambda: produced(hub) >= 3)
            # What was under way is sampled again, for the second experiment.
            assert set(under_way) <= set(env.started[env.started.index(under_way[-1]) + 1 :])
            assert hub.coordinator.ledger().rejected == {"another_run": 1}
            assert (env.env_id, env.checkpoint_dir, env.config.total_steps) == (env_id, "b", 5)
        outbox: Any = env.group_sink
        assert outbox.dropped == {"another_run": 1}


async def test_attempt_that_is_cancelled_before_it_begins_is_made_again() -> None:
    class Restarted(ScriptedEnv):
        is_cancelled = False

        async def add_train_workers(self) -> None:
            await super().add_train_workers()
            if self.started and self.running_items and not self.is_cancelled:
                runtime: Any = self.runtime
                await runtime._items.sample_again()  # the second attempt has not started
                self.is_cancelled = True

    def answer(item: int) -> Any:
        return ValueError("once") if len(env.started) == 1 else make_group()

    async with LoopbackHub() as hub:
        env = Restarted(rollout_server_url=hub.url, answer=answer, num_items=1, max_num_workers=1)
        async with serving(env):
            await until(lambda: produced(hub) > 0)
            await asyncio.sleep(0.1)
        assert produced(hub) == 1


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
async def test_hub_that_forgot_the_environment_gets_it_back_under_its_uid(pause_s: float) -> None:
    async with LoopbackHub(batch_size=4) as hub, hub.serve(max_batches_offpolicy=1):
        await until(lambda: produced(hub) == 2)
        uid = hub.coordinator.state.environments.get(0).registration.env_uid
        assert uid is not None
        await hub.coordinator.reset()
        await asyncio.sleep(pause_s)
        await hub.start_trainer()
        await until(lambda: hub.coordinator.state.environments.num_active == 1)
        assert hub.coordinator.state.environments.get(0).registration.env_uid == uid
        await until(lambda: hub.coordinator.status_env(0).self_queue_size >= 2)


async def test_engine_that_goes_away_costs_no_item(caplog: pytest.LogCaptureFixture) -> None:
    is_away = True

    def answer(item: int) -> Any:
        return EngineUnavailable("no engine at http://e") if is_away else make_group()

    caplog.set_level(logging.INFO)
    async with (
        LoopbackHub() as hub,
        hub.serve(answer=answer, num_items=3, max_consecutive_failures=2) as env,
    ):
        await until(lambda: len(env.started) >= 6)
        assert len(env.started) < 30
        is_away = False
        await until(lambda: produced(hub) == 3)
    assert caplog.text.count("the engine is unavailable") == 1
    assert caplog.text.count("the engine answers again") == 1
    assert env.num_cleanups == len(env.started)


async def test_environment_without_items_says_so(caplog: pytest.LogCaptureFixture) -> None:
    timings = replace(FAST, no_item_reminder_s=0.1)
    async with LoopbackHub() as hub, hub.serve(num_items=2, timings=timings):
        await until(lambda: caplog.text.count("get_next_item() returns None") == 2)
    assert "returns None (step 0, policy version None)" in caplog.text
    assert produced(hub) == 2


async def test_failing_item_is_tried_three_times_then_counted() -> None:
    def answer(item: int) -> Any:
        return ValueError("bad item") if item == 0 else make_group()

    async with LoopbackHub() as hub, hub.serve(answer=answer, num_items=4) as env:
        await until(lambda: env.started.count(0) == 3 and produced(hub) == 3)
        await asyncio.sleep(0.1)
    assert env.started.count(0) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ValueError("the reward is broken"), "5 items in a row failed with ValueError: the reward"),
        (make_group() | {"masks": [[-100, 6, 7], [-100]]}, r"sequences\[1\].masks: 1 values for 3 tokens"),
        (Suspicion("swap_gold: since step 3"), "^swap_gold: since step 3$"),
    ],
)  # fmt: skip
async def test_same_failure_many_times_in_a_row_ends_the_run(
    answer: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url, answer=lambda item: answer, max_consecutive_failures=5
        )
        with pytest.raises(EnvError, match=message):
            await serve(env, timings=FAST)
        assert not env.running_items
        assert produced(hub) == 0
    assert ("item failed" in caplog.text) == (not isinstance(answer, Suspicion))


async def test_item_past_its_deadline_is_cancelled_and_awaited() -> None:
    ended: list[int] = []

    async def answer(item: int) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(item)

    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url,
            answer=answer,
            worker_timeout=0.02,
            max_consecutive_failures=3,
        )
        with pytest.raises(EnvError, match="TimeoutError: the item took more than 0.02 s"):
            await serve(env, timings=FAST)
        assert sorted(ended) == sorted(env.started)


async def test_sigterm_stops_delivers_and_disconnects() -> None:
    async with LoopbackHub() as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=1)
        run = asyncio.create_task(serve(env, timings=FAST))
        await until(lambda: produced(hub) >= 2)
        os.kill(os.getpid(), signal.SIGTERM)
        outbox = await run
        assert outbox.num_held == 0
        assert hub.coordinator.state.environments.num_active == 0


async def test_group_larger_than_the_trainers_batch_is_a_config_error() -> None:
    async with LoopbackHub(batch_size=2) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, group_size=4)
        with pytest.raises(ConfigError, match="group_size: 4 sequences do not fit"):
            await serve(env, timings=FAST)


async def test_environment_waits_for_hub_and_trainer() -> None:
    hub = LoopbackHub()
    async with serving(ScriptedEnv(rollout_server_url=hub.url)) as env:
        await asyncio.sleep(0.1)
        assert not env.started
        await hub.start()
        await asyncio.sleep(0.1)
        assert not env.started
        await hub.start_trainer()
        await until(lambda: produced(hub) >= 2)
    await hub.__aexit__()


async def test_deadline_spent_waiting_for_the_engine_is_no_failure() -> None:
    async def answer(item: int) -> Any:
        if not env.server.servers[0].server_healthy:
            await asyncio.sleep(60)
        return make_group()

    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url,
            answer=answer,
            num_items=2,
            worker_timeout=0.3,
            max_consecutive_failures=2,
        )
        env.server.servers[0].server_healthy = False
        async with serving(env):
            await until(lambda: len(env.started) >= 5)
            env.server.servers[0].server_healthy = True
            await until(lambda: produced(hub) == 2)


async def test_environment_at_full_speed_makes_one_control_call_per_refill() -> None:
    async def answer(item: int) -> Any:
        await asyncio.sleep(0.02)
        return make_group()

    timings = replace(FAST, control_refill_s=5.0, poll_wait_s=10.0)
    async with LoopbackHub(batch_size=4) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, answer=answer, max_batches_offpolicy=3)
        began = time.monotonic()
        async with serving(env, timings=timings):
            await hub.train(40)
            elapsed_s, num_calls = time.monotonic() - began, hub.num_control_calls
    assert num_calls <= timings.control_burst + elapsed_s / timings.control_refill_s
    # One call tells of room for three batches: the rest was learned from the answers to groups.
    assert 3 * num_calls < 40


async def test_environment_that_waits_costs_the_hub_next_to_nothing() -> None:
    timings = replace(FAST, poll_wait_s=10.0)
    async with LoopbackHub(batch_size=4) as hub:
        await hub.coordinator.set_policy(6)
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=1)
        async with serving(env, timings=timings):
            await until(lambda: produced(hub) == 2)
            before = hub.num_control_calls
            await asyncio.sleep(0.3)
            assert hub.num_control_calls - before <= 1
            # A step is noticed at once, because a request waits at the hub.
            assert await hub.take_batch() == 2
            await until(lambda: env.curr_step == 1 and produced(hub) == 4)
            await hub.coordinator.set_policy(7)
            await until(lambda: env.status_dict["policy_version"] == 7)


async def test_hub_can_explain_that_the_trainer_waits_for_one_long_item() -> None:
    explained = asyncio.Event()

    async def answer(item: int) -> Any:
        if item == 1:
            await explained.wait()
        return make_group()

    timings = replace(FAST, poll_wait_s=0.05)
    async with LoopbackHub(batch_size=4) as hub:
        hub.coordinator.state.trainer_times.acknowledge(0.01, leased_at=0.0)
        await hub.coordinator.deliver()
        async with hub.serve(num_items=2, answer=answer, timings=timings):
            await until(
                lambda: (
                    produced(hub) == 1
                    and re.search(
                        r"reported 1 items in flight, .* ago; over age and waiting: 1 for its own code",
                        hub.coordinator.explain().reason,
                    )
                    is not None
                )
            )
            explained.set()


async def test_an_environment_that_drops_everything_is_named_in_the_same_words_at_both_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(item: int) -> Any:
        return make_group(scores=[1.0, 1.0])

    timings = replace(FAST, poll_wait_s=0.05, progress_s=0.01)
    words = r"dropped (\d+) of \1 groups: equal_scores"
    with caplog.at_level(logging.INFO, logger="atroposlib.runtime.progress"):
        async with LoopbackHub(batch_size=4) as hub:
            await hub.coordinator.deliver()
            async with hub.serve(num_items=3, answer=answer, timings=timings):
                reason = rf"0 of 4 sequences are queued; the trainer has .*; \w+_0 {words}"
                await until(
                    lambda: re.fullmatch(reason, hub.coordinator.explain().reason) is not None
                )
                await until(lambda: re.search(f"; problem {words};", caplog.text) is not None)


async def test_original_hub_is_polled_at_the_pace_and_its_bound_holds() -> None:
    timings = replace(FAST, control_refill_s=0.1, poll_wait_s=10.0)
    async with LoopbackHub(batch_size=4, is_original=True) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=2, max_num_workers=16)
        began = time.monotonic()
        async with serving(env, timings=timings):
            await until(lambda: produced(hub) == 4 and hub.calls["/status-env"] >= 4)
            assert produced(hub) == len(env.started) == 4
            assert await hub.take_batch() == 2
            await until(lambda: produced(hub) == 6)
            elapsed_s = time.monotonic() - began
            bound = timings.control_burst + elapsed_s / timings.control_refill_s
            assert hub.num_control_calls <= bound


async def test_groups_sent_since_the_last_status_count_against_the_bound() -> None:
    """The original's status is old by a poll, which here never comes."""
    timings = replace(FAST, control_refill_s=60.0)
    async with (
        LoopbackHub(batch_size=4, is_original=True) as hub,
        hub.serve(max_batches_offpolicy=3, max_num_workers=1, timings=timings) as env,
    ):
        await until(lambda: produced(hub) == 6)
        await asyncio.sleep(0.2)
        assert hub.calls["/status-env"] == 1
        assert produced(hub) == len(env.started) == 6


async def test_id_that_became_another_environments_is_noticed() -> None:
    async with LoopbackHub(batch_size=4) as hub, hub.serve(max_batches_offpolicy=1) as env:
        await until(lambda: produced(hub) == 2)
        assert env.env_id == 0
        await hub.stop()
        await hub.coordinator.reset()  # as a hub without a disk forgets
        await hub.start_trainer()
        assert await hub.start_stranger() == 0
        await hub.start()
        await until(lambda: env.env_id == 1)
        await until(lambda: hub.coordinator.status_env(1).self_queue_size == 2)
        assert hub.coordinator.status_env(0).self_queue_size == 0


async def test_full_hub_slows_the_environment_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        LoopbackHub(batch_size=4, max_queued_sequences=8) as hub,
        hub.serve(max_batches_offpolicy=50, num_items=12) as env,
    ):
        await until(lambda: len(env.started) >= 5 and "429" in caplog.text)
        assert hub.coordinator.status().queue_size <= 4
        await hub.train(6)
    outbox: Any = env.group_sink
    ledger = hub.coordinator.ledger()
    assert (outbox.num_accepted, outbox.num_stored, outbox.dropped) == (12, 12, {})
    assert (ledger.produced, ledger.trained, ledger.duplicates) == (12, 12, 0)
