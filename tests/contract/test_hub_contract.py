"""The original's clients cannot tell the difference: its endpoints, branches and shapes, replayed over HTTP.

What differs on purpose is pinned elsewhere (MIGRATING.md); what tests/api pins already is not repeated here.
"""

import gzip
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.helpers_api import FOURTEEN_KEYS, Hub, environment, group, registration, running_hub
from tests.api.helpers_replicas import two_replicas
from tests.processes import answers, free_port, running, wait_for


class WithoutReplicas(httpx.AsyncHTTPTransport):
    """Leaves out what `/status` says of the replicas: the rest is the original's."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path != "/status":
            return response
        reply = json.loads(await response.aread())
        del reply["replicas"]
        return httpx.Response(response.status_code, json=reply)


@pytest.fixture(params=["alone", pytest.param("forwarding", marks=pytest.mark.drill)])
async def hub(request: pytest.FixtureRequest) -> AsyncIterator[Hub]:
    """A hub; in the drills, one that forwards every request to the replica that owns the run."""
    if request.param == "alone":
        async with running_hub() as started:
            yield started
        return
    async with two_replicas(request.getfixturevalue("postgres_url")) as (owner, other):
        http = httpx.AsyncClient(base_url=other.address, transport=WithoutReplicas(), timeout=20)
        async with http:
            yield Hub(http, owner.replica.hub.runs["default"], other.app)


def minimal_group(**changes: Any) -> dict[str, Any]:
    """What the original's environments send at least."""
    return (
        group(
            2,
            ref_logprobs=None,
            overrides=None,
            group_overrides=None,
            distill_token_ids=None,
            distill_logprobs=None,
            env_id=0,
        )
        | changes
    )


def first_tokens(batch: list[dict[str, Any]]) -> list[int]:
    return [each["tokens"][0][0] for each in batch]


# The documented conversation, from the first call to the last


async def test_documented_conversation_is_replayed_word_for_word(hub: Hub) -> None:
    assert await hub.get("/batch") == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    reply = await hub.post("/register", registration())
    assert list(reply) == ["uuid"]
    assert 2**100 < reply["uuid"] < 2**128
    env = environment()
    assert await hub.post("/register-env", env) == {"status": "wait for trainer to start"}
    assert (await hub.http.get("/batch")).content == b'{"batch":null}'
    assert await hub.post("/register-env", env) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "foo_0",
        "checkpoint_dir": "ck",
        "starting_step": 0,
        "checkpoint_interval": 1,
        "num_steps": 3,
    }
    assert await hub.get("/wandb_info") == {"group": "g", "project": "p"}
    assert await hub.get("/info") == {"batch_size": 4, "max_token_len": 128}
    # Six groups arrive and the environment idles; then three steps, one at a time.
    for _ in range(6):
        assert await hub.post("/scored_data", minimal_group()) == {"status": "received"}
    assert await hub.get("/status") == {"current_step": 0, "queue_size": 6}
    for step in (1, 2, 3):
        batch = (await hub.get("/batch"))["batch"]
        assert [list(each) for each in batch] == [FOURTEEN_KEYS, FOURTEEN_KEYS]
        assert sum(len(each["tokens"]) for each in batch) == 4
        status = await hub.http.request("GET", "/status-env", json={"env_id": 0})
        left = 6 - 2 * step
        assert status.json() == {
            "current_step": step,
            "queue_size": left,
            "unallocated_fraction": 1.0,
            "self_queue_size": left,
            "max_group_size": 2 if left else 1,
            "env_weight": 1.0,
        }
    assert await hub.get("/batch") == {"batch": None}


async def test_documented_buffering_is_replayed_word_for_word(hub: Hub) -> None:
    await hub.start(environment(group_size=4))
    assert await hub.post("/scored_data", minimal_group()) == {
        "status": "buffered",
        "buffer_size": 2,
    }
    assert await hub.post("/scored_data", minimal_group()) == {
        "status": "buffered",
        "buffer_size": 0,
    }
    assert await hub.get("/status") == {"current_step": 0, "queue_size": 2}
    full = group(4, env_id=0)
    assert await hub.post("/scored_data_list", [full, minimal_group()]) == {
        "status": "received",
        "groups_processed": 2,
        "buffered": 1,
        "last_buffer_size": 2,
    }


# Every endpoint's shape, whatever else a client puts into the body

CONTROL = [
    ("GET", "/", None, {"message": "AtroposLib API"}),
    ("POST", "/disconnect-env", {"env_id": 0}, {"status": "success"}),
    ("GET", "/wandb_info", None, {"group": "g", "project": "p"}),
    ("GET", "/info", None, {"batch_size": 4, "max_token_len": 128}),
    ("GET", "/batch", None, {"batch": None}),
    ("POST", "/scored_data", group(2), {"status": "received"}),
    ("POST", "/scored_data_list", [group(2)], {"status": "received", "groups_processed": 1}),
    ("POST", "/scored_data_list", [], {"status": "received", "groups_processed": 0}),
    ("GET", "/status", None, {"current_step": 0, "queue_size": 0}),
]


@pytest.mark.parametrize(("method", "path", "body", "expected"), CONTROL)
async def test_answer_has_exactly_the_documented_keys(
    hub: Hub, method: str, path: str, body: Any, expected: dict[str, Any]
) -> None:
    await hub.start(environment())
    if isinstance(body, dict):
        body = body | {"unknown_field": {"nested": [1]}}
    response = await hub.http.request(method, path, json=body)
    assert (response.status_code, response.json()) == (200, expected)
    assert response.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register", registration(batch_size="many")),
        ("/register", registration(wandb_group=None)),
        ("/register", []),
        ("/register-env", environment(weight="heavy")),
        ("/register-env", environment(max_token_length=None)),
        ("/register-env", environment(min_batch_allocation="half")),
        ("/disconnect-env", {}),
        ("/disconnect-env", {"env_id": "zero"}),
        ("/scored_data", {"tokens": "abc", "masks": [[1]], "scores": [1.0]}),
        ("/scored_data", {"tokens": [["a"]], "masks": [[1]], "scores": [1.0]}),
        ("/scored_data", {"tokens": [[1]], "masks": [[1]], "scores": ["good"]}),
        ("/scored_data", {"masks": [[1]], "scores": [1.0]}),
        ("/scored_data", group(2, env_id="zero")),
        ("/scored_data", group(2, generation_params=[])),
        ("/scored_data", group(2, overrides={})),
        ("/scored_data_list", group(2)),
        ("/scored_data_list", [group(2), 7]),
    ],
)
async def test_wrong_type_is_422_with_details_of_the_usual_form(
    hub: Hub, path: str, body: Any
) -> None:
    response = await hub.http.post(path, json=body)
    assert response.status_code == 422
    details = response.json()["detail"]
    assert details
    for detail in details:
        assert detail["loc"][0] == "body"
        assert detail["msg"]
        assert detail["type"]


@pytest.mark.parametrize("field", ["max_token_length", "desired_name", "weight", "group_size"])
async def test_environment_needs_four_fields_and_may_leave_out_its_minimum(
    hub: Hub, field: str
) -> None:
    await hub.start()
    body = environment()
    del body["min_batch_allocation"]
    assert (await hub.post("/register-env", body))["status"] == "success"
    del body[field]
    response = await hub.http.post("/register-env", json=body)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", field]


# Registration


async def test_reset_lets_the_next_trainer_begin_anew(hub: Hub) -> None:
    await hub.start(environment(), starting_step=7)
    await hub.post("/scored_data", group(2, 1))
    assert (await hub.http.get("/reset_data")).text == "Reset successful"
    assert await hub.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await hub.get("/wandb_info") == {"group": None, "project": None}
    wait = {"status": "wait for trainer to start"}
    await hub.post("/register", registration(batch_size=2, starting_step=3))
    assert await hub.post("/register-env", environment()) == wait
    assert await hub.get("/status") == {"current_step": 3, "queue_size": 0}
    assert await hub.get("/batch") == {"batch": None}
    reply = await hub.post("/register-env", environment())
    assert (reply["env_id"], reply["wandb_name"], reply["starting_step"]) == (0, "foo_0", 3)


async def test_empty_wandb_names_are_not_null(hub: Hub) -> None:
    await hub.post("/register", registration(wandb_group="", wandb_project=""))
    assert await hub.get("/wandb_info") == {"group": "", "project": ""}


# Groups


MESSAGES = [
    [{"role": "user", "content": "text"}],
    [{"role": "anything at all", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "part"}], "name": "n", "k": {"a": [1]}}],
    [{"role": "tool", "content": {"value": 1, "fraction": 1.5}}, {"role": "x", "content": 3}],
]


async def test_messages_come_back_as_they_were_with_their_extra_keys(hub: Hub) -> None:
    await hub.start()
    await hub.post("/scored_data", group(4, messages=MESSAGES))
    response = await hub.http.get("/batch")
    [received] = response.json()["batch"]
    assert received["messages"] == MESSAGES
    assert '"value":1,' in response.text  # an integer stays an integer


async def test_every_field_comes_back_as_it_was_sent(hub: Hub) -> None:
    sent = group(
        2,
        tokens=[[1, 2, 3], [4, 5]],
        masks=[[-100, 2, 3], [-100, 5]],
        scores=[1, -0.5],
        advantages=[[0.1, 0.2, 0.3], [0.0, -1.0]],
        ref_logprobs=[[-0.1, -0.2, -0.3], [-1e-30, -123456.789]],
        inference_logprobs=[[1.0, -0.30000000000000004, -2.5], [1.0, -0.1]],
        messages=[MESSAGES[0], MESSAGES[1]],
        generation_params={"temperature": 0.7, "stop": ["a"], "n": 1},
        overrides=[{"set_advantage_to_zero": True}, {"sft": {"x": [1, 2.5, None]}}],
        group_overrides={"group_size": 2},
        images=[["base64", None], []],
        env_id=None,
        distill_token_ids=[[[1, 2], [3], []], [[4, 5, 6], [7]]],
        distill_logprobs=[[[-0.1, -0.2], [-0.3], []], [[-0.4, -0.5, -0.6], [-0.7]]],
    )
    await hub.start(batch_size=2)
    assert await hub.post("/scored_data", sent) == {"status": "received"}
    [received] = (await hub.get("/batch"))["batch"]
    assert list(received) == FOURTEEN_KEYS
    assert received == sent


async def test_numbers_keep_their_kind(hub: Hub) -> None:
    await hub.start(batch_size=2)
    await hub.post("/scored_data", group(2, scores=[1, 0], generation_params={"n": 1, "t": 1.0}))
    text = (await hub.http.get("/batch")).text
    assert '"scores":[1.0,0.0]' in text
    assert '"generation_params":{"n":1,"t":1.0}' in text


# Odd sizes


@pytest.mark.parametrize(
    ("expected_size", "sizes", "buffer_sizes", "queued"),
    [
        # sizes posted one by one; what each answer says is left in the buffer; what is queued then
        (4, [3, 2, 2], [3, 5, 3], [2, 2]),
        (5, [2, 3, 2], [2, 0, 2], [2, 3]),
        (4, [1, 3], [1, 0], [1, 3]),
        (4, [1, 1, 1, 1], [1, 2, 3, 0], [1, 1, 1, 1]),
        (4, [3, 3, 1], [3, 6, 3], [3, 1]),
        (4, [3, 3, 3], [3, 6, 9], []),
    ],
)
async def test_buffered_groups_leave_oldest_first_as_separate_groups(
    hub: Hub, expected_size: int, sizes: list[int], buffer_sizes: list[int], queued: list[int]
) -> None:
    await hub.start(environment(group_size=expected_size), batch_size=sum(queued) or 16)
    for number, (size, buffer_size) in enumerate(zip(sizes, buffer_sizes, strict=True)):
        reply = await hub.post("/scored_data", group(size, number, env_id=0))
        assert reply == {"status": "buffered", "buffer_size": buffer_size}
    assert (await hub.get("/status"))["queue_size"] == len(queued)
    batch = (await hub.get("/batch"))["batch"]
    assert [len(each["tokens"]) for each in batch or []] == queued


async def test_environments_have_buffers_of_their_own(hub: Hub) -> None:
    await hub.start(environment(group_size=4), environment(group_size=4))
    assert (await hub.post("/scored_data", group(2, env_id=0)))["buffer_size"] == 2
    assert (await hub.post("/scored_data", group(2, env_id=1)))["buffer_size"] == 2
    assert (await hub.get("/status"))["queue_size"] == 0


@pytest.mark.parametrize("env_id", [None, 1, 99, -1])
async def test_group_of_no_known_environment_goes_straight_to_the_queue(
    hub: Hub, env_id: int | None
) -> None:
    await hub.start(environment(group_size=4))
    assert await hub.post("/scored_data", group(2, env_id=env_id)) == {"status": "received"}
    assert (await hub.get("/status"))["queue_size"] == 1


# Batches


@pytest.mark.parametrize(
    ("sizes", "batch_size", "expected"),
    [
        ([4, 4], 8, [0, 1]),
        ([3, 4, 4], 8, [1, 2]),
        ([2, 2, 4], 4, [0, 1]),
        ([2, 4, 2], 4, [1]),
        ([2, 2, 2, 2, 8], 4, [0, 1]),
        ([4, 2, 2], 4, [0]),
        ([2, 2, 2, 2, 8], 8, [0, 1, 2, 3]),
        ([4, 2, 4], 8, [0, 2]),
        ([1, 1, 1, 1, 2], 4, [0, 1, 2, 3]),
        ([2, 4, 4], 8, [1, 2]),
        ([1, 2, 1, 2], 4, [0, 1, 2]),
        ([3, 3, 3], 8, None),
        ([3, 3, 3], 9, [0, 1, 2]),
        ([6, 3, 3], 6, [0]),
        # The original finds no batch for these two and never will.
        ([3, 3, 3, 3, 4], 12, [0, 1, 2, 3]),
        ([4, 4, 2, 2], 6, [0, 2]),
    ],
)
async def test_batch_takes_the_groups_that_the_original_takes(
    hub: Hub, sizes: list[int], batch_size: int, expected: list[int] | None
) -> None:
    await hub.start(batch_size=batch_size)
    for number, size in enumerate(sizes):
        response = await hub.http.post("/scored_data", json=group(size, number))
        assert response.status_code == (200 if size <= batch_size else 422)
    num_queued = sum(size <= batch_size for size in sizes)
    batch = (await hub.get("/batch"))["batch"]
    if expected is None:
        assert batch is None
        assert (await hub.get("/status"))["queue_size"] == num_queued
    else:
        assert sorted(first_tokens(batch)) == expected
        assert sum(len(each["tokens"]) for each in batch) == batch_size
        assert (await hub.get("/status"))["queue_size"] == num_queued - len(expected)


@pytest.mark.parametrize(
    ("batch_size", "minimums", "expected"),
    [(4, [None, 0.5], {0, 4}), (8, [0.25, 0.5], {0, 1, 4, 5})],
)
async def test_minimums_take_the_groups_that_the_original_takes(
    hub: Hub, batch_size: int, minimums: list[float | None], expected: set[int]
) -> None:
    envs = [environment(min_batch_allocation=share) for share in minimums]
    await hub.start(*envs, batch_size=batch_size)
    for number, env_id in enumerate([0, 0, 0, 0, 1, 1]):
        await hub.post("/scored_data", group(2, number, env_id=env_id))
    batch = (await hub.get("/batch"))["batch"]
    assert set(first_tokens(batch)) == expected


async def test_group_without_environment_is_taken_although_another_has_a_minimum(hub: Hub) -> None:
    await hub.start(environment(min_batch_allocation=0.5))
    await hub.post("/scored_data_list", [group(2, 1), group(2, 2, env_id=0)])
    assert first_tokens((await hub.get("/batch"))["batch"]) == [1, 2]


async def test_mixed_sizes_are_all_handed_out_in_the_long_run(hub: Hub) -> None:
    await hub.start(batch_size=8)
    sizes = [1, 2, 4, 8, 2, 1, 4, 4, 2, 2, 1, 1] * 5  # 160 sequences: 20 batches
    for number, size in enumerate(sizes):
        await hub.post("/scored_data", group(size, number))
    seen: list[int] = []
    by_size: dict[int, list[int]] = {}
    for step in range(1, 21):
        batch = (await hub.get("/batch"))["batch"]
        assert sum(len(each["tokens"]) for each in batch) == 8
        assert (await hub.get("/status"))["current_step"] == step
        seen += first_tokens(batch)
        for each in batch:
            by_size.setdefault(len(each["tokens"]), []).append(each["tokens"][0][0])
    assert sorted(seen) == list(range(len(sizes)))
    assert all(numbers == sorted(numbers) for numbers in by_size.values())
    assert await hub.get("/batch") == {"batch": None}


# Leaving, and the latest example


async def test_environment_that_left_counts_no_more_but_its_groups_do(hub: Hub) -> None:
    await hub.start(environment(weight=1.0), environment(weight=3.0, min_batch_allocation=0.75))
    await hub.post("/scored_data", group(2, 1, env_id=1))
    await hub.post("/scored_data", group(2, 2, env_id=0))
    before = await hub.get("/status-env", params={"env_id": 0})
    assert (before["env_weight"], before["unallocated_fraction"]) == (0.25, 0.25)
    assert await hub.get("/batch") == {"batch": None}
    assert await hub.post("/disconnect-env", {"env_id": 1}) == {"status": "success"}
    after = await hub.get("/status-env", params={"env_id": 0})
    assert (after["env_weight"], after["unallocated_fraction"]) == (1.0, 1.0)
    assert sorted(first_tokens((await hub.get("/batch"))["batch"])) == [1, 2]


@pytest.mark.parametrize("env_id", [-1, 1, 10**6])
async def test_leaving_under_an_unknown_id_fails_with_200(hub: Hub, env_id: int) -> None:
    await hub.start(environment())
    response = await hub.http.post("/disconnect-env", json={"env_id": env_id})
    assert response.status_code == 200
    assert response.json()["status"] == "failure"
    assert isinstance(response.json()["error"], str)
    assert (await hub.get("/status-env", params={"env_id": 0}))["env_weight"] == 1.0


async def test_latest_example_is_the_group_queued_last(hub: Hub) -> None:
    await hub.start(environment(group_size=4))
    await hub.post("/scored_data", group(4, 1, env_id=0))
    await hub.post("/scored_data", group(2, 2, env_id=0))
    assert first_tokens([await hub.get("/latest_example")]) == [1]  # buffered ones do not count
    await hub.post("/scored_data", group(2, 3, env_id=0))
    latest = await hub.get("/latest_example")
    assert list(latest) == FOURTEEN_KEYS
    assert first_tokens([latest]) == [3]
    assert (await hub.get("/batch"))["batch"]
    assert first_tokens([await hub.get("/latest_example")]) == [3]  # delivered or not


# Environment status


async def test_status_env_follows_the_original_formula(hub: Hub) -> None:
    await hub.start(
        environment(group_size=4, max_token_length=1000, weight=1.0),
        environment(group_size=2, max_token_length=500, weight=6.0, min_batch_allocation=0.3),
        environment(group_size=2, max_token_length=100, weight=0.0),
        batch_size=16,
    )
    await hub.post("/scored_data_list", [group(4, env_id=0)] * 3)
    await hub.post("/scored_data_list", [group(2, env_id=1)] * 5)
    await hub.post("/scored_data", group(2, env_id=2))
    # others in units of the largest group: ceil(10 / 4) * 4 - int(16 * 0.3) = 8, and 4
    assert await hub.get("/status-env", params={"env_id": 0}) == {
        "current_step": 0,
        "queue_size": (12 + 8 + 4) // 4,
        "unallocated_fraction": 0.7,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.25,
    }
    assert (await hub.get("/status-env", params={"env_id": 1}))["env_weight"] == 0.75
    assert (await hub.get("/status-env", params={"env_id": 2}))["env_weight"] == 0.01


# Compression


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip"])
async def test_every_body_may_come_compressed(hub: Hub, coding: str) -> None:
    async def post(path: str, body: Any) -> Any:
        content = gzip.compress(json.dumps(body).encode())
        headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
        response = await hub.http.post(path, content=content, headers=headers)
        return response.raise_for_status().json()

    assert "uuid" in await post("/register", registration())
    await hub.get("/batch")
    assert (await post("/register-env", environment()))["status"] == "success"
    assert await post("/scored_data", group(2)) == {"status": "received"}
    assert (await post("/scored_data_list", [group(2)]))["groups_processed"] == 1
    assert await post("/disconnect-env", {"env_id": 0}) == {"status": "success"}


async def test_compressed_reply_says_so_and_holds_the_same_batch(hub: Hub) -> None:
    await hub.start(batch_size=64)
    await hub.post("/scored_data_list", [group(64, 5), group(64, 5)])
    plain = await hub.http.get("/batch", headers={"Accept-Encoding": "identity"})
    packed = await hub.http.get("/batch", headers={"Accept-Encoding": "gzip, deflate"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.num_bytes_downloaded < len(plain.content) == len(packed.content)
    assert packed.json() == plain.json()


# As a process


@pytest.mark.e2e
def test_application_is_served_by_uvicorn_under_its_original_name(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = ["-m", "uvicorn", "atroposlib.api.server:app", "--port", str(port)]
    with running("uvicorn", argv, log_path=tmp_path / "log") as server:
        wait_for(lambda: answers(f"{url}/"), timeout_s=30, process=server)
        with httpx.Client(base_url=url) as http:
            assert http.get("/").json() == {"message": "AtroposLib API"}
            assert "uuid" in http.post("/register", json=registration(batch_size=2)).json()
            assert http.get("/batch").json() == {"batch": None}
            assert http.post("/register-env", json=environment()).json()["env_id"] == 0
            status = http.request("GET", "/status-env", json={"env_id": 0})
            assert status.json()["queue_size"] == 0
            posted = http.post("/scored_data", json=group(2, 9, env_id=0))
            assert posted.json() == {"status": "received"}
            batch = http.get("/batch").json()["batch"]
            assert first_tokens(batch) == [9]
            assert http.get("/reset_data").text == "Reset successful"
        assert server.stop() in (0, -signal.SIGTERM), server.log()  # uvicorn raises it again
        assert "Traceback" not in server.log()
