"""What one request may cost: body sizes, inflation, sending time, memory in flight, and waiting for room.

Two pure-ASGI middlewares. `Ladder` turns requests away, or holds them unread, while a run is full. `RequestBodies`
reads every body within the limits and hands it on inflated, so that a handler gets it with one `await request.body()`.
Nothing here looks inside a body: the checks of groups are payloads.py's business. The table of answers is in README.md.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import zstandard
from isal import isal_zlib
from isal.igzip_lib import IsalError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.http.metrics import HubMetrics
from atroposlib.api.http.routes import Body, Route
from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.hub import DEFAULT_RUN

CLIENT_HEADER = b"atropos-client"
"""Sent by our own clients on every request; they understand 429."""
IS_GONE_EXTENSION = "atropos.is_gone"
"""ASGI extension: a function that says whether the client hung up, without reading from it."""
CROWDED_EXTENSION = "atropos.is_crowded"
"""ASGI extension: true for a connection beyond the limit, which is there for what must get through."""
ABORT_EXTENSION = "atropos.abort"
"""ASGI extension: a function that closes the connection without waiting for the client to read."""

_MIB = 2**20
_GZIP_WBITS = 16 + isal_zlib.MAX_WBITS
_FEED_BYTES = {"gzip": 4096, "zstd": 256}
"""Inflated at once, to 4 MiB and 8 MiB at most: deflate makes 1032 bytes of one, a zstd block 128 KiB of four."""
_ZSTD_MAX_WINDOW_BYTES = 8 * _MIB
"""What RFC 8878 (3.1.1.1.2) asks decoders to support."""
_MAX_MEMBERS = 10_000
"""Of one body. Each costs microseconds however small it is."""
_INLINE_INFLATE_BYTES = 4 * 2**10
"""Compressed bodies up to this size inflate to 1 MiB at most, in milliseconds: not worth a thread."""
_INLINE_JOIN_BYTES = _MIB
"""Pieces of a body up to this size are joined on the event loop."""
_UNCOUNTED_BYTES = 64 * 2**10
"""Bodies up to this size never wait for the budget: acks must get through while producers flood."""
_STEP_BYTES = _MIB
"""Taken from the budget at once, as a body arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """What requests may cost."""

    max_body_bytes: int = 64 * _MIB
    """Of a request with groups, as sent."""
    max_inflated_bytes: int = 256 * _MIB
    """Of a request with groups, inflated."""
    max_inflate_ratio: int = 200
    """Inflated to sent, once 1 MiB has come out. Groups of real text stay far below 50."""
    max_control_body_bytes: int = _MIB
    """Of any other request, as sent and inflated."""
    max_inflight_bytes: int = 512 * _MIB
    """Of bodies being received or handled, once more of inflated ones, and once more of batches being sent; what needs
    more waits its turn."""
    max_lookup_bytes: int = 64 * _MIB
    """Of other large answers being sent, which are made piece by piece."""
    receive_timeout_s: float = 120.0
    """From the first read to the end of the body."""
    receive_grace_s: float = 10.0
    """Time before the minimum rate is asked for."""
    min_receive_bytes_per_s: int = 16 * 2**10
    """And no less than what gets the announced body here within `receive_timeout_s`."""
    max_wait_s: float = 60.0
    """Longest `wait=` of a long poll."""
    hold_s: float = 60.0
    """How long a request of an original client is held while its run is full."""
    max_held: int = 256
    """Requests held at once; further ones get 503 at once."""
    retry_after_s: int = 2
    """Told to clients that are turned away."""


class BodyRefused(Exception):
    """The body breaks a limit or is not what its headers say."""

    def __init__(self, status: int, message: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


def content_encoding(headers: Headers) -> str | None:
    """Return "gzip", "zstd" or, for a body sent as it is, None. Raises `BodyRefused` 415 for anything else."""
    names = [
        name.strip().lower()
        for value in headers.getlist("content-encoding")
        for name in value.split(",")
    ]
    names = [name for name in names if name and name != "identity"]
    if not names:
        return None
    [first, *others] = ["gzip" if name == "x-gzip" else name for name in names]
    if others or first not in ("gzip", "zstd"):
        raise BodyRefused(
            415,
            "Content-Encoding must be one of gzip, zstd, identity",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    return first


def inflate(data: bytes, *, encoding: str, max_bytes: int, max_ratio: int = 200) -> bytes:
    """Inflate a whole gzip or zstd body, several members or frames included.

    Raises `BodyRefused`: 400 if it is corrupt, truncated or followed by something else, 413 past a limit. Never holds
    more than `max_bytes` of output, and of a bomb only its first megabytes.
    """

    def check(num_bytes: int, *, num_read: int) -> None:
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if num_bytes > max(_MIB, max_ratio * num_read):
            raise BodyRefused(413, f"Request body inflates more than {max_ratio} times")

    pieces: list[bytes] = []
    size = 0
    try:
        # Most frames announce their size: then one call inflates them.
        announced = zstandard.frame_content_size(data) if encoding == "zstd" else -1
        if announced >= 0:
            check(announced, num_read=len(data))
            try:
                return _zstd().decompress(data, allow_extra_data=False)
            except zstandard.ZstdError:
                pass  # several frames, or a broken one: the steps tell
        for piece, num_read in _inflate_in_steps(data, encoding):
            size += len(piece)
            check(size, num_read=num_read)
            pieces.append(piece)
    except (IsalError, zstandard.ZstdError, EOFError) as e:  # type: ignore[misc] # its stub is wrong
        raise BodyRefused(400, f"Invalid {encoding} payload") from e
    # Gives up the GIL from a MiB on; a buffer that grows would copy under it.
    return b"".join(pieces)


def _inflate_in_steps(data: bytes, encoding: str) -> Iterator[tuple[bytes, int]]:
    """Yield pieces of some MiB at most, each with the number of compressed bytes read so far."""
    view = memoryview(data)
    position = 0
    for _ in range(_MAX_MEMBERS):
        is_gzip = encoding == "gzip"
        member = isal_zlib.decompressobj(_GZIP_WBITS) if is_gzip else _zstd().decompressobj()
        while not member.eof:
            fed = view[position : position + _FEED_BYTES[encoding]]
            if not fed:
                raise EOFError
            position += len(fed)
            yield member.decompress(fed), position
        position -= len(member.unused_data)
        if position == len(data):
            return
        if is_gzip and data[position] == 0:
            if data.count(0, position) == len(data) - position:
                return  # padding
            break
    raise EOFError


def _zstd() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)


def _too_large(limit: int) -> BodyRefused:
    return BodyRefused(413, f"Request body exceeds {limit} bytes; send less per request")


class ByteBudget:
    """Bytes that requests take before they use the memory, strictly first come, first served.

    A large request is not overtaken by small ones, so it cannot starve. The oldest request that holds or wants bytes
    never waits, although the total is exceeded then: requests that each hold a part and wait for the rest
    would wait for ever. For one event loop.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self.shares: dict[Share, None] = {}
        """Those that hold or want bytes, oldest first."""
        self.waiting: dict[Share, tuple[int, asyncio.Future[None]]] = {}
        """How much each of these shares wants to hold, in the order in which they are served."""

    def share(self) -> Share:
        """Return what holds bytes for the length of a `with`."""
        return Share(self)

    def serve(self) -> None:
        """Give waiting shares what is free."""
        while self.waiting:
            oldest = next(iter(self.shares))
            share = oldest if oldest in self.waiting else next(iter(self.waiting))
            wanted, turn = self.waiting[share]
            if share is not oldest and wanted - share.num_bytes > self.free_bytes:
                return
            del self.waiting[share]
            self.free_bytes -= wanted - share.num_bytes
            share.num_bytes = wanted
            if not turn.done():
                turn.set_result(None)


class Share:
    """What one request holds of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.hold(0)

    async def grow(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all; wait for the rest of them."""
        if self.grow_now(num_bytes):
            return
        waiting = self._budget.waiting
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting[self] = (num_bytes, turn)
        try:
            await turn
        finally:
            waiting.pop(self, None)

    def grow_now(self, num_bytes: int) -> bool:
        """Hold `num_bytes` in all if that takes no waiting; otherwise the share keeps its place in line."""
        budget = self._budget
        budget.shares[self] = None
        has_room = not budget.waiting and num_bytes - self.num_bytes <= budget.free_bytes
        if has_room or next(iter(budget.shares)) is self:
            self.hold(num_bytes)
            return True
        return False

    def hold(self, num_bytes: int) -> None:
        """Hold exactly this, even beyond the total: it is in memory already."""
        budget = self._budget
        budget.free_bytes += self.num_bytes - num_bytes
        self.num_bytes = num_bytes
        if num_bytes:
            budget.shares[self] = None
        else:
            budget.shares.pop(self, None)
        budget.serve()


class RequestBodies:
    """ASGI middleware: reads every request's body within the limits and hands it on inflated.

    Its memory counts against the budgets until the request is answered.
    """

    def __init__(self, app: ASGIApp, limits: HubLimits) -> None:
        self._app = app
        self._limits = limits
        self._received = ByteBudget(limits.max_inflight_bytes)
        self._inflated = ByteBudget(limits.max_inflight_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._received.share() as received, self._inflated.share() as inflated:
            try:
                body = await self._read(scope, receive, received, inflated)
            except BodyRefused as e:
                answer = PlainTextResponse(str(e), e.status, e.headers)
                await answer(scope, receive, send)
                return
            if body is not None:
                await self._app(scope, replay(body, receive), send)

    async def _read(
        self, scope: Scope, receive: Receive, received: Share, inflated: Share
    ) -> bytes | None:
        """Return the body, inflated; None when the client left."""
        expected = self._expected(scope)
        body = await self._receive(receive, expected, received)
        if body is None:
            return None
        received.hold(max(0, len(body) - _UNCOUNTED_BYTES))
        if expected.encoding is not None:
            if body:
                body = await self._inflate(body, expected, inflated)
                received.hold(0)
            scope["headers"] = list(scope["headers"])
            headers = MutableHeaders(scope=scope)
            del headers["content-encoding"]
            headers["content-length"] = str(len(body))
        return body

    def _expected(self, scope: Scope) -> _Expected:
        """What the head says of the body. Raises `BodyRefused`."""
        limits = self._limits
        headers = dict[bytes, bytes](scope["headers"])
        encoding = None
        if b"content-encoding" in headers:
            encoding = content_encoding(Headers(scope=scope))
        is_large = _body_class(scope) is Body.GROUPS
        limit = limits.max_body_bytes if is_large else limits.max_control_body_bytes
        announced = _announced_bytes(scope, headers)
        if announced is not None and announced > limit:
            raise _too_large(limit)
        return _Expected(
            num_bytes=limit if announced is None else announced,
            encoding=encoding,
            limit=limit,
            inflated_limit=limits.max_inflated_bytes if is_large else limit,
        )

    async def _receive(self, receive: Receive, expected: _Expected, share: Share) -> bytes | None:
        """Return the body as it was sent; None when the client left.

        The budget is charged for what has come, not for what is announced, which costs a client nothing to say. While
        its turn is waited for nothing more is read, and the client's time stands still.
        """
        limits = self._limits
        in_time = limits.receive_timeout_s - limits.receive_grace_s
        rate = max(
            limits.min_receive_bytes_per_s, expected.num_bytes / in_time if in_time > 0 else 0
        )
        now = asyncio.get_running_loop().time
        start = now()
        allowed_s = min(limits.receive_timeout_s, limits.receive_grace_s)
        pieces: list[bytes] = []
        size = 0
        is_whole = False
        while True:
            if size > _UNCOUNTED_BYTES + share.num_bytes:
                began = now()
                wanted = size - _UNCOUNTED_BYTES
                await share.grow(wanted if is_whole else wanted + _STEP_BYTES)
                start += now() - began
            if is_whole:
                break
            try:
                # One timer for as long as nothing is late; then what has come bought more time, or it did not.
                async with asyncio.timeout_at(start + allowed_s):
                    while not is_whole and (
                        size <= _UNCOUNTED_BYTES + share.num_bytes
                        or share.grow_now(size - _UNCOUNTED_BYTES + _STEP_BYTES)
                    ):
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return None
                        piece = message.get("body", b"")
                        size += len(piece)
                        if size > expected.limit:
                            raise _too_large(expected.limit)
                        pieces.append(piece)
                        is_whole = not message.get("more_body", False)
            except TimeoutError:
                allowed_s = min(limits.receive_timeout_s, limits.receive_grace_s + size / rate)
                if now() >= start + allowed_s:
                    raise BodyRefused(
                        408,
                        f"Only {size} bytes of the request body arrived in {allowed_s:.1f} s",
                        headers={"Connection": "close"},
                    ) from None
        if len(pieces) == 1:
            return pieces[0]
        if size <= _INLINE_JOIN_BYTES:
            return b"".join(pieces)
        return await asyncio.to_thread(b"".join, pieces)  # gives up the GIL while it copies

    async def _inflate(self, body: bytes, expected: _Expected, share: Share) -> bytes:
        assert expected.encoding is not None
        limits = self._limits
        limit = expected.inflated_limit
        # Taken for the worst case and given back at once. Nobody waits for the other budget while holding this one.
        await share.grow(min(limit, max(_MIB, limits.max_inflate_ratio * len(body))))
        work = functools.partial(
            inflate,
            body,
            encoding=expected.encoding,
            max_bytes=limit,
            max_ratio=limits.max_inflate_ratio,
        )
        is_small = len(body) <= _INLINE_INFLATE_BYTES
        data = work() if is_small else await asyncio.to_thread(work)
        share.hold(len(data))
        return data


class _Expected(NamedTuple):
    """What the head of a request says of its body, and what is allowed."""

    num_bytes: int
    """The limit, when only the body's end will tell."""
    encoding: str | None
    limit: int
    inflated_limit: int


def _body_class(scope: Scope) -> Body:
    """What the request's row says of its body; paths that no row names have no business with large ones."""
    route: Route | None = scope.get("hub_route")
    return Body.CONTROL if route is None else route.body


def _announced_bytes(scope: Scope, headers: Mapping[bytes, bytes]) -> int | None:
    """Return how large the body will be; None when only its end will tell."""
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        return int(length)
    # In HTTP/1 no length and no transfer coding is no body (RFC 9112, 6.3).
    is_http1 = scope.get("http_version", "1.1").startswith("1")
    return 0 if is_http1 and b"transfer-encoding" not in headers else None


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body in one message, then whatever follows it."""
    bodies = [body]  # emptied on delivery, so that the handler alone decides how long it lives

    async def receive_body() -> Message:
        if not bodies:
            return await receive()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    return receive_body


class Ladder:
    """ASGI middleware, outside of `RequestBodies`: what becomes of requests with groups while their run is full.

    Our own clients get 429 at once. Clients of the original would drop the group at that, so they are held, their body
    unread, until there is room; only then, or when too many are held, do they get 503. `scope["held_s"]` says how long
    that took: the handler holds a request for what is left of the time.

    Counted is every request that was not let in at once: `refused` (429), `held` (let in later), `timed_out`,
    `overflowed` and `stopped` (503), `gone` (hung up while held).
    """

    CHECK_S = 0.5
    """How often a held request is checked even if the run reports no progress: a client that left frees its place."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: HubLimits,
        runs: Mapping[str, Coordinator],
        metrics: HubMetrics,
    ) -> None:
        self._app = app
        self._limits = limits
        self._runs = runs
        self._count = metrics.back_pressure
        self._num_held = 0
        metrics.held.set_function(lambda: self._num_held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if _body_class(scope) is Body.GROUPS:
            refusal = await self._refusal(scope)
        await (refusal or self._app)(scope, receive, send)

    async def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return None when the request may go on, else the answer that turns it away."""
        name = scope.get("run", DEFAULT_RUN)
        run = self._runs.get(name)
        reason = None if run is None else run.overload()
        if reason is None:
            return None
        if any(name == CLIENT_HEADER for name, _ in scope["headers"]):
            outcome = "refused"
        else:
            outcome = await self._hold(name, scope)
        self._count.labels(name, outcome).inc()
        if outcome == "held":
            return None
        return self._answer(429 if outcome == "refused" else 503, reason)

    async def _hold(self, name: str, scope: Scope) -> str:
        if self._num_held >= self._limits.max_held:
            return "overflowed"
        # Servers without the extension cannot tell; the hold ends by its time limit.
        is_gone = scope.get("extensions", {}).get(IS_GONE_EXTENSION, lambda: False)
        now = asyncio.get_running_loop().time
        began = now()
        deadline = began + self._limits.hold_s
        self._num_held += 1
        try:
            while (run := self._runs.get(name)) is not None and run.overload() is not None:
                if is_gone():
                    return "gone"
                remaining_s = deadline - now()
                if remaining_s <= 0:
                    return "timed_out"
                if run.progress.is_closed:
                    return "stopped"
                await run.progress.wait(min(remaining_s, self.CHECK_S))
                await asyncio.sleep(0)  # room that comes and goes at once must not stop the loop
            return "held"
        finally:
            self._num_held -= 1
            scope["held_s"] = now() - began

    def _answer(self, status: int, reason: str) -> JSONResponse:
        headers = {"Retry-After": str(self._limits.retry_after_s)}
        detail = {"type": "overloaded", "msg": reason}
        return JSONResponse({"detail": detail}, status, headers)
