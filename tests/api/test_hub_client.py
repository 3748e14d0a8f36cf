"""The two clients against a real hub over loopback, and against an original server's answers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from atroposlib import __version__
from atroposlib.api.run.hub import Hub
from atroposlib.api.server import create_app
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.runs import DirectoryRuns
from atroposlib.client import (
    HubClient,
    HubStatus,
    LeasedBatch,
    LeaseExpired,
    TrainerClient,
    TrainerNotRegistered,
    TrainerRegistration,
    TrainerSuperseded,
    UnknownEnvironment,
)
from atroposlib.errors import ConfigError, GroupError, HubError, HubRejected, HubUnavailable
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from atroposlib.wire import CONTENT_TYPE_PACKED, join_packed, pack_group, split_packed
from tests.api.helpers_api import group, registration, serving

RUN = TrainerRegistration(**registration() | {"wandb_group": "", "wandb_project": ""})


def scored(num_sequences: int = 2, group_id: str = "a", **changes: object) -> ScoredGroup:
    checked = check_group(group(num_sequences, **changes), strictness=Strictness.MEANING)
    return checked.replace(group_id=group_id)


@pytest.fixture
def hub_url() -> Iterator[str]:
    with serving(create_app()) as url:
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
        assert trainer.register(RUN).uuid.bit_length() > 100
        assert trainer.batch() is None
        registered = await hub.register_env(**about)
        assert registered is not None
        assert (registered.env_id, registered.wandb_name) == (0, "foo_0")
        assert (await hub.info()).batch_size == 4
        assert (await hub.wandb_info()).project == ""
        for status in ("received", "duplicate"):  # as after a lost answer
            receipt = await hub.send([sent.replace(env_id=0)])
            assert (receipt.status, receipt.buffered) == (status, 0)
            assert receipt.env_status is not None
            assert receipt.env_status.self_queue_size == 1
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


async def test_slow_hub_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with HubClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05) as hub:
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
    def answer(request: Request) -> Any:
        if request.headers["content-type"] == "application/json":
            return {"status": "received"}
        return JSONResponse({"detail": [{"type": "model_attributes_type"}]}, 422)

    sent = scored(2)
    with recording_hub(answer) as (url, log):
        async with HubClient(url) as hub:
            await hub.send([sent])
            await hub.send([sent])
    kinds = [request.headers["content-type"] for request, _ in log]
    assert kinds == [CONTENT_TYPE_PACKED, "application/json", "application/json"]
    assert json.loads(log[1][1]) == sent.to_dict()


def test_address_without_a_scheme_is_a_configuration_error() -> None:
    for client in (HubClient, TrainerClient):
        with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
            client("localhost:8000")


Asked = tuple[str, list[tuple[Request, bytes]]]
"""The address of a recording hub, and what it was asked."""


@contextmanager
def recording_hub(
    answer: Callable[[Request], Any] = lambda _: {"status": "received"},
) -> Iterator[Asked]:
    """Serve `answer` on every route; yield the address and what was asked."""
    app = FastAPI()
    asked: list[tuple[Request, bytes]] = []

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything(request: Request) -> Any:
        asked.append((request, await request.body()))
        return answer(request)

    with serving(app) as url:
        yield url, asked


async def test_every_request_names_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_HUB_TOKEN", raising=False)
    with recording_hub(lambda _: {"current_step": 1, "queue_size": 2, "batch": None}) as (url, log):
        async with HubClient(url) as hub:
            with pytest.raises(HubError):
                await hub.info()
        with TrainerClient(url) as trainer:
            trainer.status()
            trainer.batch()
    assert [request.headers["atropos-client"] for request, _ in log] == [
        f"atroposlib/{__version__}"
    ] * 3
    assert not any("authorization" in request.headers for request, _ in log)


async def test_token_travels_as_bearer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_HUB_TOKEN", raising=False)
    with recording_hub(lambda _: {"batch": None}) as (url, log):
        for argument, variable, expected in [
            ("s3cret", None, "Bearer s3cret"),
            (None, " from-env\n", "Bearer from-env"),
            ("argument", "variable", "Bearer argument"),
            (None, "", None),
            ("", "variable", None),
        ]:
            if variable is not None:
                monkeypatch.setenv("ATROPOS_HUB_TOKEN", variable)
            async with HubClient(url, token=argument) as hub:
                with pytest.raises(HubError):
                    await hub.info()
            with TrainerClient(url, token=argument) as trainer:
                trainer.batch()
            sent = [request.headers.get("authorization") for request, _ in log[-2:]]
            assert sent == [expected] * 2


STATUS = {
    "current_step": 7,
    "queue_size": 3,
    "unallocated_fraction": 1.0,
    "self_queue_size": 2,
    "max_group_size": 4,
    "env_weight": 0.5,
    "policy_version": 6,
}


MANY = {"x" * 99: 1000, **{f"dropped_{i}": i for i in range(100)}}
"""More, and longer ones, than a request may carry."""


async def test_long_poll_says_what_was_seen() -> None:
    with recording_hub(lambda _: STATUS) as (url, log):
        async with HubClient(url) as hub:
            status = await hub.status_env(
                4, wait_s=2.5, seen_step=0, seen_policy=0, env_uid="this-process", losses=MANY
            )
            await hub.status_env(4)
    assert (status.current_step, status.policy_version) == (7, 6)
    (poll, body), (plain, _) = log
    asked = dict(poll.query_params)
    carried = json.loads(asked.pop("losses"))
    assert carried == {"x" * 64: 1000} | {f"dropped_{i}": i for i in range(69, 100)}
    assert asked == {
        "env_id": "4", "wait": "2.5", "seen_step": "0", "seen_policy": "0", "env_uid": "this-process",
    }  # fmt: skip
    assert json.loads(body) == {"env_id": 4}  # for an original server
    assert dict(plain.query_params) == {"env_id": "4"}


async def test_registration_carries_the_uid_of_the_process() -> None:
    with recording_hub(lambda _: {"status": "wait for trainer to start"}) as (url, log):
        about = {"desired_name": "x", "max_token_length": 9, "weight": 1.0, "group_size": 4}
        async with HubClient(url) as hub:
            assert await hub.register_env(**about, env_uid="u") is None
            assert await hub.register_env(**about) is None
    assert json.loads(log[0][1])["env_uid"] == "u"
    assert "env_uid" not in json.loads(log[1][1])


async def test_receipt_tells_duplicates_and_status() -> None:
    replies = iter(
        [
            {"status": "duplicate", "env_status": STATUS},
            {"status": "received", "groups_processed": 2, "duplicates": 1},
        ]
    )
    with recording_hub(lambda _: next(replies)) as (url, _):
        async with HubClient(url) as hub:
            one = await hub.send([scored()])
            two = await hub.send([scored(), scored(group_id="b")])
    assert (one.status, one.duplicates, one.buffered) == ("duplicate", 1, 0)
    assert one.env_status is not None
    assert one.env_status.queue_size == 3
    assert (two.status, two.duplicates, two.env_status) == ("received", 1, None)


def large(group_id: str = "a") -> ScoredGroup:
    tokens = [[token % 1000 for token in range(20_000)]]
    group = {"tokens": tokens, "masks": tokens, "scores": [1.0]}
    return check_group(group, strictness=Strictness.MEANING).replace(group_id=group_id)


async def test_large_bodies_are_compressed() -> None:
    with recording_hub() as (url, log):
        async with HubClient(url, compress=True) as hub:
            await hub.send([large()])
            await hub.send([scored()])
    (request, body), (small, _) = log
    assert request.headers["content-encoding"] == "zstd"
    assert request.headers["content-type"] == CONTENT_TYPE_PACKED
    assert split_packed(zstandard.decompress(body)).blobs == [pack_group(large())]
    assert "content-encoding" not in small.headers


async def test_nothing_is_compressed_for_a_hub_on_this_machine() -> None:
    with recording_hub(lambda _: {"status": "received", "batch": None}) as (url, log):
        async with HubClient(url) as hub:
            await hub.send([large()])
        with TrainerClient(url) as trainer:
            trainer.batch()
        with TrainerClient(url, compress=True) as trainer:
            trainer.batch()
    assert "content-encoding" not in log[0][0].headers
    assert [request.headers["accept-encoding"] for request, _ in log[1:]] == ["identity", "zstd"]


@pytest.mark.parametrize(
    ("url", "is_compressed"), [("http://[::1]:80/runs/a", False), ("https://10.0.0.7:8000", True)]
)
def test_compression_is_for_other_machines(url: str, is_compressed: bool) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["accept-encoding"])
        return httpx.Response(200, json={"batch": None})

    TrainerClient(url, transport=httpx.MockTransport(answer)).batch()
    assert seen == ["zstd" if is_compressed else "identity"]


def test_the_certificate_authorities_are_read_for_https_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Read(Exception): ...

    def read() -> None:
        raise Read

    monkeypatch.setattr("ssl.create_default_context", read)
    TrainerClient("http://hub").close()
    with pytest.raises(Read):
        TrainerClient("https://hub")


@pytest.mark.parametrize("refusal", [400, 415])
async def test_server_that_refuses_compression_gets_plain_bodies_from_then_on(refusal: int) -> None:
    def answer(request: Request) -> Any:
        if "content-encoding" in request.headers:
            return JSONResponse({"detail": "what is zstd?"}, refusal)
        return {"status": "received"}

    with recording_hub(answer) as (url, log):
        async with HubClient(url, compress=True) as hub:
            await hub.send([large()])
            await hub.send([large("b")])
    assert [request.headers.get("content-encoding") for request, _ in log] == ["zstd", None, None]
    assert {request.headers["content-type"] for request, _ in log} == {CONTENT_TYPE_PACKED}


async def test_status_says_whether_and_when_a_retry_can_help() -> None:
    cases: list[tuple[int, str | None, type[HubError], float | None]] = [
        (429, "7", HubUnavailable, 7.0),
        (507, "0.5", HubUnavailable, 0.5),
        (500, None, HubUnavailable, None),
        (503, None, HubUnavailable, None),
        (429, "Mon, 1 Jan", HubUnavailable, None),
        (403, "7", HubRejected, None),
    ]
    answers = iter(cases)

    def answer(_: Request) -> PlainTextResponse:
        status, header, *_rest = next(answers)
        headers = {} if header is None else {"Retry-After": header}
        return PlainTextResponse("busy", status, headers)

    with recording_hub(answer) as (url, _):
        async with HubClient(url) as hub:
            for status, _header, error, retry_after_s in cases:
                with pytest.raises(error, match=f"{status} busy") as caught:
                    await hub.send([scored()])
                assert getattr(caught.value, "retry_after_s", None) == retry_after_s


async def test_receipt_that_is_not_json_is_a_clear_error() -> None:
    with recording_hub(lambda _: PlainTextResponse("<html>")) as (url, _):
        async with HubClient(url) as hub:
            with pytest.raises(HubError, match=r"POST /scored_data: unexpected answer b'<html>'"):
                await hub.send([scored()])


# Leases


@contextmanager
def serving_disk(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve the runs kept in `folder`, as a hub that was started (again) does."""
    runs = DirectoryRuns(folder, lambda path: DiskStore(path, min_free_bytes=0))
    with serving(create_app(Hub(runs)), port) as url:
        yield url


async def test_lease_outlives_a_restart_of_the_hub(tmp_path: Path) -> None:
    with serving_disk(tmp_path) as url:
        port = int(url.rpartition(":")[2])
        with TrainerClient(url) as trainer:
            trainer.register(RUN)
            async with HubClient(url) as hub:
                await hub.send([scored(4, "a")])
                await hub.send([scored(4, "b")])
            batch = trainer.lease_batch()
            assert batch is not None
            assert (batch.step, [g.group_id for g in batch.groups]) == (1, ["a"])
    with TrainerClient(url) as trainer, ThreadPoolExecutor(1) as pool:
        done = pool.submit(trainer.ack, batch, step=1)  # while no hub listens
        with serving_disk(tmp_path, port):
            assert done.result(timeout=10) == 1
            assert trainer.ack(batch, step=1) == 1
            assert trainer.status().current_step == 1
            second = trainer.lease_batch()
            assert second is not None
            assert (second.step, second.groups[0].group_id) == (2, "b")
            trainer.release(second)
            assert trainer.checkpoint(1, tmp_path / "step_1") == 1
            async with httpx.AsyncClient() as anyone:
                ledger = (await anyone.get(f"{url}/ledger")).json()
    assert (ledger["trained"], ledger["queued"], ledger["leased"]) == (1, 1, 0)


class LosesTwoBatches(httpx.HTTPTransport):
    """The hub has answered, but its answers do not arrive: one is lost, for one a proxy answers."""

    num_left = 2

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path != "/batch" or not self.num_left:
            return response
        self.num_left -= 1
        response.close()
        if self.num_left:
            raise httpx.ReadError("cut")
        return httpx.Response(503)


async def test_lost_answer_costs_no_batch(hub_url: str) -> None:
    with TrainerClient(hub_url, transport=LosesTwoBatches()) as trainer:
        trainer.register(RUN)
        async with HubClient(hub_url) as hub:
            await hub.send([scored(4, "a")])
            await hub.send([scored(4, "b")])
        for _ in range(2):
            with pytest.raises(HubUnavailable):
                trainer.lease_batch()
        batches = [trainer.lease_batch(), trainer.lease_batch()]
    assert [b.groups[0].group_id for b in batches if b is not None] == ["a", "b"]


async def test_ended_leases_are_refused(hub_url: str, trainer: TrainerClient) -> None:
    trainer.register(RUN)
    async with HubClient(hub_url) as hub:
        await hub.send([scored(4, "a")])
        await hub.send([scored(4, "b")])
    first, second = trainer.lease_batch(ttl_s=30.0), trainer.lease_batch()
    assert first is not None
    assert second is not None
    assert trainer.heartbeat(first) == 30.0
    trainer.release(first)
    for call in (trainer.ack, trainer.heartbeat):
        with pytest.raises(LeaseExpired, match="409"):
            call(first)
    with pytest.raises(ValueError, match="again"):
        trainer.register(RUN, resume_step=0, resume="again")  # type: ignore[arg-type]
    taken_over = trainer.register(RUN, resume_step=0, resume="requeue")
    assert (taken_over.step, taken_over.requeued) == (0, 1)
    with pytest.raises(LeaseExpired):
        trainer.ack(second)
    third = trainer.lease_batch()
    assert third is not None
    assert (third.step, third.epoch) == (1, taken_over.epoch)
    assert trainer.ack(third, step=7) == 7


async def test_a_trainer_that_was_taken_over_is_told_to_stop(
    hub_url: str, trainer: TrainerClient
) -> None:
    trainer.register(RUN)
    async with HubClient(hub_url) as hub:
        for tag in "abc":
            await hub.send([scored(4, tag)])
    assert trainer.lease_batch() is not None
    with TrainerClient(hub_url) as later:
        later.register(RUN, resume_step=0)
        with pytest.raises(TrainerSuperseded, match="409.*another trainer has taken this run over"):
            trainer.lease_batch(wait_s=5)
        with pytest.raises(TrainerSuperseded):
            trainer.checkpoint(1)
        assert later.lease_batch() is not None
        trainer.register(RUN, resume_step=0)  # and so can the other be
        with pytest.raises(TrainerSuperseded):
            later.lease_batch()


async def test_compressed_groups_arrive(hub_url: str, trainer: TrainerClient) -> None:
    trainer.register(RUN.model_copy(update={"batch_size": 1}))
    async with HubClient(hub_url, compress=True) as hub:
        receipt = await hub.send([large()])
        assert hub._compresses
    assert receipt.status == "received"
    with TrainerClient(hub_url, compress=True) as compressing:
        batch = compressing.lease_batch()
    assert batch is not None
    assert batch.groups[0].to_dict() == large().to_dict()


LEASE = {"step": 3, "batch_id": 12, "lease_id": "L", "epoch": 1, "expires_in_s": 900.0}
LEASED = LeasedBatch(groups=[], **LEASE)


def packed_batch(*groups: ScoredGroup, **meta: Any) -> httpx.Response:
    content = join_packed([pack_group(group) for group in groups], meta)
    return httpx.Response(200, content=content, headers={"Content-Type": CONTENT_TYPE_PACKED})


@pytest.mark.parametrize("is_packed", [True, False])
def test_leased_batch_carries_what_ack_needs(is_packed: bool) -> None:
    asked: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        if is_packed:
            return packed_batch(scored(), **LEASE)
        return httpx.Response(200, json={"batch": [group(2)], **LEASE})

    batch = scripted_trainer(answer).lease_batch(wait_s=4.0, ttl_s=60.0)
    assert batch is not None
    assert (batch.batch_id, batch.lease_id, batch.epoch) == (12, "L", 1)
    assert (batch.step, batch.expires_in_s) == (3, 900.0)
    assert [g.num_sequences for g in batch.groups] == [2]
    [params] = asked
    assert len(params.pop("request_id")) == 32
    assert params == {"lease": "1", "ttl": "60.0", "wait": "4.0"}


def test_group_that_fails_the_gate_is_rejected_and_the_next_batch_is_asked_for() -> None:
    ids: list[str] = []
    rejected: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/batches/12/reject":
            rejected.append(json.loads(request.content))
            return httpx.Response(200, json={"status": "success", "dead": 1, "requeued": 1})
        ids.append(request.url.params["request_id"])
        groups = [group(1), group(1) if rejected else group(1, masks=[[1, 2]])]
        return httpx.Response(200, json={"batch": groups, **LEASE})

    batch = scripted_trainer(answer).lease_batch()
    assert batch is not None
    assert len(batch.groups) == 2
    [request] = rejected
    assert (request["lease_id"], request["groups"]) == ("L", [1])
    assert "masks" in request["reason"]
    assert ids[0] != ids[1]


def test_batch_comes_again_until_its_unusable_groups_are_rejected() -> None:
    ids: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            raise httpx.ReadError("connection reset")
        ids.append(request.url.params["request_id"])
        return httpx.Response(200, json={"batch": [group(1, masks=[[1, 2]])], **LEASE})

    trainer = TrainerClient("http://hub", transport=httpx.MockTransport(answer), retry_for_s=0.0)
    for _ in range(2):
        with pytest.raises(HubUnavailable):
            trainer.lease_batch()
    assert ids[0] == ids[1]


def test_plain_batch_with_an_unusable_group_is_an_error() -> None:
    faulty = {"batch": [group(1, masks=[[1, 2]])]}
    with pytest.raises(GroupError, match="masks"):
        scripted_trainer(lambda _: httpx.Response(200, json=faulty)).batch()


def test_ended_lease_and_unknown_batch_are_told_apart() -> None:
    detail = {"detail": {"type": "lease_expired", "msg": "it expired 3 s ago"}}
    late = scripted_trainer(lambda _: httpx.Response(409, json=detail))
    with pytest.raises(LeaseExpired, match="it expired 3 s ago"):
        late.release(LEASED)
    forgotten = scripted_trainer(lambda _: httpx.Response(404, json={"detail": "no batch 12"}))
    with pytest.raises(HubRejected, match="no batch 12") as caught:
        forgotten.ack(LEASED)
    assert not isinstance(caught.value, LeaseExpired)
    assert caught.value.status == 404


def test_ack_waits_for_a_hub_that_restarts_as_long_as_it_is_told_to() -> None:
    replies = [httpx.Response(503, headers={"Retry-After": "0.6"})]

    def answer(_: httpx.Request) -> httpx.Response:
        return replies.pop() if replies else httpx.Response(200, json={"step": 3})

    began = time.monotonic()
    assert scripted_trainer(answer).ack(LEASED) == 3
    assert time.monotonic() - began >= 0.6  # alone, the first backoff is at most 0.5 s


class Heartbeats:
    """Answers heartbeats from a script of statuses, the last one for ever."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.count = 0
        self.changed = threading.Condition()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/batches/12/heartbeat"
        with self.changed:
            self.count += 1
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            self.changed.notify_all()
        return httpx.Response(status, json={"status": "success", "expires_in_s": 0.15})

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, timeout=30)


SHORT = LeasedBatch(groups=[], **LEASE | {"expires_in_s": 0.15})


def test_held_lease_is_renewed_until_the_block_ends() -> None:
    hub = Heartbeats(200, 503, 200)
    began = time.monotonic()
    with scripted_trainer(hub).holding(SHORT):
        hub.wait_for(4)
    took_s, count = time.monotonic() - began, hub.count
    assert took_s >= 3.5 * 0.05
    assert not any(thread.name == "lease" for thread in threading.enumerate())
    assert hub.count == count


def test_lost_lease_is_logged_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hub = Heartbeats(409)
    with scripted_trainer(hub).holding(SHORT):
        hub.wait_for(1)
        time.sleep(0.15)  # three more would be due
    assert hub.count == 1
    assert caplog.text.count("the lease of batch 12 is lost") == 1


def test_block_that_fails_ends_the_heartbeat() -> None:
    with pytest.raises(RuntimeError), scripted_trainer(Heartbeats(200)).holding(SHORT):
        raise RuntimeError("out of memory")
    assert not any(thread.name == "lease" for thread in threading.enumerate())


def test_original_server_has_no_leases_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/batch":
            return httpx.Response(200, json={"batch": [group(2)]})
        return httpx.Response(404, json={"detail": "Not Found"})

    trainer = scripted_trainer(answer)
    with caplog.at_level(logging.WARNING):
        batch = trainer.lease_batch()
        assert batch is not None
        assert (len(batch.groups), batch.lease_id, batch.step) == (1, None, None)
        with trainer.holding(batch):
            assert trainer.heartbeat(batch) is None
        assert trainer.ack(batch, step=1) is None
        trainer.release(batch)
        assert trainer.checkpoint(1) == 0
        trainer.publish_policy(1)
    assert len(caplog.records) == 1
    assert "has no leases" in caplog.text


def test_unknown_run_is_not_taken_for_an_original_server() -> None:
    trainer = scripted_trainer(lambda _: httpx.Response(404, json={"detail": "no run 'a'"}))
    with pytest.raises(HubRejected, match="no run 'a'"):
        trainer.publish_policy(1)


def replica(process: str, *, owner: str | None = None) -> AbstractContextManager[Asked]:
    """Serve as a replica that forwards to `owner`, if there is one."""

    def answer(request: Request) -> Any:
        named = process if request.url.path.endswith("/healthz") else owner
        headers = {} if named is None else {"Atropos-Replica": named}
        return JSONResponse({"current_step": 1, "queue_size": 2}, headers=headers)

    return recording_hub(answer)


@asynccontextmanager
async def both_clients(url: str) -> AsyncIterator[list[Callable[[], Awaitable[HubStatus]]]]:
    """One call of each client."""
    async with HubClient(url, token="s3cret") as env:
        with TrainerClient(url, token="s3cret", retry_for_s=0.0) as trainer:
            yield [env.status, lambda: asyncio.to_thread(trainer.status)]


@pytest.mark.parametrize("process", ["owner", "another machine with this address"])
async def test_an_owner_gets_the_token_once_it_has_shown_that_it_is_the_one(process: str) -> None:
    with (
        replica(process) as (there, log),
        replica("other", owner=f"owner {there}/runs/a") as (url, told),
    ):
        async with both_clients(url) as calls:
            for call in calls * 2:
                await call()
    asked = [(seen.url.path, seen.headers.get("authorization")) for seen, _ in log]
    followed = [("/runs/a/status", "Bearer s3cret")] * 2 if process == "owner" else []
    assert asked == [("/runs/a/healthz", None)] * 2 + followed
    assert len(told) == 4 - len(followed)


async def test_an_owner_out_of_reach_delays_one_call_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atroposlib.client.CHECK_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 1, 99999):
            with replica("other", owner=f"owner http://127.0.0.1:{port}/runs/a") as (url, told):
                async with both_clients(url) as calls:
                    for call in calls:
                        await call()
                    began = time.monotonic()
                    for call in calls * 5:
                        await call()
                    assert time.monotonic() - began < 0.25
            assert len(told) == 12


async def test_after_a_silent_owner_the_configured_hub_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atroposlib.client.SILENCE_S", 0.2)
    is_stopped, may_end = threading.Event(), threading.Event()

    def answer(request: Request) -> Any:
        if is_stopped.is_set():
            may_end.wait(20)
        status = {"current_step": 7, "queue_size": 0}
        return JSONResponse(status, headers={"Atropos-Replica": "owner"})

    with (
        recording_hub(answer) as (there, _),
        replica("other", owner=f"owner {there}/runs/a") as (url, told),
    ):
        async with both_clients(url) as calls:
            try:
                for call in calls:
                    assert (await call()).current_step == 1
                    assert (await call()).current_step == 7
                is_stopped.set()
                for call in calls:
                    with pytest.raises(HubUnavailable):
                        await call()
                    assert (await call()).current_step == 1
            finally:
                may_end.set()
    assert len(told) == 4
