"""The hub's HTTP contract: shapes, order, refusals, encodings."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.run.hub import Hub as Runs
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.schemas import NATIVE_STATUS_FIELDS, RegisterEnv, RegisterTrainer
from atroposlib.api.server import create_app
from atroposlib.api.stores.base import Change, Durability, GroupStore, StoreBroken
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.api.stores.runs import DirectoryRuns, MemoryRuns
from atroposlib.api.stores.space import Bound, Space
from atroposlib.errors import ConfigError
from atroposlib.scored_data import Strictness, check_group
from atroposlib.wire import CONTENT_TYPE_PACKED, join_packed, pack_group, split_packed, unpack_group
from tests.api.helpers_api import FOURTEEN_KEYS, Hub, environment, group, registration, running_hub


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with running_hub() as running:
        yield running


def packed(*groups: dict[str, Any]) -> bytes:
    checked = [check_group(each, strictness=Strictness.WIRE) for each in groups]
    return join_packed([pack_group(each) for each in checked], {})


# Before and at registration


async def test_empty_hub_answers_every_question(hub: Hub) -> None:
    assert await hub.get("/") == {"message": "AtroposLib API"}
    assert await hub.get("/healthz") == {"status": "ok"}
    assert await hub.get("/wandb_info") == {"group": None, "project": None}
    assert await hub.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await hub.get("/status") == {"current_step": 0, "queue_size": 0}
    assert await hub.get("/batch") == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert await hub.get("/latest_example") == {
        name: []
        for name in (
            *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
            *("inference_logprobs", "messages", "images"),
        )
    }


async def test_registration_needs_all_eight_fields(hub: Hub) -> None:
    for missing in registration():
        body = registration()
        del body[missing]
        response = await hub.http.post("/register", json=body)
        assert response.status_code == 422
        assert response.json()["detail"][0]["loc"] == ["body", missing]


async def test_second_registration_keeps_the_live_run(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    await hub.start(starting_step=5, num_steps=9)
    first = await hub.post("/scored_data", group(2))
    second = await hub.post("/register", registration(batch_size=999, starting_step=0))
    assert first == {"status": "received"}
    assert second["uuid"].bit_length() > 100
    assert await hub.get("/status") == {"current_step": 5, "queue_size": 1}
    assert (await hub.get("/info"))["batch_size"] == 4
    assert "second trainer registered" in caplog.text


async def test_groups_that_come_before_the_trainer_are_kept(hub: Hub) -> None:
    assert await hub.post("/scored_data", group(2, 1)) == {"status": "received"}
    assert await hub.post("/scored_data", group(2, 2)) == {"status": "received"}
    assert await hub.post("/scored_data", group(5, 3)) == {"status": "received"}
    await hub.post("/register", registration())
    batch = (await hub.get("/batch"))["batch"]
    assert [each["tokens"][0][0] for each in batch] == [1, 2]
    assert (await hub.balanced_ledger())["dead"] == 1
    [dead] = (await hub.get("/dead"))["groups"]
    assert (dead["num_sequences"], dead["reason"]) == (
        5,
        "larger than the trainer's batch of 4 sequences",
    )


async def test_environments_wait_for_the_first_request_for_a_batch(hub: Hub) -> None:
    wait = {"status": "wait for trainer to start"}
    assert await hub.post("/register-env", environment()) == wait
    await hub.start()
    replies = [
        await hub.post("/register-env", environment(desired_name=name))
        for name in ("foo", "bar", "foo")
    ]
    named = [(reply["env_id"], reply["wandb_name"]) for reply in replies]
    assert named == [(0, "foo_0"), (1, "bar_0"), (2, "foo_1")]


async def test_environment_that_joins_late_starts_at_the_current_step(hub: Hub) -> None:
    await hub.start(starting_step=10)
    await hub.post("/scored_data", group(4))
    await hub.get("/batch")
    assert (await hub.post("/register-env", environment()))["starting_step"] == 11


async def test_environment_without_a_name_is_given_one(hub: Hub) -> None:
    await hub.start()
    names = [
        (await hub.post("/register-env", environment(desired_name=None)))["wandb_name"]
        for _ in range(2)
    ]
    assert names == ["env_0", "env_1"]
    for wrong in (7, ["x"]):
        refused = await hub.http.post("/register-env", json=environment(desired_name=wrong))
        assert refused.status_code == 422


# Groups and batches


async def test_batches_leave_oldest_first_and_step_advances_at_delivery(hub: Hub) -> None:
    await hub.start(environment())
    for number in range(6):
        await hub.post("/scored_data", group(2, number, env_id=0))
    assert await hub.get("/status") == {"current_step": 0, "queue_size": 6}
    for step in range(3):
        batch = (await hub.get("/batch"))["batch"]
        assert [each["tokens"][0][0] for each in batch] == [2 * step, 2 * step + 1]
        assert await hub.get("/status") == {"current_step": step + 1, "queue_size": 4 - 2 * step}
    assert await hub.get("/batch") == {"batch": None}
    assert await hub.get("/status") == {"current_step": 3, "queue_size": 0}


async def test_group_larger_than_the_environments_size_is_queued_not_lost(hub: Hub) -> None:
    await hub.start(environment(group_size=2))
    assert await hub.post("/scored_data", group(4, env_id=0)) == {"status": "received"}
    assert len((await hub.get("/batch"))["batch"]) == 1
    # Asking for the status must not raise the expected size.
    await hub.get("/status-env", params={"env_id": 0})
    assert await hub.post("/scored_data", group(2, env_id=0)) == {"status": "received"}


@pytest.mark.parametrize(
    ("bad", "path", "reason"),
    [
        (group(2, scores=[0.0, float("nan")]), "scores[1]", "invalid"),
        (group(2, scores=[0.0]), "scores", "invalid"),
        (group(2, masks=[[1, 2], [1]]), "sequences[1].masks", "invalid"),
        (group(2, inference_logprobs=[[0.0, float("-inf")]] * 2), None, "invalid"),
        ({"tokens": [[1]], "masks": [[1]]}, None, "invalid"),
        (group(0), "tokens", "empty"),
        (group(5), "tokens", "larger_than_batch"),
    ],
)
async def test_unusable_group_is_refused_with_its_path_and_counted(
    hub: Hub, bad: dict[str, Any], path: str | None, reason: str
) -> None:
    await hub.start()
    response = await hub.http.post("/scored_data", content=json.dumps(bad))
    assert response.status_code == 422
    [detail] = response.json()["detail"]
    assert detail["loc"][0] == "body"
    assert path is None or detail["loc"][1] == path
    assert detail["msg"]
    assert (await hub.balanced_ledger())["rejected"] == {reason: 1}
    assert await hub.get("/batch") == {"batch": None}
    assert (await hub.http.get("/latest_example")).status_code == 200


async def test_list_with_one_bad_group_is_refused_whole(hub: Hub) -> None:
    await hub.start()
    response = await hub.http.post("/scored_data_list", json=[group(2), group(9)])
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "[1].tokens"]
    assert await hub.get("/status") == {"current_step": 0, "queue_size": 0}
    assert (await hub.balanced_ledger())["rejected"] == {"larger_than_batch": 2}


async def test_repeated_group_id_is_a_duplicate_and_is_stored_once(hub: Hub) -> None:
    await hub.start(environment(group_size=4), batch_size=8)
    odd = group(2, env_id=0, group_id="a")
    assert await hub.post("/scored_data", odd) == {"status": "buffered", "buffer_size": 2}
    await hub.post("/scored_data", group(1, env_id=0, group_id="b"))
    assert await hub.post("/scored_data", odd) == {"status": "duplicate"}
    assert await hub.post("/scored_data_list", [odd, group(4, group_id="c")]) == {
        "status": "received",
        "groups_processed": 2,
        "duplicates": 1,
    }
    ledger = await hub.balanced_ledger()
    assert (ledger["queued"], ledger["buffered"], ledger["duplicates"]) == (1, 2, 2)


async def test_group_id_with_other_content_is_refused(hub: Hub) -> None:
    await hub.post("/scored_data", group(2, 1, group_id="a"))
    response = await hub.http.post("/scored_data", json=group(2, 9, group_id="a"))
    assert response.status_code == 422
    [fault] = response.json()["detail"]
    assert fault["loc"] == ["body", "group_id"]
    assert fault["msg"].startswith("'a' was stored with other content")
    ledger = await hub.balanced_ledger()
    assert (ledger["queued"], ledger["rejected"]) == (1, {"group_id_reused": 1})
    assert ledger["duplicates"] == 0


async def test_same_group_under_another_environment_id_is_a_duplicate(hub: Hub) -> None:
    await hub.post("/scored_data", group(2, 1, group_id="a", env_id=3))
    again = await hub.post("/scored_data", group(2, 1, group_id="a", env_id=4))
    assert again == {"status": "duplicate"}


# Leases


async def test_leased_batch_is_trained_on_when_it_is_acknowledged(hub: Hub) -> None:
    await hub.start()
    await hub.post("/scored_data", group(4, 1))
    batch = await hub.get("/batch?lease=1&ttl=30")
    assert {key: batch[key] for key in ("batch_id", "epoch", "step", "expires_in_s")} == {
        "batch_id": 0,
        "epoch": 0,
        "step": 1,
        "expires_in_s": 30.0,
    }
    assert (await hub.balanced_ledger())["leased"] == 1
    lease = {"lease_id": batch["lease_id"]}
    beat = await hub.post("/batches/0/heartbeat", lease)
    assert beat == {"status": "success", "expires_in_s": 30.0}
    for _ in range(2):
        acked = await hub.post("/batches/0/ack", lease)
        assert acked == {"status": "success", "step": 1}
    assert (await hub.balanced_ledger())["trained"] == 1
    committed = await hub.post("/checkpoints", {"step": 1, "path": "ck/1"})
    assert committed == {"status": "success", "committed": 1}
    assert await hub.post("/batches/0/ack", lease) == {"status": "success", "step": 1}
    assert (await hub.balanced_ledger())["trained"] == 1


async def test_released_batch_comes_again_and_its_old_lease_is_409(hub: Hub) -> None:
    await hub.start()
    await hub.post("/scored_data", group(4, 1))
    first = await hub.get("/batch?lease=true")
    lease = {"lease_id": first["lease_id"]}
    await hub.post("/batches/0/release", lease)
    assert (await hub.get("/batch?lease=true"))["batch"] == first["batch"]
    late = await hub.http.post("/batches/0/ack", json=lease)
    assert late.status_code == 409
    assert late.json()["detail"]["type"] == "lease_expired"
    assert (await hub.http.post("/batches/9/ack", json=lease)).status_code == 404


# Status without asking


async def test_status_rides_on_the_answer_to_our_own_clients_only(hub: Hub) -> None:
    await hub.start(environment())
    assert await hub.post("/scored_data", group(2, env_id=0)) == {"status": "received"}
    ours = await hub.http.post(
        "/scored_data", json=group(2, env_id=0), headers={"Atropos-Client": "test"}
    )
    status = await hub.get("/status-env?env_id=0")
    riding = ours.json()
    times = {name: riding["env_status"].pop(name, None) for name in NATIVE_STATUS_FIELDS}
    assert riding == {"status": "received", "env_status": status}
    assert times["trainer_waits_s"] > 0
    assert times["trainer_step_s"] is None


async def test_status_poll_waits_for_the_step_to_change(hub: Hub) -> None:
    await hub.start(environment())
    waiting = asyncio.create_task(hub.get("/status-env?env_id=0&wait=20&seen_step=0"))
    await asyncio.sleep(0)
    await hub.post("/scored_data_list", [group(2, env_id=0)] * 2)
    assert not waiting.done()
    await hub.get("/batch")
    assert (await waiting)["current_step"] == 1
    assert (await hub.get("/status-env?env_id=0&wait=20&seen_step=0"))["current_step"] == 1


async def test_our_own_clients_see_how_long_the_trainer_works_and_waits(hub: Hub) -> None:
    await hub.start(environment())
    await hub.post("/scored_data", group(4, env_id=0))
    lease = await hub.get("/batch?lease=1")
    await asyncio.sleep(0.05)
    await hub.post(f"/batches/{lease['batch_id']}/ack", {"lease_id": lease["lease_id"]})
    assert (await hub.get("/batch?lease=1"))["batch"] is None
    response = await hub.http.get("/status-env?env_id=0", headers={"Atropos-Client": "test"})
    status = response.json()
    assert status["trainer_step_s"] >= 0.04
    assert status["trainer_waits_s"] >= 0
    assert status["wanted_share"] == 1.0


# Runs


async def test_runs_do_not_see_each_other(hub: Hub) -> None:
    await hub.start()
    await hub.post("/runs/other/register", registration(batch_size=2))
    await hub.post("/runs/other/scored_data", group(2, 5))
    assert await hub.get("/batch") == {"batch": None}
    assert (await hub.get("/runs/other/info"))["batch_size"] == 2
    [delivered] = (await hub.get("/runs/other/batch"))["batch"]
    assert delivered["tokens"][0][0] == 5
    assert (await hub.http.delete("/runs/other")).status_code == 200
    assert (await hub.http.delete("/runs/other")).status_code == 404
    assert (await hub.get("/runs/other/info"))["batch_size"] == -1


async def test_explain_names_what_is_missing(hub: Hub) -> None:
    assert (await hub.get("/explain"))["blocker"] == "no_trainer"
    await hub.start(environment(), environment(desired_name="bar", min_batch_allocation=0.5))
    assert (await hub.get("/explain"))["blocker"] == "too_few"
    await hub.post("/scored_data_list", [group(2, env_id=0)] * 2)
    explained = await hub.get("/explain")
    assert (explained["blocker"], explained["env_id"], explained["need"]) == ("minimum", 1, 2)
    assert "environment 1" in explained["reason"]
    floors = {each["env_id"]: each["floor"] for each in explained["environments"]}
    assert floors == {0: 0, 1: 2}
    await hub.post("/scored_data", group(2, env_id=1))
    assert (await hub.get("/explain"))["batch"] == "ready"
    assert (await hub.balanced_ledger())["queued"] == 3


async def test_ready_hub_says_what_an_accepted_group_survives(hub: Hub) -> None:
    assert await hub.get("/readyz") == {"status": "ready", "durability": "memory"}
    assert (await hub.http.delete("/runs/default")).is_success
    assert await hub.get("/readyz") == {"status": "ready", "durability": "memory"}


async def test_full_hub_refuses_groups_says_why_and_delivers_batches() -> None:
    bound = Bound(text="all groups in memory may take 1 MiB", left_bytes=1000, flag="--some-flag")
    async with running_hub(runs=Runs(MemoryRuns(Space([bound])))) as hub:
        await hub.start()
        refused, num_stored = None, 0
        while refused is None:
            answer = await hub.http.post(
                "/scored_data", json=group(4), headers={"Atropos-Client": "test"}
            )
            refused = None if answer.is_success else answer
            num_stored += refused is None
        assert num_stored >= 2
        detail = refused.json()["detail"]
        assert (refused.status_code, detail["type"]) == (507, "store_full")
        reason = "all groups in memory may take 1 MiB; 1 MiB are missing. Make room, or change --some-flag"
        for text in (detail["msg"], (await hub.get("/explain"))["refusal"]):
            assert text == f"groups are refused: {reason}"
        assert (await hub.get("/readyz"))["status"] == "degraded"
        assert 'atropos_store_full{run="default"} 1.0' in (await hub.http.get("/metrics")).text
        for _ in range(num_stored):
            assert len((await hub.get("/batch"))["batch"]) == 1
        await hub.post("/checkpoints", {"step": num_stored})
        assert (
            await hub.http.post("/scored_data", json=group(4), headers={"Atropos-Client": "test"})
        ).is_success


# Waiting for a batch


async def test_waiting_request_gets_the_batch_when_it_becomes_complete(hub: Hub) -> None:
    await hub.start()
    waiting = asyncio.create_task(hub.get("/batch", params={"wait": 10}))
    await hub.post("/scored_data", group(2))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await hub.post("/scored_data", group(2))
    assert len((await waiting)["batch"]) == 2


async def test_two_waiting_requests_get_one_batch_each(hub: Hub) -> None:
    await hub.start()
    waiting = [asyncio.create_task(hub.get("/batch", params={"wait": 10})) for _ in range(2)]
    await asyncio.sleep(0.02)
    await hub.post("/scored_data_list", [group(4, 1), group(4, 2)])
    batches = [(await each)["batch"] for each in waiting]
    assert sorted(each[0]["tokens"][0][0] for each in batches) == [1, 2]


async def test_waiting_ends_without_a_batch(hub: Hub) -> None:
    await hub.start()
    assert await hub.get("/batch", params={"wait": 0.05}) == {"batch": None}
    assert (await hub.http.get("/batch", params={"wait": -1})).status_code == 422


# Environment status


async def test_status_env_answers_body_query_and_post_alike(hub: Hub) -> None:
    await hub.start(environment())
    await hub.post("/scored_data_list", [group(2, env_id=0)] * 6)
    from_body = (await hub.http.request("GET", "/status-env", json={"env_id": 0})).json()
    assert from_body["queue_size"] == 6
    assert await hub.get("/status-env", params={"env_id": 0}) == from_body
    assert await hub.post("/status-env", {"env_id": 0}) == from_body


@pytest.mark.parametrize("env_id", [0, 5, -1])
async def test_unknown_environment_is_404_json(hub: Hub, env_id: int) -> None:
    response = await hub.http.request("GET", "/status-env", json={"env_id": env_id})
    assert response.status_code == 404
    assert f"environment {env_id} is not registered" in response.json()["detail"]


async def test_policy_version_is_shown_once_announced(hub: Hub) -> None:
    await hub.start(environment())
    assert await hub.post("/policy", {"version": 7}) == {"status": "success"}
    assert (await hub.get("/status"))["policy_version"] == 7
    assert (await hub.get("/status-env", params={"env_id": 0}))["policy_version"] == 7
    assert (await hub.http.post("/policy", json={"version": -1})).status_code == 422


# Reset


async def test_reset_forgets_the_run_and_says_so(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    await hub.start(environment())
    await hub.post("/scored_data", group(2, env_id=0, group_id="a"))
    response = await hub.http.get("/reset_data")
    assert (response.status_code, response.text) == (200, "Reset successful")
    assert response.headers["content-type"].startswith("text/plain")
    assert "discarding 1 queued" in caplog.text
    assert (await hub.get("/batch"))["status"] == "error"
    assert await hub.get("/status") == {"current_step": 0, "queue_size": 0}
    assert (await hub.http.request("GET", "/status-env", json={"env_id": 0})).status_code == 404
    await hub.start(environment())
    assert await hub.post("/scored_data", group(2, env_id=0, group_id="a")) == {
        "status": "received"
    }
    assert (await hub.balanced_ledger())["queued"] == 1


# Packed encoding


async def test_packed_in_packed_out_is_the_same_blob(hub: Hub) -> None:
    await hub.start()
    body = packed(group(2, 1, group_id="a", policy_version=4), group(2, 2, group_id="b"))
    headers = {"Content-Type": CONTENT_TYPE_PACKED}
    response = await hub.http.post("/scored_data_list", content=body, headers=headers)
    assert response.json() == {"status": "received", "groups_processed": 2}
    response = await hub.http.get("/batch", headers={"Accept": CONTENT_TYPE_PACKED})
    assert response.headers["content-type"] == CONTENT_TYPE_PACKED
    envelope = split_packed(response.content)
    assert envelope.blobs == split_packed(body).blobs
    assert envelope.meta["step"] == 1
    # Without a batch the answer is JSON, whatever is accepted.
    response = await hub.http.get("/batch", headers={"Accept": CONTENT_TYPE_PACKED})
    assert response.json() == {"batch": None}


async def test_encodings_translate_into_each_other(hub: Hub) -> None:
    await hub.start()
    sent = group(4, 9, inference_logprobs=[[1.0, -0.1]] * 4, overrides=[], group_overrides={})
    headers = {"Content-Type": CONTENT_TYPE_PACKED}
    response = await hub.http.post("/scored_data", content=packed(sent), headers=headers)
    assert response.json() == {"status": "received"}
    as_json = (await hub.get("/batch"))["batch"][0]
    assert list(as_json) == FOURTEEN_KEYS
    assert as_json == {key: sent.get(key) for key in FOURTEEN_KEYS}
    await hub.post("/scored_data", sent)
    response = await hub.http.get("/batch", headers={"Accept": CONTENT_TYPE_PACKED})
    [blob] = split_packed(response.content).blobs
    assert unpack_group(blob, strictness=Strictness.WIRE).to_dict() == as_json


# Documentation, cross-origin


async def test_documentation_lists_every_route(hub: Hub) -> None:
    paths = (await hub.get("/openapi.json"))["paths"]
    assert set(paths) == {route.template for route in ROUTES if route.handler is not None}
    assert set(paths["/scored_data"]["post"]["requestBody"]["content"]) == {
        "application/json",
        CONTENT_TYPE_PACKED,
    }


async def test_browsers_of_other_origins_get_no_permission(hub: Hub) -> None:
    response = await hub.http.get("/status", headers={"Origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_starting_step_leaves_room_to_count(hub: Hub) -> None:
    last = registration(starting_step=2**62 - 1)
    assert (
        await hub.http.post("/register", json=last | {"starting_step": 2**62})
    ).status_code == 422
    await hub.post("/register", last)
    await hub.post("/scored_data", group(4))
    assert (await hub.get("/batch?lease=1"))["step"] == 2**62


async def test_batch_that_cannot_be_encoded_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of threads")

    async with running_hub(raise_app_exceptions=False) as hub:
        await hub.start()
        await hub.post("/scored_data", group(4))
        with monkeypatch.context() as patch:
            patch.setattr("atroposlib.api.http.payloads.GroupCodec.encode_batch", fail)
            assert (await hub.http.get("/batch")).status_code == 500
        ledger = await hub.balanced_ledger()
        assert (ledger["queued"], ledger["leased"]) == (1, 0)
        assert len((await hub.get("/batch"))["batch"]) == 1


async def test_explain_names_the_long_item_that_the_trainer_waits_for() -> None:
    now = 1000.0
    async with running_hub(runs=Runs(clock=lambda: now)) as hub:
        await hub.start(environment(), environment(desired_name="slow"))
        await hub.get("/batch")
        await hub.get("/status-env?env_id=0")
        asked = "/status-env?env_id=1&items_in_flight=3&oldest_item_s=20.5"
        await hub.get(f'{asked}&over_age={{"an engine":2}}')
        now += 10
        why = await hub.get("/explain")
        assert why["reason"].endswith(
            "the trainer has waited for 10 s; slow_0 has reported 3 items in flight, the oldest started 30 s ago;"
            " over age and waiting: 2 for an engine"
        )
        assert [each["over_age"] for each in why["environments"]] == [None, {"an engine": 2}]
        assert why["trainer_waits_s"] == 10
        views = [(each["items_in_flight"], each["oldest_item_s"]) for each in why["environments"]]
        assert views == [(None, None), (3, 30.5)]
        await hub.get("/status-env?env_id=1&items_in_flight=0")
        assert (await hub.get("/explain"))["reason"].endswith("the trainer has waited for 10 s")


async def test_explain_shows_what_came_to_nothing_at_an_environment() -> None:
    async with running_hub() as hub:
        await hub.start(environment())
        asked = "/status-env?env_id=0&items_in_flight=1"
        await hub.get(f'{asked}&losses={{"not_continued_thoughts":7}}')
        assert (await hub.get("/explain"))["environments"][0]["losses"] == {
            "not_continued_thoughts": 7
        }
        many = json.dumps({str(i): i for i in range(33)})
        for refused in (many, '{"a":-1}', "[]", "nonsense", json.dumps({"x" * 65: 1})):
            answer = await hub.http.get("/status-env", params=f"{asked[12:]}&losses={refused}")
            assert answer.status_code == 422
        await hub.get(asked)
        assert (await hub.get("/explain"))["environments"][0]["losses"] is None


async def test_explain_names_the_environment_that_makes_most_for_nothing() -> None:
    async with running_hub() as hub:
        await hub.start(*[environment(desired_name=name) for name in ("drops", "works", "fails")])
        reports = [
            ('{"dropped_equal_scores":6000,"dropped_too_long":599,"failed_OSError":9}', 0),
            ('{"dropped_equal_scores":10000}', 10000),
            ('{"items_without_groups":5,"failed_OSError":5}', 1),
        ]
        for env_id, (losses, kept) in enumerate(reports):
            asked = (
                f"/status-env?env_id={env_id}&items_in_flight=8&oldest_item_s=20&losses={losses}"
            )
            await hub.get(asked)  # of a client that does not say what it kept
            assert "items in flight" in (await hub.get("/explain"))["reason"]
            reports[env_id] = f"{asked}&groups_kept={kept}", kept
        for asked, _ in reports:
            await hub.get(asked)
        drops, fails = (
            "; drops_0 dropped 6,599 of 6,599 groups: equal_scores",
            "; fails_0 made no group of 5 of 6 items: failed_OSError",
        )
        assert (await hub.get("/explain"))["reason"].endswith(drops)
        await hub.post("/disconnect-env", {"env_id": 0})
        assert (await hub.get("/explain"))["reason"].endswith(fails)
        await hub.post("/scored_data_list", [group(4, env_id=0)])
        assert (await hub.get("/explain"))["reason"] == "a batch is ready"


async def test_explain_shows_a_page_of_the_environments_the_worst_first() -> None:
    now = 1000.0
    runs = Runs(policy=RunPolicy(env_timeout_s=60), clock=lambda: now)
    async with running_hub(runs=runs) as hub:
        wanted = {"blocks": 2, "silent": 1, "loses": 4, "works": 0, "works too": 5, "left": 3}
        names = sorted(wanted, key=lambda name: wanted[name])
        await hub.start(
            *(
                environment(desired_name=name, min_batch_allocation=0.5 * (name == "blocks"))
                for name in names
            )
        )
        await hub.post("/disconnect-env", {"env_id": wanted["left"]})
        now += 50
        for name in wanted.keys() - {"silent", "left"}:
            lost = 3 if name == "loses" else 0
            await hub.get(
                f'/status-env?env_id={wanted[name]}&items_in_flight=1&losses={{"failed":{lost}}}'
            )
        await hub.post("/scored_data", group(4, env_id=wanted["works"]))
        now += 20
        whole = await hub.get("/explain")
        assert [each["name"][:-2] for each in whole["environments"]] == [
            *("blocks", "silent", "loses", "works", "works too", "left")
        ]
        assert (whole["num_environments"], whole["num_active"]) == (6, 4)
        part = await hub.get("/explain?offset=1&limit=2")
        assert part["environments"] == whole["environments"][1:3]
        rest = {name: value for name, value in part.items() if name != "environments"}
        assert rest == {name: value for name, value in whole.items() if name != "environments"}
        assert (await hub.get("/explain?offset=6"))["environments"] == []
        for refused in ("offset=-1", "limit=1001", "limit=many"):
            assert (await hub.http.get(f"/explain?{refused}")).status_code == 422


async def test_long_poll_of_an_environment_that_died_is_no_sign_of_life() -> None:
    now = 1000.0
    runs = Runs(policy=RunPolicy(env_timeout_s=60), clock=lambda: now)
    async with running_hub(runs=runs) as hub:
        await hub.start(environment())
        has_body, is_gone = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not has_body.is_set():
                has_body.set()
                return {"type": "http.request", "body": b"", "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        scope = {"type": "http", "method": "GET", "path": "/status-env", "headers": []}
        scope["query_string"] = b"env_id=0&wait=60&seen_step=0"
        async with asyncio.timeout(30), asyncio.TaskGroup() as calls:
            calls.create_task(hub.app(scope, receive, send))
            await has_body.wait()
            await asyncio.sleep(0)
            now += 61
            is_gone.set()
            hub.coordinator.progress.notify()
        [seen] = (await hub.get("/explain"))["environments"]
        assert (seen["state"], seen["last_seen_s"]) == ("silent", 61)


class SlowToForget(MemoryRuns):
    """Deletes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_delete = threading.Event()
        self.is_deleting = threading.Event()
        self.opened_too_early = False

    def store(self, name: str) -> GroupStore:
        self.opened_too_early |= self.is_deleting.is_set() and not self.may_delete.is_set()
        return super().store(name)

    async def forget(self, name: str) -> None:
        self.is_deleting.set()
        assert await asyncio.to_thread(self.may_delete.wait, 5)
        await super().forget(name)


async def test_run_that_is_called_while_it_ends_begins_anew_when_its_files_are_gone() -> None:
    stores = SlowToForget()
    runs = Runs(stores)
    first = await runs.run("x")
    ending = asyncio.create_task(runs.forget("x"))
    await asyncio.to_thread(stores.is_deleting.wait, 5)
    again = asyncio.create_task(runs.run("x"))
    await asyncio.sleep(0.01)
    assert not again.done()
    stores.may_delete.set()
    assert await ending
    assert await again is not first
    assert not stores.opened_too_early
    await runs.close()


async def test_only_directories_of_stores_are_runs(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "lock").touch()
    runs = DirectoryRuns(tmp_path, lambda path: MemoryStore())
    assert await runs.names() == []
    runs.store("algebra")
    assert await runs.names() == ["algebra"]
    (tmp_path / "math" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not a run of a hub"):
        runs.store("math")


async def test_time_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Runs):
        num_ticks = 0
        has_gone_on = asyncio.Event()

        async def tick(self) -> None:
            self.num_ticks += 1
            if self.num_ticks == 1:
                raise RuntimeError("once")
            self.has_gone_on.set()

    monkeypatch.setattr("atroposlib.api.server.TICK_S", 0.001)
    runs = Failing()
    app = create_app(runs)
    async with app.router.lifespan_context(app), asyncio.timeout(30):
        await runs.has_gone_on.wait()
    assert "Failing.tick failed; it is tried again" in caplog.text


async def test_time_passes_in_every_run_although_the_store_of_one_is_broken() -> None:
    class Broken(MemoryStore):
        is_broken = False

        async def commit(self, change: Change) -> None:
            if self.is_broken:
                raise StoreBroken("the database is gone")
            await super().commit(change)

    class OneBroken(MemoryRuns):
        def store(self, name: str) -> GroupStore:
            return broken if name == "default" else super().store(name)

    broken = Broken()
    now_s = 0.0
    runs = Runs(OneBroken(), policy=RunPolicy(env_timeout_s=60), clock=lambda: now_s)
    for name in ("default", "later"):
        run = await runs.run(name)
        await run.register(RegisterTrainer(**registration()))
        await run.deliver()
        await run.register_env(RegisterEnv(**environment()))
    broken.is_broken, now_s = True, 61.0
    with pytest.raises(StoreBroken):
        await runs.tick()
    [seen] = runs.runs["later"].explain().environments
    assert seen.state == "silent"


async def test_only_a_valid_registration_begins_a_run(hub: Hub) -> None:
    for method, path, body, status in [
        ("POST", "/scored_data", group(2), 404),
        ("POST", "/scored_data_list", [group(2)], 404),
        ("POST", "/policy", {"version": 1}, 404),
        ("POST", "/checkpoints", {"step": 1}, 404),
        ("POST", "/batches/0/heartbeat", {"lease_id": "x"}, 404),
        ("POST", "/batches/0/ack", {"lease_id": "x"}, 404),
        ("POST", "/batches/0/release", {"lease_id": "x"}, 404),
        ("POST", "/dead/requeue", {"numbers": [0]}, 404),
        ("DELETE", "", None, 404),
        ("POST", "/register", registration(batch_size=0), 422),
        ("POST", "/register", {}, 422),
        ("POST", "/scored_data", {"tokens": 1}, 404),
        ("POST", "/disconnect-env", {"env_id": 0}, 200),
        ("POST", "/status-env", {"env_id": 0}, 404),
        ("GET", "/status-env?env_id=0", None, 404),
        ("GET", "/reset_data", None, 200),
        ("GET", "/latest_example", None, 200),
    ]:
        answer = await hub.http.request(method, f"/runs/x{path}", json=body)
        assert answer.status_code == status, path
        assert hub.runs == ["default"]
    wait = {"status": "wait for trainer to start"}
    assert await hub.post("/runs/x/register-env", environment()) == wait
    assert await hub.get("/runs/x/status") == {"current_step": 0, "queue_size": 0}
    assert await hub.get("/runs/x/wandb_info") == {"group": None, "project": None}
    assert (await hub.get("/runs/x/batch?wait=5"))["batch"] == []
    assert hub.runs == ["default"]
    await hub.post("/runs/x/register", registration())
    assert hub.runs == ["default", "x"]


async def test_run_that_is_deleted_under_traffic_stays_deleted(tmp_path: Path) -> None:
    def make_store(path: Path) -> GroupStore:
        return DiskStore(path, durability=Durability.PROCESS)

    async with running_hub(runs=Runs(DirectoryRuns(tmp_path, make_store))) as hub:
        await hub.post("/runs/x/register", registration())
        await hub.get("/runs/x/batch")
        is_over = asyncio.Event()
        statuses: set[int] = set()

        async def traffic(path: str, body: Any) -> None:
            while not is_over.is_set():
                method = "GET" if body is None else "POST"
                response = await hub.http.request(method, f"/runs/x{path}", json=body)
                statuses.add(response.status_code)
                await asyncio.sleep(0.001)  # calls in this process may never wait

        async with asyncio.TaskGroup() as tasks:
            for path, body in [
                ("/scored_data", group(2)),
                ("/scored_data_list", [group(2), group(2)]),
                ("/register-env", environment()),
                ("/policy", {"version": 1}),
                ("/batch?lease=1&wait=1", None),
                ("/status", None),
            ]:
                tasks.create_task(traffic(path, body))
            for _ in range(200):
                await asyncio.sleep(0)
            assert (await hub.http.delete("/runs/x")).status_code == 200
            for _ in range(200):
                await asyncio.sleep(0)
            is_over.set()
        assert hub.runs == ["default"]
        assert not (tmp_path / "x").exists()
        assert 404 in statuses
        assert statuses <= {200, 404, 409, 503}


# What is wrong with a request is said as FastAPI says it


@pytest.mark.parametrize(
    ("path", "content", "faults"),
    [
        ("/batches/x/ack", b'{"lease_id": "a"}', [("int_parsing", ["path", "batch_id"])]),
        ("/batches/0/ack", b"{}", [("missing", ["body", "lease_id"])]),
        ("/batches/0/ack", b'{"lease_id": 1}', [("string_type", ["body", "lease_id"])]),
        ("/batches/0/ack", b'{"lease_id"', [("json_invalid", ["body", 11])]),
        ("/batches/0/ack", b"", [("missing", ["body"])]),
        ("/batches/0/heartbeat", b"[]", [("model_attributes_type", ["body"])]),
        ("/checkpoints", b'{"step": -1}', [("greater_than_equal", ["body", "step"])]),
        ("/batch?wait=soon", None, [("float_parsing", ["query", "wait"])]),
        ("/batch?wait=inf", None, [("finite_number", ["query", "wait"])]),
        ("/batch?wait=-1&ttl=0", None, [("greater_than_equal", ["query", "wait"]), ("greater_than", ["query", "ttl"])]),
        ("/batch?lease=maybe", None, [("bool_parsing", ["query", "lease"])]),
        ("/batch?ttl=86401", None, [("less_than_equal", ["query", "ttl"])]),
        ("/batch?request_id=", None, [("string_too_short", ["query", "request_id"])]),
    ],
)  # fmt: skip
async def test_faults_of_requests_for_batches_are_named(
    hub: Hub, path: str, content: bytes | None, faults: list[Any]
) -> None:
    method = "GET" if content is None else "POST"
    headers = {"Content-Type": "application/json"}
    refused = await hub.http.request(method, path, content=content, headers=headers)
    assert refused.status_code == 422
    assert [(each["type"], each["loc"]) for each in refused.json()["detail"]] == faults


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
async def test_an_acknowledgement_is_read_as_fastapi_reads_it(hub: Hub, content_type: str) -> None:
    await hub.start(batch_size=2)
    await hub.post("/scored_data", group(2))
    taken = await hub.get("/batch?lease=1")
    acked = await hub.http.post(
        f"/batches/00{taken['batch_id']}/ack",
        content=json.dumps({"lease_id": taken["lease_id"], "step": 1}).encode(),
        headers={"Content-Type": content_type},
    )
    assert (acked.status_code, acked.json()) == (200, {"status": "success", "step": 1})
    assert (await hub.post("/checkpoints", {"step": 1}))["committed"] == 1
    assert (await hub.balanced_ledger())["trained"] == 1
