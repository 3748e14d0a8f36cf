"""A local server answers at once, also over a connection that has been used for a while."""

from __future__ import annotations

import time

import httpx
from starlette.types import Receive, Scope, Send

from atroposlib.utils.local_server import serve_locally

DELAYED_ACK_S = 0.04
"""Linux's shortest; without TCP_NODELAY no later answer of two pieces is faster."""


async def in_two_pieces(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})


async def test_an_answer_of_several_pieces_waits_for_no_acknowledgement() -> None:
    seconds = []
    async with serve_locally(in_two_pieces) as url, httpx.AsyncClient() as client:
        for _ in range(60):
            began = time.perf_counter()
            assert (await client.get(url)).content == b"ab"
            seconds.append(time.perf_counter() - began)
    assert min(seconds[-20:]) < DELAYED_ACK_S / 2
