"""A stopped trainer: the hub's memory stays bounded, producers are slowed, nothing is dropped.

The hub runs under a data-segment limit of 512 MiB (RLIMIT_DATA: any allocation beyond it fails), and its highest
resident memory is read from /proc. Ten times as much: pytest -m slow tests/faults/test_hub_memory.py -s
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atroposlib.client import HubClient, TrainerClient
from atroposlib.errors import HubUnavailable
from atroposlib.scored_data import ScoredGroup
from tests.faults.drivers import (
    GroupKey,
    assert_balanced,
    children,
    drilled,
    eventually,
    hub_process,
    make_group,
    peak_rss_bytes,
)

pytestmark = pytest.mark.e2e

MIB = 2**20
NUM_SEQUENCES, NUM_TOKENS = 8, 32_768
GROUP_BYTES = NUM_SEQUENCES * NUM_TOKENS * 8
"""Packed: 4 bytes of token and 4 of logprob each, and little else."""
RSS_BOUND = 300 * MIB
IN_FLIGHT_BOUND = 4 * 2 * GROUP_BYTES
"""Of four producers, a body each: received, and on its way to the disk."""
TEMPLATE_KEY = GroupKey(0, 0)


def stamped(template: ScoredGroup, number: int) -> ScoredGroup:
    """The template under an id and a score of its own: making 2 MB of noise anew costs too much."""
    scores = template.scores.copy()
    scores[0] = number
    return template.replace(group_id=f"m-{number}", scores=scores)


@drilled("total_bytes", (1_000 * MIB, 300), slow=(10_000 * MIB, 3000))
async def test_memory_is_bounded_while_the_trainer_is_stopped(
    total_bytes: int, tmp_path: Path
) -> None:
    max_queued = total_bytes // 2
    num_groups = total_bytes // GROUP_BYTES
    template = make_group(TEMPLATE_KEY, num_sequences=NUM_SEQUENCES, num_tokens=NUM_TOKENS)
    numbers = iter(range(num_groups))
    acknowledged: list[int] = []
    pushed_back: Counter[int] = Counter()  # refused attempts by producer

    async def produce(url: str, producer: int) -> None:
        async with HubClient(url) as hub:
            for number in numbers:
                group = stamped(template, number)
                while True:
                    try:
                        await hub.send([group])
                    except HubUnavailable:
                        pushed_back[producer] += 1
                        await asyncio.sleep(0.2)
                    else:
                        break
                acknowledged.append(number)

    with hub_process(tmp_path, "--max-queued-bytes", str(max_queued)) as hub:
        resource.prlimit(hub.pid, resource.RLIMIT_DATA, (512 * MIB, 512 * MIB))
        hub.register(batch_size=2 * NUM_SEQUENCES, max_token_len=NUM_TOKENS)
        began = time.monotonic()
        producers = [asyncio.create_task(produce(hub.url, number)) for number in range(4)]
        await eventually(
            lambda: len(pushed_back) == 4 and min(pushed_back.values()) >= 2,
            timeout_s=200,
            what="the hub pushes every producer back when it is full",
        )
        posted_s = time.monotonic() - began
        full = hub.get("/ledger")
        assert_balanced(full)
        assert full["queued"] * 0.9 <= max_queued / GROUP_BYTES + 5
        assert len(acknowledged) < num_groups
        num_before = len(acknowledged)
        await asyncio.sleep(1.0)
        # A request that was let in before the queue was full may end after it.
        assert len(acknowledged) <= num_before + 1, "the full queue grows"
        rss_full = peak_rss_bytes(hub.pid, *children(hub.pid))

        received: list[int] = []

        def consume() -> None:
            with TrainerClient(hub.url) as consumer:
                while len(received) < num_groups:
                    batch = consumer.lease_batch(0.5)
                    if batch is None:
                        continue
                    for group in batch.groups:
                        assert np.array_equal(group.tokens, template.tokens)
                        received.append(int(group.scores[0]))
                    consumer.ack(batch)
                    consumer.checkpoint(batch.step)

        consuming = asyncio.create_task(asyncio.to_thread(consume))
        await asyncio.gather(*producers)
        await consuming
        rss = peak_rss_bytes(hub.pid, *children(hub.pid))
        ledger = hub.get("/ledger")
        assert_balanced(ledger)
    print(
        f"{num_groups * GROUP_BYTES / MIB:.0f} MiB at a stopped trainer (queue bound"
        f" {max_queued / MIB:.0f} MiB, full after {posted_s:.1f} s):"
        f" highest RSS {rss_full / MIB:.0f} MiB when full, {rss / MIB:.0f} MiB after all was read;"
        f" {pushed_back.total()} attempts pushed back"
    )
    assert sorted(received) == list(range(num_groups))
    assert ledger["queued"] == 0
    assert rss <= RSS_BOUND + IN_FLIGHT_BOUND
