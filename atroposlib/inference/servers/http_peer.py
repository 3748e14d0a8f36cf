"""Long-lived HTTP sessions per inference server, and the errors that a request raises.

A request is ONE attempt: `admission.ask` alone retries. Connection errors, timeouts, 5xx, 408, 425 and 429 raise
`EngineUnavailable` (the same request may succeed later), other 4xx `EngineHttpRejected`, unreadable bodies
`EngineProtocolError`. Messages contain the URL and an excerpt of the answer.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.http_guard import is_loopback_url
from atroposlib.patience import is_transient_status, read_retry_after
from atroposlib.utils.off_loop import off_loop

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_UNKNOWN_MODEL = re.compile(r"\bmodel\b[^{}]*does not exist")
"""In the answer of vLLM and of this project's engines."""

ADAPTER_SWAP_PAUSE_S = 0.05
CONNECT_TIMEOUT_S = 10.0
EXCERPT_CHARS = 400
LANE_REQUESTS = 128
KEEP_ALIVE_S = 15.0
"""Of the first lane (aiohttp's default); up to 9 s less for the others."""
THREAD_FROM_BYTES = 256 * 1024
"""Larger answers are decoded off the event loop: each takes over 0.5 ms, and many may arrive at once."""


class EngineHttpRejected(EngineRejected):
    """A 4xx answer; `status` tells an unknown route (404, 405) from a bad request."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def lacks_route(self) -> bool:
        """Whether the server has no such route; a 404 for an unknown model is another fault."""
        return self.status in (404, 405) and not _UNKNOWN_MODEL.search(str(self))


def strip_v1(base_url: str) -> str:
    """Return the server's root: `http://h:1/v1/` and `http://h:1` both give `http://h:1`."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def excerpt(body: bytes) -> str:
    """Return the head of a body for an error message."""
    text = body[: EXCERPT_CHARS * 4].decode("utf-8", "replace").strip()
    return text if len(text) <= EXCERPT_CHARS else text[:EXCERPT_CHARS] + "..."


def decoded_or_none(decoder: msgspec.json.Decoder[T], body: bytes) -> T | None:
    """Return a decoded answer to an optional question; None for other content, as of gateways."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _encode_model(value: Any) -> Any:
    # Environments append `completion.choices[0].message`, a pydantic object, to their messages.
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if hasattr(value, "tolist"):
        return value.tolist()  # numpy scalars and arrays of token ids
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON: {value!r:.200}")


def error_of(
    status: int, body: bytes, *, where: str, retry_after: str | None = None
) -> EngineUnavailable | EngineHttpRejected:
    """Return the error that a status of 400 or more stands for; `retry_after` is the header of that name."""
    said = f"{where} answered {status}: {excerpt(body)}"
    if is_transient_status(status):
        return EngineUnavailable(said, status=status, retry_after_s=read_retry_after(retry_after))
    return EngineHttpRejected(said, status=status)


@dataclass(slots=True)
class _Lane:
    """A session for `LANE_REQUESTS` requests at once.

    aiohttp closes all expired idle connections of a session in one round of the event loop: 0.1 s for two thousand.
    """

    session: aiohttp.ClientSession
    num_in_flight: int = 0


class HttpPeer:
    """An inference server, called through aiohttp sessions that are opened on demand."""

    def __init__(
        self, root: str, *, api_key: str | None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.root = root.rstrip("/")
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {**key, **(headers or {})}
        # A proxy cannot reach this machine's loopback, so HTTP_PROXY does not apply to it.
        self._use_proxy_variables = not is_loopback_url(root)
        self._served: set[Any] = set()
        """Models that the server has served."""
        self._lanes: list[_Lane] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def _lane(self) -> _Lane:
        """Return the first session that has room."""
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._lanes, self._loop = [], loop
        for lane in self._lanes:
            if lane.num_in_flight < LANE_REQUESTS:
                return lane
        session = aiohttp.ClientSession(
            # The limiter bounds the requests in flight, not the connection pool. Idle connections of different
            # lanes expire at different times.
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_S - len(self._lanes) % 10
            ),
            headers=self._headers,
            trust_env=self._use_proxy_variables,
        )
        self._lanes.append(_Lane(session))
        return self._lanes[-1]

    async def close(self) -> None:
        """Close the sessions; a later request opens a new one."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            await lane.session.close()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        read: Callable[[bytes], T] = msgspec.json.decode,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        on_event: Callable[[bytes], None] | None = None,
    ) -> T:
        """POST a JSON body and return the answer as decoded by `read`, by default JSON.

        With `on_event`, that is called with the data of each server-sent event if the answer is a stream of them, and
        `read` then with nothing.

        `read` runs in a thread when the answer is large. A `msgspec.DecodeError` becomes `EngineProtocolError`.
        """
        payload = msgspec.json.encode(body, enc_hook=_encode_model)
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        status, answer, retry_after = await self._request(
            "POST",
            path,
            timeout_s=timeout_s,
            on_event=on_event,
            data=payload,
            headers=all_headers,
            params=query,
        )
        where = f"POST {self.root}{path}"
        if status == 404 and body.get("model") in self._served and b"does not exist" in answer:
            # A weight update unloads and reloads an adapter: its name is unknown for some milliseconds.
            raise EngineUnavailable(
                f"{where} answered 404: {excerpt(answer)}",
                status=503,
                retry_after_s=ADAPTER_SWAP_PAUSE_S,
            )
        if status >= 400:
            raise error_of(status, answer, where=where, retry_after=retry_after)
        self._served.add(body.get("model"))
        try:
            is_large = len(answer) >= THREAD_FROM_BYTES
            return await off_loop(read, answer) if is_large else read(answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            is_json = isinstance(e, msgspec.ValidationError)
            what = "unexpected values" if is_json else "a body that is not JSON"
            raise EngineProtocolError(
                f"{where} answered {status} with {what} ({e}): {excerpt(answer)}"
            ) from e

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """GET a path and return status and body; no status raises."""
        status, body, _ = await self._request("GET", path, timeout_s=timeout_s)
        return status, body

    async def delete(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """DELETE a path and return status and body; no status raises."""
        status, body, _ = await self._request("DELETE", path, timeout_s=timeout_s)
        return status, body

    async def _request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        on_event: Callable[[bytes], None] | None = None,
        **options: Any,
    ) -> tuple[int, bytes, str | None]:
        import aiohttp

        url = self.root + path
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        lane = self._lane()
        lane.num_in_flight += 1
        try:
            async with lane.session.request(method, url, timeout=timeout, **options) as response:
                retry_after = response.headers.get("Retry-After")
                if on_event is not None and response.content_type == "text/event-stream":
                    await _read_events(response.content, on_event)
                return response.status, await response.read(), retry_after
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise EngineProtocolError(f"{method} {url}: an event is not as expected: {e}") from e
        except TimeoutError as e:
            raise EngineUnavailable(f"{method} {url}: no answer within {timeout_s:g} s") from e
        except aiohttp.ClientConnectorError as e:
            raise EngineUnavailable(f"{method} {url}: cannot connect: {_reason(e.os_error)}") from e
        except (aiohttp.ClientError, OSError) as e:
            raise EngineUnavailable(f"{method} {url}: {type(e).__name__}: {e}") from e
        finally:
            lane.num_in_flight -= 1


async def _read_events(content: aiohttp.StreamReader, on_event: Callable[[bytes], None]) -> None:
    rest = b""
    async for chunk in content.iter_any():  # lines may be longer than aiohttp's limit
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                on_event(data)


def _reason(error: OSError) -> str:
    """Return why a connection failed; asyncio puts the address in place of the system's text."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    return error.strerror or str(error)
