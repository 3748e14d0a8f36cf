"""Agents through the proxy to a real vLLM: OpenAI's SDK in both of its APIs, and Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai
import pytest
from transformers import AutoTokenizer

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.proxy.command import create_app
from atroposlib.proxy.sessions import FixedSampling, Session, SessionOptions, Sessions
from atroposlib.utils.local_server import serve_locally
from tests.vllm.conftest import ServedRequest
from tests.vllm.helpers_vllm import in_float32
from tests.vllm.taught_model import ADD, ANSWER, CALL, MAX_LENGTH, QUESTION, RESULT
from tests.vllm.test_vllm_sessions import assert_sampled_by

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GREEDY = SessionOptions(max_tokens=100, sampling=FixedSampling(temperature=0.0))


class Opened(NamedTuple):
    """A session at a proxy."""

    url: str
    session: Session


@asynccontextmanager
async def opened(served: ServedRequest, options: SessionOptions = GREEDY) -> AsyncIterator[Opened]:
    config = APIServerConfig(
        base_url=f"{served.url}/v1", model_name=str(served.model), server_type="vllm"
    )
    manager = ServerManager([config])
    app = create_app(manager, AutoTokenizer.from_pretrained(served.model), "taught")
    try:
        async with serve_locally(app) as url:
            sessions: Sessions = app.state.sessions
            yield Opened(url, await sessions.open(options))
    finally:
        await manager.close()


def assert_conversation(served: ServedRequest, session: Session) -> None:
    """One sequence: the call and the answer as they were sampled, with the model's logprobs."""
    [node] = session.nodes()
    trained = [label for label in node.masked_tokens if label != -100]
    text = "".join(f"{answer}<|im_end|>" for answer in (CALL, ANSWER))
    assert AutoTokenizer.from_pretrained(served.model).decode(trained) == text
    print("largest gap:", assert_sampled_by(in_float32(served.model), node))


async def test_chat_agent_that_streams_is_one_exact_sequence(served_model: ServedRequest) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [ADD]
    async with (
        opened(served_model) as (url, session),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.uuid) as client,
    ):
        for _ in range(2):
            async with client.chat.completions.stream(
                model="any", messages=messages, tools=tools, temperature=1
            ) as stream:
                deltas = [each.delta async for each in stream if each.type == "content.delta"]
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        assert message.content == ANSWER == "".join(deltas)
        assert len(deltas) > 1  # told while it is sampled
        assert_conversation(served_model, session)


async def test_vllms_refusals_reach_the_agent_as_openais(served_model: ServedRequest) -> None:
    async with (
        opened(served_model) as (url, session),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.uuid, max_retries=0) as client,
    ):
        long: Any = [{"role": "user", "content": "x" * (2 * MAX_LENGTH)}]
        nearly: Any = [{"role": "user", "content": "x" * (MAX_LENGTH - 50)}]
        for messages in (long, nearly):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="any", messages=messages)
            assert refused.value.code == "context_length_exceeded"
        assert session.nodes() == []


async def test_vllm_constrains_an_answer_to_a_format(served_model: ServedRequest) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "pick",
            "schema": {
                "type": "object",
                "properties": {"pick": {"enum": ["a", "b"]}},
                "required": ["pick"],
                "additionalProperties": False,
            },
        },
    }
    async with (
        opened(served_model) as (url, session),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.uuid, max_retries=0) as client,
    ):
        completion = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "pick"}], response_format=schema
        )
        assert json.loads(completion.choices[0].message.content or "")["pick"] in ("a", "b")
