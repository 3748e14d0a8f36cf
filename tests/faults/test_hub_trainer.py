"""Plain batches: one that is cut off comes again, one that has arrived never does (real processes, real sockets)."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.client import HubClient
from atroposlib.scored_data import Strictness, check_group
from tests.faults.drivers import (
    BATCH_SIZE,
    GroupKey,
    HubProcess,
    assert_balanced,
    eventually,
    hub_process,
    make_group,
    read_group,
)
from tests.faults.proxy import Direction, Proxy

pytestmark = pytest.mark.e2e


async def post_groups(url: str, num_groups: int, *, size: int, num_tokens: int) -> list[GroupKey]:
    """Post groups of `size` sequences one after another."""
    keys = [GroupKey(0, index) for index in range(num_groups)]
    async with HubClient(url) as hub:
        for key in keys:
            await hub.send([make_group(key, num_sequences=size, num_tokens=num_tokens)])
    return keys


def keys_of(batch: list[dict[str, Any]]) -> list[GroupKey]:
    return [read_group(check_group(each, strictness=Strictness.WIRE)) for each in batch]


@pytest.mark.timeout(120)
async def test_plain_batch_cut_on_its_way_comes_again(tmp_path: Path) -> None:
    """Up to the last megabytes, which the kernel takes from the hub before the client has them."""
    identity = {"Accept-Encoding": "identity"}  # 10 MB: more than kernels take
    with hub_process(tmp_path) as hub:
        hub.register(max_token_len=20_000)
        keys = await post_groups(hub.url, 4, size=BATCH_SIZE // 2, num_tokens=20_000)
        async with (
            Proxy(hub.port) as proxy,
            httpx.AsyncClient(timeout=10, headers=identity) as client,
        ):
            cuts = [0, 1, 15, 200, 5_000, 100_000, 1_000_000]
            for num_bytes in cuts:
                proxy.reset_after(Direction.REPLY, num_bytes)
                with pytest.raises(httpx.TransportError):
                    await client.get(f"{proxy.url}/batch")
                assert not proxy.is_armed
                await eventually(
                    lambda: hub.get("/ledger")["queued"] == len(keys),
                    timeout_s=30,
                    what="the groups of the cut batch are queued again",
                )
            batches = []
            for _ in range(2):
                reply = (await client.get(f"{proxy.url}/batch")).raise_for_status().json()
                batches.append(keys_of(reply["batch"]))
            status = await client.get(f"{proxy.url}/status")  # on the same connection
        assert sorted(batches[0] + batches[1]) == keys
        assert status.json()["current_step"] == 2
        await all_trained(hub, len(keys))


@pytest.mark.timeout(120)
async def test_plain_batches_that_were_lost_do_not_count_as_trained(tmp_path: Path) -> None:
    """These fit into the buffers of the kernels, so the hub has sent all of each when its connection breaks."""
    num_batches, num_received = 24, 0
    with hub_process(tmp_path) as hub:
        hub.register()
        await post_groups(hub.url, num_batches, size=BATCH_SIZE, num_tokens=500)
        async with Proxy(hub.port) as proxy:
            for number in range(num_batches):
                if number % 3 == 0:
                    proxy.reset_after(Direction.REPLY, 1000)
                if number % 3 == 1:
                    await asyncio.to_thread(leave_without_the_batch, hub)
                    continue
                async with httpx.AsyncClient(timeout=10) as client:
                    try:
                        reply = await client.get(f"{proxy.url}/batch")
                    except httpx.TransportError:
                        continue
                    num_received += len(reply.raise_for_status().json()["batch"])
            await eventually(
                lambda: hub.get("/ledger")["trained"] >= num_received,
                timeout_s=30,
                what="every batch that was received counts as trained",
            )
        ledger = hub.get("/ledger")
    assert_balanced(ledger)
    assert ledger["trained"] == num_received == num_batches // 3
    # A break before the last byte is sent gives the groups back.
    assert ledger["delivered_unconfirmed"] + ledger["queued"] == num_batches - num_received
    assert ledger["delivered_unconfirmed"] > num_batches // 3


def leave_without_the_batch(hub: HubProcess) -> None:
    """Ask for a batch, and close once the hub has sent all of it; only a little can have arrived."""
    num_sent = hub.get("/ledger")["delivered_unconfirmed"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", hub.port))
        connection.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while hub.get("/ledger")["delivered_unconfirmed"] == num_sent:
            time.sleep(0.005)
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.1)  # so that the hub sees the end before the reset


async def all_trained(hub: HubProcess, num_groups: int) -> None:
    """Wait until all groups count as trained: the last batch does at the next request, or the end of the connection."""
    await eventually(
        lambda: hub.get("/ledger")["trained"] == num_groups, timeout_s=30, what="all are trained"
    )
    ledger = hub.get("/ledger")
    assert_balanced(ledger)
    assert ledger["queued"] == ledger["delivered_unconfirmed"] == 0


def fetch_batch_and_kill(hub: HubProcess, *, num_unread: int) -> list[GroupKey]:
    """Kill the hub when all of a plain batch but the last `num_unread` bytes has come; [] if they do not come."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=30)
    connection.request("GET", "/batch")
    response = connection.getresponse()
    assert response.length is not None
    body = response.read(response.length - num_unread)
    hub.kill()
    try:
        body += response.read()
    except (http.client.IncompleteRead, ConnectionResetError):
        return []
    finally:
        connection.close()
    return keys_of(json.loads(body)["batch"])


@pytest.mark.timeout(240)
async def test_plain_batch_that_arrived_does_not_come_again_after_kill_9(tmp_path: Path) -> None:
    num_kills = 6
    delivered: Counter[GroupKey] = Counter()
    num_cut = 0
    with hub_process(tmp_path) as hub:
        hub.register(max_token_len=20_000)
        await post_groups(hub.url, num_kills, size=BATCH_SIZE, num_tokens=2000)
        for kill in range(num_kills):
            keys = await asyncio.to_thread(fetch_batch_and_kill, hub, num_unread=kill % 2)
            num_cut += not keys
            delivered.update(keys)
            await asyncio.to_thread(hub.start)
        while (batch := hub.get("/batch")["batch"]) is not None:
            delivered.update(keys_of(batch))
        ledger = hub.get("/ledger")
    assert_balanced(ledger)
    assert set(delivered.values()) == {1}, "a batch was delivered twice"
    # A hub that is killed learns of no receipt.
    assert ledger["trained"] + ledger["delivered_unconfirmed"] == num_kills
    assert ledger["delivered_unconfirmed"] >= num_kills - len(delivered)
    # The hub counts a batch as delivered before it sends the last byte: killed between the two, that batch is lost.
    assert num_kills - len(delivered) <= num_cut <= num_kills // 2
