"""Managed sessions: what was sampled stays exactly as it was sampled, turn after turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers_inference import FastVLLM, StockVLLM

from atroposlib.errors import ConfigError, EngineProtocolError
from atroposlib.inference.harness import (
    ByteTokenizer,
    HarnessRequest,
    ServerHarness,
)
from atroposlib.inference.servers.api_server import TokenCompletions
from atroposlib.inference.sessions.managed_server import ManagedServer
from tests.inference.helpers_templates import user

TOKENIZER = ByteTokenizer()


def echo(request: HarnessRequest) -> str:
    return f"<think>c{request.choice}</think> reply {request.call}.{request.choice} "


async def test_calls_made_at_the_same_time_have_their_nodes_in_call_order() -> None:
    class Reversed(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
            for _ in range(10 * (5 - len(self.requests))):
                await asyncio.sleep(0)
            return answer

    managed = ManagedServer(Reversed(respond=echo))
    replies = await asyncio.gather(
        *(managed.chat_completion(messages=[user("one")]) for _ in range(4))
    )
    for reply, node in zip(replies, managed.get_state()["nodes"], strict=True):
        assert reply.choices[0].message.content in node.full_text


async def test_an_end_token_spelled_out_by_the_caller_is_not_doubled() -> None:
    managed = ManagedServer(ServerHarness(respond=lambda request: "yes"))
    first = await managed.completion(prompt="<user>one<eos><assistant>")
    await managed.completion(
        prompt=f"<user>one<eos><assistant>{first.choices[0].text}<eos><user>two<eos><assistant>"
    )
    [node] = managed.get_state()["nodes"]
    text = TOKENIZER.decode(node.tokens)
    assert text == "<bos><user>one<eos><assistant>yes<eos><user>two<eos><assistant>yes<eos>"


async def test_misaligned_answers_raise_and_leave_no_node() -> None:
    class Short(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
            return TokenCompletions(answer[0], answer[1], [answer[2][0][:-1]], answer[3])

    managed = ManagedServer(Short(respond=echo))
    with pytest.raises(EngineProtocolError, match="logprobs for"):
        await managed.chat_completion(messages=[user("one")])
    assert managed.get_state()["nodes"] == []


async def test_an_engine_that_changes_a_continued_prompt_is_refused() -> None:
    class Changing(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
            return TokenCompletions([1, *answer[0]], *answer[1:])

    managed = ManagedServer(Changing(respond=echo))
    reply = await managed.chat_completion(messages=[user("one")])
    assert managed.get_state()["nodes"][0].tokens[0] == 1  # what the engine saw
    with pytest.raises(EngineProtocolError, match="prompt tokens that are not"):
        await managed.chat_completion(messages=[user("one"), reply.choices[0].message, user("two")])


async def test_sampling_keywords_reach_the_engine_and_the_rest_does_not() -> None:
    harness = ServerHarness(respond=echo)
    managed = ManagedServer(harness)
    await managed.chat_completion(
        messages=[user("one")], temperature=0.3, stop=["x"], logprobs=True, tool_choice="auto"
    )
    sent = {k: v for k, v in harness.requests[0].items() if k not in ("input_ids", "prompt")}
    assert sent == {"temperature": 0.3, "stop": ["x"], "model": "test_model"}


@pytest.mark.parametrize(
    "given",
    [{}, {"max_completion_tokens": 99}, {"max_new_tokens": 5}, {"extra_body": {"max_tokens": 99}}],
)
async def test_no_name_of_an_answers_limit_exceeds_what_the_prompt_leaves(given: Any) -> None:
    async with StockVLLM() as engine:
        server = FastVLLM(engine.config())
        managed = ManagedServer(server, tokenizer=TOKENIZER)
        managed.max_context_tokens = 40
        await managed.completion(prompt="some room", **given)
        await server.close()
    num_prompt = len(TOKENIZER.encode("some room"))
    [node] = managed.nodes
    assert len(node.tokens) == (num_prompt + 5 if "max_new_tokens" in given else 40)


async def test_reset_clears_the_session_but_not_lists_obtained_before() -> None:
    managed = ManagedServer(ServerHarness(respond=echo))
    await managed.chat_completion(messages=[user("one")])
    nodes = managed.get_state()["nodes"]
    managed.reset()
    assert managed.get_state() == {"nodes": []}
    assert len(nodes) == 1


async def test_a_turn_in_flight_at_a_reset_is_dropped_and_later_turns_are_kept() -> None:
    harness = ServerHarness(respond=echo)
    managed = ManagedServer(harness)
    first = await managed.chat_completion(messages=[user("one")])
    messages = [user("one"), first.choices[0].message, user("two")]
    async with managed.chat_turn(messages=messages) as (second, *_):
        managed.reset()
    assert managed.get_state() == {"nodes": []}
    messages += [second.choices[0].message, user("three")]
    third = await managed.chat_completion(messages=messages)
    [node] = managed.get_state()["nodes"]
    num_trained = sum(label != -100 for label in node.masked_tokens)
    assert num_trained == len(third.choices[0].message.content) + 1


async def test_a_tokenizer_without_template_is_a_configuration_error() -> None:
    class Bare(ByteTokenizer):
        chat_template = None  # type: ignore[assignment]

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            raise ValueError("no template")

    managed = ManagedServer(ServerHarness(tokenizer=Bare(), respond=echo))
    with pytest.raises(ConfigError, match="no chat template"):
        await managed.chat_completion(messages=[user("one")])
