"""Read and decode request bodies with limits on size and time; the errors of servers with OpenAI's routes.

A bad body raises `BodyRefused` (status 400, 408, 413, or 499 if the client disconnects), which each server turns into
its own form of error: proxy and engines into an `ApiError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar, TypeVar

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


class ApiError(Exception):
    """A request that is answered with an error body in OpenAI's form."""

    default_type: ClassVar[str | None] = None
    """None: vLLM's for the status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type or self.default_type or _type_for(status)
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code or self.status}}


def _type_for(status: int) -> str:
    other = "BadRequestError" if status < 500 else "InternalServerError"
    return {
        403: "PermissionDeniedError",
        404: "NotFoundError",
        429: "RateLimitError",
        503: "ServiceUnavailableError",
    }.get(status, other)


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


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection; call after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
