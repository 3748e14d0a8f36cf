"""The two clients against a real hub over loopback, and against an original server's answers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from atroposlib.api.coordinator import Coordinator
from atroposlib.api.server import create_app
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.client import (
    HubClient,
    TrainerClient,
    TrainerNotRegistered,
    TrainerRegistration,
    UnknownEnvironment,
)
from atroposlib.errors import ConfigError, GroupError, HubError, HubRejected, HubUnavailable
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from tests.api.helpers_api import group

RUN = TrainerRegistration(
    batch_size=4,
    max_token_len=128,
    checkpoint_dir="ck",
    save_checkpoint_interval=1,
    starting_step=0,
    num_steps=3,
)


def scored(num_sequences: int = 2, group_id: str = "a", **changes: object) -> ScoredGroup:
    checked = check_group(group(num_sequences, **changes), strictness=Strictness.MEANING)
    return checked.replace(group_id=group_id)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve `app` on a free loopback port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def hub_url() -> Iterator[str]:
    with serving(create_app(Coordinator(MemoryStore()))) as url:
        yield url


@pytest.fixture
def trainer(hub_url: str) -> Iterator[TrainerClient]:
    with TrainerClient(hub_url, retry_for_s=0.0) as client:
        yield client


async def test_group_travels_from_environment_to_trainer(
    hub_url: str, trainer: TrainerClient
) -> None:
    sent = scored(4, first_token=9, inference_logprobs=[[1.0, -0.1]] * 4, policy_version=3)
    async with HubClient(hub_url) as hub:
        about = {"desired_name": "foo", "max_token_length": 64, "weight": 1.0, "group_size": 4}
        assert (await hub.wandb_info()).project is None
        assert await hub.register_env(**about) is None
        assert trainer.register(RUN).bit_length() > 100
        assert trainer.batch() is None
        registered = await hub.register_env(**about)
        assert registered is not None
        assert (registered.env_id, registered.wandb_name) == (0, "foo_0")
        assert (await hub.info()).batch_size == 4
        assert (await hub.wandb_info()).project == ""
        for _ in range(2):  # as after a lost answer
            receipt = await hub.send([sent.replace(env_id=0)])
            assert (receipt.status, receipt.buffered) == ("received", 0)
        trainer.publish_policy(5)
        status = await hub.status_env(0)
        assert (status.self_queue_size, status.policy_version) == (1, 5)
        [received] = trainer.batch() or []
        assert received.to_dict() == sent.replace(env_id=0).to_dict()
        assert (received.group_id, received.policy_version) == ("a", 3)
        assert trainer.batch() is None
        assert trainer.status().current_step == 1
        await hub.disconnect_env(0)
        trainer.reset()
        with pytest.raises(UnknownEnvironment):
            await hub.status_env(0)
        with pytest.raises(UnknownEnvironment):
            await hub.disconnect_env(0)
    with pytest.raises(TrainerNotRegistered, match="Call /register first"):
        trainer.batch()


async def test_buffered_groups_are_reported(hub_url: str, trainer: TrainerClient) -> None:
    trainer.register(RUN)
    trainer.batch()
    async with HubClient(hub_url) as hub:
        await hub.register_env(desired_name="x", max_token_length=9, weight=1.0, group_size=4)
        receipt = await hub.send([scored(3, "a", env_id=0)])
        assert (receipt.status, receipt.buffered, receipt.buffer_size) == ("buffered", 1, 3)
        receipt = await hub.send([scored(3, "b", env_id=0), scored(4, "c", env_id=0)])
        assert (receipt.status, receipt.buffered, receipt.buffer_size) == ("received", 1, 6)


async def test_waiting_trainer_gets_the_batch_at_once(hub_url: str, trainer: TrainerClient) -> None:
    trainer.register(RUN)
    async with HubClient(hub_url) as hub:
        waiting = asyncio.create_task(asyncio.to_thread(trainer.batch, 30.0))
        await asyncio.sleep(0.05)
        await hub.send([scored(4)])
        assert len(await waiting or []) == 1


async def test_client_that_left_while_waiting_takes_no_batch(
    hub_url: str, trainer: TrainerClient
) -> None:
    trainer.register(RUN)
    async with httpx.AsyncClient(timeout=0.1) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.get(f"{hub_url}/batch", params={"wait": 30})
    async with HubClient(hub_url) as hub:
        await hub.send([scored(4)])
    assert len(trainer.batch() or []) == 1


async def test_refused_group_names_the_reason_and_is_not_sent_twice(
    hub_url: str, trainer: TrainerClient
) -> None:
    trainer.register(RUN)
    async with HubClient(hub_url) as hub:
        with pytest.raises(HubRejected, match="5 sequences, but a batch holds 4") as caught:
            await hub.send([scored(5)])
        assert caught.value.status == 422
        with pytest.raises(ValueError, match="group_id"):
            await hub.send([scored(2).replace(group_id=None)])
    async with httpx.AsyncClient() as anyone:
        ledger = (await anyone.get(f"{hub_url}/ledger")).json()
    assert ledger["rejected"] == {"larger_than_batch": 1}


async def test_absent_hub_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with HubClient(url) as hub:
        with pytest.raises(HubUnavailable, match="/info"):
            await hub.info()
    with TrainerClient(url, retry_for_s=0.0) as trainer:
        with pytest.raises(HubUnavailable, match="/register"):
            trainer.register(RUN)
        with pytest.raises(HubUnavailable, match="/batch"):
            trainer.batch()


@pytest.mark.parametrize(
    ("status", "error"), [(500, HubUnavailable), (503, HubUnavailable), (403, HubRejected)]
)
async def test_status_decides_whether_a_retry_can_help(status: int, error: type[Exception]) -> None:
    app = FastAPI()

    @app.get("/info")
    async def info() -> Response:
        return PlainTextResponse("why", status)

    with serving(app) as url:
        async with HubClient(url) as hub:
            with pytest.raises(error, match=f"{status} why"):
                await hub.info()


async def test_slow_hub_is_unavailable() -> None:
    app = FastAPI()

    @app.get("/info")
    async def info() -> None:
        await asyncio.sleep(0.5)

    with serving(app) as url:
        async with HubClient(url, timeout_s=0.05) as hub:
            with pytest.raises(HubUnavailable):
                await hub.info()


def scripted_trainer(answer: Callable[[httpx.Request], httpx.Response]) -> TrainerClient:
    return TrainerClient("http://hub", transport=httpx.MockTransport(answer), retry_for_s=5.0)


def test_control_calls_are_retried_and_batches_are_not() -> None:
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        if calls.count(request.url.path) == 1:
            return httpx.Response(503)
        return httpx.Response(200, json={"current_step": 1, "queue_size": 2})

    trainer = scripted_trainer(answer)
    assert trainer.status().queue_size == 2
    with pytest.raises(HubUnavailable):
        trainer.batch()
    assert calls == ["/status", "/status", "/batch"]


def test_group_that_fails_the_trainers_gate_is_an_error() -> None:
    bad = group(1, masks=[[1, 2]])
    trainer = scripted_trainer(lambda _: httpx.Response(200, json={"batch": [bad]}))
    with pytest.raises(GroupError, match="masks"):
        trainer.batch()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}"])
def test_something_else_on_the_port_is_a_clear_error(body: bytes) -> None:
    trainer = scripted_trainer(lambda _: httpx.Response(200, content=body))
    with pytest.raises(HubError, match="GET /batch"):
        trainer.batch()
    with pytest.raises(HubError, match="not a hub's HubStatus"):
        trainer.status()


def test_original_server_that_ignores_wait_is_not_polled_in_a_tight_loop() -> None:
    trainer = scripted_trainer(lambda _: httpx.Response(200, json={"batch": None}))
    began = time.monotonic()
    assert trainer.batch(wait_s=0.2) is None
    assert time.monotonic() - began >= 0.2


async def test_original_server_is_spoken_to_in_json() -> None:
    app = FastAPI()
    bodies: list[tuple[str, object]] = []

    @app.post("/scored_data")
    async def scored_data(request: Request) -> Response:
        content_type = request.headers["content-type"]
        if content_type != "application/json":
            bodies.append((content_type, None))
            return JSONResponse({"detail": [{"type": "model_attributes_type"}]}, 422)
        bodies.append((content_type, await request.json()))
        return JSONResponse({"status": "received"})

    with serving(app) as url:
        async with HubClient(url) as hub:
            sent = scored(2)
            await hub.send([sent])
            await hub.send([sent])
    kinds = [content_type for content_type, _ in bodies]
    assert kinds[1:] == ["application/json", "application/json"]
    assert len(kinds) == 3
    assert bodies[1][1] == sent.to_dict()


def test_address_without_a_scheme_is_a_configuration_error() -> None:
    for client in (HubClient, TrainerClient):
        with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
            client("localhost:8000")


async def test_token_travels_as_bearer() -> None:
    app = FastAPI()
    seen: list[str | None] = []

    @app.get("/info")
    async def info(request: Request) -> dict[str, int]:
        seen.append(request.headers.get("authorization"))
        return {"batch_size": 1, "max_token_len": 1}

    with serving(app) as url:
        async with HubClient(url, token="s3cret") as hub:
            await hub.info()
    assert seen == ["Bearer s3cret"]
