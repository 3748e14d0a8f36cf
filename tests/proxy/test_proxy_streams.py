"""Streams: they begin at once, hold what the same answer holds otherwise, and end with their request."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.tools.parsers import STYLES
from atroposlib.proxy import stream
from atroposlib.proxy.spoken import Spoken, certain, divide
from atroposlib.utils.local_server import serve_locally
from tests.proxy.helpers_proxy import (
    WEATHER,
    Endless,
    Proxy,
    call_text,
    events_of,
    trained_text,
)

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}


class Slow:
    """Delays every answer of a proxy's engine."""

    def __init__(self, proxy: Proxy, *, by_s: float) -> None:
        self.num_asked = 0
        answer = proxy.engine._tokens_and_logprobs_completion_wrapper

        async def wait(**kwargs: Any) -> Any:
            self.num_asked += 1
            await asyncio.sleep(by_s)
            return await answer(**kwargs)

        proxy.engine._tokens_and_logprobs_completion_wrapper = wait  # type: ignore[method-assign]


@pytest.fixture
def keeps_alive_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(stream, "OPEN_AFTER_S", 0.02)


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("v1/chat/completions", '"role":"assistant"'),
        ("v1/responses", "response.created"),
        ("v1/messages", "message_start"),
    ],
)
async def test_a_client_with_a_short_timeout_gets_a_slow_answer_from_one_request(
    path: str, first: str, keeps_alive_fast: None
) -> None:
    async with Proxy(lambda request: "done") as proxy, serve_locally(proxy.app) as url:
        slow = Slow(proxy, by_s=0.6)
        uuid = await proxy.open()
        body = {**ASKED, "input": "Go.", "max_tokens": 50, "stream": True}
        async with httpx.AsyncClient(timeout=0.3) as client:
            answer = await client.post(f"{url}/{uuid}/{path}", json=body)
        assert first in answer.text.split("\n\n")[0]
        assert ": keep-alive" in answer.text
        assert "done" in answer.text
        assert slow.num_asked == 1
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == "done<eos>"


async def test_a_client_that_goes_away_ends_the_request_and_nothing_is_trained(
    keeps_alive_fast: None,
) -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        endless = Endless(proxy.engine)
        uuid = await proxy.open()
        chat = f"{url}/{uuid}/v1/chat/completions"
        async with httpx.AsyncClient() as client:
            async with client.stream("POST", chat, json={**ASKED, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith(": "):
                        break
        async with asyncio.timeout(5):
            await endless.cancelled.wait()
        assert await proxy.nodes(uuid) == []


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "v1/messages"])
async def test_a_failure_after_the_stream_began_is_its_last_event(
    path: str, keeps_alive_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Proxy() as proxy:
        uuid = await proxy.open()

        async def fail(**kwargs: Any) -> Any:
            await asyncio.sleep(0.1)
            raise EngineUnavailable("out of memory", status=500)

        monkeypatch.setattr(proxy.engine, "max_attempts", 1)
        monkeypatch.setattr(proxy.engine, "_tokens_and_logprobs_completion_wrapper", fail)
        body = {**ASKED, "input": "Go.", "max_tokens": 50, "stream": True}
        answer = await proxy.client.post(f"/{uuid}/{path}", json=body)
        assert answer.status_code == 200
        assert "out of memory" in events_of(answer.text)[-1]["error"]["message"]
        assert await proxy.nodes(uuid) == []


async def test_what_is_refused_at_once_has_its_status(keeps_alive_fast: None) -> None:
    async with Proxy() as proxy:
        uuid = await proxy.open(max_context_tokens=2)
        answer = await proxy.client.post(
            f"/{uuid}/v1/chat/completions", json={**ASKED, "stream": True}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


# Thoughts.

PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", " ", "\n\n", "a", "<", "{", "}"]
PIECES += [call_text("Oslo"), '{"name": "weather", "parameters": {}}', "[TOOL_CALLS]"]


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    cut=st.integers(0, 200),
    style=st.sampled_from([None, *sorted(STYLES)]),
    has_thoughts=st.booleans(),
    is_opened=st.booleans(),
)
def test_what_is_certain_is_the_beginning_of_what_is_said(
    text: str, cut: int, style: str | None, has_thoughts: bool, is_opened: bool
) -> None:
    content, markers = text, ()
    if style is not None:
        content = STYLES[style].parse(text, [WEATHER]).content
        markers = STYLES[style].starts
    has_thoughts |= is_opened
    whole = divide(content, is_opened=is_opened) if has_thoughts else Spoken("", content)
    told = certain(text[:cut], has_thoughts=has_thoughts, is_opened=is_opened, markers=markers)
    assert whole.thought.startswith(told.thought)
    assert whole.content.startswith(told.content)
    if told.content:
        assert told.thought == whole.thought
