"""What one request may cost: sizes, inflation, sending time, memory in flight, and the ladder of a full run."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.http.limits import ByteBudget, HeldBytes, HubLimits, RequestBodies, inflate
from atroposlib.api.http.security import Access
from atroposlib.api.run.types import Overloaded
from atroposlib.http_bodies import BodyRefused
from tests.api.helpers_api import (
    Answers,
    FullRun,
    group,
    running_hub,
    unexpected_receive,
    unexpected_send,
)

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body that a handler sees, and its headers."""
    request = Request(scope, receive)
    body = await request.body()
    answer = JSONResponse({"size": len(body), "headers": dict(request.headers)})
    await answer(scope, receive, send)


def client(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Access(app, ROUTES, None))
    return httpx.AsyncClient(transport=transport, base_url="http://hub")


async def post(
    body: bytes | AsyncIterator[bytes],
    *,
    path: str = "/scored_data",
    encoding: str | None = None,
    **limits: Any,
) -> httpx.Response:
    headers = {} if encoding is None else {"Content-Encoding": encoding}
    async with client(RequestBodies(echo, HubLimits(**limits))) as http:
        return await http.post(path, content=body, headers=headers)


def compress(data: bytes, encoding: str) -> bytes:
    return gzip.compress(data) if encoding == "gzip" else zstandard.compress(data)


def zstd_in_steps(data: bytes) -> bytes:
    """A frame that does not announce its size."""
    writer = zstandard.ZstdCompressor().compressobj()
    return writer.compress(data) + writer.flush()


# Inflation


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_inflate_caps_output_exactly(encoding: str) -> None:
    data = compress(b"x" * 1000, encoding)
    assert inflate(data, encoding=encoding, max_bytes=1000) == b"x" * 1000
    with pytest.raises(BodyRefused) as refusal:
        inflate(data, encoding=encoding, max_bytes=999)
    assert refusal.value.status == 413


@pytest.mark.parametrize("make", [zstandard.compress, zstd_in_steps, gzip.compress])
def test_inflate_gives_back_what_was_compressed(make: Callable[[bytes], bytes]) -> None:
    data = os.urandom(MIB // 4) + b"0, 1, " * MIB
    encoding = "gzip" if make is gzip.compress else "zstd"
    assert inflate(make(data), encoding=encoding, max_bytes=len(data)) == data


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_inflate_reads_several_members(encoding: str) -> None:
    members = compress(b"a", encoding) + compress(b"b" * 9, encoding)
    assert inflate(members, encoding=encoding, max_bytes=10) == b"a" + b"b" * 9
    with pytest.raises(BodyRefused, match="exceeds 9 bytes"):
        inflate(members, encoding=encoding, max_bytes=9)


def test_inflate_ignores_the_zero_padding_of_gzip() -> None:
    assert inflate(gzip.compress(b"a") + b"\0" * 99, encoding="gzip", max_bytes=9) == b"a"


BROKEN = {
    "gzip: nothing compressed": b"plain",
    "gzip: no length": gzip.compress(b"x" * 100)[:-4],
    "gzip: one byte short": gzip.compress(os.urandom(99_999))[:-1],
    "gzip: half a header": gzip.compress(b"x" * 100)[:5],
    "gzip: checksum of something else": gzip.compress(b"x" * 100)[:-8] + b"\0" * 8,
    "gzip: zlib": zlib.compress(b"x"),
    "gzip: a tail": gzip.compress(b"x") + b"tail",
    "gzip: padding and a tail": gzip.compress(b"x") + b"\0tail",
    "gzip: zstd": zstandard.compress(b"x"),
    "zstd: nothing compressed": b"plain",
    "zstd: one byte short": zstandard.compress(os.urandom(9999))[:-1],
    "zstd: a stream one byte short": zstd_in_steps(os.urandom(9999))[:-1],
    "zstd: half a header": zstd_in_steps(b"x" * 9999)[:6],
    "zstd: a tail": zstandard.compress(b"x" * 99) + b"tail",
    "zstd: gzip": gzip.compress(b"x"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_inflate_refuses_what_is_broken(what: str) -> None:
    encoding, data = what.split(":")[0], BROKEN[what]
    with pytest.raises(BodyRefused) as refusal:
        inflate(data, encoding=encoding, max_bytes=MIB)
    assert (refusal.value.status, str(refusal.value)) == (400, f"Invalid {encoding} payload")


@pytest.mark.parametrize("make", [zstandard.compress, zstd_in_steps, gzip.compress])
def test_ratio_counts_beyond_the_first_mebibyte(make: Callable[[bytes], bytes]) -> None:
    encoding = "gzip" if make is gzip.compress else "zstd"
    free = make(b"0" * MIB)
    assert len(free) * 200 < MIB
    assert inflate(free, encoding=encoding, max_bytes=9 * MIB) == b"0" * MIB
    with pytest.raises(BodyRefused, match="more than 200 times") as refusal:
        inflate(make(b"0" * 8 * MIB), encoding=encoding, max_bytes=9 * MIB)
    assert refusal.value.status == 413


def test_a_body_of_countless_empty_members_is_refused() -> None:
    with pytest.raises(BodyRefused, match="Invalid gzip payload"):
        inflate(gzip.compress(b"") * 10_001, encoding="gzip", max_bytes=MIB)


BOMBS = r"""
import asyncio, json, struct, zlib
from types import SimpleNamespace
from atroposlib.api.http.limits import HubLimits, RequestBodies

def gzip_bomb():
    writer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = writer.compress(bytes(2**20)) + writer.flush(zlib.Z_FULL_FLUSH)
    again = writer.compress(bytes(2**20)) + writer.flush(zlib.Z_FULL_FLUSH)
    return head + again * 1023

def members_bomb():
    writer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return (writer.compress(bytes(2**20)) + writer.flush()) * 1024

def zstd_bomb():
    block = ((2**17 << 3) | 2).to_bytes(3, "little") + b"0"
    return b"\x28\xb5\x2f\xfd\x00\x68" + block * 8192

def announced_zstd_bomb():
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 2**30) + zstd_bomb()[6:]

def wide_window_bomb():
    return b"\x28\xb5\x2f\xfd\x00\xa8" + zstd_bomb()[6:]

def high_water_kib():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])

async def post(body, encoding):
    status = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    async def receive():
        return messages.pop()
    async def send(message):
        status.append(message.get("status"))
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/scored_data"}
    scope["headers"] = [(b"content-encoding", encoding), (b"content-length", b"%d" % len(body))]
    scope["hub_route"] = SimpleNamespace(has_groups=True)
    async def app(*_):
        raise AssertionError("a bomb got through")
    await RequestBodies(app, HubLimits())(scope, receive, send)
    return status[0]

bodies = [(gzip_bomb(), b"gzip"), (members_bomb(), b"gzip"), (zstd_bomb(), b"zstd")]
bodies += [(announced_zstd_bomb(), b"zstd"), (wide_window_bomb(), b"zstd")]
before = high_water_kib()
found = [asyncio.run(post(*body)) for body in bodies]
print(json.dumps({"statuses": found, "grown_mib": (high_water_kib() - before) / 1024}))
"""


def test_bombs_of_a_gigabyte_cost_megabytes() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BOMBS], capture_output=True, text=True, cwd=ROOT, timeout=50
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    # The last asks for a window of 2 GiB, which is refused as a frame.
    assert report["statuses"] == [413, 413, 413, 413, 400]
    assert report["grown_mib"] < 64


# Bodies


@pytest.mark.parametrize("size", [3, 100_000], ids=["inline", "thread"])
@pytest.mark.parametrize("encoding", ["gzip", "GZip", "x-gzip", "identity, gzip", "zstd"])
async def test_compressed_body_reaches_the_handler_inflated(size: int, encoding: str) -> None:
    body = compress(os.urandom(size), "zstd" if encoding == "zstd" else "gzip")
    answer = (await post(body, encoding=encoding)).json()
    assert answer["size"] == size
    assert answer["headers"]["content-length"] == str(size)
    assert "content-encoding" not in answer["headers"]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("size", [3, 100_000], ids=["inline", "thread"])
async def test_broken_compression_is_400(size: int, encoding: str) -> None:
    response = await post(compress(os.urandom(size), encoding)[:-1], encoding=encoding)
    assert (response.status_code, response.text) == (400, f"Invalid {encoding} payload")


async def test_empty_compressed_body_is_passed_on_empty() -> None:
    answer = (await post(b"", encoding="gzip")).json()
    assert answer["size"] == 0
    assert "content-encoding" not in answer["headers"]


@pytest.mark.parametrize("encoding", ["gzip, gzip", "gzip, zstd", "br", "deflate", "gzipped", "*"])
async def test_stacked_and_unknown_encodings_are_415(encoding: str) -> None:
    response = await post(gzip.compress(gzip.compress(b"{}")), encoding=encoding)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, zstd"


async def test_two_encoding_headers_are_stacked_too() -> None:
    headers = [("Content-Encoding", "gzip"), ("Content-Encoding", "zstd")]
    async with client(RequestBodies(echo, HubLimits())) as http:
        response = await http.post("/scored_data", content=b"x", headers=headers)
    assert response.status_code == 415


@pytest.mark.parametrize("encoding", ["", "identity", "Identity, identity"])
async def test_identity_is_no_encoding(encoding: str) -> None:
    assert (await post(b"abc", encoding=encoding)).json()["size"] == 3


async def test_oversized_bodies_are_413_announced_or_not() -> None:
    async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
        for _ in range(num_bytes):
            yield b" "

    for body in (b" " * 101, pieces(101)):
        response = await post(body, max_body_bytes=100)
        assert (response.status_code, response.text[:32]) == (
            413,
            "Request body exceeds 100 bytes; ",
        )
    for body in (b" " * 100, pieces(100)):
        assert (await post(body, max_body_bytes=100)).json()["size"] == 100


async def test_oversized_body_is_refused_before_it_is_read() -> None:
    sent = Answers()
    scope = scope_of("/scored_data", 2**40)
    await RequestBodies(echo, HubLimits())(scope, unexpected_receive, sent.send)
    assert sent[0]["status"] == 413


async def test_control_bodies_have_a_limit_of_their_own() -> None:
    limits = {"max_control_body_bytes": 1000}
    assert (await post(b" " * 1001, path="/register", **limits)).status_code == 413
    assert (await post(b" " * 1001, path="/scored_data_list", **limits)).status_code == 200
    bomb = gzip.compress(b" " * 1001)
    assert (await post(bomb, path="/register", encoding="gzip", **limits)).status_code == 413
    assert (await post(bomb, path="/scored_data", encoding="gzip", **limits)).status_code == 200


async def test_handler_gets_one_bytes_object_and_then_the_disconnect() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(await receive())
        seen.append(await receive())

    messages = [b"ab", b"", b"cd"]

    async def receive() -> Any:
        if not messages:
            return {"type": "http.disconnect"}
        body = messages.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(messages)}

    await RequestBodies(app, HubLimits())(scope_of("/scored_data", 4), receive, unexpected_send)
    assert seen == [
        {"type": "http.request", "body": b"abcd", "more_body": False},
        {"type": "http.disconnect"},
    ]
    assert type(seen[0]["body"]) is bytes


async def test_client_that_leaves_while_sending_reaches_no_handler() -> None:
    pieces = [b" " * 90_000]

    async def receive() -> Any:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}
        return {"type": "http.disconnect"}

    async def app(*_: Any) -> None:
        raise AssertionError("called")

    bodies = RequestBodies(app, HubLimits(max_inflight_bytes=10))
    await bodies(scope_of("/scored_data", 100_000), receive, unexpected_send)
    assert bodies.received.free_bytes == 10


# Sending time


def scope_of(path: str, content_length: int | None, **more: Any) -> dict[str, Any]:
    headers = [(b"transfer-encoding", b"chunked")]
    if content_length is not None:
        headers = [(b"content-length", b"%d" % content_length)]
    found = ROUTES.find("POST", path)
    assert found is not None
    scope = {"type": "http", "method": "POST", "path": path, "http_version": "1.1"}
    return scope | {"headers": headers, "hub_route": found} | more


def sending(body: bytes) -> Receive:
    """Return the `receive` of a client that sends `body` at once."""

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


@dataclass
class Sender:
    """A client that sends `piece` every `interval_s`, for ever, and keeps what it is answered."""

    piece: bytes
    interval_s: float
    answers: Answers = field(default_factory=Answers)

    async def receive(self) -> Any:
        await asyncio.sleep(self.interval_s)
        return {"type": "http.request", "body": self.piece, "more_body": True}


@pytest.mark.parametrize(
    ("sender", "limits"),
    [
        (Sender(b"x", 3600), {"receive_grace_s": 0.05}),
        (Sender(b"x", 0.01), {"receive_grace_s": 0.05, "min_receive_bytes_per_s": 10_000}),
        (Sender(b"x" * 99, 0.001), {"receive_grace_s": 0.05, "receive_timeout_s": 0.2}),
    ],
    ids=["silent", "below the rate", "past the deadline"],
)
@pytest.mark.parametrize("announced", [None, 60_000_000])
async def test_slow_sender_is_408_and_its_connection_is_closed(
    sender: Sender, limits: dict[str, float], announced: int | None
) -> None:
    sender.answers.clear()
    bodies = RequestBodies(echo, HubLimits(**limits))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await bodies(scope_of("/scored_data", announced), sender.receive, sender.answers.send)
    assert sender.answers[0]["status"] == 408
    assert (b"connection", b"close") in sender.answers[0]["headers"]
    assert bodies.received.free_bytes == bodies.received.total_bytes


async def test_rate_is_what_gets_the_announced_body_here_in_time() -> None:
    # 100 kB in 10 s is 10 kB/s; the sender manages about 2, far above the general minimum.
    limits = HubLimits(receive_grace_s=0.1, receive_timeout_s=10.1, min_receive_bytes_per_s=1)
    sender = Sender(b"x" * 20, 0.01)
    async with asyncio.timeout(30):
        bodies = RequestBodies(echo, limits)
        await bodies(scope_of("/scored_data", 100_000), sender.receive, sender.answers.send)
    assert sender.answers[0]["status"] == 408


# Memory in flight


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_budget_serves_strictly_in_order() -> None:
    budget = ByteBudget(10)
    order: list[str] = []
    release = {name: asyncio.Event() for name in "abcd"}

    async def hold(name: str, num_bytes: int) -> None:
        with HeldBytes(budget) as held:
            await held.grow(num_bytes)
            order.append(name)
            await release[name].wait()

    async with asyncio.TaskGroup() as tasks:
        for name, num_bytes in [("a", 6), ("b", 10), ("c", 1), ("d", 4)]:
            tasks.create_task(hold(name, num_bytes))
            await settle()
        assert order == ["a"]  # c would fit beside a, but b was first
        assert len(budget.waiting) == 3
        release["a"].set()
        await settle()
        assert order == ["a", "b"]
        release["b"].set()
        await settle()
        assert order == ["a", "b", "c", "d"]
        release["c"].set()
        release["d"].set()
    assert (budget.free_bytes, len(budget.waiting)) == (10, 0)


async def test_who_stops_waiting_for_the_budget_leaves_no_trace() -> None:
    budget = ByteBudget(10)

    async def hold(num_bytes: int, until: asyncio.Event) -> None:
        with HeldBytes(budget) as held:
            await held.grow(num_bytes)
            await until.wait()

    done = asyncio.Event()
    first = asyncio.create_task(hold(6, done))
    await settle()
    large = asyncio.create_task(hold(10, done))
    small = asyncio.create_task(hold(4, done))
    await settle()
    assert (budget.free_bytes, len(budget.waiting)) == (4, 2)
    large.cancel()
    await settle()
    assert (budget.free_bytes, len(budget.waiting)) == (0, 0)  # small moved up
    small.cancel()
    await settle()
    assert budget.free_bytes == 4
    # Cancelled in the same moment as its turn comes.
    late = asyncio.create_task(hold(10, done))
    await settle()
    done.set()
    await first
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (budget.free_bytes, len(budget.waiting)) == (10, 0)


async def test_the_oldest_request_may_exceed_the_budget() -> None:
    budget = ByteBudget(10)
    with HeldBytes(budget) as held:
        await held.grow(11)
        assert (held.num_bytes, budget.free_bytes) == (11, -1)
        held.hold(3)
        assert budget.free_bytes == 7
    assert budget.free_bytes == 10


async def test_requests_that_each_hold_a_part_do_not_wait_for_each_other() -> None:
    budget = ByteBudget(10)
    done: list[str] = []

    async def grow_in_steps(name: str) -> None:
        with HeldBytes(budget) as held:
            for num_bytes in range(1, 9):
                await held.grow(num_bytes)
                await asyncio.sleep(0)
            done.append(name)

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(grow_in_steps(name))
    assert done == ["a", "b", "c"]
    assert (budget.free_bytes, len(budget.waiting)) == (10, 0)


@pytest.mark.parametrize("announced", [None, 64 * MIB], ids=["chunked", "announced"])
async def test_bodies_that_do_not_come_hold_no_memory_of_others(announced: int | None) -> None:
    bodies = RequestBodies(echo, HubLimits())
    never = asyncio.Event()

    async def dawdle() -> None:
        pieces = [b"x"]

        async def receive() -> Any:
            if not pieces:
                await never.wait()
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}

        await bodies(scope_of("/scored_data", announced), receive, unexpected_send)

    dawdlers = [asyncio.create_task(dawdle()) for _ in range(16)]
    await settle()
    assert bodies.received.free_bytes == bodies.received.total_bytes
    sent = Answers()
    async with asyncio.timeout(30):
        await bodies(scope_of("/scored_data", 40 * MIB), sending(b" " * 40 * MIB), sent.send)
    assert sent[0]["status"] == 200
    for each in dawdlers:
        each.cancel()
    await asyncio.gather(*dawdlers, return_exceptions=True)


async def test_bodies_wait_while_others_are_handled_and_acks_do_not() -> None:
    handled: list[str] = []
    finish = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        handled.append(scope["name"])
        if scope["path"] == "/scored_data":
            await finish.wait()

    bodies = RequestBodies(app, HubLimits(max_inflight_bytes=150_000))

    async def request(name: str, path: str, num_bytes: int) -> None:
        scope = scope_of(path, num_bytes, name=name)
        await bodies(scope, sending(b" " * num_bytes), unexpected_send)

    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(request(name, "/scored_data", 130_000))
        await settle()
        assert handled == ["a", "b"]
        await request("ack", "/batches/1/ack", 100)
        assert handled == ["a", "b", "ack"]
        finish.set()
    assert handled == ["a", "b", "ack", "c"]
    assert bodies.received.free_bytes == 150_000


async def test_inflated_bodies_have_a_budget_too() -> None:
    inside = 0
    most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await receive()
        await asyncio.sleep(0.01)
        inside -= 1

    limits = HubLimits(max_inflight_bytes=3 * MIB, max_inflated_bytes=2 * MIB)
    bodies = RequestBodies(app, limits)
    body = gzip.compress(os.urandom(300_000) + b"0" * 1_300_000)

    async def request() -> None:
        scope = scope_of("/scored_data", len(body))
        scope["headers"].append((b"content-encoding", b"gzip"))
        await bodies(scope, sending(body), unexpected_send)

    await asyncio.gather(*[request() for _ in range(4)])
    assert most == 1
    assert bodies.inflated.free_bytes == bodies.received.free_bytes == 3 * MIB


# The ladder of a full run


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
async def test_our_client_is_told_to_come_back_at_once(path: str) -> None:
    run = FullRun()
    async with client(run.ladder(echo)) as http:
        response = await http.post(path, headers={"Atropos-Client": "atroposlib/1"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.json()["detail"] == {"type": "overloaded", "msg": run.reason}
    assert run.outcomes == {"default refused": 1}


async def test_original_client_is_held_unread_until_there_is_room() -> None:
    run = FullRun()
    num_read = 0

    async def receive() -> Any:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"", "more_body": False}

    sent = Answers()
    scope = scope_of("/scored_data", 0, run="math")
    held = asyncio.create_task(run.ladder(echo)(scope, receive, sent.send))
    await settle()
    assert (num_read, run.num_held(), sent) == (0, 1, [])
    run.reason = None
    run.progress.notify()
    await held
    assert (num_read, run.num_held(), sent[0]["status"]) == (1, 0, 200)
    assert run.outcomes == {"math held": 1}


async def test_original_client_gets_503_and_never_4xx_when_the_hold_ends() -> None:
    run = FullRun()
    async with client(run.ladder(echo, hold_s=0.05)) as http:
        response = await http.post("/scored_data", content=b"{}")
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert run.outcomes == {"default timed_out": 1}


async def test_beyond_the_places_to_hold_original_clients_get_503_at_once() -> None:
    run = FullRun()
    async with client(run.ladder(echo, max_held=2)) as http:
        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(http.post("/scored_data")) for _ in range(2)]
            await settle()
            assert run.num_held() == 2
            assert (await http.post("/scored_data")).status_code == 503
            run.reason = None
            run.progress.notify()
        assert [task.result().status_code for task in held] == [200, 200]
    assert run.outcomes == {"default overflowed": 1, "default held": 2}


async def test_held_clients_get_503_when_the_hub_stops() -> None:
    run = FullRun()
    async with client(run.ladder(echo)) as http, asyncio.timeout(30):
        held = asyncio.create_task(http.post("/scored_data"))
        await settle()
        run.progress.close()
        assert (await held).status_code == 503
    assert run.outcomes == {"default stopped": 1}


async def test_room_that_is_gone_at_once_does_not_stop_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FullRun()
    monkeypatch.setattr(run.progress, "wait", lambda _: asyncio.sleep(0))
    async with client(run.ladder(echo, hold_s=0.1)) as http:
        held = asyncio.create_task(http.post("/scored_data"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not held.done()
        assert (await held).status_code == 503


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/register"), ("GET", "/batch"), ("GET", "/status")]
)
async def test_only_requests_with_groups_meet_the_ladder(method: str, path: str) -> None:
    run = FullRun()
    async with client(run.ladder(echo)) as http:
        assert (await http.request(method, path)).status_code == 200
    assert run.outcomes == {}


async def test_a_request_is_held_once_and_no_longer_than_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run may be full for one environment when it has room for others: both checks share one hold."""
    async with running_hub(HubLimits(hold_s=0.6)) as hub:
        await hub.start()
        holds: list[float] = []
        full = iter(["full", "full"])

        def overload() -> str | None:
            return next(full, None)

        async def accept(_: Any) -> Any:
            raise Overloaded("full for this environment")

        async def wait(timeout_s: float) -> None:
            holds.append(timeout_s)
            await asyncio.sleep(min(timeout_s, 0.3))

        monkeypatch.setattr(hub.coordinator, "overload", overload)
        monkeypatch.setattr(hub.coordinator, "accept", accept)
        monkeypatch.setattr(hub.coordinator.progress, "wait", wait)
        response = await hub.http.post("/scored_data", json=group())
        assert response.status_code == 503
    first, second, *_ = holds
    assert first == pytest.approx(0.5, abs=0.05)  # `Ladder.CHECK_S`: while the body is unread
    assert second <= 0.3 + 0.05  # with the body, for what is left
