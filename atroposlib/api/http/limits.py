"""Limits of one request: body size, inflation, transfer time, memory in flight, and waiting for room.

Two pure-ASGI middlewares. `Ladder` refuses requests, or holds them unread, while a run is full. `RequestBodies` reads
and inflates every body within the limits, so that one message of `receive` has all of it. Nothing here
parses a body: payloads.py checks groups. README.md lists the responses.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import zstandard
from isal import isal_zlib
from isal.igzip_lib import IsalError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.http.metrics import HubMetrics
from atroposlib.api.http.routes import Route
from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.hub import DEFAULT_RUN
from atroposlib.http_bodies import BodyRefused

IS_GONE_EXTENSION = "atropos.is_gone"
"""ASGI extension: a function that returns whether the client disconnected, without reading from it."""
CROWDED_EXTENSION = "atropos.is_crowded"
"""ASGI extension: whether the connection is beyond the limit and so serves vital routes only."""
RECEIPT_EXTENSION = "atropos.receipt"
"""ASGI extension: a function that takes one to call once the answer was received: at the connection's next request, or
its end without an error. If the connection breaks, it is not called."""
ABORT_EXTENSION = "atropos.abort"
"""ASGI extension: a function that closes the connection without waiting for the client to read."""

RETRY_AFTER_S = "2"
"""`Retry-After` of requests that may be sent again."""
_MIB = 2**20
_GZIP_WBITS = 16 + isal_zlib.MAX_WBITS
_FEED_BYTES = {"gzip": 4096, "zstd": 256}
"""Fed per call, which yields at most 4 and 8 MiB: deflate makes 1032 bytes of one, a zstd block 128 KiB of four."""
_ZSTD_MAX_WINDOW_BYTES = 8 * _MIB
"""What RFC 8878 (3.1.1.1.2) asks decoders to support."""
_MAX_MEMBERS = 10_000
"""gzip members or zstd frames in one body. Each costs microseconds however small it is."""
_INLINE_INFLATE_BYTES = 4 * 2**10
"""Compressed bodies up to this size inflate to 1 MiB at most, in milliseconds: not worth a thread."""
_INLINE_JOIN_BYTES = _MIB
"""Pieces of a body up to this size are joined on the event loop."""
_UNCOUNTED_BYTES = 64 * 2**10
"""Bodies up to this size never wait for the budget: acks must get through under load."""
_TRIM_EVERY_S = 5.0
_TRIM_FROM_BYTES = 32 * _MIB
"""Freed since memory was returned last."""
_STEP_BYTES = _MIB
"""Taken from the budget per step while a body arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """Limits of requests."""

    max_body_bytes: int = 64 * _MIB
    """Body of a request with groups, as sent."""
    max_inflated_bytes: int = 256 * _MIB
    """Body of a request with groups, inflated."""
    max_inflate_ratio: int = 200
    """Inflated to sent bytes, checked beyond 1 MiB of output. Groups of real text stay far below 50."""
    max_control_body_bytes: int = _MIB
    """Body of any other request, as sent and inflated."""
    max_inflight_bytes: int = 256 * _MIB
    """Each of three budgets: bodies received or handled, inflated bodies, batches being sent. Requests wait for it."""
    max_lookup_bytes: int = 64 * _MIB
    """Budget of other large responses, which are encoded piece by piece."""
    receive_timeout_s: float = 120.0
    """From the first read to the end of the body."""
    receive_grace_s: float = 10.0
    """Time before the minimum rate is enforced."""
    min_receive_bytes_per_s: int = 16 * 2**10
    """Raised if the announced body needs more to arrive within `receive_timeout_s`."""
    max_wait_s: float = 60.0
    """Longest `wait=` of a long poll."""
    hold_s: float = 60.0
    """How long a request of an original client is held while its run is full."""
    max_held: int = 256
    """Requests held at a time; further ones get 503 immediately."""


def is_native(scope: Scope) -> bool:
    """Whether a native client sent the request: it retries after 429, where an original one drops the group."""
    return any(name == b"atropos-client" for name, _ in scope["headers"])


def refusal(status: int, kind: str, text: str, *, is_temporary: bool = True) -> JSONResponse:
    """Return the answer to a refused request; `is_temporary`: a retry may succeed."""
    headers = {"Retry-After": RETRY_AFTER_S} if is_temporary else None
    return JSONResponse({"detail": {"type": kind, "msg": text}}, status, headers)


def content_encoding(scope: Scope) -> str | None:
    """Return "gzip", "zstd", or None for an uncompressed body. Raises `BodyRefused` 415 for anything else."""
    values = [value for name, value in scope["headers"] if name == b"content-encoding"]
    value = b",".join(values).decode("latin-1").lower()
    names = [name.strip().replace("x-gzip", "gzip") for name in value.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if names not in ([], ["gzip"], ["zstd"]):
        raise BodyRefused(
            415,
            "Content-Encoding must be one of gzip, zstd, identity",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    return names[0] if names else None


def inflate(data: bytes, *, encoding: str, max_bytes: int, max_ratio: int = 200) -> bytes:
    """Inflate a whole gzip or zstd body, several members or frames included.

    Raises `BodyRefused`: 400 if it is corrupt, truncated or followed by other data, 413 past a limit. Output stops at
    most one piece (8 MiB) past a limit.
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
                pass  # several frames, or a broken one: retried in steps
        for piece, num_read in _inflate_in_steps(data, encoding):
            size += len(piece)
            check(size, num_read=num_read)
            pieces.append(piece)
    except (IsalError, zstandard.ZstdError, EOFError) as e:  # type: ignore[misc] # its stub is wrong
        raise BodyRefused(400, f"Invalid {encoding} payload") from e
    # `join` releases the GIL from 1 MiB on; a growing buffer would copy while holding it.
    return b"".join(pieces)


def _inflate_in_steps(data: bytes, encoding: str) -> Iterator[tuple[bytes, int]]:
    """Yield pieces of a few MiB at most, each with the number of compressed bytes read so far."""
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
    """A memory budget that requests reserve bytes from, strictly first come, first served, on one event loop.

    Small requests do not overtake a large one, so it cannot starve. The oldest request that holds or wants bytes never
    waits, even past the total: otherwise requests that each hold a part and wait for the rest would deadlock.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self.lowest_free_bytes = total_bytes
        """Since `return_memory` set it to `free_bytes`."""
        self.holders: dict[HeldBytes, None] = {}
        """Those that hold or want bytes, oldest first."""
        self.waiting: dict[HeldBytes, tuple[int, asyncio.Future[None]]] = {}
        """Bytes that each waiting holder wants in all, in the order of service."""

    def serve(self) -> None:
        """Grant free bytes to waiting holders."""
        while self.waiting:
            oldest = next(iter(self.holders))
            held = oldest if oldest in self.waiting else next(iter(self.waiting))
            wanted, turn = self.waiting[held]
            if held is not oldest and wanted - held.num_bytes > self.free_bytes:
                return
            del self.waiting[held]
            self.free_bytes -= wanted - held.num_bytes
            self.lowest_free_bytes = min(self.lowest_free_bytes, self.free_bytes)
            held.num_bytes = wanted
            if not turn.done():
                turn.set_result(None)


class HeldBytes:
    """The bytes that one request holds of a budget, until the end of a `with` block."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._budget.holders:
            self.hold(0)

    async def grow(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all, waiting until they are granted."""
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
        """Hold `num_bytes` in all and return True if that needs no wait; if not, only keep its rank."""
        budget = self._budget
        budget.holders[self] = None
        has_room = not budget.waiting and num_bytes - self.num_bytes <= budget.free_bytes
        if has_room or next(iter(budget.holders)) is self:
            self.hold(num_bytes)
            return True
        return False

    def hold(self, num_bytes: int) -> None:
        """Hold exactly `num_bytes`, even beyond the total, for bytes that are already in memory."""
        budget = self._budget
        budget.free_bytes += self.num_bytes - num_bytes
        budget.lowest_free_bytes = min(budget.lowest_free_bytes, budget.free_bytes)
        self.num_bytes = num_bytes
        if num_bytes:
            budget.holders[self] = None
        else:
            budget.holders.pop(self, None)
        if budget.waiting:
            budget.serve()


async def return_memory(*budgets: ByteBudget) -> None:
    """Return to the system, until cancelled, what large bodies have freed: glibc keeps it for later allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_TRIM_EVERY_S)
        if sum(each.free_bytes - each.lowest_free_bytes for each in budgets) >= _TRIM_FROM_BYTES:
            for each in budgets:
                each.lowest_free_bytes = each.free_bytes
            await asyncio.to_thread(trim, 0)


class RequestBodies:
    """ASGI middleware: passes every body on inflated, within the limits; budgets count it until the answer is sent."""

    def __init__(self, app: ASGIApp, limits: HubLimits) -> None:
        self._app = app
        self._limits = limits
        self.received = ByteBudget(limits.max_inflight_bytes)
        self.inflated = ByteBudget(limits.max_inflight_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with HeldBytes(self.received) as received, HeldBytes(self.inflated) as inflated:
            try:
                encoding = content_encoding(scope)
                body = await self._receive(scope, receive, received)
                if body and encoding is not None:
                    is_large = _has_groups(scope)
                    body = await self._inflate(body, inflated, encoding=encoding, is_large=is_large)
                    received.hold(0)
            except BodyRefused as e:
                answer = PlainTextResponse(str(e), e.status, e.headers)
                await answer(scope, receive, send)
                return
            if body is None:
                return
            if encoding is not None:
                scope["headers"] = list(scope["headers"])
                changed = MutableHeaders(scope=scope)
                del changed["content-encoding"]
                changed["content-length"] = str(len(body))
            # Emptied on delivery, so that the handler alone decides how long the body lives.
            bodies = [body]
            del body

            async def receive_body() -> Message:
                if not bodies:
                    return await receive()
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}

            await self._app(scope, receive_body, send)

    async def _receive(self, scope: Scope, receive: Receive, held: HeldBytes) -> bytes | None:
        """Return the body as sent; None if the client disconnected.

        The budget is charged for the bytes received, not for the announced size, which may be false. While this waits
        for the budget, it reads nothing, and the client's deadline is extended by the wait.
        """
        limits = self._limits
        limit = limits.max_body_bytes if _has_groups(scope) else limits.max_control_body_bytes
        headers = dict[bytes, bytes](scope["headers"])
        length = headers.get(b"content-length", b"")
        # In HTTP/1 no length and no transfer coding is no body (RFC 9112, 6.3).
        is_http1 = scope.get("http_version", "1.1").startswith("1")
        has_none = is_http1 and b"transfer-encoding" not in headers
        announced = int(length) if length.isdigit() else 0 if has_none else None
        if announced is not None and announced > limit:
            raise _too_large(limit)
        in_time = limits.receive_timeout_s - limits.receive_grace_s
        num_expected = limit if announced is None else announced
        rate = max(limits.min_receive_bytes_per_s, num_expected / in_time if in_time > 0 else 0)
        now = asyncio.get_running_loop().time
        start = now()
        allowed_s = min(limits.receive_timeout_s, limits.receive_grace_s)
        pieces: list[bytes] = []
        size = 0
        is_whole = False
        while True:
            if size > _UNCOUNTED_BYTES + held.num_bytes:
                began = now()
                wanted = size - _UNCOUNTED_BYTES
                await held.grow(wanted if is_whole else wanted + _STEP_BYTES)
                start += now() - began
            if is_whole:
                break
            try:
                # One timer until the deadline; the bytes received by then may have extended it.
                async with asyncio.timeout_at(start + allowed_s):
                    while not is_whole and (
                        size <= _UNCOUNTED_BYTES + held.num_bytes
                        or held.grow_now(size - _UNCOUNTED_BYTES + _STEP_BYTES)
                    ):
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return None
                        piece = message.get("body", b"")
                        size += len(piece)
                        if size > limit:
                            raise _too_large(limit)
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
        if held.num_bytes:
            held.hold(max(0, size - _UNCOUNTED_BYTES))
        if len(pieces) == 1 or size <= _INLINE_JOIN_BYTES:
            return b"".join(pieces)  # of a single piece no copy
        return await asyncio.to_thread(b"".join, pieces)  # releases the GIL while it copies

    async def _inflate(
        self, body: bytes, held: HeldBytes, *, encoding: str, is_large: bool
    ) -> bytes:
        limits = self._limits
        limit = limits.max_inflated_bytes if is_large else limits.max_control_body_bytes
        ratio = limits.max_inflate_ratio
        # Reserved for the worst case, corrected below. No request waits for the other budget while it holds this one.
        await held.grow(min(limit, max(_MIB, ratio * len(body))))
        work = functools.partial(inflate, body, encoding=encoding, max_bytes=limit, max_ratio=ratio)
        is_small = len(body) <= _INLINE_INFLATE_BYTES
        data = work() if is_small else await asyncio.to_thread(work)
        held.hold(len(data))
        return data


def _has_groups(scope: Scope) -> bool:
    route: Route | None = scope.get("hub_route")
    return route is not None and route.has_groups


class Ladder:
    """ASGI middleware around `RequestBodies`: refuses or holds requests with groups while their run is full.

    Native clients get 429 at once. Original clients would drop the group, so they are held, their body unread, until
    there is room; after `hold_s`, or if too many are held, they get 503. `scope["held_s"]` is the time spent: the
    handler holds a request for the rest of `hold_s` only.

    Every request not admitted at once is counted: `refused` (429), `held` (admitted later), `timed_out`, `overflowed`
    and `stopped` (503), `gone` (disconnected while held).
    """

    CHECK_S = 0.5
    """How often a held request is checked without progress of the run: a disconnected client frees its slot."""

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
        answer: ASGIApp = self._app
        name = scope.get("run", DEFAULT_RUN)
        run = self._runs.get(name) if _has_groups(scope) else None
        reason = None if run is None else run.overload()
        if reason is not None:
            outcome = "refused" if is_native(scope) else await self._hold(name, scope)
            self._count.labels(name, outcome).inc()
            if outcome != "held":
                status = 429 if outcome == "refused" else 503
                answer = refusal(status, "overloaded", reason)
        await answer(scope, receive, send)

    async def _hold(self, name: str, scope: Scope) -> str:
        if self._num_held >= self._limits.max_held:
            return "overflowed"
        # Without the extension a disconnect is not noticed; the hold ends at its time limit.
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
                await asyncio.sleep(0)  # yield even if `wait` returned at once
            return "held"
        finally:
            self._num_held -= 1
            scope["held_s"] = now() - began
