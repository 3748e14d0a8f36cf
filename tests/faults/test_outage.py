"""A hub or an engine that is away for a minute and comes back costs no group (real processes, real sockets)."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from atroposlib.client import TrainerClient
from tests.faults.drivers import assert_balanced, eventually, hub_process
from tests.faults.proxy import Proxy
from tests.processes import Process, answers, engine_argv, free_port, parity_argv, running, wait_for
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

AWAY_S = 60.0


class Consumer:
    """A trainer that takes batches as fast as they come, until told to stop."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_batches = 0
        self.must_stop = threading.Event()

    def run(self, hub_url: str) -> None:
        with TrainerClient(hub_url) as hub:
            while not self.must_stop.is_set():
                groups = hub.batch(wait_s=0.5)
                if groups is not None:
                    self.num_groups += len(groups)
                    self.num_batches += 1
                self.must_stop.wait(0.05)

    async def take(self, num_batches: int, *, environment: Process) -> None:
        wanted = self.num_batches + num_batches

        def is_done() -> bool:
            assert environment.popen.poll() is None, environment.log()[-4000:]
            return self.num_batches >= wanted

        await eventually(is_done, timeout_s=90, what=f"{num_batches} batches")


@pytest.mark.parametrize("peer", ["hub", "engine"])
async def test_a_peer_that_is_away_for_a_minute_costs_no_group(peer: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine_port = free_port()
    engine_url = f"http://127.0.0.1:{engine_port}"
    with (
        hub_process(tmp_path) as hub,
        running(
            "engine", engine_argv(model, engine_port), log_path=tmp_path / "engine.log"
        ) as engine,
    ):
        wait_for(lambda: answers(f"{engine_url}/health"), timeout_s=60, process=engine)
        hub.register(max_token_len=64)
        consumer = Consumer()
        consuming = asyncio.create_task(asyncio.to_thread(consumer.run, hub.url))
        async with Proxy(hub.port if peer == "hub" else engine_port) as link:
            urls = {"hub": hub.url, "engine": engine_url, peer: link.url}
            argv = parity_argv(model, hub_url=urls["hub"], engine_url=urls["engine"])
            argv.append("--env.total_steps=1000000")
            with running("environment", argv, log_path=tmp_path / "env.log") as environment:
                await consumer.take(5, environment=environment)
                await link.cut()
                await asyncio.sleep(AWAY_S)
                assert environment.popen.poll() is None, environment.log()[-4000:]
                await link.heal()
                await consumer.take(5, environment=environment)
                code = await asyncio.to_thread(environment.stop)
                assert code == 0, environment.log()[-4000:]
        consumer.must_stop.set()
        await consuming
        ledger = hub.get("/ledger")

    said = r"(\d+) groups accepted, (\d+) stored by the hub, (\d+) held"
    accepted, stored, held = map(int, re.findall(said, environment.log())[-1])
    assert (stored, held) == (accepted, 0), environment.log()[-4000:]
    assert ledger["produced"] == accepted
    assert ledger["trained"] == consumer.num_groups
    assert_balanced(ledger)
