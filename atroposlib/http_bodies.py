"""Read and decode request bodies with limits on size and time, for the proxy and the local engine.

A bad body raises `BodyRefused` (status 400, 408, 413, or 499 if the client disconnects), which each server turns into
its own form of error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_BODY_BYTES = 32 * 2**20
BODY_TIMEOUT_S = 60.0

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's `receive`."""


class BodyRefused(Exception):
    """A refused body; the message gives the reason, `status` and `headers` are those of the response."""

    def __init__(
        self, status: int, message: str, *, code: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers


async def read_body(
    receive: Receive, *, max_bytes: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Return the whole body. Raises BodyRefused: 413 too large, 408 too slow, 499 the client disconnected."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BodyRefused(499, "the client disconnected", code="client_gone")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise BodyRefused(
                        413, f"the body has more than {max_bytes} bytes", code="body_too_large"
                    )
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as e:
        raise BodyRefused(
            408, f"the body did not arrive within {timeout_s:g} s", code="slow_body"
        ) from e


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body; an empty one is `{}`. Raises BodyRefused (400) for invalid JSON or too deep nesting.

    Raises `msgspec.ValidationError` for JSON that is not a `kind`: the caller knows the fields.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BodyRefused(400, f"the body is not JSON: {e}", code="not_json") from e
    except RecursionError as e:
        raise too_deep() from e


def too_deep() -> BodyRefused:
    """Return the refusal of a body that exceeds the recursion limit."""
    return BodyRefused(400, "the body is nested too deeply", code="nested_too_deeply")
