"""Request bodies: a size limit and transparent gzip, before any route sees them.

Pure ASGI, so that a handler reads the body with one `await request.body()`. Inflation is streaming
and capped: a bomb costs at most the limit. Who may send how often, and back-pressure, are not
decided here.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_GZIP_WBITS = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """What one request may cost."""

    max_body_bytes: int = 256 * 2**20
    """Of a request, on the wire and inflated."""
    offload_bytes: int = 256 * 2**10
    """Bodies from this size on are inflated, decoded and encoded in a thread: others are served."""
    max_wait_s: float = 60.0
    """Longest `GET /batch?wait=`."""


class BodyTooLarge(Exception):
    """The body, on the wire or inflated, exceeds the limit."""


class InvalidGzip(Exception):
    """Not gzip, corrupt, or truncated."""


def inflate(data: bytes, *, max_bytes: int) -> bytes:
    """Inflate one or more gzip members.

    Raises `InvalidGzip` or, past `max_bytes` of output, `BodyTooLarge`.
    """
    out: list[bytes] = []
    room = max_bytes
    while data:
        member = zlib.decompressobj(_GZIP_WBITS)
        try:
            # One byte more than allowed tells "exactly full" from "too large".
            piece = member.decompress(data, room + 1)
        except zlib.error as e:
            raise InvalidGzip(str(e)) from e
        if len(piece) > room:
            raise BodyTooLarge
        if not member.eof:
            raise InvalidGzip("the stream ends early")
        out.append(piece)
        room -= len(piece)
        data = member.unused_data.lstrip(b"\0")  # gzip allows zero padding after a member
    return b"".join(out)


class RequestBodies:
    """ASGI middleware: reads every request's body, within the limits, and hands it on inflated."""

    def __init__(self, app: ASGIApp, limits: HubLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except InvalidGzip:
            await PlainTextResponse("Invalid gzip payload", 400)(scope, receive, send)
            return
        except BodyTooLarge:
            limit = self._limits.max_body_bytes
            text = f"Request body exceeds {limit} bytes; send fewer groups per request"
            await PlainTextResponse(text, 413)(scope, receive, send)
            return
        if body is None:
            return
        is_delivered = False

        async def receive_body() -> Message:
            nonlocal is_delivered
            if is_delivered:
                return await receive()
            is_delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_body, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, inflated, headers of `scope` corrected; None when the client left."""
        limit = self._limits.max_body_bytes
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLarge
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise BodyTooLarge
            pieces.append(piece)
            if not message.get("more_body", False):
                break
        body = b"".join(pieces)
        if "gzip" not in headers.get("content-encoding", "").lower():
            return body
        if len(body) >= self._limits.offload_bytes:
            body = await asyncio.to_thread(inflate, body, max_bytes=limit)
        else:
            body = inflate(body, max_bytes=limit)
        scope["headers"] = list(scope["headers"])
        corrected = MutableHeaders(scope=scope)
        del corrected["content-encoding"]
        corrected["content-length"] = str(len(body))
        return body
