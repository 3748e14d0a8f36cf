"""Requests to an application in this process, byte for byte as a test wants them: no client checks or mends them.

`Caller` speaks ASGI itself, which costs a tenth of an HTTP client and allows what clients refuse to send. An exception
that leaves the application is a status of 500 here, with its traceback as the body. No test lives here.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import zstandard
from starlette.types import ASGIApp, Message

from atroposlib.api.run.hub import Hub
from atroposlib.api.stores.base import Durability
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.runs import DirectoryRuns

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes
    """Inflated."""
    is_whole: bool = True
    """False: the application ended before it had sent everything, so that a server would cut the connection."""

    def json(self) -> Any:
        """Decode strictly: NaN and Infinity are no JSON."""
        assert self.is_whole, "cut off"
        return json.loads(self.body, parse_constant=_refuse_constant)

    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


def hub_on_disk(directory: Path) -> Hub:
    """Return a hub that stores its runs below `directory`."""
    return Hub(DirectoryRuns(directory, partial(DiskStore, durability=Durability.PROCESS)))


class Caller:
    """Calls one application; `client` is the address that it sees."""

    def __init__(self, app: ASGIApp, *, client: str = "127.0.0.1") -> None:
        self._app = app
        self._client = client
        self.num_calls = 0

    async def __call__(
        self,
        method: str,
        target: str,
        body: bytes | Sequence[bytes] = b"",
        *,
        headers: Headers = (),
    ) -> Answer:
        """Send `body`, in pieces if it is a sequence; `target` is a path with its query, percent-encoded."""
        self.num_calls += 1
        path, _, query = target.partition("?")
        pieces = [body] if isinstance(body, bytes) else list(body)
        sent = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers
        ]
        if not any(name in (b"content-length", b"transfer-encoding") for name, _ in sent):
            sent.append((b"content-length", b"%d" % sum(map(len, pieces))))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": sent,
            "client": (self._client, 1),
            "server": ("hub", 80),
        }
        messages: list[Message] = []

        async def receive() -> Message:
            if not pieces:
                return {"type": "http.disconnect"} if _is_over(messages) else await _never()
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(message: Message) -> None:
            messages.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:  # noqa: BLE001 - what a server would turn into 500
            return Answer(status=500, headers={}, body=traceback.format_exc().encode())
        found = {k.decode().lower(): v.decode("latin-1") for k, v in messages[0]["headers"]}
        content = b"".join(message.get("body", b"") for message in messages[1:])
        if not _is_over(messages):
            return Answer(status=messages[0]["status"], headers=found, body=content, is_whole=False)
        if found.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        elif found.get("content-encoding") == "zstd":
            content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        return Answer(status=messages[0]["status"], headers=found, body=content)


def _is_over(messages: Sequence[Message]) -> bool:
    return bool(messages) and not messages[-1].get(
        "more_body", messages[-1]["type"].endswith("start")
    )


async def _never() -> Message:
    """A client that stays connected and says nothing more."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
