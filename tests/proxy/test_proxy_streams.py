"""Streams: they begin at once, hold what the same answer holds otherwise, and end with their request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers_proxy import (
    WEATHER,
    Endless,
    Proxy,
    call_text,
    events_of,
    trained_text,
)
from hypothesis import example, given
from hypothesis import strategies as st

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.stops import Stops
from atroposlib.inference.sessions.chat_template import ChatTemplate
from atroposlib.inference.sessions.sampled_text import TextSoFar
from atroposlib.inference.tools.parsers import STYLES
from atroposlib.proxy import stream
from atroposlib.proxy.spoken import Spoken, certain, divide
from atroposlib.utils.local_server import serve_locally
from tests.inference.helpers_templates import CHANNELS, make_tokenizer

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


# An engine that streams.


class StreamingEngine:
    """vLLM's `/v1/completions` with `stream`: sends `text` token by token and waits for `go` at each `pause`."""

    def __init__(
        self, text: str, *, breaks_off: bool = False, tokenizer: Any = None, pause: str = "|"
    ) -> None:
        self.text, self.pause = text, pause
        self.tokenizer = tokenizer or ByteTokenizer()
        self.breaks_off = breaks_off
        self.go = asyncio.Event()
        self.aborted = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, part in enumerate(self.text.split(self.pause)):
                if number:
                    await self.go.wait()
                for token in self.tokenizer.encode(part, add_special_tokens=False):
                    await self._send(response, [token], None, body["prompt"])
            if self.breaks_off:
                assert request.transport is not None
                request.transport.abort()
                return response
            await self._send(response, [self.tokenizer.eos_token_id], "stop", body["prompt"])
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise
        return response

    async def _send(
        self, response: web.StreamResponse, tokens: list[int], reason: str | None, prompt: Any
    ) -> None:
        choice = {
            "index": 0,
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
            "finish_reason": reason,
        }
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())


@asynccontextmanager
async def streaming_proxy(engine: StreamingEngine) -> AsyncIterator[tuple[str, Proxy]]:
    """Serve a proxy over an engine; yield the URL of a session, and the proxy."""
    app = web.Application()
    app.router.add_post("/v1/completions", engine.answer)
    async with TestServer(app, handler_cancellation=True) as server, Proxy() as proxy:
        config = APIServerConfig(
            model_name="tiny",
            base_url=f"{server.make_url('/')}v1",
            server_type="vllm",
            health_check=False,
        )
        proxy.sessions.manager = manager = ServerManager([config])
        try:
            async with serve_locally(proxy.app) as url:
                yield f"{url}/{await proxy.open()}/v1", proxy
        finally:
            await manager.close()


@pytest.mark.parametrize(
    ("text", "tools", "before"),
    [
        ("Hello| there", [], "Hello"),
        ("half a char: \u00e9| there", [], "half a char: \u00e9"),
        (f"Let me look.\n| {call_text('Oslo')}", [WEATHER], "Let me look."),
        (
            f"Let me look.\n{call_text('Oslo')[:9]}|{call_text('Oslo')[9:]}",
            [WEATHER],
            "Let me look.",
        ),
    ],
)
async def test_text_arrives_while_the_engine_samples_and_is_trained_once(
    text: str, tools: list[Any], before: str
) -> None:
    engine = StreamingEngine(text)
    async with streaming_proxy(engine) as (url, proxy), httpx.AsyncClient() as client:
        body = {**ASKED, "tools": tools, "stream": True}
        told, lines = "", []
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                events = events_of(line)
                told += "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
                if told == before:
                    engine.go.set()
        assert told == before + (" there" if not tools else "")
        last = events_of("\n".join(lines))[-1]["choices"][0]
        assert last["finish_reason"] == ("tool_calls" if tools else "stop")
        assert [body["stream"] for body in engine.bodies] == [True]
        (node,) = await proxy.nodes(url.split("/")[-2])
        assert trained_text(node) == text.replace("|", "") + "<eos>"


async def test_thoughts_and_the_final_message_of_gpt_oss_arrive_while_the_engine_samples() -> None:
    start = "<|start|>assistant"
    text = f"<|channel|>analysis<|message|>It is mild.<|end|>{start}<|channel|>commentary<|message|>So:<|end|>"
    text += f"{start}<|channel|>final<|message|>The weather is mild@ today."
    tokenizer = make_tokenizer(CHANNELS, eos="<|return|>")
    engine = StreamingEngine(text, tokenizer=tokenizer, pause="@")
    async with streaming_proxy(engine) as (url, proxy), httpx.AsyncClient() as client:
        proxy.sessions.tokenizer = tokenizer
        uuid = await proxy.open(tool_parser="gpt_oss")
        chat = f"{url.rsplit('/', 2)[0]}/{uuid}/v1/chat/completions"
        told = {"reasoning_content": "", "content": ""}
        async with client.stream("POST", chat, json={**ASKED, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                for event in events_of(line):
                    for key in told:
                        told[key] += event["choices"][0]["delta"].get(key) or ""
                if told["content"].startswith("So:\nThe weather"):
                    assert told["reasoning_content"] == "It is mild."
                    engine.go.set()
        said = "So:\nThe weather is mild today."
        assert told == {"reasoning_content": "It is mild.", "content": said}
        (node,) = await proxy.nodes(uuid)
        assert node["full_text"].endswith(text.replace("@", "") + "<|return|>")


async def test_a_client_that_leaves_a_stream_ends_the_request_at_the_engine() -> None:
    engine = StreamingEngine("Hello|")
    async with streaming_proxy(engine) as (url, proxy), httpx.AsyncClient() as client:
        body = {**ASKED, "stream": True}
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if "Hell" in line or '"content":"H' in line:
                    break
        async with asyncio.timeout(5):
            await engine.aborted.wait()
        assert await proxy.nodes(url.split("/")[-2]) == []


async def test_an_answer_that_broke_off_is_not_sampled_again_behind_what_was_told() -> None:
    engine = StreamingEngine("Hello", breaks_off=True)
    async with streaming_proxy(engine) as (url, proxy), httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/chat/completions", json={**ASKED, "stream": True})
        assert "broke off" in events_of(answer.text)[-1]["error"]["message"]
        assert len(engine.bodies) == 1
        assert await proxy.nodes(url.split("/")[-2]) == []


class Cleaning(ByteTokenizer):
    """Removes spaces when it decodes, as some tokenizers of transformers do."""

    clean_up_tokenization_spaces = True

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        text = super().decode(tokens, skip_special_tokens)
        return text.replace(" .", ".").replace(" n't", "n't")


@example(pieces=[" ", "."], tokenizer=Cleaning(), stops=Stops([], []))
@given(
    pieces=st.lists(st.sampled_from(["\u00e9", " ", ".", " n", "'t", "a", "STOP", "<eos>", "ST"])),
    tokenizer=st.sampled_from([ByteTokenizer(), Cleaning()]),
    stops=st.sampled_from([Stops([], []), Stops(["STOP"], []), Stops([], [ord("a") + 3])]),
)
def test_text_so_far_grows_and_begins_the_whole_text(
    pieces: list[str], tokenizer: ByteTokenizer, stops: Stops
) -> None:
    tokens = tokenizer.encode("".join(pieces), add_special_tokens=False)
    template = ChatTemplate(tokenizer)
    told = [""]
    listen = TextSoFar(template, stops, told.append)
    for token in tokens:
        listen([token])
    whole = template.decode_both(tokens)[1]
    assert all(later.startswith(sooner) for sooner, later in pairwise([*told, whole]))
