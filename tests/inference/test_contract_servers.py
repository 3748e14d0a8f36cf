"""What holds for every server type: request bodies, parsed replies, errors, and the same surface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from helpers_peer import Characters, Peer, Reply

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.inference.servers.api_server import APIServer, TokenCompletions
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.sglang import SGLangServer
from atroposlib.inference.servers.trl import TrlVllmServer
from atroposlib.inference.servers.vllm import VLLMServer

HELLO = [{"role": "user", "content": "hi"}]
A = [97, 2]
B = [98]


def chat_reply(n: int) -> Any:
    message = {"role": "assistant", "content": "a"}
    choice = {"message": message, "finish_reason": "stop"}
    return {"id": "c", "choices": [{**choice, "index": i} for i in range(n)]}


def text_reply(n: int) -> Any:
    return {
        "id": "c",
        "choices": [{"index": i, "text": "a", "finish_reason": "stop"} for i in range(n)],
    }


def vllm_reply(n: int) -> Any:
    rows = [(A, [-0.1, -0.2], "stop"), (B, [-0.3], "length")][:n]
    return {
        "choices": [
            {
                "index": i,
                "text": "a",
                "finish_reason": reason,
                "token_ids": tokens,
                "prompt_token_ids": [1, 104, 105],
                "logprobs": {"token_logprobs": logprobs, "tokens": [], "top_logprobs": None},
            }
            for i, (tokens, logprobs, reason) in enumerate(rows)
        ]
    }


def sglang_reply(n: int) -> Any:
    rows = [
        {
            "output_token_logprobs": [[-0.1, 97, None], [-0.2, 2, None]],
            "finish_reason": {"type": "stop", "matched": 2},
        },
        {"output_token_logprobs": [[-0.3, 98, None]], "finish_reason": "length"},
    ][:n]
    results = [{"text": "a", "meta_info": meta} for meta in rows]
    return results if n > 1 else results[0]


def trl_reply(n: int) -> Any:
    return {
        "prompt_ids": [[1, 104, 105]],
        "completion_ids": [A, B][:n],
        "logprobs": [[-0.1, -0.2], [-0.3]][:n],
    }


@dataclass(frozen=True)
class Kind:
    """One server type and what it should put on the wire."""

    make: type[APIServer]
    chat: Callable[[int], Any]
    text: Callable[[int], Any]
    tokens: Callable[[int], Any] | None
    chat_request: tuple[str, Any]
    text_request: tuple[str, Any]
    token_request: tuple[str, Any] | None


TRL_BODY = {
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 9,
}
OPENAI_BODY = {"model": "m", "n": 2, "temperature": 0.5, "max_tokens": 9}
NEUTRAL = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

KINDS = {
    "openai": Kind(
        OpenAIServer,
        chat_reply,
        text_reply,
        None,
        ("/v1/chat/completions", {"messages": HELLO, **OPENAI_BODY}),
        ("/v1/completions", {"prompt": "hi", **OPENAI_BODY}),
        None,
    ),
    "vllm": Kind(
        VLLMServer,
        chat_reply,
        text_reply,
        vllm_reply,
        ("/v1/chat/completions", {"messages": HELLO, **OPENAI_BODY}),
        ("/v1/completions", {"prompt": "hi", **OPENAI_BODY}),
        (
            "/v1/completions",
            {
                "prompt": [1, 104, 105],
                **OPENAI_BODY,
                **NEUTRAL,
                "top_k": 0,
                "logprobs": 0,
                "return_token_ids": True,
            },
        ),
    ),
    "sglang": Kind(
        SGLangServer,
        chat_reply,
        text_reply,
        sglang_reply,
        ("/v1/chat/completions", {"messages": HELLO, **OPENAI_BODY}),
        ("/v1/completions", {"prompt": "hi", **OPENAI_BODY}),
        (
            "/generate",
            {
                "input_ids": [1, 104, 105],
                "sampling_params": {
                    "n": 2,
                    "max_new_tokens": 9,
                    "temperature": 0.5,
                    "top_k": -1,
                    **NEUTRAL,
                },
                "return_logprob": True,
                "return_text_in_logprobs": False,
            },
        ),
    ),
    "trl": Kind(
        TrlVllmServer,
        trl_reply,
        trl_reply,
        trl_reply,
        ("/generate/", {"prompts": ["user:hi\nassistant:"], **TRL_BODY}),
        ("/generate/", {"prompts": ["hi"], **TRL_BODY}),
        ("/generate/", {"prompts": [[1, 104, 105]], **TRL_BODY}),
    ),
}
EVERY = pytest.mark.parametrize("name", KINDS)
WITH_TOKENS = pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].tokens])


def open_server(name: str, peer: Peer, **changes: Any) -> Any:
    # TRL's servers have their root in base_url, the others may have /v1 behind it.
    url = peer.url if name == "trl" else f"{peer.url}/v1"
    config = peer.config(**{"base_url": url, "server_type": name, **changes})
    server = peer.opened(KINDS[name].make(config))
    if name != "openai":
        server.tokenizer = Characters()  # type: ignore[attr-defined]
    return server


def posted(peer: Peer) -> list[tuple[str, Any]]:
    return [(asked.path, asked.body) for asked in peer.asked]


# Requests.


@EVERY
async def test_a_chat_request_has_this_body(name: str) -> None:
    kind = KINDS[name]
    async with Peer(kind.chat(2)) as peer:
        answer = await open_server(name, peer).chat_completion(
            model="another", messages=HELLO, n=2, temperature=0.5, max_tokens=9
        )
    assert posted(peer) == [kind.chat_request]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "a"
    assert answer.choices[0].finish_reason == "stop"


@EVERY
async def test_a_text_request_has_this_body(name: str) -> None:
    kind = KINDS[name]
    async with Peer(kind.text(2)) as peer:
        answer = await open_server(name, peer).completion(
            prompt="hi", n=2, temperature=0.5, max_tokens=9
        )
    assert posted(peer) == [kind.text_request]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a", "stop")


@WITH_TOKENS
@pytest.mark.parametrize("prompt", [{"input_ids": [1, 104, 105]}, {"prompt": "hi"}])
async def test_a_token_request_has_this_body(name: str, prompt: dict[str, Any]) -> None:
    kind = KINDS[name]
    assert kind.tokens is not None
    async with Peer(kind.tokens(2)) as peer:
        answer = await open_server(name, peer).tokens_and_logprobs_completion(
            **prompt, n=2, temperature=0.5, max_tokens=9
        )
    assert posted(peer) == [kind.token_request]
    assert isinstance(answer, TokenCompletions)
    prompt_tokens, tokens, logprobs, reasons = answer
    assert prompt_tokens == [1, 104, 105]
    assert tokens == [A, B]
    assert logprobs == [[-0.1, -0.2], [-0.3]]
    assert reasons == ["stop", "length"]
    assert {type(token) for row in tokens for token in row} == {int}
    assert {type(value) for row in logprobs for value in row} == {float}
    assert answer.weight_versions == [None, None]


@EVERY
async def test_keywords_for_the_client_are_not_sent(name: str) -> None:
    async with Peer(KINDS[name].chat(1)) as peer:
        await open_server(name, peer, api_key="secret").chat_completion(
            messages=HELLO,
            timeout=3,
            split="eval",
            skip_reasoning=True,
            stop=None,
            extra_headers={"X-Me": "1"},
            extra_query={"q": "2"},
        )
    asked = peer.asked[0]
    kept = {"messages", "model"} if name != "trl" else {"prompts", *TRL_BODY}
    assert set(asked.body) == kept
    assert (asked.headers["X-Me"], asked.headers["Authorization"]) == ("1", "Bearer secret")
    assert asked.query == {"q": "2"}


# The original's /generate, for servers that have nothing else.


def without_token_ids() -> Any:
    [choice] = vllm_reply(1)["choices"]
    return {"choices": [{**choice, "token_ids": None}]}


@pytest.mark.parametrize("first", [Reply({"detail": "Not Found"}, 404), Reply(without_token_ids())])
async def test_vllm_generate_is_asked_as_the_original_asks_it(first: Reply) -> None:
    reply = {
        "logprobs": [[[{"97": -0.1}], [{"2": -0.2}]], [[{"98": -0.3}]]],
        "finish_reasons": ["stop", "length"],
        "text": ["ignored"],
    }
    gets = {"/openapi.json": Reply({"paths": {"/generate": {}}})}
    async with Peer(first, reply, gets=gets) as peer:
        server = open_server("vllm", peer)
        for _ in range(2):
            answer = await server.tokens_and_logprobs_completion(
                input_ids=[1, 2, 3], n=2, max_tokens=16
            )
    body = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "logprobs": 0, "n": 2, "max_tokens": 16}
    assert posted(peer)[1:] == [("/generate", body)] * 2
    assert tuple(answer) == ([1, 2, 3], [A, B], [[-0.1, -0.2], [-0.3]], ["stop", "length"])


async def test_a_vllm_server_without_token_ids_and_without_generate_is_named() -> None:
    gets = {"/openapi.json": Reply({"paths": {"/v1/completions": {}}})}
    async with Peer(without_token_ids(), gets=gets) as peer:
        with pytest.raises(EngineProtocolError, match="must support return_token_ids"):
            await attempt(open_server("vllm", peer), "tokens")


# The URL and the health.


@WITH_TOKENS
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_base_url_may_end_in_v1_or_not(name: str, suffix: str) -> None:
    async with Peer(KINDS[name].chat(1)) as peer:
        await open_server(name, peer, base_url=peer.url + suffix).chat_completion(messages=HELLO)
    assert peer.paths == [KINDS[name].chat_request[0]]


HEALTH_PATHS = {
    "openai": "/v1/models",
    "vllm": "/health",
    "sglang": "/health",
    "trl": "/health/",
}


@EVERY
async def test_health_is_asked_once_and_without_generating(name: str) -> None:
    path = HEALTH_PATHS[name]
    async with Peer(KINDS[name].chat(1), gets={path: Reply({})}) as peer:
        server = open_server(name, peer, health_check=True)
        for _ in range(2):
            await server.chat_completion(messages=HELLO)
    assert peer.gotten.count(path) == 1
    assert len(peer.asked) == 2


@EVERY
@pytest.mark.parametrize("status", [200, 401, 404, 503])
async def test_the_health_status_shows_whether_a_server_is_up(name: str, status: int) -> None:
    path = HEALTH_PATHS[name]
    async with Peer({}, gets={path: Reply(b"loading", status)}) as peer:
        server = open_server(name, peer)
        fault = await server._find_fault()
        down = f"GET {peer.url}{path} answered {status}: loading"
    # An API may lack the list of models, and a TRL server with the original's routes its health route.
    is_up = status == 200 or (status < 500 and name in ("openai", "trl"))
    assert fault == (None if is_up else down)


# Errors of one attempt, without retries.


async def attempt(server: Any, call: str, **options: Any) -> Any:
    try:
        if call == "chat":
            return await server._chat_completion_wrapper(model="m", messages=HELLO, **options)
        if call == "text":
            return await server._completion_wrapper(model="m", prompt="hi", **options)
        return await server._tokens_and_logprobs_completion_wrapper(input_ids=[1], **options)
    finally:
        await server.close()


CALLS = pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call)
        for name in KINDS
        for call in ("chat", "text", "tokens")
        if call != "tokens" or KINDS[name].tokens
    ],
)


@CALLS
@pytest.mark.parametrize("status", [400, 403])
async def test_a_refusal_keeps_the_servers_message(name: str, call: str, status: int) -> None:
    body = {"error": {"message": "the prompt is too long", "code": status}}
    async with Peer(Reply(body, status)) as peer:
        with pytest.raises(
            EngineRejected, match=rf"POST http.* answered {status}: .*the prompt is too long"
        ) as caught:
            await attempt(open_server(name, peer), call)
    assert caught.value.status == status  # type: ignore[attr-defined]
    assert len(peer.asked) == 1


@CALLS
@pytest.mark.parametrize("status", [429, 502])
async def test_busy_and_broken_servers_may_answer_later(name: str, call: str, status: int) -> None:
    async with Peer(Reply(b"overloaded", status, {"Retry-After": "7"})) as peer:
        with pytest.raises(EngineUnavailable, match=f"answered {status}: overloaded") as caught:
            await attempt(open_server(name, peer), call)
    assert caught.value.status == status
    assert caught.value.retry_after_s == 7.0
    assert len(peer.asked) == 1


@CALLS
@pytest.mark.parametrize("body", [b"", b"\xff\xfe"])
async def test_an_answer_that_is_no_json_is_an_error(name: str, call: str, body: bytes) -> None:
    async with Peer(Reply(body)) as peer:
        with pytest.raises(EngineProtocolError, match=r"POST http.* answered 200 with .*not JSON"):
            await attempt(open_server(name, peer), call)
    assert len(peer.asked) == 1


@CALLS
@pytest.mark.parametrize("body", [{}, [], None, {"object": "list"}])
async def test_json_that_is_no_answer_is_an_error(name: str, call: str, body: Any) -> None:
    async with Peer(body) as peer:
        with pytest.raises(EngineProtocolError):
            await attempt(open_server(name, peer), call)


@CALLS
async def test_a_server_that_cannot_be_reached_is_unavailable(name: str, call: str) -> None:
    async with Peer({}) as peer:
        server = open_server(name, peer)
    with pytest.raises(EngineUnavailable, match="127.0.0.1"):
        await attempt(server, call)


@WITH_TOKENS
@pytest.mark.parametrize("n", [1, 3])
async def test_another_number_of_token_completions_is_an_error(name: str, n: int) -> None:
    kind = KINDS[name]
    assert kind.tokens is not None
    async with Peer(kind.tokens(2)) as peer:
        with pytest.raises(EngineProtocolError, match="answered 2 .*expected"):
            await open_server(name, peer).tokens_and_logprobs_completion(
                input_ids=[1, 104, 105], n=n
            )


def spoil(name: str, value: Any) -> Any:
    """A reply whose second completion has `value` instead of its only logprob."""
    if name == "vllm":
        reply = vllm_reply(2)
        reply["choices"][1]["logprobs"]["token_logprobs"] = value
    elif name == "sglang":
        reply = sglang_reply(2)
        pairs = [[v, 98, None] for v in value] if isinstance(value, list) else value
        reply[1]["meta_info"]["output_token_logprobs"] = pairs
        reply[1]["meta_info"]["completion_tokens"] = 1
    else:
        reply = trl_reply(2)
        reply["logprobs"][1] = value
    return reply


@WITH_TOKENS
@pytest.mark.parametrize("value", [[None], ["-0.3"], [], [-0.3, -0.4], None, "x"])
async def test_logprobs_that_do_not_fit_their_tokens_are_refused(name: str, value: Any) -> None:
    async with Peer(spoil(name, value)) as peer:
        with pytest.raises(EngineProtocolError):
            await open_server(name, peer).tokens_and_logprobs_completion(
                input_ids=[1, 104, 105], n=2
            )


@WITH_TOKENS
async def test_a_null_logprob_is_named_with_its_position(name: str) -> None:
    async with Peer(spoil(name, [None])) as peer:
        # The completion is the second, the token its first.
        with pytest.raises(EngineProtocolError, match=r"got `null` - at `\$.*\[1\].*\[0\]"):
            await open_server(name, peer).tokens_and_logprobs_completion(
                input_ids=[1, 104, 105], n=2
            )


# What third parties rely on.


@EVERY
async def test_the_private_attempts_can_be_replaced_on_the_class(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def recorder(attribute: str, answer: Any) -> Any:
        async def attempt(self: Any, **kwargs: Any) -> Any:
            seen.append((attribute, kwargs))
            return answer

        return attempt

    make = KINDS[name].make
    plain = ([1], [[2]], [[-0.5]], [{"type": "stop"}])
    for attribute, answer in (
        ("_chat_completion_wrapper", "chat"),
        ("_completion_wrapper", "text"),
        ("_tokens_and_logprobs_completion_wrapper", plain),
    ):
        monkeypatch.setattr(make, attribute, recorder(attribute, answer))
    async with Peer({}) as peer:
        server = open_server(name, peer)
        assert await server.chat_completion(messages=HELLO, split="train") == "chat"
        assert await server.completion(prompt="x") == "text"
        tokens = await server.tokens_and_logprobs_completion(input_ids=[1], split="eval")
    assert tuple(tokens) == plain
    assert tokens.weight_versions == [None]
    assert seen == [
        ("_chat_completion_wrapper", {"messages": HELLO, "model": "m"}),
        ("_completion_wrapper", {"prompt": "x", "model": "m"}),
        ("_tokens_and_logprobs_completion_wrapper", {"input_ids": [1], "model": "m"}),
    ]


@EVERY
async def test_connections_are_kept_and_closing_twice_is_harmless(name: str) -> None:
    async with Peer(KINDS[name].chat(1)) as peer:
        server = open_server(name, peer)
        for _ in range(6):
            await server.chat_completion(messages=HELLO)
        # One for requests, perhaps another while the server's own figures are being read.
        assert len({asked.port for asked in peer.asked}) <= 2
        await server.close()
        await server.close()
        await server.chat_completion(messages=HELLO)  # a later request opens another
        await server.close()
    assert len(peer.asked) == 7


class Silent(Peer):
    """Holds POSTs until `release` is set."""

    def __init__(self, *replies: Any) -> None:
        super().__init__(*replies)
        self.arrived, self.release = asyncio.Event(), asyncio.Event()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.arrived.set()
            await self.release.wait()
        return await super()._answer(request)


@CALLS
async def test_a_server_that_is_silent_for_too_long_is_unavailable(name: str, call: str) -> None:
    async with Silent({}) as peer:
        with pytest.raises(EngineUnavailable, match=r"POST http.*: no answer within 0\.02 s"):
            await attempt(open_server(name, peer), call, timeout=0.02)
        peer.release.set()


@EVERY
async def test_cancelling_a_call_ends_it(name: str) -> None:
    async with Silent(KINDS[name].chat(1)) as peer:
        server = open_server(name, peer)
        call = asyncio.create_task(server.chat_completion(messages=HELLO))
        await peer.arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert server.num_assigned == {"train": 0, "eval": 0}
        peer.release.set()
