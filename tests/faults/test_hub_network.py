"""A bad network between hub, environments and trainer costs no group, and repeats none among the committed.

Latency, resets, slices, narrow links, silence and cuts at chosen bytes, through tests/faults/proxy.py. The half-minute
silence: pytest -m slow tests/faults/test_hub_network.py -s
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from atroposlib.client import HubClient, TrainerClient
from atroposlib.errors import HubUnavailable
from atroposlib.wire import encode_json
from tests.faults.drivers import (
    BATCH_SIZE,
    GroupKey,
    HubProcess,
    LeaseTrainer,
    assert_balanced,
    eventually,
    hub_process,
    make_group,
    read_group,
    registration,
    traffic,
)
from tests.faults.proxy import Direction, Proxy, Toxics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

T = TypeVar("T")

TIMEOUT_S = 2.0
"""The clients' own; silence shorter than it is only slowness."""
RECOVERY_S = 60.0
"""Generous: the machine may be slow. The time is printed."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with hub_process(tmp_path_factory.mktemp("hub")) as running:
        yield running


@asynccontextmanager
async def fresh_run(hub: HubProcess, *, seed: int = 0) -> AsyncIterator[Proxy]:
    """A proxy to the hub, whose run is forgotten first."""
    await asyncio.to_thread(hub.forget)
    async with Proxy(hub.port, seed=seed) as proxy:
        yield proxy


# Traffic over a bad network


@pytest.mark.parametrize(
    ("toxics", "duration_s"),
    [
        pytest.param(Toxics(latency_s=0.1), 2.0, id="latency-200ms-both-ways"),
        pytest.param(Toxics(reset_chance=0.01), 2.0, id="resets-1-percent"),
        pytest.param(Toxics(slice_bytes=700), 2.0, id="slices"),
        pytest.param(Toxics(bytes_per_s=200_000), 2.0, id="narrow-link"),
        pytest.param(Toxics(is_blackhole=True), 5.0, id="blackhole-5s"),
        pytest.param(Toxics(is_blackhole=True), 30.0, id="blackhole-30s", marks=pytest.mark.slow),
    ],
)
async def test_bad_network_loses_nothing_and_repeats_nothing(
    hub: HubProcess, toxics: Toxics, duration_s: float, request: pytest.FixtureRequest
) -> None:
    async with fresh_run(hub, seed=3) as proxy:
        trainer = LeaseTrainer(proxy.url, timeout_s=TIMEOUT_S)
        async with traffic(proxy.url, trainer=trainer, num_producers=3) as load:
            await eventually(
                lambda: trainer.num_batches >= 5, timeout_s=60, what="batches over a good network"
            )
            before = load.num_acknowledged
            proxy.toxics = toxics
            await asyncio.sleep(duration_s)
            if not toxics.is_blackhole:
                await eventually(
                    lambda: (
                        load.num_acknowledged > before
                        and (proxy.num_resets > 0) >= (toxics.reset_chance > 0)
                    ),
                    timeout_s=RECOVERY_S,
                    what="groups pass, and a connection is reset where any is",
                )
            during = load.num_acknowledged - before
            await proxy.heal()
            healed = time.monotonic()
            num_batches = trainer.num_batches
            await eventually(
                lambda: load.last_acknowledged > healed and trainer.num_batches > num_batches,
                timeout_s=RECOVERY_S,
                what=f"a group and a batch after the network healed; {load.account()}",
            )
            recovery_s = time.monotonic() - healed
            await load.finish()
        assert_balanced(hub.get("/ledger"))
        print(
            f"{request.node.callspec.id}: {during} groups in {duration_s:.0f} s, {proxy.num_resets} resets;"
            f" recovered in {recovery_s:.2f} s; {load.account()}"
        )
    if toxics.is_blackhole:
        assert during <= 3  # what was already on its way back
    assert (proxy.num_resets > 0) == (toxics.reset_chance > 0)


# One connection broken at chosen bytes


def sweep(length: int, *, num_points: int = 40) -> list[int]:
    """Byte counts below `length`, closest to each other at the beginning, where the heads are."""
    points = {round((length - 1) * (i / (num_points - 1)) ** 2) for i in range(num_points)}
    return sorted(points | {1, length - 2})


@pytest.mark.parametrize("direction", Direction)
async def test_send_cut_at_any_byte_is_stored_once(hub: HubProcess, direction: Direction) -> None:
    num_duplicates = num_sent = 0
    async with fresh_run(hub) as proxy, HubClient(proxy.url, timeout_s=TIMEOUT_S) as client:

        async def send() -> str:
            nonlocal num_sent
            group = make_group(GroupKey(0, 1_000 + num_sent), num_sequences=2)
            num_sent += 1
            while True:
                try:
                    return (await client.send([group])).status
                except HubUnavailable:
                    continue

        assert await send() == "received"
        points = sweep(proxy.num_passed[direction])
        for num_bytes in points:
            proxy.reset_after(direction, num_bytes)
            num_duplicates += await send() == "duplicate"
            assert not proxy.is_armed
        ledger = hub.get("/ledger")
    assert_balanced(ledger)
    assert (ledger["queued"], ledger["produced"]) == (num_sent, num_sent)
    assert ledger["rejected"] == {}
    # Only an answer that is on its way means that the group was stored.
    assert num_duplicates == (len(points) if direction is Direction.REPLY else 0)


def test_body_of_an_environment_that_is_killed_is_not_stored_in_part(hub: HubProcess) -> None:
    """JSON without an id, as the original sends it: nothing repeats it."""
    hub.forget()
    num_stored = 0
    body = encode_json(make_group(GroupKey(1, 0), num_sequences=4))
    head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    sent = head.encode() + body
    for num_bytes in [*sweep(len(sent)), len(sent)]:
        with socket.create_connection(("127.0.0.1", hub.port), 30) as connection:
            connection.sendall(sent[:num_bytes])
            if num_bytes == len(sent):
                num_stored += b" 200 " in connection.recv(4096)
    ledger = hub.get("/ledger")
    assert_balanced(ledger)
    assert (ledger["rejected"], ledger["produced"], ledger["queued"], num_stored) == ({}, 1, 1, 1)


@pytest.mark.parametrize("direction", Direction)
async def test_lease_and_ack_cut_at_any_byte_train_each_batch_once(
    hub: HubProcess, direction: Direction
) -> None:
    received: list[GroupKey] = []
    num_posted = 0

    async with fresh_run(hub) as proxy, HubClient(hub.url) as producer:
        with TrainerClient(proxy.url, timeout_s=TIMEOUT_S, retry_for_s=0) as trainer:

            async def persist(call: Callable[..., T], *args: Any) -> T:
                while True:
                    try:
                        return await asyncio.to_thread(call, *args)
                    except HubUnavailable:
                        continue

            async def step(lease_cut: int | None, ack_cut: int | None) -> tuple[int, int]:
                """Train one batch; return the bytes of the lease and of the acknowledgement."""
                nonlocal num_posted
                for _ in range(2):
                    key = GroupKey(0, 1_000 + num_posted)
                    group = make_group(key, num_sequences=BATCH_SIZE // 2, num_tokens=64)
                    await producer.send([group])
                    num_posted += 1
                passed = [proxy.num_passed[direction]]
                if lease_cut is not None:
                    proxy.reset_after(direction, lease_cut)
                batch = await persist(trainer.lease_batch)
                assert batch is not None
                received.extend(read_group(group) for group in batch.groups)
                passed.append(proxy.num_passed[direction])
                if ack_cut is not None:
                    proxy.reset_after(direction, ack_cut)
                await persist(trainer.ack, batch)
                assert not proxy.is_armed
                passed.append(proxy.num_passed[direction])
                return passed[1] - passed[0], passed[2] - passed[1]

            await persist(trainer.register, registration())
            lease_bytes, ack_bytes = await step(None, None)
            lease_cuts, ack_cuts = sweep(lease_bytes), sweep(ack_bytes)
            for num_bytes in lease_cuts:
                await step(num_bytes, None)
            for num_bytes in ack_cuts:
                await step(None, num_bytes)
        ledger = hub.get("/ledger")
        num_batches = hub.get("/status")["current_step"]
    assert received == [GroupKey(0, 1_000 + index) for index in range(num_posted)]
    assert_balanced(ledger)
    assert (ledger["trained"], ledger["leased"], ledger["queued"]) == (num_posted, 0, 0)
    assert num_batches == 1 + len(lease_cuts) + len(ack_cuts)
