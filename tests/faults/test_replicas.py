"""Three run-api on one PostgreSQL serve six runs, and everything that can fail does: no group is lost or trained twice.

Environments and trainers know one address, of a balancer that passes each connection on to any replica, and go from
there to the owner of their run. The long variant: pytest -m slow tests/faults/test_replicas.py -s
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.drivers import (
    HubProcess,
    LeaseTrainer,
    Traffic,
    assert_balanced,
    drilled,
    kill_group,
    traffic,
)
from tests.faults.proxy import Balancer, Proxy, Toxics
from tests.postgres import Cluster, running_cluster

pytestmark = pytest.mark.e2e

NUM_RUNS = 6
TAKEOVER_S = 30.0
"""From a fault to the time when every run is served again, by any replica that works; 7 s where nothing else runs."""


@dataclass
class Replicas:
    """Replicas of a hub on one database, their balancer, and what is sent through it."""

    directory: Path
    cluster: Cluster
    relay: Proxy
    """Between the first replica and the database."""
    hubs: list[HubProcess] = field(default_factory=list)
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=3))
    loads: list[Traffic] = field(default_factory=list)
    takeovers_s: dict[str, list[float]] = field(default_factory=dict)
    """By fault."""

    async def add(self) -> HubProcess:
        directory = self.directory / f"hub-{len(list(self.directory.iterdir()))}"
        directory.mkdir()
        port = None if self.hubs else self.relay.port
        hub = HubProcess(directory, ("--database", self.cluster.url(port=port)))
        self.hubs.append(hub)
        await asyncio.to_thread(hub.start)
        return hub

    async def owned(self, by: HubProcess) -> dict[str, list[str]]:
        """Return the runs of every living replica by its address, as the replica `by` sees them.

        While the default run moves, its status is 502 or 503.
        """
        deadline = time.monotonic() + TAKEOVER_S
        while (answer := await self.http.get(f"{by.url}/status")).status_code in (502, 503):
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.2)
        status = answer.raise_for_status().json()
        return {each["address"]: each["runs"] for each in status["replicas"] if each["is_alive"]}

    async def busiest(self) -> HubProcess:
        """Return the replica with the most runs."""
        owned = await self.owned(self.hubs[-1])
        return max(self.hubs, key=lambda hub: len(owned.get(hub.url, ())))

    async def until_served(self, fault: str, began: float, *, by: list[HubProcess]) -> None:
        """Wait until each of the replicas `by` answers for every run."""
        for hub in by:
            for number in range(NUM_RUNS):
                while not await self.answers(f"{hub.url}/runs/r{number}/ledger"):
                    assert time.monotonic() - began < TAKEOVER_S, (
                        f"{fault}: r{number} is not served"
                    )
                    await asyncio.sleep(0.1)
        self.takeovers_s.setdefault(fault, []).append(time.monotonic() - began)

    async def answers(self, url: str) -> bool:
        try:
            return (await self.http.get(url)).status_code == 200
        except httpx.HTTPError:
            return False

    async def until(self, condition: Callable[[dict[str, list[str]]], bool], *, what: str) -> None:
        """Wait until `condition` holds for what the replicas own."""
        deadline = time.monotonic() + 40
        while not condition(await self.owned(self.hubs[-1])):
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.2)

    async def progress(self) -> None:
        """Wait until every run has taken in and trained more."""
        for load in self.loads:
            await load.progress(load.num_acknowledged + 3)

    def others(self, hub: HubProcess) -> list[HubProcess]:
        return [each for each in self.hubs if each is not hub]


# Faults


async def kill_an_owner(replicas: Replicas) -> None:
    hub = await replicas.busiest()
    hub.kill()
    await replicas.until_served("owner killed", time.monotonic(), by=replicas.others(hub))
    await asyncio.to_thread(hub.start)


async def stop_an_owner(replicas: Replicas) -> None:
    hub = await replicas.busiest()
    began = time.monotonic()
    os.kill(hub.pid, signal.SIGSTOP)
    try:
        await replicas.until_served("owner stopped", began, by=replicas.others(hub))
    finally:
        os.kill(hub.pid, signal.SIGCONT)
    await replicas.until_served("owner woken", time.monotonic(), by=[hub])


async def kill_the_database(replicas: Replicas) -> None:
    began = time.monotonic()
    await asyncio.to_thread(replicas.cluster.kill)
    await asyncio.sleep(1)
    await asyncio.to_thread(replicas.cluster.start)
    await replicas.until_served("database killed", began, by=replicas.hubs)


async def cut_the_database_off(replicas: Replicas) -> None:
    hub = replicas.hubs[0]
    began = time.monotonic()
    replicas.relay.toxics = Toxics(is_blackhole=True)
    await replicas.until(lambda owned: hub.url not in owned, what="its lapse")
    assert not await replicas.answers(f"{hub.url}/readyz")
    await replicas.until_served("database cut off", began, by=replicas.others(hub))
    replicas.relay.toxics = Toxics()
    await replicas.until_served("database back", time.monotonic(), by=[hub])


async def add_and_remove(replicas: Replicas) -> None:
    hub = await replicas.add()
    await replicas.until(
        lambda owned: len(owned.get(hub.url, ())) >= 1, what="runs for the new one"
    )
    replicas.hubs.remove(hub)
    began = time.monotonic()
    assert await asyncio.to_thread(hub.stop) == 0
    await replicas.until_served("replica removed", began, by=replicas.hubs)


FAULTS: list[Callable[[Replicas], Awaitable[None]]] = [
    kill_an_owner,
    stop_an_owner,
    kill_the_database,
    cut_the_database_off,
    add_and_remove,
]


@asynccontextmanager
async def three_replicas(directory: Path) -> AsyncIterator[Replicas]:
    """Three replicas with six runs, an environment and a trainer each, that work for the length of the block."""
    # Each trainer takes a thread for as long as it works.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * NUM_RUNS))
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(running_cluster())
        relay = await stack.enter_async_context(Proxy(cluster.port))
        replicas = Replicas(directory, cluster, relay)
        stack.push_async_callback(replicas.http.aclose)
        stack.callback(lambda: [_end(hub) for hub in replicas.hubs])
        for _ in range(3):
            await replicas.add()
        ports = [hub.port for hub in replicas.hubs]
        balancer = await stack.enter_async_context(Balancer(ports))
        for number in range(NUM_RUNS):
            url = f"{balancer.url}/runs/r{number}"
            trainer = LeaseTrainer(url, crash_chance=0.02, seed=number)
            load = await stack.enter_async_context(traffic(url, trainer=trainer, num_producers=1))
            load.producers[0].pause_s = 0.1
            replicas.loads.append(load)
        yield replicas


def _end(hub: HubProcess) -> None:
    if hub.process is not None:
        kill_group(hub.pid)
        hub.process.popen.wait()


@drilled("seconds", (None, 240), slow=(600, 1500))
async def test_no_fault_of_a_replica_or_the_database_loses_a_group_or_trains_one_twice(
    seconds: int | None, tmp_path: Path
) -> None:
    rng = random.Random(seconds)
    began = time.monotonic()
    done: Counter[str] = Counter()
    async with three_replicas(tmp_path) as replicas:
        await replicas.progress()
        left = list(FAULTS)
        while left:
            fault = left.pop(0)
            await fault(replicas)
            done[fault.__name__] += 1
            await replicas.progress()
            if not left and seconds is not None and time.monotonic() - began < seconds:
                left = rng.sample(FAULTS, len(FAULTS))
        for number, load in enumerate(replicas.loads):
            await load.finish()
            url = f"{replicas.hubs[number % 3].url}/runs/r{number}/ledger"
            ledger: dict[str, Any] = (await replicas.http.get(url)).json()
            assert_balanced(ledger)
            assert ledger["trained"] == load.num_acknowledged, (ledger, load.account())
            assert ledger["queued"] == ledger["leased"] == 0
    print(f"\n{dict(done)} in {time.monotonic() - began:.0f} s")
    for name, times_s in replicas.takeovers_s.items():
        print(f"  {name}: every run served after {max(times_s):.1f} s at most")
    requests_s = sorted(each for load in replicas.loads for each in load.trainer.requests_s)
    p99_s = requests_s[99 * len(requests_s) // 100]
    print(f"  GET /batch: p99 {p99_s:.1f} s, longest {requests_s[-1]:.1f} s of {len(requests_s)}")
    for load in replicas.loads:
        print(f"  {load.account()}; lost 0, committed twice 0")
