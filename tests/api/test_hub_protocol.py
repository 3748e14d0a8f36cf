"""Hostile and unlucky clients on real connections: slow heads, endless heads, unwanted bodies, hang-ups."""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.api.http.connections import RESERVED_CONNECTIONS, Connections, HubProtocol
from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.http.limits import (
    IS_GONE_EXTENSION,
    RECEIPT_EXTENSION,
    HubLimits,
    Ladder,
    RequestBodies,
)
from atroposlib.api.http.security import Access
from atroposlib.utils.local_server import listening
from tests.api.helpers_api import FullRun

GET = b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


@asynccontextmanager
async def serving(
    app: ASGIApp, *, max_connections: int = 4096, keep_alive_s: float = 5
) -> AsyncIterator[Server]:
    listener = listening("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=functools.partial(  # type: ignore[arg-type]
                HubProtocol, connections=Connections(max_connections)
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    reached = Server(listener.getsockname()[1])
    try:
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.005)
        yield reached
    finally:
        await reached.close()
        server.should_exit = True
        await task


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> bytes:
        """The status line of the next answer; its headers and body are read too."""
        async with asyncio.timeout(30):
            head = await self.reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await self.reader.readexactly(int(line.split(b":")[1]))
        return head.split(b"\r\n")[0]

    async def is_closed(self) -> bool:
        async with asyncio.timeout(30):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


class Server:
    """A server on loopback, and the connections to it, which end with it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[Client] = []

    async def connect(self, *, buffer_bytes: int | None = None) -> Client:
        """`buffer_bytes`: what its system receives without a read, roughly; None: the default."""
        connection = socket.socket()
        limit = 2**16
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            limit = 1  # `StreamReader` reads until it holds twice as much
        connection.connect(("127.0.0.1", self._port))
        client = Client(*await asyncio.open_connection(sock=connection, limit=limit))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()
        closing = [client.writer.wait_closed() for client in self._clients]
        await asyncio.gather(*closing, return_exceptions=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubProtocol, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(HubProtocol, "UNWANTED_BODY_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("before", "sent"),
    [
        (b"", b""),  # after a request, silence is the keep-alive timer's business
        *[
            (before, sent)
            for before in (b"", GET)
            for sent in (b"GET", GET[:-2], b"\r\n", GET[:-2] + b"X-Slow: ")
        ],
    ],
)
async def test_head_that_does_not_end_is_cut_off(before: bytes, sent: bytes) -> None:
    async with serving(hello) as server:
        client = await server.connect()
        if before:
            client.writer.write(before)
            assert await client.answer() == b"HTTP/1.1 200 OK"
        client.writer.write(sent)
        assert await client.is_closed()


@pytest.mark.usefixtures("impatient")
async def test_dripping_head_is_cut_off_although_it_moves() -> None:
    async with serving(hello) as server:
        client = await server.connect()

        async def drip() -> None:
            client.writer.write(GET[:-2])
            while True:
                client.writer.write(b"X: y\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert await client.is_closed()
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


@pytest.mark.usefixtures("impatient")
async def test_answer_that_takes_long_is_not_cut_off() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.22)
        await hello(scope, receive, send)

    async with serving(slow) as server:
        client = await server.connect()
        for _ in range(2):
            client.writer.write(GET)
            assert await client.answer() == b"HTTP/1.1 200 OK"
        client.writer.write(GET + GET)  # pipelined
        assert await client.answer() == b"HTTP/1.1 200 OK"
        assert await client.answer() == b"HTTP/1.1 200 OK"


async def test_endless_head_is_431_and_closed() -> None:
    async with serving(hello) as server:
        client = await server.connect()
        client.writer.write(GET[:-2])
        for _ in range(80):
            client.writer.write(b"X: " + b"y" * 1000 + b"\r\n")
        assert await client.answer() == b"HTTP/1.1 431 Request Header Fields Too Large"
        assert await client.is_closed()


async def test_large_body_is_not_taken_for_a_head() -> None:
    async with serving(read_all) as server:
        client = await server.connect()
        body = b"z" * (HubProtocol.MAX_HEAD_BYTES * 4)
        request = b"POST / HTTP/1.1\r\nHost: hub\r\nContent-Length: %d\r\n\r\n" % len(body)
        for _ in range(2):
            client.writer.write(request + body)
            assert await client.answer() == b"HTTP/1.1 200 OK"


@pytest.mark.usefixtures("impatient")
async def test_unread_body_may_end_but_not_continue_for_ever() -> None:
    request = b"POST / HTTP/1.1\r\nHost: hub\r\nContent-Length: 4\r\n\r\n"
    async with serving(hello) as server:
        patient = await server.connect()
        patient.writer.write(request)
        assert await patient.answer() == b"HTTP/1.1 200 OK"
        patient.writer.write(b"body" + GET)
        assert await patient.answer() == b"HTTP/1.1 200 OK"
        endless = await server.connect()
        endless.writer.write(request.replace(b": 4", b": 99999999999"))
        assert await endless.answer() == b"HTTP/1.1 200 OK"

        async def pour() -> None:
            while True:
                endless.writer.write(b"z" * 1000)
                await asyncio.sleep(0.01)

        pouring = asyncio.create_task(pour())
        assert await endless.is_closed()
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)


async def test_oversized_body_is_413_and_the_answer_arrives_while_it_is_sent() -> None:
    limits = HubLimits(max_control_body_bytes=1000)
    async with serving(RequestBodies(read_all, limits)) as server:
        client = await server.connect()
        client.writer.write(b"POST / HTTP/1.1\r\nHost: hub\r\nContent-Length: 9999999\r\n\r\n")
        client.writer.write(b"z" * 9_999_999)
        assert (await client.answer()).startswith(b"HTTP/1.1 413 ")
        client.writer.write(GET)
        assert await client.answer() == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("num_sent", [0, 10, 500_000], ids=["nothing", "a little", "more"])
async def test_held_client_that_hangs_up_frees_its_place_with_its_body_unread(
    num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ladder, "CHECK_S", 0.02)
    run = FullRun()
    async with serving(Access(run.ladder(hello), ROUTES, None)) as server:
        client = await server.connect()
        client.writer.write(
            b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        )
        client.writer.write(b"z" * num_sent)
        async with asyncio.timeout(30):
            while not run.num_held():  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert run.num_held() == 1  # being silent is not hanging up
            client.writer.transport.abort()
            while not run.outcomes:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.01)
        assert run.outcomes == {"default gone": 1}
        assert run.num_held() == 0


# More connections than there is room for


def ask(path: str) -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()


async def test_idle_connections_keep_no_client_out_and_cuts_off_no_client() -> None:
    async with serving(Access(hello, ROUTES, None), max_connections=8) as server:
        trainers = [await server.connect() for _ in range(3)]
        for trainer in trainers:
            trainer.writer.write(ask("/status"))
            assert await trainer.answer() == b"HTTP/1.1 200 OK"
        crowd = []
        for _ in range(30):
            crowd.append(await server.connect())
            crowd[-1].writer.write(ask("/healthz"))  # needs no rights, and shows none
            assert await crowd[-1].answer() == b"HTTP/1.1 200 OK"
        crowd += [await server.connect() for _ in range(30)]  # these say nothing at all
        for path in ("/healthz", "/status"):
            fresh = await server.connect()
            fresh.writer.write(ask(path))
            assert await fresh.answer() == b"HTTP/1.1 200 OK"
            crowd.append(fresh)
        for trainer in trainers:
            trainer.writer.write(ask("/status"))
            assert await trainer.answer() == b"HTTP/1.1 200 OK"
        assert await crowd[0].is_closed()


async def test_busy_crowd_leaves_room_for_health_and_acknowledgements() -> None:
    release, are_busy = asyncio.Event(), asyncio.Event()
    num_busy = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_busy
        if scope["path"] == "/batch":
            num_busy += 1
            if num_busy == 4:
                are_busy.set()
            await release.wait()
        await hello(scope, receive, send)

    ack = b"POST /batches/1/ack HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    async with serving(Access(app, ROUTES, None), max_connections=4) as server:
        busy = [await server.connect() for _ in range(4)]
        for client in busy:
            client.writer.write(ask("/batch"))
        async with asyncio.timeout(30):
            await are_busy.wait()
        for request, status in [
            (ask("/healthz"), b"HTTP/1.1 200 OK"),
            (ack, b"HTTP/1.1 200 OK"),
            (ask("/status"), b"HTTP/1.1 503 Service Unavailable"),
        ]:
            for _ in range(2 * RESERVED_CONNECTIONS):  # more than are reserved: each makes room
                client = await server.connect()
                client.writer.write(request)
                assert await client.answer() == status
                busy.append(client)
        release.set()
        for client in busy[:4]:
            assert await client.answer() == b"HTTP/1.1 200 OK"
        late = await server.connect()
        late.writer.write(ask("/status"))
        assert await late.answer() == b"HTTP/1.1 200 OK"


async def test_nothing_is_asked_of_a_connection_that_broke_before_its_timer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await hello(scope, receive, send)
        scope["extensions"][RECEIPT_EXTENSION](lambda: None)

    async with serving(answer, keep_alive_s=0.2) as server:
        client = await server.connect()
        client.writer.write(GET)
        assert await client.answer() == b"HTTP/1.1 200 OK"
        reset = struct.pack("ii", 1, 0)
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, reset
        )
        client.writer.transport.abort()
        await asyncio.sleep(0.3)
    assert caplog.text == ""


@pytest.mark.parametrize("closed_by", ["keep_alive", "another_connection"])
@pytest.mark.parametrize("has_room", [True, False])
async def test_an_answer_was_received_only_if_the_client_has_all_of_it_when_the_hub_closes(
    closed_by: str, has_room: bool
) -> None:
    received: list[str] = []
    is_sent, is_closed = asyncio.Event(), asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("x" * 60_000)(scope, receive, send)
        scope["extensions"][RECEIPT_EXTENSION](lambda: received.append("all"))
        is_sent.set()
        while not scope["extensions"][IS_GONE_EXTENSION]():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        is_closed.set()

    keep_alive_s = 0.3 if closed_by == "keep_alive" else 30
    async with serving(answer, max_connections=1, keep_alive_s=keep_alive_s) as server:
        client = await server.connect(buffer_bytes=None if has_room else 2048)
        client.writer.write(GET)
        async with asyncio.timeout(10):
            await is_sent.wait()
            if closed_by == "another_connection":
                await asyncio.sleep(0.1)  # for the acknowledgement
                await server.connect()
            await is_closed.wait()
        assert received == (["all"] if has_room else [])
