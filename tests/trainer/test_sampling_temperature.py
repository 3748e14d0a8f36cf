"""The temperature that an environment samples at reaches the trainer, whether or not the author says it."""

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest
import torch

from atroposlib.runtime.serve import serve
from atroposlib.scored_data import Strictness, check_group
from example_trainer.data import make_batch
from tests.envs.test_dataset_env import Sums, make
from tests.runtime.helpers_runtime import FAST, LoopbackHub
from tests.trainer.test_trainer_data import OPTIONS


class Claims(Sums):
    """The author says a temperature."""

    def shape_group(self, row: Any, group: Any) -> Any:
        return {**group, "generation_params": {"temperature": 0.9}}


async def first_group(env_cls: type[Sums], temperature: float) -> dict[str, Any]:
    """Serve an environment and return the first group that a trainer is given, as JSON."""
    async with LoopbackHub(batch_size=4, max_token_len=1000) as hub:
        env = make(env_cls, temperature=temperature, rollout_server_url=hub.url, total_steps=1)
        run = asyncio.create_task(serve(env, timings=FAST))
        async with httpx.AsyncClient(base_url=hub.url, trust_env=False) as trainer:
            while (  # noqa: ASYNC110 - a trainer polls
                batch := (await trainer.get("/batch")).json()["batch"]
            ) is None:
                await asyncio.sleep(0.01)
        await run
    group: dict[str, Any] = batch[0]
    return group


@pytest.mark.parametrize(
    ("env_cls", "temperature", "sent", "trained_at"),
    [
        (Sums, 0.7, {"temperature": 0.7}, 0.7),
        (Sums, 1.0, None, 1.0),
        (Claims, 0.7, {"temperature": 0.9}, 0.9),
    ],
)
async def test_trainer_computes_logprobs_at_the_temperature_of_the_samples(
    env_cls: type[Sums], temperature: float, sent: dict[str, Any] | None, trained_at: float
) -> None:
    group = await first_group(env_cls, temperature)
    assert group["generation_params"] == sent
    options = dataclasses.replace(OPTIONS, processed_logprobs=True)
    checked = check_group(group, strictness=Strictness.MEANING)
    (micro_batch,) = make_batch([checked], options).micro_batches
    found = micro_batch.positions.temperature_N
    torch.testing.assert_close(found, torch.full_like(found, trained_at))
