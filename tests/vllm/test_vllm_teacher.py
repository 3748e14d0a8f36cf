"""Teacher logprobs and the token routes of a real vLLM (CPU build), compared with transformers in float32.

Run with `ATROPOS_VLLM_PYTHON=.venv-vllm/bin/python pytest -m vllm tests/vllm -rs`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.envs.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.vllm import VLLMServer
from atroposlib.runtime.group_log import GroupLog
from atroposlib.runtime.outbox import Outbox
from tests.vllm.conftest import ServedRequest
from tests.vllm.helpers_vllm import MAX_GAP, logprobs_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SEQUENCES = [
    [72, 101, 108, 108, 111, 10, 120, 61, 49],
    [40, 33, 7, 200, 41, 90, 91, 92, 93, 94, 95],
]


def config(served: ServedRequest) -> APIServerConfig:
    return APIServerConfig(
        base_url=f"{served.url}/v1", model_name=str(served.model), server_type="vllm"
    )


@asynccontextmanager
async def client(served: ServedRequest) -> AsyncIterator[VLLMServer]:
    server = VLLMServer(config(served))
    try:
        yield server
    finally:
        await server.close()


def assert_top_k(
    model: Any, tokens: list[int], ids: list[list[int]], logprobs: list[list[float]], *, k: int
) -> None:
    """Check ids and logprobs of every position; k 0 stands for the sequence's own token."""
    assert len(ids) == len(logprobs) == len(tokens)
    assert ids[0] == logprobs[0] == []
    for position, own_V in enumerate(logprobs_of(model, tokens), start=1):
        assert len(ids[position]) == len(logprobs[position]) == max(1, k)
        if k == 0:
            assert ids[position] == [tokens[position]]
        else:
            best = own_V.topk(k).values
            assert torch.allclose(torch.tensor(logprobs[position]), best, atol=MAX_GAP, rtol=0)
        own = own_V[torch.tensor(ids[position])]
        assert torch.allclose(torch.tensor(logprobs[position]), own, atol=MAX_GAP, rtol=0)


@pytest.mark.parametrize("k", [0, 1, 5])
async def test_prompt_logprobs_are_the_models_at_every_position(
    served_model: ServedRequest, model: Any, k: int
) -> None:
    async with client(served_model) as server:
        for tokens in SEQUENCES:
            answer = await server.get_logprobs(input_ids=tokens, top_k=k)
            assert answer["prompt_tokens"] == tokens
            assert_top_k(
                model,
                tokens,
                answer["prompt_topk_token_ids"],
                answer["prompt_topk_logprobs"],
                k=k,
            )


class Distilled(TeacherDistillationEnv):
    async def get_next_item(self) -> None:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.mark.parametrize("k", [0, 3])
async def test_groups_carry_the_teachers_logprobs_of_every_token(
    served_model: ServedRequest, model: Any, tmp_path: Path, k: int
) -> None:
    settings = TeacherDistillationConfig(
        group_size=2,
        use_wandb=False,
        tokenizer_name=str(served_model.model),
        teacher_enabled=True,
        teacher_top_k=k,
    )
    env = Distilled(settings, [config(served_model)], [config(served_model)])
    log = GroupLog.open(tmp_path / "groups.jsonl")
    env.group_sink = Outbox(env, log=log)
    try:
        group = {
            "tokens": SEQUENCES,
            "masks": [[-100, *tokens[1:]] for tokens in SEQUENCES],
            "scores": [1.0, 0.0],
        }
        assert await env.handle_send_to_api(group) == 1
    finally:
        log.close()
        assert env.teacher_server is not None
        await env.teacher_server.close()
        await env.server.close()
    assert env.num_teacher_failures == 0
    line = json.loads(log.path.read_text())
    for tokens, ids, logprobs in zip(
        SEQUENCES, line["distill_token_ids"], line["distill_logprobs"], strict=True
    ):
        assert_top_k(model, tokens, ids, logprobs, k=k)


async def test_both_token_routes_give_the_models_tokens_and_logprobs(
    served_model: ServedRequest, model: Any
) -> None:
    """The tokens route also says under which weights; at temperature 0 both sample the same."""
    [prompt, _] = SEQUENCES
    async with client(served_model) as server:
        with_versions = await server.tokens_and_logprobs_completion(
            input_ids=prompt, max_tokens=12, temperature=0.0
        )
        assert server._uses_tokens_route, "the shared vLLM must run with --enable-scale-out"
        server._uses_tokens_route = False
        plain = await server.tokens_and_logprobs_completion(
            input_ids=prompt, max_tokens=12, temperature=0.0
        )
    [tokens] = with_versions.output_tokens
    assert plain.output_tokens == [tokens]
    assert plain.finish_reasons == with_versions.finish_reasons
    own = logprobs_of(model, prompt + tokens)[len(prompt) - 1 :]
    expected = own.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    for answer in (with_versions, plain):
        found = torch.tensor(answer.output_logprobs[0])
        assert torch.allclose(found, expected, atol=MAX_GAP, rtol=0)
    [spans] = with_versions.weight_versions
    assert spans is not None
    assert sum(span.num_tokens for span in spans) == len(tokens)
    assert plain.weight_versions == [[(spans[0].weight_version, len(tokens))]]


async def test_samples_of_one_request_differ_and_obey_their_keywords(
    served_model: ServedRequest, model: Any
) -> None:
    async with client(served_model) as server:
        answer = await server.tokens_and_logprobs_completion(
            input_ids=SEQUENCES[1],
            n=4,
            max_tokens=6,
            temperature=1.0,
            seed=3,
            ignore_eos=True,
            stop_token_ids=[],
        )
        assert server._uses_tokens_route
    assert [len(tokens) for tokens in answer.output_tokens] == [6] * 4
    assert len({tuple(tokens) for tokens in answer.output_tokens}) > 1
    for tokens, logprobs in zip(answer.output_tokens, answer.output_logprobs, strict=True):
        own = logprobs_of(model, SEQUENCES[1] + tokens)[len(SEQUENCES[1]) - 1 :]
        expected = own.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=MAX_GAP, rtol=0)
