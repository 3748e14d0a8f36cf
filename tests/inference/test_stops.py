"""`stop` with token ids, as original environments pass it: `stop=[tokenizer.eos_token_id]`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.scripted_engine import ByteTokenizer, Script, ScriptedEngine
from atroposlib.inference.servers.stops import with_stop_ids

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


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("stop", "text"),
    [([EOS], TEXT), ([H, "four"], "one two t"), (["two", H], "one "), (H, "one two t")],
)
async def test_every_server_type_ends_chats_and_texts_at_stop_ids(
    kind: str, stop: Any, text: str
) -> None:
    async with ScriptedEngine(Script(answers=(TEXT,))) as engine:
        manager = ServerManager([config_of(engine, kind)])
        manager.servers[0].tokenizer = TOKENIZER  # type: ignore[attr-defined]
        chat = await manager.chat_completion(messages=[USER], stop=stop, max_tokens=99)
        plain = await manager.completion(prompt="hi", stop=stop, max_tokens=99)
        await manager.close()
    found = [(c.message.content, c.finish_reason) for c in chat.choices]
    assert [*found, (plain.choices[0].text, plain.choices[0].finish_reason)] == [(text, "stop")] * 2


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
