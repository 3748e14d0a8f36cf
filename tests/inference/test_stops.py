"""What ends an answer: limits, stop strings, and token ids in `stop`, as in `stop=[tokenizer.eos_token_id]`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from atroposlib.checker.engine import ProbeEngine
from atroposlib.envs.in_process_policy import answerer
from atroposlib.envs.stepwise import Answer, Request, _OuterPolicy
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.scripted_engine import ByteTokenizer, Script, ScriptedEngine
from atroposlib.inference.servers.api_server import APIServer, with_stop_ids

TYPES = ("openai", "vllm", "sglang", "trl")
TEXT = "one two three four"
TOKENIZER = ByteTokenizer()
(H,) = TOKENIZER.encode("h", add_special_tokens=False)
EOS = TOKENIZER.eos_token_id
USER = {"role": "user", "content": "hi"}


def config_of(engine: ScriptedEngine, kind: Any) -> APIServerConfig:
    url = engine.url if kind == "trl" else f"{engine.url}/v1"
    return APIServerConfig(base_url=url, server_type=kind, model_name=engine.model_name)


@pytest.mark.parametrize(
    ("given", "stop", "stop_token_ids"),
    [
        ({"stop": [EOS]}, None, [2]),
        ({"stop": EOS}, None, [2]),
        ({"stop": 0}, None, [0]),
        ({"stop": np.int64(7)}, None, [7]),
        ({"stop": ("a", 5, "b", 5)}, ["a", "b"], [5]),
        ({"stop": ["a", 5], "stop_token_ids": [9, 5]}, ["a"], [9, 5]),
        ({"stop": [5], "extra_body": {"stop_token_ids": (9,)}}, None, [9, 5]),
        ({"stop": "a", "extra_body": {"stop": [5, "b"], "top_k": 3}}, ["b"], [5]),
        ({"stop": ["a", "b"]}, ["a", "b"], None),
        ({"stop": "a"}, "a", None),
        ({"stop": None}, None, None),
        ({"stop": []}, [], None),
    ],
)
def test_token_ids_in_stop_become_stop_token_ids(
    given: Any, stop: Any, stop_token_ids: Any
) -> None:
    before = repr(given)
    found = with_stop_ids(given)
    extra = found.get("extra_body", {})
    assert (found.get("stop"), found.get("stop_token_ids")) == (stop, stop_token_ids)
    assert not extra.keys() & {"stop", "stop_token_ids"} or stop_token_ids is None
    assert extra.get("top_k") == given.get("extra_body", {}).get("top_k")
    assert all(type(each) is int for each in found.get("stop_token_ids") or ())
    assert repr(given) == before
    assert with_stop_ids(found) == found


@pytest.mark.parametrize("wrong", [[True], [None], [-1], [2.0], [["a"]], True, -1, 2.5])
def test_a_stop_that_is_neither_text_nor_a_token_id_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"stop has .*, expected text or a token id"):
        with_stop_ids({"stop": wrong})


class Trainer:
    """Answers the requests of a stepped episode."""

    async def ask(self, request: Request) -> Answer:
        return Answer(text=TEXT)


async def opened(kind: str, stack: AsyncExitStack) -> APIServer:
    """Return a server of this type, or an imitation in this process, that answers `TEXT`."""
    server: Any
    if kind in TYPES:
        engine = await stack.enter_async_context(ScriptedEngine(Script(answers=(TEXT,))))
        server = ServerManager([config_of(engine, kind)]).servers[0]
    elif kind == "stepwise":
        server = _OuterPolicy(TOKENIZER)
        stack.callback(answerer.reset, answerer.set(Trainer()))
    elif kind == "check":
        server = ProbeEngine(TOKENIZER)
        server.script([TEXT])
    else:
        server = ServerHarness(respond=lambda request: TEXT)
    server.tokenizer = TOKENIZER
    stack.push_async_callback(server.close)
    return server


@pytest.mark.parametrize("kind", [*TYPES, "harness", "stepwise"])
@pytest.mark.parametrize(
    ("asked", "text", "sampled", "reason"),
    [
        ({}, TEXT, f"{TEXT}<eos>", "stop"),
        ({"stop": [EOS]}, TEXT, f"{TEXT}<eos>", "stop"),
        ({"max_tokens": 3}, "one", "one", "length"),
        ({"max_tokens": len(TEXT) + 1}, TEXT, f"{TEXT}<eos>", "stop"),
        ({"stop": [H, "four"]}, "one two t", "one two th", "stop"),
        ({"stop": H}, "one two t", "one two th", "stop"),
        ({"stop": ["three", "two"]}, "one ", "one two", "stop"),
        ({"stop": ["two", H], "max_tokens": 6}, "one tw", "one tw", "length"),
        ({"extra_body": {"stop": ["two"]}}, "one ", "one two", "stop"),
    ],
)
async def test_limits_and_stops_end_the_answers_of_every_server(
    kind: str, asked: dict[str, Any], text: str, sampled: str, reason: str
) -> None:
    asked = {"n": 2, "max_tokens": 99, **asked}
    async with AsyncExitStack() as stack:
        server = await opened(kind, stack)
        chat = await server.chat_completion(messages=[USER], **asked)
        plain = await server.completion(prompt="hi", **asked)
        found = [(c.message.content, c.finish_reason) for c in chat.choices]
        assert found + [(c.text, c.finish_reason) for c in plain.choices] == [(text, reason)] * 4
        if kind != "openai":  # it has no token ids
            tokens = await server.tokens_and_logprobs_completion(prompt="hi", **asked)
            assert [TOKENIZER.decode(each) for each in tokens.output_tokens] == [sampled] * 2
            assert tokens.finish_reasons == [reason] * 2


async def test_the_check_gives_graders_whole_texts_within_the_limit() -> None:
    async with AsyncExitStack() as stack:
        server = await opened("check", stack)
        whole = await server.completion(prompt="hi", stop=["two"])
        cut = await server.completion(prompt="hi", stop=["two"], max_tokens=5)
    assert [each.choices[0].text for each in (whole, cut)] == [TEXT, TEXT[:5]]
    assert [each.choices[0].finish_reason for each in (whole, cut)] == ["stop", "length"]


@pytest.mark.parametrize("kind", TYPES[1:])
@pytest.mark.parametrize(
    ("stop", "shown", "sampled", "reason"),
    [
        ([EOS], TEXT, f"{TEXT}<eos>", None),
        ([H, "four"], "one two t", "one two th", H),
        (["two", H], "one ", "one two", "two"),
    ],
)
async def test_the_stop_token_is_sampled_and_trained_but_not_shown(
    kind: str, stop: Any, shown: str, sampled: str, reason: Any
) -> None:
    async with ScriptedEngine(Script(answers=(TEXT,))) as engine:
        manager = ServerManager([config_of(engine, kind)])
        async with manager.managed_server(tokenizer=TOKENIZER) as managed:
            manager.servers[0].tokenizer = TOKENIZER  # type: ignore[attr-defined]
            reply = await managed.chat_completion(messages=[USER], stop=stop, max_tokens=99)
            (choice,), (first,) = reply.choices, managed.nodes
            again = [USER, {"role": "assistant", "content": choice.message.content}, USER]
            await managed.chat_completion(messages=again, stop=stop, max_tokens=99)
            (node,) = managed.nodes
        await manager.close()
    trained = [token for token in first.masked_tokens if token != -100]
    assert (choice.message.content, TOKENIZER.decode(trained)) == (shown, sampled)
    assert choice.model_dump().get("stop_reason") == reason
    assert node.tokens[: len(first.tokens)] == first.tokens


async def test_an_original_environments_call_passes_through_harness_and_session() -> None:
    harness = ServerHarness(respond=lambda request: "hello", tokenizer=TOKENIZER)
    manager = ServerManager([APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")])
    manager.servers = [harness]
    async with manager.managed_server(tokenizer=TOKENIZER) as managed:
        reply = await managed.chat_completion(
            messages=[USER], n=2, max_tokens=9, stop=[TOKENIZER.eos_token_id, "\n"]
        )
        assert [c.message.content for c in reply.choices] == ["hello"] * 2
        assert len(managed.get_state()["nodes"]) == 2
    await manager.completion(prompt="x", stop=[TOKENIZER.eos_token_id])
    asked = [(r.get("stop"), r["stop_token_ids"]) for r in harness.requests]
    assert asked == [(["\n"], [EOS]), (None, [EOS])]
