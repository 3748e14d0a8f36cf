"""Environments that are killed leave no partial group and no claim that holds batches up (real processes)."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.client import TrainerClient
from atroposlib.wire import (
    CONTENT_TYPE_JSON,
    CONTENT_TYPE_PACKED,
    encode_json,
    join_packed,
    pack_group,
)
from tests.faults.drivers import (
    GroupKey,
    HubProcess,
    assert_balanced,
    eventually,
    hub_process,
    make_group,
    read_group,
    registration,
)
from tests.processes import ROOT, Process

pytestmark = pytest.mark.e2e

SCRIPT = str(ROOT / "tests" / "faults" / "original_env.py")
GROUP_SIZE = 4
SLOW_MACHINE_S = 15.0


async def settled_ledger(hub: HubProcess) -> dict[str, Any]:
    """The ledger once what the killed have sent to its end, and no answer waits for, is stored too."""
    before: dict[str, Any] = {}
    while (ledger := hub.get("/ledger")) != before:
        before = ledger
        await asyncio.sleep(1.5)
    return ledger


@pytest.mark.timeout(120)
async def test_environment_killed_while_it_sends_leaves_no_partial_group(tmp_path: Path) -> None:
    num_cycles = 50
    rng = random.Random(2)
    num_complete = 0
    with hub_process(tmp_path) as hub:
        for cycle in range(num_cycles):
            group = make_group(GroupKey(1, cycle), num_sequences=GROUP_SIZE, num_tokens=2000)
            body, content_type = encode_json(group), CONTENT_TYPE_JSON
            if cycle % 2:
                body, content_type = join_packed([pack_group(group)], {}), CONTENT_TYPE_PACKED
            file = tmp_path / f"body-{cycle}"
            file.write_bytes(body)
            env = Process(
                "environment",
                ["-S", SCRIPT, "post", str(hub.port), "/scored_data", content_type, str(file)],
                log_path=tmp_path / f"env-{cycle}.log",
            )
            await eventually(
                lambda env=env: "sending" in env.log(),
                timeout_s=20,
                what="the environment sends",
                interval_s=0.002,
            )
            duration_s = 0.0015 * len(body) / 4096
            await asyncio.sleep(1.3 * duration_s * rng.random())
            env.popen.kill()
            env.popen.wait()
            num_complete += "status 200" in env.log()
        ledger = await settled_ledger(hub)
        assert_balanced(ledger)
        assert ledger["rejected"] == {}
        num_stored = ledger["queued"]
        assert num_complete <= num_stored == ledger["produced"] < num_cycles
        with TrainerClient(hub.url) as trainer:
            await asyncio.to_thread(
                trainer.register, registration(batch_size=GROUP_SIZE, max_token_len=2000)
            )
            received = []
            while (batch := await asyncio.to_thread(trainer.lease_batch, 0.2)) is not None:
                received += [read_group(each) for each in batch.groups]
                await asyncio.to_thread(trainer.ack, batch)
        assert len(set(received)) == len(received) == num_stored
    print(
        f"{num_cycles} environments killed while they sent: {num_stored} groups stored whole,"
        f" {num_cycles - num_stored} not at all, none in part"
    )


@pytest.mark.timeout(120)
async def test_dead_environments_with_minimums_hold_batches_up_no_longer_than_their_timeout(
    tmp_path: Path,
) -> None:
    timeout_s, poll_s = 3.0, 0.25
    arrivals: list[float] = []
    with hub_process(tmp_path, "--env-timeout-s", str(timeout_s)) as hub:
        async with httpx.AsyncClient(base_url=hub.url) as trainer:

            async def poll() -> Any:
                reply = (await trainer.get("/batch")).raise_for_status().json()
                if reply["batch"]:
                    arrivals.append(time.monotonic())
                return reply["batch"]

            body = registration(batch_size=8, max_token_len=64).model_dump()
            (await trainer.post("/register", json=body)).raise_for_status()
            await poll()
            environments = [
                Process(
                    f"environment {n}",
                    ["-S", SCRIPT, "serve", str(hub.port), f"env{n}", "0.25"],
                    log_path=tmp_path / f"env-{n}.log",
                )
                for n in range(4)
            ]
            try:
                while len(arrivals) < 4:
                    await poll()
                    await asyncio.sleep(poll_s)
                killed = time.monotonic()
                for each in environments[1:]:
                    each.popen.kill()
                    each.popen.wait()
                blockers = set()
                while sum(arrival > killed + timeout_s for arrival in arrivals) < 2:
                    if await poll() is None:
                        blockers.add((await trainer.get("/explain")).json()["blocker"])
                    await asyncio.sleep(poll_s)
            finally:
                for each in environments:
                    each.stop()
        assert_balanced(hub.get("/ledger"))
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    print(
        f"3 of 4 environments killed: longest time without a batch {max(gaps):.2f} s"
        f" (environment timeout {timeout_s} s, a poll every {poll_s} s)"
    )
    assert "minimum" in blockers, blockers
    assert max(gaps) <= timeout_s + SLOW_MACHINE_S
