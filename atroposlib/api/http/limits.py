"""What one request may cost: body sizes, inflation, sending time, memory in flight, and waiting for room.

Two pure-ASGI middlewares. `Ladder` turns requests away, or holds them unread, while a run is full. `RequestBodies`
reads every body within the limits and hands it on inflated, so that a handler gets it with one `await request.body()`.
Nothing here looks inside a body: the checks of groups are payloads.py's business. The table of answers is in README.md.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import zstandard
from isal import isal_zlib
from isal.igzip_lib import IsalError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.http.routes import Body, Route

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
_GZIP_FEED_BYTES = 16 * 2**10
_GZIP_STEP_BYTES = 256 * 2**10
_ZSTD_FEED_BYTES = 256
"""A run-length block makes 128 KiB of 4 bytes, so one feed yields 8 MiB at most."""
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


@dataclass(slots=True, kw_only=True)
class _Output:
    """Collects inflated bytes and stops a bomb as soon as it shows."""

    max_bytes: int
    max_ratio: int
    _pieces: list[bytes] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, piece: bytes, *, num_read: int) -> None:
        """Append what the first `num_read` compressed bytes gave so far."""
        self._num_bytes += len(piece)
        self.check(self._num_bytes, num_read=num_read)
        self._pieces.append(piece)

    def check(self, num_bytes: int, *, num_read: int) -> None:
        if num_bytes > self.max_bytes:
            raise _too_large(self.max_bytes)
        if num_bytes > max(_MIB, self.max_ratio * num_read):
            raise BodyRefused(413, f"Request body inflates more than {self.max_ratio} times")

    def value(self) -> bytes:
        # Gives up the GIL from a MiB on; a buffer that grows would copy under it.
        return b"".join(self._pieces)


def inflate(data: bytes, *, encoding: str, max_bytes: int, max_ratio: int = 200) -> bytes:
    """Inflate a whole gzip or zstd body, several members or frames included.

    Raises `BodyRefused`: 400 if it is corrupt, truncated or followed by something else, 413 past a limit. Never holds
    more than `max_bytes` of output, and of a bomb only its first megabytes.
    """
    output = _Output(max_bytes=max_bytes, max_ratio=max_ratio)
    try:
        if encoding == "gzip":
            _inflate_gzip(data, output)
        else:
            whole = _inflate_zstd_frame(data, output)
            if whole is not None:
                return whole
            _inflate_zstd(data, output)
    except (IsalError, zstandard.ZstdError, EOFError) as e:  # type: ignore[misc] # its stub is wrong
        raise BodyRefused(400, f"Invalid {encoding} payload") from e
    return output.value()


def _inflate_gzip(data: bytes, output: _Output) -> None:
    view = memoryview(data)
    position = 0
    for _ in range(_MAX_MEMBERS):
        member = isal_zlib.decompressobj(_GZIP_WBITS)
        while not member.eof:
            pending: bytes | memoryview = view[position : position + _GZIP_FEED_BYTES]
            if not pending:
                raise EOFError
            position += len(pending)
            while True:
                piece = member.decompress(pending, _GZIP_STEP_BYTES)
                output.add(piece, num_read=position)
                pending = member.unconsumed_tail
                # zlib may keep output back although it has taken all input; past the end it keeps a stale tail.
                if member.eof or (not pending and len(piece) < _GZIP_STEP_BYTES):
                    break
        position -= len(member.unused_data)
        if position == len(data):
            return
        if data[position] == 0:  # padding, to the end
            if data.count(0, position) == len(data) - position:
                return
            break
    raise EOFError


def _inflate_zstd_frame(data: bytes, output: _Output) -> bytes | None:
    """Inflate a single frame that announces its size, as most do; None when it is not that."""
    size = zstandard.frame_content_size(data)
    if size < 0:
        return None
    output.check(size, num_read=len(data))
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
    try:
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        return None  # several frames, or broken: the stepwise way tells


def _inflate_zstd(data: bytes, output: _Output) -> None:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
    view = memoryview(data)
    position = 0
    for _ in range(_MAX_MEMBERS):
        frame = decompressor.decompressobj()
        while not frame.eof:
            fed = view[position : position + _ZSTD_FEED_BYTES]
            if not fed:
                raise EOFError
            position += len(fed)
            output.add(frame.decompress(fed), num_read=position)
        position -= len(frame.unused_data)
        if position == len(data):
            return
    raise EOFError


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
        self._shares: dict[Share, None] = {}
        """Those that hold or want something, in the order in which they came."""
        self._waiting: dict[Share, tuple[int, asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def share(self, num_bytes: int = 0) -> Share:
        """Return what holds `num_bytes` for the length of an `async with`."""
        return Share(self, num_bytes)

    async def take(self, share: Share, num_bytes: int) -> None:
        """Take `num_bytes` more for `share`, when it is its turn."""
        if self.take_now(share, num_bytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[share] = (num_bytes, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(share, None) is None:
                self.free_bytes += num_bytes  # the turn came in the same moment
            self._serve()  # a later request may fit
            raise

    def take_now(self, share: Share, num_bytes: int) -> bool:
        """Take `num_bytes` more for `share` if it need not wait for them; it stands in line from now on."""
        self._shares.setdefault(share)
        need_not_wait = next(iter(self._shares)) is share or (
            not self._waiting and num_bytes <= self.free_bytes
        )
        if need_not_wait:
            self.free_bytes -= num_bytes
        return need_not_wait

    def give_back(self, share: Share, num_bytes: int, *, is_all: bool) -> None:
        self.free_bytes += num_bytes
        if is_all:
            self._shares.pop(share, None)
        if self._waiting:
            self._serve()

    def _serve(self) -> None:
        first = next(iter(self._shares), None)
        if first in self._waiting:
            self._grant(first)
        while self._waiting:
            share, (wanted, _) = next(iter(self._waiting.items()))
            if wanted > self.free_bytes:
                return
            self._grant(share)

    def _grant(self, share: Share) -> None:
        wanted, turn = self._waiting.pop(share)
        self.free_bytes -= wanted
        if not turn.done():
            turn.set_result(None)


class Share:
    """What one request holds of a budget: nothing after it is left."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self._budget = budget
        self._wanted = num_bytes
        self.num_bytes = 0

    async def __aenter__(self) -> Share:
        if self._wanted:
            await self.grow(self._wanted)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shrink(0)

    async def grow(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all; wait for the rest of them."""
        try:
            await self._budget.take(self, num_bytes - self.num_bytes)
        except asyncio.CancelledError:
            self._budget.give_back(self, 0, is_all=self.num_bytes == 0)
            raise
        self.num_bytes = num_bytes

    def grow_now(self, num_bytes: int) -> bool:
        """Hold `num_bytes` in all if that takes no waiting."""
        has_them = self._budget.take_now(self, num_bytes - self.num_bytes)
        if has_them:
            self.num_bytes = num_bytes
        return has_them

    def settle(self, num_bytes: int) -> None:
        """Hold what turned out to be needed, more than was asked for included: it is in memory already."""
        surplus, self.num_bytes = self.num_bytes - num_bytes, num_bytes
        if surplus or not num_bytes:
            self._budget.give_back(self, surplus, is_all=num_bytes == 0)

    def shrink(self, num_bytes: int) -> None:
        """Keep at most `num_bytes`."""
        if num_bytes < self.num_bytes or self.num_bytes == 0:
            self.settle(max(0, min(num_bytes, self.num_bytes)))


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
        try:
            expected = self._expected_bytes(scope)
        except BodyRefused as e:
            await _refuse(e, scope, receive, send)
            return
        async with self._received.share() as received, self._inflated.share() as inflated:
            try:
                body = await self._receive(receive, expected, received)
                if body is None:
                    return  # the client left
                received.shrink(max(0, len(body) - _UNCOUNTED_BYTES))
                if expected.encoding is not None:
                    if body:
                        body = await self._inflate(body, expected, inflated)
                        received.shrink(0)
                    _correct_headers(scope, len(body))
            except BodyRefused as e:
                await _refuse(e, scope, receive, send)
                return
            await self._app(scope, replay(body, receive), send)

    def _expected_bytes(self, scope: Scope) -> _Expected:
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
        share.shrink(len(data))
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


async def _refuse(refusal: BodyRefused, scope: Scope, receive: Receive, send: Send) -> None:
    answer = PlainTextResponse(str(refusal), refusal.status, refusal.headers)
    await answer(scope, receive, send)


def _correct_headers(scope: Scope, num_bytes: int) -> None:
    """Say that the body comes as it is."""
    scope["headers"] = list(scope["headers"])
    corrected = MutableHeaders(scope=scope)
    del corrected["content-encoding"]
    corrected["content-length"] = str(num_bytes)


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


class BackPressureMetrics(Protocol):
    """Who counts what `Ladder` does."""

    def count_back_pressure(self, run: str, outcome: str) -> None: ...
    def show_held(self, num_held: Callable[[], int]) -> None: ...


class Ladder:
    """ASGI middleware, outside of `RequestBodies`: what becomes of requests with groups while their run is full.

    Our own clients get 429 at once. Clients of the original would drop the group at that, so they are held, their body
    unread, until there is room; only then, or when too many are held, do they get 503. `scope["held_s"]` says how long
    that took: the handler holds a request for what is left of the time.

    `is_full(run)` gives the reason, or None; `room(run, timeout_s)` returns when there may be room again or the time is
    up, False when the hub stops. Counted is every request that was not let in at once: `refused` (429), `held` (let in
    later), `timed_out`, `overflowed` and `stopped` (503), `gone` (hung up while held).
    """

    CHECK_S = 0.5
    """How often a held request is looked at whatever `room` says: a client that left must free its place."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: HubLimits,
        is_full: Callable[[str], str | None],
        room: Callable[[str, float], Awaitable[bool]],
        metrics: BackPressureMetrics,
    ) -> None:
        self._app = app
        self._limits = limits
        self._is_full = is_full
        self._room = room
        self._metrics = metrics
        self._num_held = 0
        metrics.show_held(lambda: self._num_held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if _body_class(scope) is Body.GROUPS:
            refusal = await self._refusal(scope)
        await (refusal or self._app)(scope, receive, send)

    async def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return None when the request may go on, else the answer that turns it away."""
        run = scope.get("run", "default")
        reason = self._is_full(run)
        if reason is None:
            return None
        if any(name == CLIENT_HEADER for name, _ in scope["headers"]):
            self._metrics.count_back_pressure(run, "refused")
            return self._answer(429, reason)
        outcome = await self._hold(run, scope)
        self._metrics.count_back_pressure(run, outcome)
        return None if outcome == "held" else self._answer(503, reason)

    async def _hold(self, run: str, scope: Scope) -> str:
        if self._num_held >= self._limits.max_held:
            return "overflowed"
        is_gone = scope.get("extensions", {}).get(IS_GONE_EXTENSION, _unknown)
        now = asyncio.get_running_loop().time
        began = now()
        deadline = began + self._limits.hold_s
        self._num_held += 1
        try:
            while self._is_full(run) is not None:
                if is_gone():
                    return "gone"
                remaining_s = deadline - now()
                if remaining_s <= 0:
                    return "timed_out"
                if not await self._room(run, min(remaining_s, self.CHECK_S)):
                    return "stopped"
                await asyncio.sleep(0)  # room that comes and goes at once must not stop the loop
            return "held"
        finally:
            self._num_held -= 1
            scope["held_s"] = now() - began

    def _answer(self, status: int, reason: str) -> JSONResponse:
        headers = {"Retry-After": str(self._limits.retry_after_s)}
        detail = {"type": "overloaded", "msg": reason}
        return JSONResponse({"detail": detail}, status, headers)


def _unknown() -> bool:
    """Servers without the extension cannot tell; the hold ends by its time limit."""
    return False
