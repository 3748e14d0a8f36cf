"""Sessions of an `HttpPeer`: a new one when the others are full."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.inference.servers import http_peer as http


async def test_connections_of_many_requests_do_not_all_expire_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LANE_REQUESTS", 2)
    asked = asyncio.Event()
    waiting = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 5:
            asked.set()
        await asked.wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/ask", answer)
    async with TestServer(app) as server:
        peer = http.HttpPeer(str(server.make_url("/")), api_key=None)
        await asyncio.gather(*(peer.post("/ask", {}, timeout_s=10) for _ in range(5)))
        assert [lane.num_in_flight for lane in peer._lanes] == [0, 0, 0]
        await peer.post("/ask", {}, timeout_s=10)
        assert len(peer._lanes) == 3
        kept = {lane.session.connector._keepalive_timeout for lane in peer._lanes}  # type: ignore[union-attr]
        assert kept == {15.0, 14.0, 13.0}
        await peer.close()
