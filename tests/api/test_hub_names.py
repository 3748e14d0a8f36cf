"""Names of the original's server module that callers import to build or check bodies, or for their own application."""

from __future__ import annotations

import gzip
import random

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import ValidationError

from atroposlib.api import server
from atroposlib.api.http.limits import HubLimits
from atroposlib.api.server import (
    MIN_ENV_WEIGHT,
    GZipRequestMiddleware,
    Info,
    Registration,
    ScoredData,
    Status,
)
from tests.api.helpers_api import FOURTEEN_KEYS, group, registration, running_hub


def test_the_models_describe_what_the_hub_speaks() -> None:
    assert MIN_ENV_WEIGHT == 0.01
    assert Registration(**registration()).model_dump(exclude_none=True) == registration()
    assert Status(current_step=3, queue_size=6).model_dump(exclude_none=True) == {
        "current_step": 3,
        "queue_size": 6,
    }
    assert Info(batch_size=4, max_token_len=8).model_dump() == {"batch_size": 4, "max_token_len": 8}
    assert list(ScoredData.model_fields) == FOURTEEN_KEYS


HANDLERS = {
    "root": "GET /",
    "register": "POST /register",
    "register_env_url": "POST /register-env",
    "disconnect_env": "POST /disconnect-env",
    "wandb_info": "GET /wandb_info",
    "info": "GET /info",
    "get_batch": "GET /batch",
    "get_latest_example": "GET /latest_example",
    "scored_data": "POST /scored_data",
    "scored_data_list": "POST /scored_data_list",
    "get_status": "GET /status",
    "get_status_env": "GET /status-env",
    "reset_data": "GET /reset_data",
}


def test_the_handlers_have_the_names_of_the_original_and_serve_its_routes() -> None:
    served = {
        f"{method} {route.path}": route.endpoint
        for route in server.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    for name, route in HANDLERS.items():
        assert served[route] is getattr(server, name)


async def test_what_the_hub_delivers_is_a_scored_data() -> None:
    sent = ScoredData(**group(messages=[[{"role": "user", "content": None}]] * 2), images=["x"])
    async with running_hub() as hub:
        await hub.start()
        await hub.post("/scored_data", sent.model_dump())
        assert ScoredData(**await hub.get("/latest_example")) == sent


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user"}, "no content"),
        ({"content": "x"}, "no role"),
        ({}, "no content and no role"),
    ],
)
def test_messages_need_a_role_and_a_content(message: dict[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=rf"\[1\]\[0\] has {reason}"):
        ScoredData(**group(messages=[[], [message]]))


async def test_the_middleware_inflates_requests_of_any_application() -> None:
    app = FastAPI()
    app.add_middleware(GZipRequestMiddleware, limits=HubLimits(max_body_bytes=2_000_000))

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        encoded = {"Content-Encoding": "gzip"}
        sizes = {}
        for size in (10, 1_500_000, 3_000_000):
            body = gzip.compress(random.Random(0).randbytes(size), 1)
            answer = await http.post("/echo", content=body, headers=encoded)
            sizes[size] = (answer.status_code, answer.text)
        assert sizes[10] == (200, "10")
        assert sizes[1_500_000] == (200, "1500000")
        assert sizes[3_000_000][0] == 413
        assert (await http.post("/echo", content=b"no gzip", headers=encoded)).status_code == 400
