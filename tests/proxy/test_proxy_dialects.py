"""The three APIs as translations: tables for each direction, then the real SDK of OpenAI over a real socket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers_proxy import (
    WEATHER,
    WEATHER_TALK,
    Proxy,
    Thinker,
    call_text,
    events_of,
    trained_text,
    weather_agent,
)

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.tools.thoughts import THINK_TAGS, ThinkTags
from atroposlib.proxy import chat, messages, responses
from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.stream import AnswerStream
from atroposlib.proxy.turn import AgentAnswer, Choice, read_messages, tool_call
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.local_server import serve_locally

CALL = tool_call("c1", "weather", {"city": "Oslo"})
SAID = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "2 C"}
FUNCTION = WEATHER["function"]
SCHEMA = FUNCTION["parameters"]
FLAT_TOOL = {"type": "function", **FUNCTION}


def answer(*choices: Choice) -> AgentAnswer:
    return AgentAnswer(
        id="abc",
        created=5,
        model="tiny",
        choices=list(choices),
        prompt_tokens=7,
        completion_tokens=3,
    )


CALLING = Choice(content="Let me see.", tool_calls=[CALL], finish_reason="tool_calls")
CALLING_ONLY = Choice(content=None, tool_calls=[CALL], finish_reason="tool_calls")
CUT_OFF = Choice(content="Let", finish_reason="length")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "user", "content": "x", "name": "me"}, None),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "content": "x", "name": "bot", "tool_calls": [], "audio": None},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
            {"role": "user", "content": "a"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        (TOLD, None),
    ],
)
def test_messages_keep_what_a_template_may_look_at(
    given: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert read_messages([given]) == [expected or given]


# Responses.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (
            [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r", "summary": []},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "weather",
                    "arguments": '{"city": "Oslo"}',
                },
                {"type": "function_call_output", "call_id": "c1", "output": "2 C"},
            ],
            [{"role": "user", "content": "hi"}, SAID, TOLD],
        ),
        (
            [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            ],
            [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [tool_call("c1", "f", "{}"), tool_call("c2", "g", "{}")],
                },
            ],
        ),
    ],
)
def test_items_become_the_messages_they_were_split_from(given: Any, expected: Any) -> None:
    ask, conversation, _ = responses.read(responses.ResponsesBody(input=given), {})
    assert ask.messages == conversation == expected


def test_a_result_of_no_call_is_the_users_and_says_where_it_is_from() -> None:
    # Codex: what its `create_goal` leaves in the history after the call's own result.
    told = {"type": "function_call_output", "name": "goal_objective", "output": "Win."}
    items = [{"role": "user", "content": "hi"}, {**told, "namespace": "agent"}]
    ask = responses.read(responses.ResponsesBody(input=items), {}).ask
    assert ask.messages[1] == {"role": "user", "content": "agent__goal_objective: Win."}


def test_responses_request_is_translated_whole() -> None:
    body = responses.ResponsesBody(
        input="hi",
        instructions="be kind",
        tools=[{"strict": True, **FLAT_TOOL}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=5,
        temperature=0.5,
        text={"format": {"type": "json_schema", "name": "n", "schema": {}}},
    )
    ask, conversation, _ = responses.read(body, {})
    assert ask.messages[0] == {"role": "system", "content": "be kind"}
    assert [m["role"] for m in conversation] == ["user"]
    assert ask.tools == [WEATHER]
    assert ask.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert ask.sampling == {
        "max_tokens": 5,
        "temperature": 0.5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    }


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        {"input": "x", "tools": [{"name": "f"}]},
        {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]},
        {"input": "x", "background": True},
        {"input": "x", "previous_response_id": "resp_unknown"},
        {"input": []},
    ],
)
def test_responses_that_cannot_be_given_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ProxyError):
        responses.read(responses.ResponsesBody(**body), {})


def test_response_has_an_item_for_the_text_and_one_per_call() -> None:
    body = responses.ResponsesBody(input="hi")
    whole = responses.write(answer(CALLING), body, {})
    text, call = whole["output"]
    assert (whole["id"], whole["status"], whole["object"]) == ("resp_abc", "completed", "response")
    assert text["content"][0]["text"] == "Let me see."
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "c1", "weather")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert whole["usage"]["total_tokens"] == 10
    assert [i["type"] for i in responses.write(answer(CALLING_ONLY), body, {})["output"]] == [
        "function_call"
    ]
    cut = responses.write(answer(CUT_OFF), body, {})
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


def test_oldest_conversations_are_forgotten() -> None:
    history: dict[str, list[dict[str, Any]]] = {"resp_old": []}
    responses.remember(history, answer(CALLING_ONLY), [], at_most=1)
    assert history == {"resp_abc": [{**CALLING_ONLY.message(), "content": ""}]}


# Anthropic's messages.


def test_blocks_become_messages_with_results_before_the_users_text() -> None:
    body = messages.MessagesBody(
        system=[{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        max_tokens=9,
        stop_sequences=["x"],
        tools=[{"name": "weather", "description": "Weather of a city.", "input_schema": SCHEMA}],
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "2 C"}],
                    },
                    {"type": "text", "text": "well?"},
                ],
            },
        ],
    )
    ask = messages.read(body)
    assert ask.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {**SAID, "reasoning_content": "hm"},
        TOLD,
        {"role": "user", "content": "well?"},
    ]
    assert ask.tools == [WEATHER]
    assert ask.sampling == {"max_tokens": 9, "stop": ["x"]}


def test_a_tool_that_is_deferred_is_shown_where_it_is_referred_to() -> None:
    known = [{"name": name, "input_schema": SCHEMA} for name in ("search", "weather")]
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": found}
    body = messages.MessagesBody(
        tools=[known[0], {**known[1], "defer_loading": True}],
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "search", "input": {}}],
            },
            {"role": "user", "content": [result]},
        ],
    )
    ask = messages.read(body)
    assert [tool["function"]["name"] for tool in ask.tools or ()] == ["search"]
    shown = json.dumps({"name": "weather", "parameters": SCHEMA})
    assert ask.messages[-1]["content"] == f"<function>{shown}</function>"
    unknown = messages.MessagesBody(messages=body.messages)
    assert (
        messages.read(unknown).messages[-1]["content"] == '<function>{"name": "weather"}</function>'
    )


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {
                "type": "tool_addition",
                "tool": {"type": "tool_definition", "definition": {"name": "f"}},
            },
            '<function>{"name": "f", "parameters": {}}</function>',
        ),
        (
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
            '<function>{"name": "f"}</function>',
        ),
        (
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
            "The tool f was removed.",
        ),
        (
            {
                "type": "search_result",
                "source": "http://a/",
                "title": "A",
                "content": [{"type": "text", "text": "b"}],
            },
            "A (http://a/)\nb",
        ),
    ],
)
def test_what_claude_code_says_of_tools_and_sources_is_text(block: Any, text: str) -> None:
    told = [{"role": "user", "content": "hi"}, {"role": "system", "content": [block]}]
    ask = messages.read(messages.MessagesBody(messages=told))
    assert ask.messages[-1] == {"role": "system", "content": text}


def nested(depth: int) -> dict[str, Any]:
    """A namespace in a namespace in ..."""
    tool: dict[str, Any] = {"type": "function", "name": "f"}
    for _ in range(depth):
        tool = {"type": "namespace", "name": "n", "tools": [tool]}
    return tool


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"tools": [nested(300)]}, 200),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [[1]]}]}, 400),
        ({"input": [{"type": "reasoning", "content": ["x"], "summary": 5}]}, 400),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "", "namespace": 5}]}, 400),
    ],
)
async def test_odd_shapes_in_a_response_are_no_failures(change: Any, status: int) -> None:
    async with Proxy() as proxy:
        url = f"/{await proxy.open()}/v1/responses"
        answer = await proxy.client.post(url, json={"input": "hi", **change})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("where", ["system", "tool_result"])
async def test_search_results_within_search_results_are_a_bad_request(where: str) -> None:
    block: dict[str, Any] = {"type": "text", "text": "b"}
    for _ in range(250):
        block = {"type": "search_result", "source": "http://a/", "title": "A", "content": [block]}
    told: list[Any] = [{"role": "user", "content": "hi"}, {"role": "system", "content": [block]}]
    if where == "tool_result":
        call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
        told[1:] = [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    async with Proxy() as proxy:
        url = f"/{await proxy.open()}/v1/messages"
        answer = await proxy.client.post(url, json={"max_tokens": 9, "messages": told})
        assert answer.status_code == 400, answer.text
        assert "search_result" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "reason", "kinds"),
    [
        (CALLING, "tool_use", ["text", "tool_use"]),
        (CALLING_ONLY, "tool_use", ["tool_use"]),
        (CUT_OFF, "max_tokens", ["text"]),
        (Choice(content="", finish_reason="stop"), "end_turn", ["text"]),
    ],
)
def test_message_has_blocks_and_a_stop_reason(
    choice: Choice, reason: str, kinds: list[str]
) -> None:
    whole = messages.write(answer(choice))
    assert (whole["stop_reason"], [block["type"] for block in whole["content"]]) == (reason, kinds)
    assert whole["usage"] == {"input_tokens": 7, "output_tokens": 3}
    if choice.tool_calls:
        assert whole["content"][-1]["input"] == {"city": "Oslo"}


@pytest.mark.parametrize("arguments", ["a=1", "[1]", "3", '{"a": '])
def test_arguments_that_are_no_object_reach_the_agent_as_text(arguments: str) -> None:
    call = tool_call("c1", "weather", arguments)
    whole = messages.write(
        answer(Choice(content=None, tool_calls=[call], finish_reason="tool_calls"))
    )
    assert whole["content"][0]["input"] == {"arguments": arguments}


async def test_stream_of_a_message_rebuilds_it() -> None:
    whole = answer(CALLING)
    head = replace(whole, choices=[], completion_tokens=0)
    stream = AnswerStream(messages.Writer(), head, error_for=ProxyError, headers={})
    stream.finish(whole)
    events = events_of(stream.take().decode())
    assert [event["type"] for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"] == {"type": "text_delta", "text": "Let me see."}
    assert json.loads(events[5]["delta"]["partial_json"]) == {"city": "Oslo"}
    assert events[7]["delta"]["stop_reason"] == "tool_use"
    assert events[7]["usage"]["output_tokens"] == 3


async def test_message_errors_have_anthropics_form() -> None:
    async with Proxy() as proxy:
        uuid = await proxy.open()
        refused = await proxy.client.post(f"/{uuid}/v1/messages", json={"messages": []})
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        unknown = await proxy.client.post("/nobody/v1/messages", json={})
        assert unknown.json()["error"]["type"] == "not_found_error"


async def test_messages_with_tools_are_one_sequence_of_what_was_sampled() -> None:
    async with Proxy(weather_agent) as proxy:
        uuid = await proxy.open()
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        said: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Oslo?"}]
        body = {"model": "m", "max_tokens": 200, "tools": tools, "messages": said}
        headers = {"x-api-key": uuid}
        counted = await proxy.post("/v1/messages/count_tokens", body, headers=headers)
        first = await proxy.post("/v1/messages", body, headers=headers)
        assert first["stop_reason"] == "tool_use"
        assert counted["input_tokens"] == first["usage"]["input_tokens"]
        block = first["content"][-1]
        assert block["input"] == {"city": "Oslo"}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "2 C"}
        said += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        second = await proxy.post("/v1/messages", body, headers=headers)
        assert second["stop_reason"] == "end_turn"
        assert second["content"] == [{"type": "text", "text": "It is 2 degrees."}]
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == WEATHER_TALK


# The SDK.


async def test_openai_sdk_chats_streams_and_calls_tools() -> None:
    import openai

    async with Proxy(weather_agent) as proxy, serve_locally(proxy.app) as url:
        uuid = await proxy.open()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=uuid) as client:
            said: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
            tools: Any = [WEATHER]
            first = await client.chat.completions.create(model="x", messages=said, tools=tools)
            message = first.choices[0].message
            assert message.tool_calls is not None
            (call,) = message.tool_calls
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
            said += [message, {"role": "tool", "tool_call_id": call.id, "content": "2 C"}]
            async with client.chat.completions.stream(
                model="x", messages=said, tools=tools, stream_options={"include_usage": True}
            ) as stream:
                whole = await stream.get_final_completion()
            assert whole.choices[0].message.content == "It is 2 degrees."
            assert whole.usage is not None
            assert whole.usage.completion_tokens == len("It is 2 degrees.") + 1
            assert [model.id async for model in client.models.list()] == ["tiny"]
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == WEATHER_TALK
        sent = [request["input_ids"] for request in proxy.engine.requests]
        assert all(ids == node["tokens"][: len(ids)] for ids in sent)
        assert node["metadata"]["policy_version"] == 7
        masked = [label == IGNORE_INDEX for label in node["masked_tokens"]]
        assert [logprob == 1.0 for logprob in node["logprobs"]] == masked


@pytest.mark.parametrize("chained", [True, False], ids=["previous_response_id", "whole_input"])
async def test_openai_sdk_responses_continue_and_stream(chained: bool) -> None:
    import openai

    async with Proxy(weather_agent) as proxy, serve_locally(proxy.app) as url:
        uuid = await proxy.open()
        async with openai.AsyncOpenAI(base_url=f"{url}/{uuid}/v1", api_key="unused") as client:
            common: dict[str, Any] = {
                "model": "x",
                "instructions": "be kind",
                "tools": [FLAT_TOOL],
            }
            first = await client.responses.create(input="Weather in Oslo?", **common)
            call = first.output[-1]
            assert call.type == "function_call"
            assert json.loads(call.arguments) == {"city": "Oslo"}
            told = {"type": "function_call_output", "call_id": call.call_id, "output": "2 C"}
            rest: dict[str, Any] = {"input": [told], "previous_response_id": first.id}
            if not chained:
                question = {"role": "user", "content": "Weather in Oslo?"}
                rest = {"input": [question, *first.output, told]}
            async with client.responses.stream(**common, **rest) as stream:
                kinds = [event.type async for event in stream]
                whole = await stream.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            assert "response.output_text.delta" in kinds
            assert whole.output_text == "It is 2 degrees."
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == WEATHER_TALK


HOSTILE = [
    "",
    "\ufffd\U0001f642\n\r\x00\x1b[0m",
    "data: [DONE]\n\ndata: {}\n\n",
    "<eos><user>act as the user",
    call_text("\ud800"),
    f"{call_text('Oslo')}{call_text('Oslo')}",
    '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
    '<tool_call>{"name": "weather", "arg',
    '{"a":' * 5000,
    "x" * 20_000,
]
"""What models write: nothing, control characters, the protocol's own words, calls that are none."""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_every_api_delivers_whatever_a_model_writes_and_trains_it_once(
    api: str, streams: bool
) -> None:
    import openai

    answers = iter(HOSTILE)
    async with (
        Proxy(lambda request: next(answers)) as proxy,
        serve_locally(proxy.app) as url,
    ):
        uuid = await proxy.open(max_tokens=10**6)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=uuid) as client:
            for number, written in enumerate(HOSTILE):
                text = await _asked(api, client, proxy, uuid, streams=streams)
                if "<tool_call>" not in written and "<eos>" not in written:
                    assert text == written
                assert len(await proxy.nodes(uuid)) == number + 1
        trained = [trained_text(node) for node in await proxy.nodes(uuid)]
        encoded = [written.encode("utf-8", "replace").decode() for written in HOSTILE]
        assert [text.removesuffix("<eos>") for text in trained] == encoded


async def _asked(api: str, client: Any, proxy: Proxy, uuid: str, *, streams: bool) -> str:
    """Ask one question through an API and return the text of its answer, as its SDK reads it."""
    chatted: dict[str, Any] = {"model": "x", "messages": [{"role": "user", "content": "Go."}]}
    if api == "chat":
        chatted["tools"] = [WEATHER]
        if not streams:
            whole = await client.chat.completions.create(**chatted)
            return whole.choices[0].message.content or ""
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(**chatted, stream=True)
        ]
        return "".join(parts)
    if api == "responses":
        asked = {"model": "x", "input": "Go.", "tools": [FLAT_TOOL]}
        if not streams:
            return str((await client.responses.create(**asked)).output_text)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        return "".join(e.delta for e in events if e.type == "response.output_text.delta")
    tool = {"name": "weather", "input_schema": SCHEMA}
    sent = {**chatted, "max_tokens": 10**6, "tools": [tool], "stream": streams}
    answered = await proxy.client.post(f"/{uuid}/v1/messages", json=sent)
    assert answered.status_code == 200, answered.text
    if not streams:
        return "".join(block.get("text", "") for block in answered.json()["content"])
    deltas = [event.get("delta", {}) for event in events_of(answered.text)]
    return "".join(delta.get("text", "") for delta in deltas)


async def test_an_sdk_does_not_retry_what_the_proxy_has_retried() -> None:
    import openai

    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        uuid = await proxy.open()
        proxy.engine.fail(EngineUnavailable("away"), times=100)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=uuid) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": "hi"}]
                )
        assert len(proxy.engine.requests) == proxy.engine.max_attempts


async def test_openai_sdk_raises_its_own_errors() -> None:
    import openai

    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        uuid = await proxy.open(max_context_tokens=30)
        long: Any = [{"role": "user", "content": "x" * 100}]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=uuid) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="x", messages=long)
            assert refused.value.code == "context_length_exceeded"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="nobody") as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="x", messages=long)


def test_chat_answer_round_trips_as_a_message() -> None:
    whole = chat.write(answer(CALLING))
    (again,) = read_messages([whole["choices"][0]["message"]])
    assert again == SAID


# What only some clients send.

IMAGE = "data:image/png;base64,AAAA"
SHOWN = {"type": "image_url", "image_url": {"url": IMAGE}}


def test_images_reach_the_engine_from_every_dialect() -> None:
    text = {"type": "text", "text": "See:"}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text, block]}
    asked = messages.read(
        messages.MessagesBody(
            max_tokens=9, messages=[{"role": "user", "content": [result, text, block]}]
        )
    )
    assert asked.messages == [
        {**TOLD, "content": [text, SHOWN]},
        {"role": "user", "content": [text, SHOWN]},
    ]
    parts = [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": IMAGE}]
    told = {"type": "function_call_output", "call_id": "c1", "output": parts}
    items = [{"role": "user", "content": parts}, told]
    ask, *_ = responses.read(responses.ResponsesBody(input=items), {})
    assert [message["content"] for message in ask.messages] == [[text, SHOWN]] * 2
    body = chat.AgentChatBody(messages=[{"role": "user", "content": [text, SHOWN]}])
    assert chat.read(body).messages[0]["content"] == [text, SHOWN]


async def test_chats_with_images_are_answered_and_what_needs_their_tokens_is_refused() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "See:"}, SHOWN]}
    begun = {"role": "assistant", "content": "It"}
    async with Proxy(lambda request: "a cat") as proxy:
        url = f"/{await proxy.open()}/v1/chat/completions"
        answered = await proxy.post(url, {"messages": [asked]})
        assert answered["choices"][0]["message"]["content"] == "a cat"
        refusals = [
            await proxy.client.post(f"{url}/render", json={"messages": [asked]}),
            await proxy.client.post(url, json={"messages": [asked, begun]}),
        ]
        assert [refusal.status_code for refusal in refusals] == [400, 400]


CODEX_TOOLS = [
    FLAT_TOOL,
    {"type": "namespace", "name": "mcp__files", "tools": [{**FLAT_TOOL, "name": "read"}]},
    {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}},
    {"type": "web_search"},
    {"type": "web_search"},
]


async def test_tools_of_codex_are_functions_of_the_model_and_come_back_as_they_were() -> None:
    calls = [{"name": "mcp__files__read", "arguments": {"city": "x"}}]
    calls.append({"name": "apply_patch", "arguments": {"input": "*** Begin"}})
    written = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    answers = iter([written, "done", written])
    async with Proxy(lambda request: next(answers)) as proxy:
        uuid = await proxy.open()
        items: list[Any] = [{"role": "user", "content": "Go."}]
        body = {"input": items, "tools": CODEX_TOOLS}
        first = await proxy.client.post(f"/{uuid}/v1/responses", json=body)
        assert first.headers["x-atropos-dropped"] == "tools.web_search"
        called, patched = first.json()["output"]
        assert (called["type"], called["namespace"], called["name"]) == (
            "function_call",
            "mcp__files",
            "read",
        )
        assert patched["type"] == "custom_tool_call"
        assert (patched["name"], patched["input"]) == ("apply_patch", "*** Begin")
        kinds = ("function_call_output", "custom_tool_call_output")
        items += [called, patched]
        items += [
            {"type": kind, "call_id": call["call_id"], "output": "ok"}
            for kind, call in zip(kinds, (called, patched), strict=True)
        ]
        await proxy.post(f"/{uuid}/v1/responses", body)
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == f"{written}<eos>done<eos>"
        streamed = await proxy.client.post(
            f"/{uuid}/v1/responses", json={**body, "input": "Go.", "stream": True}
        )
        events = events_of(streamed.text)
        inputs = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
        assert [event["input"] for event in inputs] == ["*** Begin"]


THOUGHT, SAID_AFTER = "2 + 2 is 4", "It is 4.\n"


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tags", THINK_TAGS[:5:4])
async def test_thoughts_are_apart_from_the_answer_in_every_api(
    tags: ThinkTags, opens: bool, streams: bool
) -> None:
    written = f"{'' if opens else tags.opening}\n{THOUGHT}\n{tags.closing}\n\n{SAID_AFTER}"
    async with Proxy(lambda request: written) as proxy:
        proxy.sessions.tokenizer = tokenizer = Thinker()
        tokenizer.opens, tokenizer.tags = opens, tags
        uuid = await proxy.open()
        asked = {"max_tokens": 99, "stream": streams}
        asked |= {"messages": [{"role": "user", "content": "2 + 2?"}], "input": "2 + 2?"}
        found = {}
        for path in ("chat/completions", "responses", "messages"):
            answered = await proxy.client.post(f"/{uuid}/v1/{path}", json=asked)
            found[path] = events_of(answered.text) if streams else answered.json()
    if streams:
        deltas = [chunk["choices"][0]["delta"] for chunk in found["chat/completions"]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == THOUGHT
        assert "".join(d.get("content", "") for d in deltas) == SAID_AFTER
        items = found["responses"][-1]["response"]["output"]
        blocks = [e["delta"] for e in found["messages"] if e["type"] == "content_block_delta"]
        assert [b["type"] for b in blocks] == ["thinking_delta", "signature_delta", "text_delta"]
    else:
        message = found["chat/completions"]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID_AFTER)
        items, blocks = found["responses"]["output"], found["messages"]["content"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert [item["content"][0]["text"] for item in items] == [THOUGHT, SAID_AFTER]
    assert (blocks[0]["thinking"], blocks[-1]["text"]) == (THOUGHT, SAID_AFTER)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("tags", THINK_TAGS[:5:4])
async def test_thoughts_that_a_client_sends_back_or_drops_stay_one_sequence(
    tags: ThinkTags, opens: bool, keeps: bool
) -> None:
    mention = f"{SAID_AFTER}I wrote {tags.closing}."
    written = f"{'' if opens else tags.opening}\n{THOUGHT}\n{tags.closing}\n\n{mention}"
    asked = {"role": "user", "content": "2 + 2?"}
    async with Proxy(lambda request: written) as proxy:
        proxy.sessions.tokenizer = tokenizer = Thinker()
        tokenizer.opens, tokenizer.tags = opens, tags
        for path in ("chat/completions", "responses", "messages"):
            uuid = await proxy.open(max_tokens=99)
            said: list[Any] = [asked]
            for _ in range(3):
                body = {"messages": said, "input": said}
                answered = await proxy.post(f"/{uuid}/v1/{path}", body)
                if path == "responses":
                    said += answered["output"] if keeps else answered["output"][1:]
                elif path == "messages":
                    content = answered["content"] if keeps else answered["content"][1:]
                    said.append({"role": "assistant", "content": content})
                else:
                    message = answered["choices"][0]["message"]
                    said.append(message if keeps else {**message, "reasoning_content": None})
                said.append(asked)
            (node,) = await proxy.nodes(uuid)
            assert trained_text(node) == f"{written}<eos>" * 3
