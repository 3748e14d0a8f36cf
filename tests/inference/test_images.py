"""Chats with images: the engine makes the prompt's tokens, and the session records those that it reports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.scripted_engine import Script, ScriptedEngine
from atroposlib.inference.sessions.managed_server import ManagedServer
from tests.proxy.helpers_proxy import WEATHER, call_text

PNG = "data:image/png;base64,iVBORw0KGgo="
QUESTION: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "text", "text": "What is it?"},
    ],
}
AGAIN: dict[str, Any] = {"role": "user", "content": "Are you sure?"}


class Expanding(ByteTokenizer):
    """The engine's tokenizer: an image is as many positions as the engine says."""

    num_positions = 5

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text = text.replace("[image]", "\0" * self.num_positions)
        return super().encode(text, add_special_tokens)


def session(respond: Any, **options: Any) -> tuple[ServerHarness, ManagedServer]:
    engine = ServerHarness(respond=respond, tokenizer=Expanding())
    return engine, ManagedServer(engine, tokenizer=ByteTokenizer(), **options)


async def test_the_prompt_of_a_node_is_the_engines() -> None:
    engine, managed = session(lambda request: ["a cat", "a dog"][request.choice])
    answer = await managed.chat_completion(messages=[QUESTION], n=2, max_tokens=20)
    assert [choice.message.content for choice in answer.choices] == ["a cat", "a dog"]
    prompt = engine.tokenizer.encode("<user>[image]What is it?<eos><assistant>", False)
    assert len(prompt) > len(ByteTokenizer().encode("<user>What is it?<eos><assistant>", False)) + 4
    for node, text in zip(managed.nodes, ["a cat<eos>", "a dog<eos>"], strict=True):
        sampled = engine.tokenizer.encode(text, False)
        assert node.tokens == prompt + sampled
        assert node.masked_tokens == [-100] * len(prompt) + sampled
        assert all(logprob < 0 for logprob in node.logprobs[len(prompt) :])
    [request] = engine.requests
    assert request["messages"] == [QUESTION]
    assert "input_ids" not in request


@pytest.mark.parametrize(("rewrites", "num_nodes"), [(False, 1), (True, 2)])
async def test_a_later_turn_grows_the_node_if_the_engine_kept_its_tokens(
    rewrites: bool, num_nodes: int
) -> None:
    def respond(request: HarnessRequest) -> str:
        engine.tokenizer.num_positions += rewrites
        return "a cat"

    engine, managed = session(respond)
    engine.tokenizer.num_positions = 5
    messages = [QUESTION]
    for _ in range(2):
        answer = await managed.chat_completion(messages=messages, max_tokens=20)
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        messages = [*messages, said, AGAIN]
    assert len(managed.nodes) == num_nodes
    assert managed.num_broken_prefixes == num_nodes - 1
    num_answer = len("a cat") + 1
    trained = [sum(label != -100 for label in node.masked_tokens) for node in managed.nodes]
    assert trained == ([2 * num_answer] if num_nodes == 1 else [num_answer, num_answer])


async def test_calls_before_an_image_are_shown_to_a_model_whose_template_has_none() -> None:
    engine, managed = session(lambda request: call_text("Oslo"), tool_parser="hermes")
    messages: list[Any] = [AGAIN]
    for _ in range(3):
        answer = await managed.chat_completion(messages=messages, tools=[WEATHER], max_tokens=99)
        message = answer.choices[0].message
        call_id = message.tool_calls[0].id
        result = {"role": "tool", "tool_call_id": call_id, "content": QUESTION["content"]}
        messages = [*messages, message, result]
    (node,) = managed.nodes
    assert node.full_text.count(call_text("Oslo")) == 3
    assert managed.num_broken_prefixes == 0


@pytest.mark.parametrize("starts_with_image", [False, True])
@pytest.mark.parametrize(("said", "reason"), [("a dog", "changed"), ("a cat", "template")])
async def test_calls_with_images_that_begin_a_sequence_are_counted_by_reason(
    said: str, reason: str, starts_with_image: bool
) -> None:
    _, managed = session(lambda request: " a cat\n")
    messages: list[Any] = [QUESTION if starts_with_image else AGAIN]
    for _ in range(3):
        await managed.chat_completion(messages=messages, max_tokens=20)
        messages = [*messages, {"role": "assistant", "content": said}, QUESTION]
    assert len(managed.nodes) == 3
    assert managed.broken_prefixes == {reason: 2}


async def test_what_needs_the_prompts_tokens_beforehand_is_refused() -> None:
    _, managed = session(lambda request: "a cat")
    with pytest.raises(ValueError, match="only the engine knows"):
        managed.preview(messages=[QUESTION])
    with pytest.raises(ValueError, match="only the engine knows"):
        await managed.get_logprobs(messages=[QUESTION])
    with pytest.raises(ValueError, match="cannot continue an answer"):
        await managed.chat_completion(messages=[QUESTION, {"role": "assistant", "content": "a"}])


@asynccontextmanager
async def managed_by(name: Any) -> AsyncIterator[Any]:
    async with ScriptedEngine(Script(answers=("a cat", "a dog")), weight_version="7") as engine:
        url = engine.url if name == "trl" else f"{engine.url}/v1"
        config = APIServerConfig(base_url=url, server_type=name, model_name=engine.model_name)
        manager = ServerManager([config])
        manager.servers[0].tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
        async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
            yield managed
        await manager.close()


async def test_vllm_reports_the_tokens_of_a_chat_with_images() -> None:
    async with managed_by("vllm") as managed:
        await managed.chat_completion(messages=[QUESTION], n=2, max_tokens=20)
        nodes = managed.get_state()["nodes"]
    prompt = ByteTokenizer().encode("<user>[image]What is it?<eos><assistant>", False)
    texts = [ByteTokenizer().decode(node.tokens[len(prompt) :]) for node in nodes]
    assert texts == ["a cat<eos>", "a dog<eos>"]
    assert all(node.tokens[: len(prompt)] == prompt for node in nodes)
    assert all(node.metadata["policy_version"] == 7 for node in nodes)


@pytest.mark.parametrize("name", ["sglang", "trl"])
async def test_other_engines_are_refused_by_name(name: str) -> None:
    async with managed_by(name) as managed:
        with pytest.raises(NotImplementedError, match="no token ids of chats with images"):
            await managed.chat_completion(messages=[QUESTION], max_tokens=20)
