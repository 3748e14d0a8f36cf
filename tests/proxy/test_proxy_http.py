"""The proxy's endpoints: shapes, errors, sessions, limits, tokens, who may do what."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_proxy import (
    ENGINE_URL,
    WEATHER,
    Held,
    Proxy,
    call_text,
    events_of,
    trained_text,
    weather_agent,
)

from atroposlib.errors import ConfigError, EngineProtocolError, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, ServerHarness, create_chat_completion
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.proxy import chat
from atroposlib.proxy.command import create_app, main
from atroposlib.proxy.sessions import SessionLimits
from tests.inference.helpers_templates import CHATML, make_tokenizer

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with Proxy() as proxy:
        yield proxy


def chat_url(uuid: str) -> str:
    return f"/{uuid}/v1/chat/completions"


async def test_health_models_and_servers_describe_the_proxy(proxy: Proxy) -> None:
    await proxy.open()
    assert (await proxy.client.get("/health")).json() == {
        "status": "ok",
        "model": "tiny",
        "sessions": 1,
        "servers": 1,
        "healthy_servers": 1,
    }
    models = (await proxy.client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [(m["id"], m["owned_by"]) for m in models["data"]] == [("tiny", "atropos")]
    for path in ("/v1/models/gpt-4o", "/some-uuid/v1/models/org/name"):
        assert (await proxy.client.get(path)).json() == models["data"][0]
    assert (await proxy.client.get("/servers")).json()["servers"] == [
        {
            "index": 0,
            "base_url": ENGINE_URL,
            "healthy": True,
            "model_name": "tiny",
            "server_type": "vllm",
        }
    ]


async def test_session_is_created_listed_and_deleted(proxy: Proxy) -> None:
    created = await proxy.post("/sessions/create", {})
    originals = {"uuid", "model_name", "tool_parser", "base_url", "created_at"}
    assert set(created) == {*originals, "agent_base_url"}
    assert (created["model_name"], created["tool_parser"]) == ("tiny", "hermes")
    assert created["base_url"] == ENGINE_URL
    uuid = created["uuid"]
    await proxy.post(created["agent_base_url"] + "/chat/completions", HELLO)
    (entry,) = (await proxy.client.get("/sessions")).json()["sessions"]
    assert entry["uuid"] == uuid
    assert entry["num_nodes"] == 1
    assert abs(entry["last_accessed"] - entry["created_at"]) < 5
    deleted = await proxy.client.delete(f"/{uuid}")
    assert deleted.json() == {"status": "deleted", "uuid": uuid}
    for answer in (
        await proxy.client.get(f"/{uuid}/nodes"),
        await proxy.client.delete(f"/{uuid}"),
        await proxy.client.post(chat_url(uuid), json=HELLO),
    ):
        assert answer.status_code == 404
        assert set(answer.json()["error"]) >= {"message", "type", "code"}
    assert (await proxy.client.get("/sessions")).json() == {"sessions": []}


async def test_unknown_engine_is_404_and_a_known_one_is_used(proxy: Proxy) -> None:
    assert await proxy.open(base_url=ENGINE_URL + "/")
    refused = await proxy.client.post("/sessions/create", json={"base_url": "http://nowhere"})
    assert refused.status_code == 404
    assert ENGINE_URL in refused.json()["error"]["message"]


async def test_chat_answers_in_openais_shape_with_usage() -> None:
    async with Proxy(lambda request: "ab"[request.choice]) as proxy:
        uuid = await proxy.open()
        answer = await proxy.post(chat_url(uuid), {**HELLO, "n": 2, "model": "gpt-4"})
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "tiny"
        assert answer["choices"] == [
            {
                "index": i,
                "message": {"role": "assistant", "content": "ab"[i]},
                "logprobs": None,
                "finish_reason": "stop",
            }
            for i in range(2)
        ]
        num_prompt = len("<user>hi") + 1 + len("<assistant>")
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": 4,
            "total_tokens": num_prompt + 4,
        }
        assert [trained_text(node) for node in await proxy.nodes(uuid)] == ["a<eos>", "b<eos>"]


async def test_what_the_agent_asks_for_reaches_the_engine_and_the_rest_is_ignored(
    proxy: Proxy,
) -> None:
    uuid = await proxy.open()
    asked = {
        "top_p": 0.5,
        "seed": 3,
        "stop": ["x"],
        "max_completion_tokens": 4,
        "frequency_penalty": 0.1,
    }
    empty = {"logit_bias": {}, "stop_token_ids": [], "tools": [], "n": None}
    ignored = {
        **empty,
        "user": "me",
        "store": True,
        "service_tier": "auto",
        "reasoning_effort": "low",
    }
    formats = {"response_format": {"type": "text"}, "parallel_tool_calls": False}
    await proxy.post(chat_url(uuid), {**HELLO, **asked, **ignored, **formats})
    (sent,) = proxy.engine.requests
    expected = {**asked, "max_tokens": 4, "temperature": 1.0, "n": 1, "model": "tiny"}
    del expected["max_completion_tokens"]
    assert set(sent) - set(expected) == {"input_ids", "prompt"}
    assert {name: sent[name] for name in expected} == expected
    await proxy.post(chat_url(uuid), HELLO)
    assert proxy.engine.requests[1]["max_tokens"] == 1024


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({**HELLO, "n": 0}, "n"),
        ({**HELLO, "temperature": "hot"}, "temperature"),
        ({**HELLO, "top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({**HELLO, "functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({**HELLO, "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({**HELLO, "stop": [True]}, "stop.str"),
        ({**HELLO, "stop": -1}, "stop.str"),
        ({**HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_requests_that_cannot_be_answered_are_400_and_name_the_field(
    proxy: Proxy, body: dict[str, Any], param: str
) -> None:
    uuid = await proxy.open()
    answer = await proxy.client.post(chat_url(uuid), json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert proxy.engine.requests == []
    assert await proxy.nodes(uuid) == []


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]", b'{"messages": [', b"\xff\xfe"])
async def test_bodies_that_are_no_json_object_are_400(proxy: Proxy, content: bytes) -> None:
    uuid = await proxy.open()
    answer = await proxy.client.post(chat_url(uuid), content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


NAMES = (
    *("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template"),
    *("tokenize", "return_dict", "add_generation_prompt", "sanitize_control_tokens"),
)


async def test_variables_that_would_replace_parameters_of_the_template_are_400(
    proxy: Proxy,
) -> None:
    proxy.sessions.tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    uuid = await proxy.open()
    for name, value in itertools.product(NAMES, (1, None)):
        body = {**HELLO, "chat_template_kwargs": {name: value}}
        answer = await proxy.client.post(chat_url(uuid), json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
        assert repr(name) in answer.json()["error"]["message"]
    fixed = await proxy.open(sampling={"chat_template_kwargs": {"self": 1}})
    answer = await proxy.client.post(chat_url(fixed), json=HELLO)
    assert (answer.status_code, proxy.engine.requests) == (400, [])


@pytest.mark.parametrize("value", [[1], None])
async def test_variables_and_tools_that_the_template_cannot_use_are_400(
    proxy: Proxy, value: Any
) -> None:
    template = (
        CHATML
        + "{{ style + 'x' }}{% for t in tools or () %}{{ t.function.name + t.function.x }}{% endfor %}"
    )
    proxy.sessions.tokenizer = make_tokenizer(template, eos="<|im_end|>")
    uuid = await proxy.open()
    fine = {**HELLO, "chat_template_kwargs": {"style": "plain", "any key": value}}
    await proxy.post(chat_url(uuid), fine)
    odd = {"type": "function", "function": {"name": "f", "x": value}}
    for changes in ({"chat_template_kwargs": {"style": value}}, {"tools": [odd]}):
        answer = await proxy.client.post(chat_url(uuid), json={**fine, **changes})
        assert answer.status_code == 400
        assert "the chat template refuses" in answer.json()["error"]["message"]


async def test_response_format_is_refused_where_the_engine_cannot_do_it(proxy: Proxy) -> None:
    uuid = await proxy.open()
    asked = {**HELLO, "response_format": {"type": "json_object"}}
    await proxy.post(chat_url(uuid), asked)  # vLLM's routes take it
    assert proxy.engine.requests[0]["response_format"] == {"type": "json_object"}
    proxy.engine.config = proxy.engine.config.model_copy(update={"server_type": "sglang"})
    refused = await proxy.client.post(chat_url(uuid), json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


async def test_logprobs_are_those_of_the_node(proxy: Proxy) -> None:
    uuid = await proxy.open()
    answer = await proxy.post(chat_url(uuid), {**HELLO, "logprobs": True})
    (node,) = await proxy.nodes(uuid)
    shown = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in shown] == [*"hello", "<eos>"]
    assert [entry["logprob"] for entry in shown] == node["logprobs"][-6:]
    assert shown[0]["bytes"] == [ord("h")]


async def test_tokens_are_decoded_one_by_one_off_the_event_loop(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    singles: set[bool] = set()

    def decode(tokens: Any, **options: Any) -> str:
        if len(tokens) == 1 and tokens[0] != ByteTokenizer.eos_token_id:
            singles.add(threading.current_thread() is threading.main_thread())
        return ByteTokenizer().decode(tokens, **options)

    uuid = await proxy.open()
    monkeypatch.setattr(proxy.tokenizer, "decode", decode)
    await proxy.post(chat_url(uuid), {**HELLO, "logprobs": True})
    assert singles == {False}


async def test_tool_choice_none_leaves_the_text_alone() -> None:
    async with Proxy(weather_agent) as proxy:
        uuid = await proxy.open()
        body = {**HELLO, "tools": [WEATHER], "tool_choice": "none"}
        (choice,) = (await proxy.post(chat_url(uuid), body))["choices"]
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


async def test_stream_has_chunks_tool_call_deltas_usage_and_an_end() -> None:
    async with Proxy(weather_agent) as proxy:
        uuid = await proxy.open()
        body = {**HELLO, "tools": [WEATHER], "stream": True}
        answer = await proxy.client.post(
            chat_url(uuid), json={**body, "stream_options": {"include_usage": True}}
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("data: [DONE]\n\n")
        *chunks, last, counts = events_of(answer.text)
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "Let me look."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        assert calls[0]["function"]["name"] == "weather"
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert json.loads(arguments) == {"city": "Oslo"}
        assert last["choices"][0]["finish_reason"] == "tool_calls"
        assert last["choices"][0]["delta"] == {}
        assert counts["choices"] == []
        assert counts["usage"]["total_tokens"] > 0
        assert len(await proxy.nodes(uuid)) == 1


async def test_an_event_is_one_line_whatever_the_model_wrote() -> None:
    said = "a\u2028b\u2029c\x85d"
    async with Proxy(lambda request: said) as proxy:
        uuid = await proxy.open()
        answer = await proxy.client.post(chat_url(uuid), json={**HELLO, "stream": True})
        _, chunk, *_ = events_of(answer.text)  # str.splitlines, as some clients do
        assert chunk["choices"][0]["delta"]["content"] == said


async def test_render_shows_the_prompt_and_makes_no_node(proxy: Proxy) -> None:
    uuid = await proxy.open()
    url = f"/{uuid}/v1/chat/completions/render"
    fresh = await proxy.post(url, HELLO)
    assert fresh["prompt_text"] == "<user>hi<eos><assistant>"
    assert fresh["token_ids"] == proxy.tokenizer.encode(fresh["prompt_text"], False)
    assert fresh["num_tokens"] == len(fresh["token_ids"])
    assert await proxy.nodes(uuid) == []
    await proxy.post(chat_url(uuid), HELLO)
    (node,) = await proxy.nodes(uuid)
    more = [
        *HELLO["messages"],
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "so"},
    ]
    rendered = await proxy.post(url, {"messages": more})
    assert rendered["token_ids"][: len(node["tokens"])] == node["tokens"]
    await proxy.post(chat_url(uuid), {"messages": more})
    assert proxy.engine.requests[-1]["input_ids"] == rendered["token_ids"]
    assert proxy.engine.requests[-1]["prompt"] == rendered["prompt_text"]


async def test_text_completions_continue_their_sequence() -> None:
    async with Proxy(lambda request: "bc") as proxy:
        uuid = await proxy.open()
        url = f"/{uuid}/v1/completions"
        first = await proxy.post(url, {"prompt": "a", "max_tokens": 2, "logprobs": 0})
        assert first["object"] == "text_completion"
        assert first["choices"][0]["text"] == "bc"
        assert first["choices"][0]["finish_reason"] == "length"
        assert first["choices"][0]["logprobs"]["tokens"] == ["b", "c"]
        await proxy.post(url, {"prompt": ["abcd"], "max_tokens": 2})
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == "bcbc"
        for bad in ({"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}):
            assert (await proxy.client.post(url, json=bad)).status_code == 400
        streamed = await proxy.client.post(url, json={"prompt": "z", "stream": True})
        event, end = events_of(streamed.text)
        assert event["choices"][0]["text"] == "bc"
        assert end["choices"][0]["finish_reason"] == "stop"


async def test_key_selects_the_session_for_agents_that_cannot_change_the_path() -> None:
    async with Proxy(token="let-me-in") as proxy:
        created = await proxy.client.post(
            "/sessions/create", json={}, headers={"Authorization": "Bearer let-me-in"}
        )
        uuid = created.json()["uuid"]
        for headers in ({"Authorization": f"Bearer {uuid}"}, {"x-api-key": uuid}):
            await proxy.post("/v1/chat/completions", HELLO, headers=headers)
        assert len(await proxy.nodes(uuid)) == 2
        for headers in ({}, {"Authorization": "Bearer let-me-in"}):
            refused = await proxy.client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert refused.status_code == 401
        stray = {"Authorization": "Bearer 00000000-0000-4000-8000-000000000000"}
        refused = await proxy.client.post("/v1/chat/completions", json=HELLO, headers=stray)
        assert refused.status_code == 404


async def test_control_needs_the_token_and_the_session_its_uuid() -> None:
    async with Proxy(token="let-me-in") as proxy:
        for method, path in (
            ("POST", "/sessions/create"),
            ("GET", "/sessions"),
            ("GET", "/servers"),
            ("POST", "/setup"),
        ):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = await proxy.client.request(method, path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer let-me-in"}
        assert (await proxy.client.get("/sessions", headers=headers)).status_code == 200
        created = await proxy.client.post("/sessions/create", json={}, headers=headers)
        uuid = created.json()["uuid"]
        await proxy.post(chat_url(uuid), HELLO)
        assert len(await proxy.nodes(uuid)) == 1
        assert (await proxy.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://example.org"}, {"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example"}],
)
async def test_web_pages_get_no_answer(proxy: Proxy, headers: dict[str, str]) -> None:
    url = "http://127.0.0.1:9100/sessions/create"
    answer = await proxy.client.post(url, json={}, headers=headers)
    assert answer.status_code == 403
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert proxy.sessions.open_sessions() == []
    assert (await proxy.client.post(url, json={})).status_code == 200


async def test_a_private_proxy_has_an_agents_own_session_and_nothing_else() -> None:
    async with Proxy(is_private=True) as proxy:
        session = await proxy.sessions.open()
        uuid = session.uuid
        await proxy.post(chat_url(uuid), HELLO)
        for method, path in [
            ("GET", "/health"),
            ("GET", "/servers"),
            ("GET", "/sessions"),
            ("POST", "/sessions/create"),
            ("POST", "/setup"),
            ("GET", f"/{uuid}/nodes"),
            ("DELETE", f"/{uuid}/nodes"),
            ("DELETE", f"/{uuid}"),
        ]:
            answer = await proxy.client.request(method, path)
            assert answer.status_code == 404, path
        assert len(session.nodes()) == 1


async def test_sequences_of_a_session_with_an_owner_are_not_the_agents_to_drop(
    proxy: Proxy,
) -> None:
    key = "0123456789abcdef"
    uuid = await proxy.open(owner_key=key)
    await proxy.post(chat_url(uuid), HELLO)
    owner = {"X-Atropos-Owner-Key": key}
    wrong = {"X-Atropos-Owner-Key": "key of another owner"}
    for method, path in [
        ("GET", f"/{uuid}/nodes"),
        ("DELETE", f"/{uuid}/nodes"),
        ("DELETE", f"/{uuid}"),
    ]:
        for headers in ({}, wrong):
            answer = await proxy.client.request(method, path, headers=headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "not_the_owner"
        answer = await proxy.client.request(method, path, headers=owner)
        assert answer.status_code == 200


async def test_sampling_that_would_make_logprobs_wrong_is_dropped_and_reported(
    proxy: Proxy,
) -> None:
    uuid = await proxy.open(keeps_distribution=True, sampling={"temperature": 0.7})
    lies = {
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "min_tokens": 3,
        "seed": 1,
        "temperature": 0.0,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 100.0},
        "response_format": {"type": "json_object"},
    }
    for stream in (False, True):
        body = {**HELLO, **lies, "max_tokens": 9, "stop": ["x"], "stream": stream}
        answer = await proxy.client.post(chat_url(uuid), json=body)
        assert answer.status_code == 200, answer.text
        assert set(answer.headers["X-Atropos-Dropped"].split(", ")) == set(lies)
        sent = proxy.engine.requests[-1]
        assert (sent["temperature"], sent["max_tokens"], sent["stop"]) == (0.7, 9, ["x"])
        assert not (lies.keys() - {"temperature"}) & sent.keys()
    honest = await proxy.client.post(chat_url(uuid), json={**HELLO, "max_tokens": 4})
    assert "X-Atropos-Dropped" not in honest.headers


async def test_an_answer_that_cannot_be_written_is_not_kept(proxy: Proxy) -> None:
    session = await proxy.sessions.open()
    ask = chat.read(chat.AgentChatBody(messages=HELLO["messages"]))

    def unwritable(answer: Any) -> bytes:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    with pytest.raises(UnicodeEncodeError):
        await session.run(session.ask(ask, unwritable))
    assert (session.nodes(), session.last_messages) == ([], [])
    await session.run(session.ask(ask, chat.write))
    assert len(session.nodes()) == 1


async def test_bodies_that_nest_too_deeply_are_400() -> None:
    deep = b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    inside = json.dumps('{"a":' * 100_000).encode()
    call = b'{"id": "c", "function": {"name": "f", "arguments": ' + inside + b"}}"
    said = b'{"messages": [{"role": "assistant", "tool_calls": [' + call + b"]}]}"
    async with Proxy() as proxy:
        uuid = await proxy.open()
        for path in (chat_url(uuid), f"/{uuid}/v1/messages", "/sessions/create"):
            answer = await proxy.client.post(path, content=deep)
            assert answer.status_code == 400, answer.text
        answer = await proxy.client.post(chat_url(uuid), content=said)
        assert answer.status_code in (200, 400), answer.text


async def test_a_session_without_a_parser_has_none_whatever_the_manager_prefers() -> None:
    async with Proxy(lambda request: call_text("Oslo")) as proxy:
        proxy.manager.tool_parser = "hermes"
        uuid = await proxy.open(tool_parser=None)
        answer = await proxy.post(chat_url(uuid), {**HELLO, "tools": [WEATHER]})
        assert answer["choices"][0]["message"]["content"] == call_text("Oslo")


async def test_stop_strings_are_cut_in_every_dialect() -> None:
    async with Proxy(lambda request: "Act\nObservation:") as proxy:
        uuid = await proxy.open()
        chatted = await proxy.post(chat_url(uuid), {**HELLO, "stop": "\nObservation:<eos>"})
        assert chatted["choices"][0]["message"]["content"] == "Act\nObservation:"
        chatted = await proxy.post(chat_url(uuid), {**HELLO, "stop": [":"]})
        assert chatted["choices"][0]["message"]["content"] == "Act\nObservation"
        body = {**HELLO, "max_tokens": 99, "stop_sequences": [":"]}
        message = await proxy.post(f"/{uuid}/v1/messages", body)
        assert message["content"] == [{"type": "text", "text": "Act\nObservation"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ":")
        text = await proxy.post(f"/{uuid}/v1/completions", {"prompt": "Q", "stop": ":"})
        assert text["choices"][0]["text"] == "Act\nObservation"
        trained = {trained_text(node) for node in await proxy.nodes(uuid)}
        assert trained == {"Act\nObservation:<eos>", "Act\nObservation:"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", HELLO),
        ("completions", {"prompt": "Q"}),
        ("messages", {**HELLO, "max_tokens": 9}),
        ("responses", {"input": "hi"}),
    ],
)
async def test_token_ids_in_stop_reach_the_engine_from_every_dialect(
    proxy: Proxy, path: str, body: dict[str, Any]
) -> None:
    fixed = await proxy.open(sampling={"stop": [7, "b"]})
    for stop in ([2, "b"], 2):
        await proxy.post(f"/{await proxy.open()}/v1/{path}", {**body, "stop": stop})
    await proxy.post(f"/{fixed}/v1/{path}", {**body, "stop_token_ids": [2]})
    asked = [(r.get("stop"), r["stop_token_ids"]) for r in proxy.engine.requests]
    assert asked == [(["b"], [2]), (None, [2]), (["b"], [2, 7])]


async def test_idle_and_old_sessions_expire_with_410() -> None:
    async with Proxy(limits=SessionLimits(idle_s=60, life_s=100)) as proxy:
        idle, busy = await proxy.open(), await proxy.open()
        proxy.clock.now_s += 59
        await proxy.post(chat_url(busy), HELLO)
        proxy.clock.now_s += 2
        gone = await proxy.client.post(chat_url(idle), json=HELLO)
        assert gone.status_code == 410
        assert gone.json()["error"]["code"] == "session_expired"
        assert "60 s" in gone.json()["error"]["message"]
        await proxy.post(chat_url(busy), HELLO)
        assert (await proxy.client.get("/health")).json()["sessions"] == 1
        proxy.clock.now_s += 39
        gone = await proxy.client.get(f"/{busy}/nodes")
        assert gone.status_code == 410
        assert "100 s" in gone.json()["error"]["message"]
        assert (await proxy.client.delete(f"/{busy}")).status_code == 410
        assert proxy.engine.num_assigned["train"] == 0


async def test_session_that_is_answered_is_not_idle() -> None:
    async with Proxy(limits=SessionLimits(idle_s=60)) as proxy:
        uuid = await proxy.open()
        held = Held(proxy.engine)
        call = asyncio.create_task(proxy.post(chat_url(uuid), HELLO))
        await held.asked.wait()
        proxy.clock.now_s += 600
        await proxy.sessions.expire()
        held.go_on.set()
        await call
        proxy.clock.now_s += 59
        assert len(await proxy.nodes(uuid)) == 1


async def test_sessions_at_the_same_time_keep_apart() -> None:
    async with Proxy(lambda request: request.prompt.split("<user>")[1][:3]) as proxy:

        async def talk(number: int) -> tuple[str, list[dict[str, Any]]]:
            name = f"{number:03}"
            uuid = await proxy.open()
            messages: list[dict[str, Any]] = []
            for _ in range(3):
                messages.append({"role": "user", "content": f"{name}?"})
                answer = await proxy.post(chat_url(uuid), {"messages": messages})
                messages.append(answer["choices"][0]["message"])
            return name, await proxy.nodes(uuid)

        for name, nodes in await asyncio.gather(*map(talk, range(12))):
            (node,) = nodes
            assert trained_text(node) == f"{name}<eos>" * 3


async def test_deleting_a_session_cancels_what_the_engine_is_doing_for_it(proxy: Proxy) -> None:
    uuid = await proxy.open()
    held = Held(proxy.engine)
    call = asyncio.create_task(proxy.client.post(chat_url(uuid), json=HELLO))
    await held.asked.wait()
    assert (await proxy.client.delete(f"/{uuid}")).status_code == 200
    assert (await call).status_code == 404
    assert held.cancelled.is_set()


async def test_session_deleted_while_a_body_arrives_asks_the_engine_nothing(proxy: Proxy) -> None:
    uuid = await proxy.open()
    arrives, deleted = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        content = json.dumps(HELLO).encode()
        yield content[:9]
        arrives.set()
        await deleted.wait()
        yield content[9:]

    call = asyncio.ensure_future(proxy.client.post(chat_url(uuid), content=body()))
    await arrives.wait()
    await proxy.client.delete(f"/{uuid}")
    deleted.set()
    answer = await call
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "session_not_found"
    assert proxy.engine.requests == []


async def test_limits_of_sessions_sequences_and_bodies_are_kept() -> None:
    limits = SessionLimits(max_sessions=2, max_nodes=2, max_body_bytes=1000)
    async with Proxy(limits=limits) as proxy:
        uuid = await proxy.open()
        await proxy.open()
        refused = await proxy.client.post("/sessions/create", json={})
        assert refused.status_code == 429
        await proxy.post(chat_url(uuid), {**HELLO, "n": 2})
        refused = await proxy.client.post(chat_url(uuid), json=HELLO)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "too_many_sequences"
        long = {"messages": [{"role": "user", "content": "x" * 1000}]}
        assert (await proxy.client.post(chat_url(uuid), json=long)).status_code == 413


async def test_requests_at_the_same_time_keep_the_limit_of_sequences() -> None:
    async with Proxy(limits=SessionLimits(max_nodes=4)) as proxy:
        uuid = await proxy.open()
        asking = [proxy.client.post(chat_url(uuid), json={**HELLO, "n": n}) for n in (1, 2, 2, 9)]
        statuses = [answer.status_code for answer in await asyncio.gather(*asking)]
        assert statuses == [200, 200, 400, 400]
        assert (await proxy.client.post(chat_url(uuid), json=HELLO)).status_code == 200
        nodes = await proxy.client.get(f"/{uuid}/nodes")
        assert len(nodes.json()["nodes"]) == 4


async def test_sessions_opened_at_the_same_time_keep_the_limit() -> None:
    async with Proxy(limits=SessionLimits(max_sessions=10)) as proxy:
        opening = [proxy.client.post("/sessions/create", json={}) for _ in range(30)]
        statuses = [answer.status_code for answer in await asyncio.gather(*opening)]
        assert sorted(statuses) == [200] * 10 + [429] * 20
        await proxy.sessions.close_all()
        assert await proxy.open()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineUnavailable("engine is down"), 503, "engine_unavailable"),
        (ConnectionResetError("reset"), 503, "engine_unavailable"),
        (EngineProtocolError("half an answer"), 502, "engine_protocol_error"),
        (EngineHttpRejected("no such model", status=404), 502, "engine_rejected"),
        (EngineHttpRejected("bad seed", status=400), 400, "engine_rejected"),
        (
            EngineHttpRejected("This model's maximum context length is 8 tokens", status=400),
            400,
            "context_length_exceeded",
        ),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
async def test_failures_of_the_engine_have_a_status_and_a_reason(
    proxy: Proxy, error: Exception, status: int, code: str
) -> None:
    uuid = await proxy.open()
    proxy.engine.fail(error, times=3)
    answer = await proxy.client.post(chat_url(uuid), json=HELLO)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert str(error) in answer.json()["error"]["message"]
    assert await proxy.nodes(uuid) == []


async def test_engine_that_says_later_is_passed_on_with_its_time(proxy: Proxy) -> None:
    uuid = await proxy.open()

    async def later(**kwargs: Any) -> Any:
        raise EngineUnavailable("too many requests", status=429, retry_after_s=2.5)

    proxy.engine.tokens_and_logprobs_completion = later  # type: ignore[method-assign]
    answer = await proxy.client.post(chat_url(uuid), json=HELLO)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "3"


async def test_context_of_a_session_is_kept_and_a_longer_prompt_is_too_long() -> None:
    async with Proxy(lambda request: "x" * 100) as proxy:
        uuid = await proxy.open(max_context_tokens=40, max_tokens=50)
        answer = await proxy.post(chat_url(uuid), HELLO)
        assert answer["usage"]["total_tokens"] == 40
        assert answer["choices"][0]["finish_reason"] == "length"
        long = {"messages": [{"role": "user", "content": "x" * 40}]}
        own_limit = {"max_context_tokens": 1000}  # cannot raise the session's
        refused = await proxy.client.post(chat_url(uuid), json={**long, **own_limit})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 40 tokens" in refused.json()["error"]["message"]


async def test_sampling_of_the_session_replaces_the_agents(proxy: Proxy) -> None:
    uuid = await proxy.open(sampling={"temperature": 0.7, "top_p": 1.0}, split="eval")
    await proxy.post(chat_url(uuid), {**HELLO, "temperature": 0, "top_p": 0.1, "seed": 5})
    (sent,) = proxy.engine.requests
    assert (sent["temperature"], sent["top_p"], sent["seed"]) == (0.7, 1.0, 5)
    assert len(proxy.engine.eval_request_timings) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"sampling": {"messages": []}},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"top_p": 2.0}},
        {"tool_parser": "hermse"},
        {"max_tokens": 0},
        {"split": "test"},
        {"max_context_tokens": "many"},
    ],
)
async def test_sessions_that_cannot_be_are_refused_when_they_are_opened(
    proxy: Proxy, body: dict[str, Any]
) -> None:
    refused = await proxy.client.post("/sessions/create", json=body)
    assert refused.status_code == 400
    assert next(iter(body)).split("_")[0] in refused.json()["error"]["message"]
    assert proxy.sessions.open_sessions() == []


async def test_setup_replaces_the_engines_for_new_sessions(proxy: Proxy) -> None:
    before = await proxy.open()
    body = {"model_name": "other", "servers": [{"base_url": "http://127.0.0.1:8/v1"}]}
    answer = await proxy.post("/setup", body)
    assert answer == {"status": "ok", "servers": 1, "model_name": "other"}
    (server,) = (await proxy.client.get("/servers")).json()["servers"]
    assert (server["base_url"], server["server_type"]) == ("http://127.0.0.1:8/v1", "vllm")
    assert (await proxy.post("/sessions/create", {}))["model_name"] == "other"
    await proxy.post(chat_url(before), HELLO)
    assert len(proxy.engine.requests) == 1
    assert (await proxy.client.post("/setup", json={"model_name": "x"})).status_code == 400


async def test_sampling_of_the_session_that_is_null_is_not_given(proxy: Proxy) -> None:
    uuid = await proxy.open(sampling={"max_tokens": None}, max_context_tokens=40)
    await proxy.post(chat_url(uuid), {**HELLO, "max_tokens": 3})
    assert proxy.engine.requests[0]["max_tokens"] == 3


async def test_tree_sessions_keep_every_turn_as_a_node(proxy: Proxy) -> None:
    uuid = await proxy.open(track_tree=True)
    await proxy.post(chat_url(uuid), HELLO)
    more = [
        *HELLO["messages"],
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "so"},
    ]
    await proxy.post(chat_url(uuid), {"messages": more})
    assert len(await proxy.nodes(uuid)) == 2


async def test_unknown_routes_are_json_too(proxy: Proxy) -> None:
    answer = await proxy.client.get("/v1/embeddings/x/y")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_route"
    answer = await proxy.client.get("/sessions/create")
    assert answer.status_code == 405


def test_proxy_does_not_stand_on_a_proxy() -> None:
    config = APIServerConfig(model_name="m", base_url=ENGINE_URL, server_type="vllm")
    manager = ServerManager([config], proxy_url="http://127.0.0.1:9100")
    with pytest.raises(ConfigError, match="ATROPOS_PROXY_URL"):
        create_app(manager, ByteTokenizer())


def test_manager_that_was_made_without_its_constructor_serves_a_synchronous_client() -> None:
    from fastapi.testclient import TestClient

    engine = ServerHarness(respond=lambda request: "hello")
    engine.config = SimpleNamespace(model_name="m")  # type: ignore[assignment]
    manager = object.__new__(ServerManager)
    manager.max_n_completions = 8
    manager.reasoning_config = None
    manager.servers = [engine]
    app = create_app(server_manager=manager, tokenizer=ByteTokenizer(), model_name="m")
    client = TestClient(app)
    uuid = client.post("/sessions/create", json={}).json()["uuid"]
    for turn in range(2):
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        messages = [*said * turn, {"role": "user", "content": "hi"}]
        answer = client.post(f"/{uuid}/v1/chat/completions", json={"messages": messages})
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert len(client.get(f"/{uuid}/nodes").json()["nodes"]) == 1


async def test_api_without_token_ids_is_501_unless_made_up_tokens_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    async with Proxy() as proxy:
        server = OpenAIServer(APIServerConfig(model_name="gpt", base_url=ENGINE_URL, api_key="x"))
        proxy.manager.servers = [server]
        refused = await proxy.client.post("/sessions/create", json={})
        assert refused.status_code == 501
        assert "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER" in refused.json()["error"]["message"]
        monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")

        async def plain(**kwargs: Any) -> Any:
            return create_chat_completion("made by the API")

        server.chat_completion = plain  # type: ignore[method-assign]
        uuid = await proxy.open()
        answer = await proxy.post(chat_url(uuid), HELLO)
        assert answer["choices"][0]["message"]["content"] == "made by the API"
        (node,) = await proxy.nodes(uuid)
        assert node["metadata"]["dummy_tokens"] is True


def test_open_address_without_a_token_is_refused(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_PROXY_TOKEN", raising=False)
    path = tmp_path / "proxy.json"
    path.write_text('{"model_name": "m", "servers": [{"base_url": "http://127.0.0.1:9/v1"}]}')
    assert main(["--config", str(path), "--host", "0.0.0.0"]) == 2
    told = capsys.readouterr().err
    assert "ATROPOS_PROXY_TOKEN" in told
    assert "--insecure" in told
