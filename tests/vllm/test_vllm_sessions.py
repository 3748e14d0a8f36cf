"""Managed sessions against a real vLLM (CPU build): what it samples is what is kept, and its logprobs are the model's.

Run with `ATROPOS_VLLM_PYTHON=.venv-vllm/bin/python pytest -m vllm tests/vllm -rs`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import load
from atroposlib.engine.server import create_app
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.sessions.managed_server import SequenceNode
from tests.vllm.conftest import ServedRequest
from tests.vllm.helpers_vllm import MAX_GAP, logprobs_of
from tests.vllm.taught_model import (
    ADD,
    ANSWER,
    CALL,
    CONVERSATION,
    FAREWELL,
    QUESTION,
    RESULT,
    THANKS,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@asynccontextmanager
async def session(served: ServedRequest) -> AsyncIterator[Any]:
    config = APIServerConfig(
        base_url=f"{served.url}/v1",
        model_name=str(served.model),
        server_type="vllm",
        num_max_requests_at_once=16,
    )
    manager = ServerManager([config], tool_parser="hermes")
    try:
        async with manager.managed_server() as managed:
            yield managed
    finally:
        await manager.close()


def assert_sampled_by(model: Any, node: SequenceNode) -> float:
    """Check every trained token's logprob against the model; return the largest gap."""
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    tokens_T = torch.tensor(node.tokens)
    own_T = logprobs_of(model, node.tokens).gather(1, tokens_T[1:, None])[:, 0]
    is_trained_T = torch.tensor(node.masked_tokens[1:]) != -100
    assert int(is_trained_T.sum()) > 0
    assert torch.equal(
        torch.tensor(node.masked_tokens[1:])[is_trained_T], tokens_T[1:][is_trained_T]
    )
    gap_T = (own_T - torch.tensor(node.logprobs[1:])).abs()[is_trained_T]
    assert float(gap_T.max()) <= MAX_GAP
    return float(gap_T.max())


async def test_single_turns_have_the_models_logprobs(
    served_model: ServedRequest, model: Any
) -> None:
    async with session(served_model) as managed:
        reply = await managed.chat_completion(
            messages=[{"role": "user", "content": "anything"}],
            n=8,
            max_tokens=40,
            temperature=1.0,
        )
        nodes = managed.get_state()["nodes"]
    end = managed.tokenizer.eos_token_id
    gaps = []
    for choice, node in zip(reply.choices, nodes, strict=True):
        gaps.append(assert_sampled_by(model, node))
        sampled = [label for label in node.masked_tokens if label != -100]
        assert choice.finish_reason == ("stop" if sampled[-1] == end else "length")
        assert (len(sampled) == 40) or choice.finish_reason == "stop"
        assert managed.tokenizer.decode(sampled, skip_special_tokens=True) == choice.message.content
    print("largest gap of single turns:", max(gaps))


async def test_three_turns_with_a_tool_are_one_sequence_of_sampled_ids(
    served_model: ServedRequest, model: Any
) -> None:
    options = {"tools": [ADD], "temperature": 0.0, "max_tokens": 100}
    async with session(served_model) as managed:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await managed.chat_completion(messages=messages, **options)
        message = first.choices[0].message
        [call] = message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        # As an agent would send it after writing and reading JSON.
        messages.append(json.loads(message.model_dump_json(exclude_none=True)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        second = await managed.chat_completion(messages=messages, **options)
        messages += [second.choices[0].message, {"role": "user", "content": THANKS}]
        third = await managed.chat_completion(messages=messages, **options)
        [node] = managed.get_state()["nodes"]
    assert second.choices[0].message.content == ANSWER
    assert third.choices[0].message.content == FAREWELL
    replies = [first, second, third]
    assert [r.choices[0].finish_reason for r in replies] == ["tool_calls", "stop", "stop"]
    trained = [label for label in node.masked_tokens if label != -100]
    text = "".join(f"{answer}<|im_end|>" for answer in (CALL, ANSWER, FAREWELL))
    assert managed.tokenizer.decode(trained) == text
    own = managed.tokenizer.apply_chat_template(CONVERSATION, tools=[ADD], tokenize=False)
    assert f"{node.full_text}\n" == own
    assert managed.num_broken_prefixes == 0
    print("largest gap of three turns with a tool:", assert_sampled_by(model, node))


async def test_three_turns_keep_ids_that_their_text_would_not_give(
    served_model: ServedRequest, model: Any
) -> None:
    # Bytes from 0xA1 up, hardly ever UTF-8 in a row.
    high_bytes = {str(token): 8.0 for token in range(94, 188)}
    async with session(served_model) as managed:
        messages: list[Any] = [{"role": "user", "content": "anything"}]
        for text in ("and then?", "why?", "stop"):
            reply = await managed.chat_completion(
                messages=messages, tools=[ADD], max_tokens=30, logit_bias=high_bytes, seed=1
            )
            assert reply.choices[0].finish_reason in ("length", "stop")
            messages += [reply.choices[0].message, {"role": "user", "content": text}]
        [node] = managed.get_state()["nodes"]
    trained = [label for label in node.masked_tokens if label != -100]
    again = managed.tokenizer.encode(managed.tokenizer.decode(trained))
    assert again != trained
    print("largest gap of three turns of bytes:", assert_sampled_by(model, node))


async def test_the_local_engine_and_vllm_give_the_same_greedy_tokens(
    served_model: ServedRequest,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served_model.model)
    texts = ["hello", "1 + 2?", "the weather in Paris", QUESTION + CALL, "\u00e9\u00e9\u00e9", "}{"]
    body = {
        "prompt": [tokenizer.encode(text) for text in texts],
        "max_tokens": 48,
        "temperature": 0.0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "model": str(served_model.model),
    }
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        theirs = (await client.post(f"{served_model.url}/v1/completions", json=body)).json()
    config = EngineConfig(
        model=str(served_model.model), device="cpu", served_model_name=str(served_model.model)
    )
    loaded = load(config)
    loaded.engine.start()
    try:
        transport = httpx.ASGITransport(app=create_app(loaded))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            ours = (await client.post("/v1/completions", json=body, timeout=120)).json()
    finally:
        loaded.engine.close()
    assert len(theirs["choices"]) == len(ours["choices"]) == len(texts)
    gap = 0.0
    for their, our in zip(theirs["choices"], ours["choices"], strict=True):
        assert their["token_ids"] == our["token_ids"]
        assert their["finish_reason"] == our["finish_reason"] == "length"
        pairs = zip(
            their["logprobs"]["token_logprobs"], our["logprobs"]["token_logprobs"], strict=True
        )
        gap = max(gap, *(abs(a - b) for a, b in pairs))
    assert gap <= MAX_GAP
    print("largest gap between the engines:", gap)
