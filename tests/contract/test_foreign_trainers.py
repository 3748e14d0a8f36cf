"""Trainers written for the original hub, black box: their requests, in their order, and what they read of the answers.

axolotl's plugin: https://github.com/axolotl-ai-cloud/plugin-atropos (datasets.py, plugin.py). verl's recipe:
https://github.com/verl-project/verl-recipe, folder atropos (atropos_integration.py, grpo_atropos_trainer.py). Neither
is installed here: what they send and read was taken from their source. Both send through `requests`.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.helpers_api import FOURTEEN_KEYS, Hub, environment, group, running_hub

OF_REQUESTS = {
    "User-Agent": "python-requests/2.32.5",
    "Accept-Encoding": "gzip, deflate",
    "Accept": "*/*",
    "Connection": "keep-alive",
}


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with running_hub() as started:
        yield started


async def post(hub: Hub, path: str, body: dict[str, Any]) -> httpx.Response:
    return await hub.http.post(path, json=body, headers=OF_REQUESTS)


async def get(hub: Hub, path: str) -> httpx.Response:
    return await hub.http.get(path, headers=OF_REQUESTS)


async def test_axolotl_trains_on_what_the_original_would_give_it(hub: Hub) -> None:
    # Its data thread starts before the trainer registers: an answer with an empty batch keeps it asking.
    early = await get(hub, "/batch")
    assert early.status_code == 200
    assert early.json()["batch"] == []
    registered = await post(
        hub,
        "/register",
        {
            "wandb_group": "default",
            "wandb_project": "axolotl",
            "batch_size": 4,
            "max_token_len": 2048,
            "starting_step": 0,
            "checkpoint_dir": "./outputs",
            "save_checkpoint_interval": 100,
            "num_steps": 10,
        },
    )
    assert registered.status_code == 200
    # Null, and the key is there: it asks again after a second.
    assert (await get(hub, "/batch")).json()["batch"] is None
    await post(hub, "/register-env", environment(group_size=2))
    silenced = [{"set_advantage_to_zero": True}, {}]
    await post(hub, "/scored_data", group(2, 7, env_id=0))
    await post(hub, "/scored_data", group(2, 8, env_id=0, overrides=silenced))

    batch = (await get(hub, "/batch")).json()["batch"]
    assert [list(each) for each in batch] == [FOURTEEN_KEYS] * 2
    # It reads `item["overrides"]`, null or one dict per sequence, without asking whether the key is there.
    assert [each["overrides"] for each in batch] == [None, silenced]
    assert [each["scores"] for each in batch] == [[0.0, 1.0]] * 2
    assert [each["tokens"] for each in batch] == [[[7, 0], [7, 1]], [[8, 0], [8, 1]]]
    assert [each["masks"] for each in batch] == [[[-100, 0], [-100, 1]]] * 2
    assert (await get(hub, "/batch")).json()["batch"] is None


async def test_verl_trains_on_what_the_original_would_give_it(hub: Hub) -> None:
    # Asked before anything else, and the trainer ends unless the answer is 200.
    assert (await get(hub, "/status")).status_code == 200
    registered = await post(
        hub,
        "/register",
        {
            "wandb_group": "verl_atropos",
            "wandb_project": "grpo",
            "batch_size": 4,
            "max_token_len": 1024,
            "checkpoint_dir": "./checkpoints",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 0,
        },
    )
    assert registered.status_code == 200
    assert registered.json()["uuid"]
    # No batch is 200 with null: any other status counts as a failed attempt.
    none_yet = await get(hub, "/batch")
    assert none_yet.status_code == 200
    assert none_yet.json()["batch"] is None
    await post(hub, "/register-env", environment(group_size=2))

    # It sums masks to find the response, so that its environments send 0 and 1, and takes the length of `advantages`.
    sent = group(
        2,
        env_id=0,
        tokens=[[5, 6, 7], [5, 8]],
        masks=[[0, 1, 1], [0, 1]],
        advantages=[[0.0, 0.5, -0.5], [0.0, 1.5]],
        overrides=[{}, {"set_advantage_to_zero": True}],
    )
    for _ in range(2):
        assert (await post(hub, "/scored_data", sent)).json() == {"status": "received"}
    batch = (await get(hub, "/batch")).json()["batch"]
    assert len(batch) == 2
    for received in batch:
        names = ("tokens", "masks", "scores", "advantages", "overrides")
        assert {name: received[name] for name in names} == {name: sent[name] for name in names}
    assert (await get(hub, "/status")).json() == {"current_step": 1, "queue_size": 0}
