"""kill -9 of the hub under load: nothing acknowledged is lost, nothing is committed twice, nothing is damaged.

The long variant: pytest -m slow tests/faults/test_hub_kill.py -s
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path

import pytest

from tests.faults.drivers import (
    LeaseTrainer,
    assert_balanced,
    eventually,
    has_group_ended,
    hub_process,
    traffic,
)

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "num_cycles",
    [
        pytest.param(60, marks=pytest.mark.timeout(300)),
        pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_killed_hub_loses_no_group_and_commits_none_twice(
    num_cycles: int, tmp_path: Path
) -> None:
    rng = random.Random(num_cycles)
    began = time.monotonic()
    killed_groups = []
    with hub_process(tmp_path) as hub:
        trainer = LeaseTrainer(hub.url, crash_chance=0.05)
        async with traffic(hub.url, trainer=trainer, num_producers=4) as load:
            for cycle in range(num_cycles):
                await asyncio.sleep(0.15 + 0.35 * rng.random())
                load.check()
                killed_groups.append(hub.pid)
                await asyncio.to_thread(hub.kill)
                if cycle % 10 == 9:  # once more while it recovers
                    hub.launch()
                    await asyncio.sleep(rng.random() * statistics.median(hub.start_times_s))
                    killed_groups.append(hub.pid)
                    await asyncio.to_thread(hub.kill)
                await asyncio.to_thread(hub.start)
            cycles_s = time.monotonic() - began
            await load.finish()
        ledger = hub.get("/ledger")
        assert_balanced(ledger)
        assert ledger["trained"] == load.num_acknowledged
        assert ledger["queued"] == ledger["leased"] == 0
        for pid in killed_groups:
            await eventually(
                lambda pid=pid: has_group_ended(pid),
                timeout_s=5,
                what=f"what the killed hub {pid} had started ends by itself",
            )
    print(
        f"{num_cycles} kills in {cycles_s:.0f} s; restart to ready"
        f" p50 {statistics.median(hub.start_times_s):.2f} s, max {max(hub.start_times_s):.2f} s;"
        f" {load.account()}; lost 0, committed twice 0, corrupt 0"
    )
    assert load.num_acknowledged > 10 * num_cycles, "too little load to show anything"
