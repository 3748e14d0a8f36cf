"""A real vLLM tells how many requests it runs, and environments find it."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.concurrency import ServerLoad
from atroposlib.inference.servers.vllm import VLLMServer
from tests.vllm.conftest import ServedModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_load_of_a_real_vllm_is_found_while_it_works(served_model: ServedModel) -> None:
    server = VLLMServer(
        APIServerConfig(
            base_url=served_model.url, model_name=str(served_model.model), server_type="vllm"
        )
    )
    asks = [
        asyncio.create_task(
            server.tokens_and_logprobs_completion(
                input_ids=[5, 6, 7], max_tokens=64, min_tokens=64, temperature=1.0
            )
        )
        for _ in range(16)
    ]
    loads: list[ServerLoad] = []
    while not all(ask.done() for ask in asks):
        load = await server._find_load()
        assert load is not None
        loads.append(load)
        await asyncio.sleep(0.02)
    answers = await asyncio.gather(*asks)
    await server.close()
    assert [len(answer.output_tokens[0]) for answer in answers] == [64] * 16
    assert max(load.running for load in loads) >= 8
    assert all(load.running + load.waiting <= 16 for load in loads)
