"""kill -9 of the hub under load: nothing acknowledged is lost, nothing is committed twice, nothing is damaged.

The long variant: pytest -m slow tests/faults/test_hub_kill.py -s
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from atroposlib.wire import encode_json
from tests.faults.drivers import (
    GroupKey,
    LeaseTrainer,
    Producer,
    Traffic,
    assert_balanced,
    children,
    drilled,
    eventually,
    has_group_ended,
    hub_process,
    make_group,
    traffic,
)

pytestmark = pytest.mark.e2e


@drilled("num_cycles", (10, 300), slow=(1000, 3600))
async def test_killed_hub_loses_no_group_and_commits_none_twice(
    num_cycles: int, tmp_path: Path
) -> None:
    rng = random.Random(num_cycles)
    began = time.monotonic()
    with hub_process(tmp_path) as hub:
        trainer = LeaseTrainer(hub.url, crash_chance=0.05)
        async with traffic(hub.url, trainer=trainer) as load:
            for cycle in range(num_cycles):
                await asyncio.sleep(0.15 + 0.35 * rng.random())
                await load.progress(3 * (cycle + 1))
                await asyncio.to_thread(hub.kill)
                if cycle % 10 == 9:  # once more while it recovers
                    hub.launch()
                    await asyncio.sleep(rng.random() * statistics.median(hub.start_times_s))
                    await asyncio.to_thread(hub.kill)
                await asyncio.to_thread(hub.start)
            cycles_s = time.monotonic() - began
            await load.finish()
        ledger = hub.get("/ledger")
        assert_balanced(ledger)
        assert ledger["trained"] == load.num_acknowledged
        assert ledger["queued"] == ledger["leased"] == 0
    print(
        f"{num_cycles} kills in {cycles_s:.0f} s; restart to ready"
        f" p50 {statistics.median(hub.start_times_s):.2f} s, max {max(hub.start_times_s):.2f} s;"
        f" {load.account()}; lost 0, committed twice 0, corrupt 0"
    )


@asynccontextmanager
async def its_turn(experiment: Traffic) -> AsyncIterator[None]:
    """Let the experiment's trainer begin, or resume, it; the one before must have ended."""
    trainer = experiment.trainer
    trainer.must_stop.clear()
    experiment.training = asyncio.create_task(asyncio.to_thread(trainer.run))
    try:
        yield
    finally:
        trainer.must_stop.set()
        await experiment.training


@drilled("num_turns", (6, 240), slow=(200, 1800))
async def test_experiments_that_take_turns_are_each_trained_on_their_own_groups_alone(
    num_turns: int, tmp_path: Path
) -> None:
    """The hub is killed, or stopped and woken, in every turn; environments never notice whose turn it is."""
    rng = random.Random(num_turns)
    with hub_process(tmp_path) as hub:
        experiments = []
        for number in range(3):
            name = f"experiment-{number}"
            trainer = LeaseTrainer(hub.url, experiment=name, crash_chance=0.05, seed=number)
            producer = Producer(number, hub.url, experiment=name, pause_s=0.01)
            producer.may_send = lambda p=producer, t=trainer: len(p.acknowledged) - t.num_seen < 60
            each = Traffic([producer], trainer)
            each.producing = [asyncio.create_task(producer.run(each.stop_producing))]
            experiments.append(each)
        for turn in range(num_turns):
            async with its_turn(experiments[turn % len(experiments)]):
                await asyncio.sleep(0.1 + 0.6 * rng.random())
                await experiments[turn % 3].progress(4 * (turn // 3 + 1))
                if turn % 3 == 2:
                    os.kill(hub.pid, signal.SIGSTOP)
                    await asyncio.sleep(0.3)
                    os.kill(hub.pid, signal.SIGCONT)
                else:
                    await asyncio.to_thread(hub.kill)
                    await asyncio.to_thread(hub.start)
                await asyncio.sleep(0.1 + 0.4 * rng.random())
            for each in experiments:
                each.check()
        for each in experiments:
            async with its_turn(each):
                await each.finish()
            ledger = hub.get("/ledger")
            assert_balanced(ledger)
            assert ledger["trained"] == each.num_acknowledged, each.account()
            assert ledger["queued"] == ledger["leased"] == 0
    num_refused = sum(each.producers[0].num_for_another for each in experiments)
    print(f"{num_turns} turns: {num_refused} sends for another experiment refused")
    for each in experiments:
        print(f"  {each.account()}; lost 0, committed twice 0")


@pytest.mark.timeout(60)
async def test_killed_hub_leaves_no_process_behind(tmp_path: Path) -> None:
    """Its decoder processes notice that it has gone, in the middle of their work too."""
    num_groups = 8
    bodies = [  # 4 MB each: not decoded in the hub itself
        encode_json(make_group(GroupKey(0, n), num_sequences=16, num_tokens=8192))
        for n in range(num_groups)
    ]
    with hub_process(tmp_path) as hub:
        async with httpx.AsyncClient(base_url=hub.url, timeout=30) as client:
            posting = [
                asyncio.create_task(client.post("/scored_data", content=body)) for body in bodies
            ]
            await asyncio.wait(posting, return_when=asyncio.FIRST_COMPLETED)
            assert children(hub.pid), "the bodies are decoded in the hub itself"
            killed = hub.pid
            hub.kill()
            outcomes = await asyncio.gather(*posting, return_exceptions=True)
        num_answered = sum(isinstance(each, httpx.Response) for each in outcomes)
        assert 1 <= num_answered < num_groups, outcomes
        await eventually(
            lambda: has_group_ended(killed), timeout_s=30, what="the decoder processes end"
        )
        await asyncio.to_thread(hub.start)
        ledger = hub.get("/ledger")
        assert_balanced(ledger)
        assert num_answered <= ledger["queued"] == ledger["produced"] <= num_groups
