"""Large answers: sent in pieces to those who read, cut off for those who do not, bounded in memory for all."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from atroposlib import wire
from atroposlib.api.http.limits import ABORT_EXTENSION, HubLimits
from atroposlib.api.http.payloads import even_pieces
from atroposlib.api.http.sending import PIECE_BYTES
from atroposlib.api.schemas import DeadGroup
from atroposlib.scored_data import GroupHeader, Strictness, check_group
from tests.api.helpers_api import Hub, group, registration, running_hub

LONG = 200_000
"""Tokens of a sequence; as JSON, a group of two has about 2 MB."""


LARGE = group(2, tokens=[list(range(LONG))] * 2, masks=[list(range(LONG))] * 2)
LARGE_PACKED = wire.join_packed([wire.pack_group(check_group(LARGE, strictness=Strictness.WIRE))])


async def post_large(hub: Hub) -> None:
    """Post `LARGE` packed: as JSON, a process would be started to decode it."""
    headers = {"Content-Type": wire.CONTENT_TYPE_PACKED}
    response = await hub.http.post("/scored_data", content=LARGE_PACKED, headers=headers)
    response.raise_for_status()


class Reader:
    """A client that reads `num_pieces` of an answer's body and then no more."""

    def __init__(self, hub: Hub, path: str, query: bytes = b"", *, num_pieces: int) -> None:
        self.body = b""
        self.is_cut_off = False
        self.is_whole = False
        self.num_pieces = num_pieces
        self.on_message: Callable[[Any], None] = lambda message: None
        self._has_asked = False
        scope = {"type": "http", "method": "GET", "path": path, "query_string": query}
        scope |= {"headers": [], "extensions": {ABORT_EXTENSION: self._abort}}
        self.task = asyncio.create_task(hub.app(scope, self._receive, self._send))

    def _abort(self) -> None:
        self.is_cut_off = True

    async def _receive(self) -> Any:
        if self._has_asked:
            await asyncio.Event().wait()
        self._has_asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.on_message(message)
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            return
        if self.num_pieces == 0:
            await asyncio.Event().wait()
        self.num_pieces -= 1
        self.body += message["body"]
        self.is_whole = not message.get("more_body", False)


async def test_plain_batch_is_trained_before_its_last_byte_is_sent() -> None:
    async with running_hub() as hub:
        await hub.start()
        await hub.post("/scored_data", group(4))
        seen: list[tuple[bytes, int, int]] = []

        def look(message: Any) -> None:
            ledger = hub.coordinator.ledger()
            seen.append((message.get("body", b""), ledger.leased, ledger.trained))

        reader = Reader(hub, "/batch", num_pieces=99)
        reader.on_message = look
        await reader.task
        assert len(json.loads(reader.body)["batch"]) == 1
        last = max(index for index, (body, _, _) in enumerate(seen) if body)
        assert seen[last] == (b"}", 0, 1)
        assert {(leased, trained) for _, leased, trained in seen[:last]} == {(1, 0)}


@pytest.mark.parametrize("end", ["reset", "another experiment"])
async def test_batch_of_a_run_that_ended_meanwhile_never_gets_its_last_byte(end: str) -> None:
    async with running_hub() as hub:
        await hub.start()
        await post_large(hub)
        await hub.post("/scored_data", group(2))
        reader = Reader(hub, "/batch", num_pieces=99)
        ends: list[asyncio.Task[Any]] = []

        def end_run(message: Any) -> None:
            if not ends and message.get("body"):
                following = registration(experiment="next")
                work = (
                    hub.http.get("/reset_data")
                    if end == "reset"
                    else hub.post("/register", following)
                )
                ends.append(asyncio.create_task(work))

        reader.on_message = end_run
        await reader.task
        await ends[0]
        assert not reader.is_whole
        with pytest.raises(json.JSONDecodeError):
            json.loads(reader.body)
        assert await hub.get("/status") == {"current_step": 0, "queue_size": 0}


@pytest.mark.parametrize(
    ("path", "query"),
    [("/latest_example", b""), ("/batch", b""), ("/batch", b"lease=1"), ("/dead", b"")],
)
async def test_who_does_not_read_is_cut_off(
    path: str, query: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.api.http.sending.STALL_S", 0.05)
    async with running_hub() as hub:
        await hub.start(batch_size=2)
        await post_large(hub)
        reader = Reader(hub, path, query, num_pieces=1 if path != "/dead" else 0)
        async with asyncio.timeout(30):
            await reader.task
        assert reader.is_cut_off
        assert not reader.is_whole
        services = hub.app.state.services
        for budget in (services.lookups, services.batches):
            assert budget.free_bytes == budget.total_bytes
        assert (await hub.balanced_ledger())["queued"] == (0 if query else 1)


async def test_examples_that_are_not_read_are_not_made() -> None:
    limits = HubLimits(max_lookup_bytes=8 * PIECE_BYTES)
    async with running_hub(limits) as hub:
        await post_large(hub)
        readers = [Reader(hub, "/latest_example", num_pieces=1) for _ in range(25)]
        for _ in range(500):
            await asyncio.sleep(0)
        started = [reader for reader in readers if reader.body]
        assert len(started) == 4  # 2 pieces each: what is being sent, and what is made meanwhile
        assert all(len(reader.body) <= PIECE_BYTES for reader in started)
        for reader in readers:
            reader.task.cancel()
        await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
        assert hub.app.state.services.lookups.free_bytes == limits.max_lookup_bytes
        whole = await hub.get("/latest_example")
        assert whole["tokens"] == LARGE["tokens"]


@pytest.mark.parametrize(
    "changes",
    [
        LARGE | {"inference_logprobs": [[-0.123456789] * LONG] * 2},
        {"messages": [[{"role": "user", "content": "x" * 3_000_000}]] * 2},
        group(2000) | {name: [[1] * 70] * 2000 for name in ("tokens", "masks")},
    ],
    ids=["tokens", "text", "short rows"],
)
def test_an_example_takes_no_more_memory_than_its_share_of_the_budget(changes: Any) -> None:
    body = json.dumps(group(2) | changes).encode()
    [checked] = wire.iter_json_groups(body, many=False)
    blob = wire.pack_group(checked)

    def send() -> int:
        held, num_bytes = b"", 0
        for piece in even_pieces(wire.json_pieces(blob), PIECE_BYTES):
            held = piece  # is being sent while the next one is made
            num_bytes += len(held)
        return num_bytes

    num_bytes = send()
    tracemalloc.start()
    assert send() == num_bytes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes > 200_000
    assert peak < 1.2 * 2 * PIECE_BYTES


async def test_batches_that_are_not_read_hold_no_more_than_the_budget() -> None:
    limits = HubLimits(max_inflight_bytes=4 * 2**20)
    async with running_hub(limits) as hub:
        await hub.start(batch_size=2)
        for _ in range(6):
            await post_large(hub)
        readers = [Reader(hub, "/batch", b"lease=1", num_pieces=0) for _ in range(6)]
        async with asyncio.timeout(10):
            while hub.coordinator.ledger().leased == 0:
                await hub.coordinator.progress.wait(1)
        for _ in range(500):
            await asyncio.sleep(0)
        assert hub.coordinator.ledger().leased == 1  # `_BATCH_BYTES` is more than the budget
        async with asyncio.timeout(10):
            for reader in readers:
                reader.task.cancel()
                await asyncio.gather(reader.task, return_exceptions=True)
        assert hub.app.state.services.batches.free_bytes == limits.max_inflight_bytes


async def test_a_long_list_of_dead_groups_leaves_the_event_loop_to_others() -> None:
    num_groups = 20_000
    async with running_hub() as hub:
        await hub.post("/register", registration())
        for number in range(num_groups):
            header = GroupHeader(number=number, env_id=None, num_sequences=1)
            hub.coordinator.state.dead.add(header, "larger than the batch")
        num_turns = 0
        asking = asyncio.create_task(hub.get("/dead"))
        while not asking.done():
            num_turns += 1
            await asyncio.sleep(0)
        groups = (await asking)["groups"]
        assert [each["number"] for each in groups] == list(range(num_groups))
        assert list(groups[0]) == list(DeadGroup.model_fields)
        assert num_turns >= num_groups / 500
        assert await hub.get("/runs/none/dead") == {"groups": []}
