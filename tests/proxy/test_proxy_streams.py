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
    Held,
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
from atroposlib.inference.scripted_engine import Latency, Script, ScriptedEngine
from atroposlib.inference.servers.api_server import Stops
from atroposlib.inference.sessions.chat_template import ChatTemplate
from atroposlib.inference.sessions.sampled_text import TextSoFar
from atroposlib.inference.tools.parsers import STYLES
from atroposlib.inference.tools.thoughts import THINK_TAGS, Spoken, ThinkTags
from atroposlib.proxy import stream
from atroposlib.proxy.spoken import certain
from atroposlib.utils.local_server import serve_locally
from tests.inference.helpers_templates import CHANNELS, make_tokenizer

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}


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
        held = Held(proxy.engine)
        uuid = await proxy.open()
        body = {**ASKED, "input": "Go.", "max_tokens": 50, "stream": True}
        received = ""
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}/{uuid}/{path}", json=body) as answer,
        ):
            async for text in answer.aiter_text():
                received += text
                if received.count(": keep-alive") >= 3:
                    held.go_on.set()
        assert first in received.split("\n\n")[0]
        assert "done" in received.rpartition(": keep-alive")[2]
        assert held.num_asked == 1
        (node,) = await proxy.nodes(uuid)
        assert trained_text(node) == "done<eos>"


async def test_a_client_that_goes_away_ends_the_request_and_nothing_is_trained(
    keeps_alive_fast: None,
) -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        held = Held(proxy.engine)
        uuid = await proxy.open()
        chat = f"{url}/{uuid}/v1/chat/completions"
        async with httpx.AsyncClient() as client:
            async with client.stream("POST", chat, json={**ASKED, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith(": "):
                        break
        async with asyncio.timeout(5):
            await held.cancelled.wait()
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
    tags=st.sampled_from(THINK_TAGS),
    pieces=st.lists(st.sampled_from([*PIECES, "OPENING", "CLOSING"]), max_size=12),
    cut=st.integers(0, 200),
    style=st.sampled_from([None, *sorted(STYLES)]),
    has_thoughts=st.booleans(),
    is_opened=st.booleans(),
)
def test_what_is_certain_is_the_beginning_of_what_is_said(
    tags: ThinkTags,
    pieces: list[str],
    cut: int,
    style: str | None,
    has_thoughts: bool,
    is_opened: bool,
) -> None:
    text = "".join(pieces).replace("OPENING", tags.opening).replace("CLOSING", tags.closing)
    read = None if style is None else STYLES[style].read(text, [WEATHER])
    content = text if read is None else read.parsed.content
    has_channels = style is not None and STYLES[style].begun is not None
    has_thoughts = (has_thoughts or is_opened) and not has_channels
    whole = Spoken("" if read is None else read.thoughts, content)
    whole = tags.divide(content, is_opened=is_opened) if has_thoughts else whole
    told = certain(
        text[:cut],
        tags=tags if has_thoughts else None,
        is_opened=is_opened,
        style=style and STYLES[style],
        tools=[WEATHER],
    )
    assert whole.thought.startswith(told.thought)
    assert whole.content.startswith(told.content)
    if told.content:
        assert told.thought == whole.thought


# An engine that streams.


class StreamingEngine:
    """vLLM's `/v1/completions` with `stream`: sends a text per choice by tokens and waits for `go` at each `pause`."""

    def __init__(
        self,
        *texts: str,
        breaks_off: bool = False,
        refuses_n: bool = False,
        tokenizer: Any = None,
        pause: str = "|",
    ) -> None:
        self.texts, self.pause = texts, pause
        self.tokenizer = tokenizer or ByteTokenizer()
        self.breaks_off = breaks_off
        self.refuses_n = refuses_n
        self.go = asyncio.Event()
        self.aborted = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses_n and body["n"] > 1:
            await self.go.wait()
            return web.json_response({"error": {"message": "'n' must be 1"}}, status=400)
        texts = [text.split(self.pause) for text in self.texts[: body["n"]]]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, parts in enumerate(zip(*texts, strict=True)):
                if number:
                    await self.go.wait()
                for index, part in enumerate(parts):
                    for token in self.tokenizer.encode(part, add_special_tokens=False):
                        await self._send(response, index, [token], None, body["prompt"])
            if self.breaks_off:
                assert request.transport is not None
                request.transport.abort()
                return response
            for index in range(len(texts)):
                end = [self.tokenizer.eos_token_id]
                await self._send(response, index, end, "stop", body["prompt"])
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise
        return response

    async def _send(
        self,
        response: web.StreamResponse,
        index: int,
        tokens: list[int],
        reason: str | None,
        prompt: Any,
    ) -> None:
        choice = {
            "index": index,
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
    async with TestServer(app, handler_cancellation=True) as server:
        async with proxy_over(f"{server.make_url('/')}v1", "vllm") as found:
            yield found


@asynccontextmanager
async def proxy_over(engine_url: str, server_type: Any) -> AsyncIterator[tuple[str, Proxy]]:
    config = APIServerConfig(
        model_name="tiny", base_url=engine_url, server_type=server_type, health_check=False
    )
    async with Proxy() as proxy:
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


async def test_text_arrives_while_sglang_samples_and_ends_with_its_client() -> None:
    script = Script(answers=("Hello there, " + "and on" * 99,), latency=Latency(per_token_s=0.01))
    async with (
        ScriptedEngine(script, model_name="tiny") as engine,
        proxy_over(f"{engine.url}/v1", "sglang") as (url, proxy),
        httpx.AsyncClient() as client,
    ):
        body, told = {**ASKED, "max_tokens": 999, "stream": True}, ""
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                events = events_of(line)
                told += "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
                if told.startswith("Hello there"):
                    break
        assert engine.generator.num_running == 1
        async with asyncio.timeout(5):
            while engine.generator.num_running:  # noqa: ASYNC110 - the engine has no event
                await asyncio.sleep(0.001)
        assert not engine.served[0].was_generated
        assert await proxy.nodes(url.split("/")[-2]) == []


ROUTES = [("chat/completions", ASKED), ("completions", {"prompt": "Go."})]


def texts_of(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the choice and the text of each event that has one."""
    pieces = [choice for event in events for choice in event.get("choices", ())]
    texts = [(c["index"], c.get("text") or c.get("delta", {}).get("content")) for c in pieces]
    return [(index, text) for index, text in texts if text]


@pytest.mark.parametrize(("route", "asked"), ROUTES)
async def test_each_choice_arrives_while_the_others_are_sampled(
    route: str, asked: dict[str, Any]
) -> None:
    engine = StreamingEngine("Hello| there", "Good| day", "|Hi")
    async with streaming_proxy(engine) as (url, proxy), httpx.AsyncClient() as client:
        body, told = {**asked, "n": 3, "stream": True}, {0: "", 1: "", 2: ""}
        async with client.stream("POST", f"{url}/{route}", json=body) as answer:
            async for line in answer.aiter_lines():
                for index, text in texts_of(events_of(line)):
                    told[index] += text
                if told == {0: "Hello", 1: "Good", 2: ""}:
                    engine.go.set()
        assert told == {0: "Hello there", 1: "Good day", 2: "Hi"}
        assert [body["n"] for body in engine.bodies] == [3]
        nodes = await proxy.nodes(url.split("/")[-2])
        assert list(map(trained_text, nodes)) == ["Hello there<eos>", "Good day<eos>", "Hi<eos>"]


@pytest.mark.parametrize(("route", "asked"), ROUTES)
async def test_choices_of_sglang_arrive_together(route: str, asked: dict[str, Any]) -> None:
    script = Script(answers=("one two", "three"))
    async with (
        ScriptedEngine(script, model_name="tiny") as engine,
        proxy_over(f"{engine.url}/v1", "sglang") as (url, proxy),
        httpx.AsyncClient() as client,
    ):
        answer = await client.post(f"{url}/{route}", json={**asked, "n": 2, "stream": True})
        told = texts_of(events_of(answer.text))
        assert [index for index, _ in told[:4]] == [0, 1, 0, 1]
        for index, text in enumerate(("one two", "three")):
            assert "".join(piece for number, piece in told if number == index) == text
        nodes = await proxy.nodes(url.split("/")[-2])
        assert list(map(trained_text, nodes)) == ["one two<eos>", "three<eos>"]


async def test_choices_that_were_told_are_not_sampled_again_one_by_one() -> None:
    engine = StreamingEngine("Hello|", refuses_n=True)
    async with streaming_proxy(engine) as (url, proxy), httpx.AsyncClient() as client:
        body = {**ASKED, "n": 3, "max_tokens": 16384, "stream": True}  # asks for 2 choices, and 1
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if texts_of(events_of(line)) and not engine.go.is_set():
                    engine.go.set()
                    engine.texts = ("Hello",)
        assert "broke off" in events_of("\n".join(lines))[-1]["error"]["message"]
        assert [body["n"] for body in engine.bodies] == [2, 1]
        answer = await client.post(f"{url}/chat/completions", json=body)
        told = texts_of(events_of(answer.text))
        assert {index for index, _ in told} == {0, 1, 2}
        assert [body["n"] for body in engine.bodies] == [2, 1, 1, 1, 1]
        assert len(await proxy.nodes(url.split("/")[-2])) == 3


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
