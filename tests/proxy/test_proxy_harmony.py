"""gpt-oss behind the proxy: thoughts, content and calls in every API, and back, in one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers_proxy import WEATHER, Proxy, events_of

from tests.inference.helpers_templates import CHANNELS, ToldEngine, make_tokenizer

TOKENIZER = make_tokenizer(CHANNELS, eos="<|return|>")
START = "<|start|>assistant"
CALLS = (
    f"<|channel|>analysis<|message|>I must look.<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>"
    f'{START}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Oslo"}}'
)
SAYS = f"<|channel|>analysis<|message|>It is mild.<|end|>{START}<|channel|>final<|message|>Mild."
SAMPLED = f"{CALLS}<|call|>{SAYS}<|return|>"


def told_proxy(proxy: Proxy) -> ToldEngine:
    """Let a proxy's engine be one that is told what to sample, with a tokenizer that has the marks."""
    engine = ToldEngine(TOKENIZER)
    proxy.manager.servers = [engine]
    proxy.sessions.tokenizer = TOKENIZER
    return engine


def trained(node: dict[str, Any]) -> str:
    return TOKENIZER.decode([label for label in node["masked_tokens"] if label != -100])


def _chat(body: dict[str, Any], keeps: bool) -> tuple[list[Any], str, str, list[Any]]:
    [choice] = body["choices"]
    message = choice["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "5 degrees"}
        for call in message.get("tool_calls", ())
    ]
    thought = message["reasoning_content"] if keeps else message.pop("reasoning_content")
    return [message], thought, message["content"], results


def _responses(body: dict[str, Any], keeps: bool) -> tuple[list[Any], str, str, list[Any]]:
    thought, said, *calls = body["output"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "5 degrees"}
        for call in calls
    ]
    texts = [item["content"][0]["text"] for item in (thought, said)]
    return body["output"][not keeps :], *texts, results


FUNCTION = WEATHER["function"]
APIS = {
    "chat/completions": (_chat, WEATHER),
    "responses": (_responses, {"type": "function", **FUNCTION}),
}


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("path", APIS)
async def test_thoughts_and_calls_are_apart_and_two_turns_are_one_sequence(
    path: str, keeps: bool
) -> None:
    read: Callable[..., tuple[list[Any], str, str, list[Any]]]
    read, tool = APIS[path]
    async with Proxy() as proxy:
        engine = told_proxy(proxy)
        uuid = await proxy.open(tool_parser="gpt_oss")
        said: list[Any] = [{"role": "user", "content": "Oslo?"}]
        found = []
        for text, end in ((CALLS, "<|call|>"), (SAYS, "<|return|>")):
            engine.tell(text, end=end)
            body = {"messages": said, "input": said, "tools": [tool], "max_tokens": 99}
            answer = await proxy.post(f"/{uuid}/v1/{path}", body)
            turn, thought, content, results = read(answer, keeps)
            found.append((thought, content, len(results)))
            said += [*turn, *results]
        assert found == [("I must look.", "I look.", 1), ("It is mild.", "Mild.", 0)]
        (node,) = await proxy.nodes(uuid)
        assert trained(node) == SAMPLED


@pytest.mark.parametrize("tools", [[], [WEATHER]])
async def test_thoughts_are_apart_in_streams(tools: list[Any]) -> None:
    async with Proxy() as proxy:
        engine = told_proxy(proxy)
        uuid = await proxy.open(tool_parser="gpt_oss")
        engine.tell(SAYS, end="<|return|>")
        said = [{"role": "user", "content": "Oslo?"}]
        asked = {"messages": said, "tools": tools, "stream": True}
        answer = await proxy.client.post(f"/{uuid}/v1/chat/completions", json=asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in events_of(answer.text)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is mild."
    assert "".join(delta.get("content", "") for delta in deltas) == "Mild."


async def test_a_text_completion_is_text() -> None:
    async with Proxy() as proxy:
        engine = told_proxy(proxy)
        uuid = await proxy.open(tool_parser="gpt_oss")
        for streams in (False, True):
            engine.tell(SAYS, end="<|return|>")
            body = {"prompt": "Oslo?", "stream": streams}
            answer = await proxy.client.post(f"/{uuid}/v1/completions", json=body)
            whole = events_of(answer.text) if streams else [answer.json()]
            told = "".join(each["choices"][0]["text"] for each in whole)
            assert told == TOKENIZER.decode(
                TOKENIZER.encode(SAYS, add_special_tokens=False), skip_special_tokens=True
            )
