"""Whatever is sent to a session, the answer is a completion or a 4xx with a reason, never a 5xx."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from helpers_proxy import Proxy, weather_agent
from hypothesis import given, settings
from hypothesis import strategies as st

SCALARS = st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=5)
WORDS = st.sampled_from(
    [
        *["user", "assistant", "tool", "system", "developer", "function", "custom", "message"],
        *["text", "input_text", "output_text", "refusal", "tool_use", "tool_result", "thinking"],
        *["function_call", "function_call_output", "reasoning", "image_url", "json_object", "auto"],
        *["none", "required", "any", "c1", "weather", '{"city": "Oslo"}', "{", "train"],
    ]
)
KEYS = st.sampled_from(
    [
        *[
            "role",
            "content",
            "type",
            "text",
            "tool_calls",
            "tool_call_id",
            "name",
            "id",
            "function",
        ],
        *["arguments", "parameters", "call_id", "output", "tool_use_id", "input", "input_schema"],
        *["format", "include_usage", "json_schema", "description", "refusal", "summary"],
    ]
)
VALUES = st.recursive(
    WORDS | SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
PARTS = st.fixed_dictionaries({"type": WORDS}, optional={"text": VALUES, "content": VALUES})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": WORDS},
        optional={
            "content": VALUES | st.lists(PARTS, max_size=2),
            "type": WORDS,
            "tool_calls": VALUES,
            "tool_call_id": VALUES,
            "name": VALUES,
        },
    )
    | st.dictionaries(KEYS, VALUES, max_size=5),
    max_size=3,
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": WORDS}, optional={"name": WORDS, "function": VALUES}),
    max_size=2,
)
FIELDS = {
    "messages": MESSAGES,
    "input": MESSAGES | VALUES,
    "prompt": VALUES,
    "tools": TOOLS | VALUES,
    "tool_choice": VALUES,
    "system": VALUES,
    "instructions": VALUES,
    "stream": VALUES,
    "stream_options": VALUES,
    "response_format": VALUES,
    "text": VALUES,
    "n": st.integers(0, 3),
    "max_tokens": SCALARS,
    "temperature": SCALARS,
    "stop": VALUES,
    "logprobs": VALUES,
    "previous_response_id": VALUES,
    "chat_template_kwargs": VALUES,
}
SHALLOW = st.fixed_dictionaries({}, optional=FIELDS)  # type: ignore[arg-type]
DEEP = st.fixed_dictionaries(
    {
        "messages": MESSAGES.filter(len),
        "input": MESSAGES.filter(len),
        "prompt": st.text(max_size=3),
        "max_tokens": st.just(40),
    },
    optional={
        name: FIELDS[name]
        for name in (
            *["tools", "tool_choice", "system", "instructions", "stream", "text"],
            *["stream_options", "response_format", "chat_template_kwargs"],
        )
    },  # type: ignore[arg-type]
)
BODIES = SHALLOW | DEEP
ROUTES = ("chat/completions", "chat/completions/render", "completions", "responses", "messages")


@pytest.mark.parametrize("route", ROUTES)
def test_no_body_breaks_a_route(route: str) -> None:
    loop = asyncio.new_event_loop()
    proxy = Proxy(weather_agent)
    uuid = loop.run_until_complete(proxy.open(max_tokens=50))

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(body=BODIES)
    def check(body: dict[str, Any]) -> None:
        answer = loop.run_until_complete(
            proxy.client.post(f"/{uuid}/v1/{route}", content=json.dumps(body))
        )
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    try:
        check()
    finally:
        loop.run_until_complete(proxy.__aexit__())
        loop.close()
