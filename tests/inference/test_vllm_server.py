"""VLLMServer's choice among vLLM's routes, against an in-process server that offers some of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.errors import EngineProtocolError, EngineRejected
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.http_peer import THREAD_FROM_BYTES, HttpPeer
from atroposlib.inference.servers.vllm import TOKENS_ROUTE, VLLMServer

PROMPT = [5, 6, 7]


class FastVLLM(VLLMServer):
    max_backoff_s = 0.0


class Engine:
    """Samples the ids 10, 11, ...: `first` of them for the first completion of a request, and so on."""

    def __init__(self, *listed: str) -> None:
        self.listed = listed
        self.tokens_status = 200
        self.description: bytes | None = None
        """Answered instead of the listed paths."""
        self.describe_statuses: list[int] = []
        """Answered, and used up, before the description is given."""
        self.weight_info: list[Any] = []
        """Answers of /weight_info, used up; a status, a body or a version. Empty: 404."""
        self.num_weight_info = 0
        self.spans: Any = None
        """Weight versions of every completion of /v1/completions."""
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        app = web.Application(client_max_size=2**24)
        for path, handler in (
            ("/health", self._health),
            ("/openapi.json", self._describe),
            ("/weight_info", self._weight_info),
        ):
            app.router.add_get(path, handler)
        app.router.add_post(TOKENS_ROUTE, self._tokens)
        app.router.add_post("/v1/completions", self._completions)
        self.server = TestServer(app)

    async def __aenter__(self) -> Engine:
        await self.server.start_server()
        url = str(self.server.make_url("/v1"))
        self.client = FastVLLM(APIServerConfig(base_url=url, model_name="m", server_type="vllm"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()
        await self.server.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _describe(self, request: web.Request) -> web.Response:
        self.calls["/openapi.json"] += 1
        await asyncio.sleep(0)
        if self.describe_statuses:
            return web.Response(status=self.describe_statuses.pop(0))
        if self.description is not None:
            return web.Response(body=self.description)
        return web.json_response({"openapi": "3.1.0", "paths": dict.fromkeys(self.listed, {})})

    async def _weight_info(self, request: web.Request) -> web.Response:
        answer = self.weight_info.pop(0) if self.weight_info else 404
        self.num_weight_info += 1
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return web.json_response({"weight_version": answer})

    async def _read(self, request: web.Request) -> dict[str, Any]:
        self.calls[request.path] += 1
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        return body

    async def _tokens(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        if self.tokens_status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.tokens_status)
        n = body["sampling_params"].get("n", 1)
        content = [{"token_id": 10, "logprob": -0.5}, {"token_id": 11, "logprob": -1.0}]
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
        choice = {
            "index": 0,
            "token_ids": [10, 11],
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": spans,
        }
        return web.json_response({"choices": [choice] * n})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        first = 100 * body.get("seed", 0)
        choices = [
            {
                "index": i,
                "text": "",
                "token_ids": [first + i],
                "prompt_token_ids": body["prompt"],
                "logprobs": {"token_logprobs": [-0.25]},
                "finish_reason": "length",
                "weight_versions": self.spans,
            }
            for i in range(body.get("n", 1))
        ]
        return web.json_response({"choices": choices})


async def test_the_tokens_route_is_used_where_it_is_listed() -> None:
    async with Engine(TOKENS_ROUTE, "/v1/completions") as engine:
        answer = await engine.client.tokens_and_logprobs_completion(
            input_ids=PROMPT, n=2, max_new_tokens=2, stop=["x"]
        )
    assert answer == (PROMPT, [[10, 11]] * 2, [[-0.5, -1.0]] * 2, ["stop"] * 2)
    assert answer.weight_versions == [[("3", 1), ("4", 1)]] * 2
    assert engine.calls == {"/openapi.json": 1, TOKENS_ROUTE: 1}
    assert engine.bodies == [
        {
            "model": "m",
            "token_ids": PROMPT,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "n": 2,
                "stop": ["x"],
                "max_tokens": 2,
                "logprobs": 0,
            },
        }
    ]


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_a_tokens_route_that_refuses_is_asked_once(status: int) -> None:
    async with Engine(TOKENS_ROUTE) as engine:
        engine.tokens_status = status
        for _ in range(2):
            answer = await engine.client.tokens_and_logprobs_completion(
                input_ids=PROMPT, max_tokens=1
            )
            assert answer.output_logprobs == [[-0.25]]
    assert engine.calls == {"/openapi.json": 1, TOKENS_ROUTE: 1, "/v1/completions": 2}


async def test_a_bad_request_at_the_tokens_route_is_the_callers() -> None:
    async with Engine(TOKENS_ROUTE) as engine:
        engine.tokens_status = 400
        with pytest.raises(EngineRejected, match="answered 400"):
            await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert engine.calls["/v1/completions"] == 0


async def test_only_keywords_that_completions_alone_support_are_sent_to_completions() -> None:
    async with Engine(TOKENS_ROUTE) as engine:
        sample = engine.client.tokens_and_logprobs_completion
        await sample(input_ids=PROMPT, max_tokens=1, extra_body={"response_format": {}})
        await sample(input_ids=PROMPT, max_tokens=1)
    assert engine.calls == {"/openapi.json": 1, TOKENS_ROUTE: 1, "/v1/completions": 1}
    assert "response_format" in engine.bodies[0]


async def test_many_first_requests_ask_once_what_the_server_offers() -> None:
    async with Engine() as engine:
        calls = [
            engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
            for _ in range(20)
        ]
        await asyncio.gather(*calls)
    assert engine.calls == {"/openapi.json": 1, "/v1/completions": 20}


async def test_a_server_that_is_starting_is_asked_again_what_it_offers() -> None:
    async with Engine(TOKENS_ROUTE) as engine:
        engine.describe_statuses = [503]
        await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert engine.calls == {"/openapi.json": 2, TOKENS_ROUTE: 1}


async def test_a_server_without_a_description_is_asked_for_completions() -> None:
    async with Engine(TOKENS_ROUTE) as engine:
        engine.describe_statuses = [404] * 9
        for _ in range(2):
            await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert engine.calls == {"/openapi.json": 1, "/v1/completions": 2}


async def test_completions_of_large_answers_keep_their_order_over_several_requests() -> None:
    async with Engine() as engine:
        answer = await engine.client.tokens_and_logprobs_completion(
            input_ids=PROMPT, n=5, max_tokens=16_000, seed=3
        )
    assert answer.output_tokens == [[300], [301], [500], [501], [700]]
    assert sorted((body["seed"], body["n"]) for body in engine.bodies) == [(3, 2), (5, 2), (7, 1)]


@pytest.mark.parametrize("answers", [["7", 500], [500, "7"], ["7", 503], ["7", "8"], ["7", 429]])
async def test_a_sample_is_kept_when_its_version_is_unknown(answers: list[Any]) -> None:
    async with Engine() as engine:
        engine.weight_info = answers
        answer = await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert answer.weight_versions == [None]
    assert engine.calls["/v1/completions"] == 1


async def test_a_server_that_reports_versions_with_its_answers_is_asked_for_none() -> None:
    async with Engine() as engine:
        engine.weight_info, engine.spans = ["7"] * 9, [{"weight_version": "8", "num_tokens": 1}]
        for _ in range(3):
            answer = await engine.client.tokens_and_logprobs_completion(
                input_ids=PROMPT, max_tokens=1
            )
            assert answer.weight_versions == [[("8", 1)]]
    assert engine.num_weight_info == 1


SOMETHING_ELSE = [
    b"",
    b"<html>It works!</html>",
    b"null",
    b"[]",
    b'"7"',
    b"{}",
    b'{"status": "ok"}',
    b'{"weight_version": {"a": 1}}',
    b'{"weight_version": true}',
    b'{"weight_version": "\xff"}',
    b"\xff\xfe",
]
"""What gateways and other servers answer with status 200 at a path that they do not know."""


@pytest.mark.parametrize("body", [*SOMETHING_ELSE, 403, 404, 405])
async def test_a_server_with_another_answer_has_no_version_and_is_asked_once(
    body: Any,
) -> None:
    async with Engine() as engine:
        engine.weight_info = [body]
        for _ in range(2):
            answer = await engine.client.tokens_and_logprobs_completion(
                input_ids=PROMPT, max_tokens=1
            )
            assert answer.weight_versions == [None]
    assert engine.num_weight_info == 1
    assert engine.calls["/v1/completions"] == 2


async def test_a_version_that_is_not_set_yet_is_asked_for_again() -> None:
    async with Engine() as engine:
        engine.weight_info = [None, "7", "7", "8", "8"]
        answers = [
            await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
            for _ in range(3)
        ]
    versions = [answer.weight_versions for answer in answers]
    assert versions == [[None], [[("7", 1)]], [[("8", 1)]]]


@pytest.mark.parametrize("body", SOMETHING_ELSE)
async def test_a_server_that_describes_something_else_is_asked_at_completions(body: bytes) -> None:
    async with Engine() as engine:
        engine.description = body
        for _ in range(2):
            await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert (engine.calls["/openapi.json"], engine.calls["/v1/completions"]) == (1, 2)


async def test_prompts_may_be_any_integers_and_lists_are_not_copied() -> None:
    import numpy as np

    async with Engine() as engine:
        same = await engine.client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
        other = await engine.client.tokens_and_logprobs_completion(
            input_ids=np.array(PROMPT), max_tokens=1
        )
    assert same.prompt_tokens is PROMPT
    assert other.prompt_tokens == PROMPT
    assert [type(token) for token in other.prompt_tokens] == [int] * 3


@pytest.mark.parametrize(
    ("keywords", "asked"),
    [
        ({}, 1),
        ({"top_k": 0}, 0),
        ({"top_k": 3}, 3),
        ({"top_logprobs": 2}, 2),
        ({"top_k": 0, "top_logprobs": 2}, 0),
        ({"top_k": None, "top_logprobs": 0}, 0),
    ],
)
async def test_top_k_zero_asks_for_the_prompts_own_tokens_only(
    keywords: dict[str, Any], asked: int
) -> None:
    async with Engine() as engine:
        with pytest.raises(EngineProtocolError, match="must have 3 positions, got nothing"):
            await engine.client.get_logprobs(input_ids=PROMPT, **keywords)
    assert engine.bodies == [
        {
            "model": "m",
            "prompt": PROMPT,
            "n": 1,
            "temperature": 0.0,
            "top_p": 1.0,
            "max_tokens": 1,
            "prompt_logprobs": asked,
        }
    ]


@pytest.mark.parametrize(("top_k", "asked", "ids"), [(0, 1, [6]), (1, 1, [9]), (2, 2, [9, 6])])
async def test_the_originals_server_is_asked_for_at_least_one_prompt_logprob(
    top_k: int, asked: int, ids: list[int]
) -> None:
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"prompt_logprobs": [None, {"6": -2.0, "9": -0.5}]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        client = FastVLLM(APIServerConfig(base_url=url, model_name="m", server_type="vllm"))
        answer = await client.get_logprobs(input_ids=[5, 6], top_k=top_k)
        await client.close()
    assert answer["prompt_topk_token_ids"] == [[], ids]
    assert bodies == [
        {
            "prompt": {"prompt_token_ids": [5, 6]},
            "prompt_logprobs": asked,
            "n": 1,
            "temperature": 0.0,
            "top_p": 1.0,
            "max_tokens": 1,
        }
    ]


# The transport.


async def post(body: bytes, read: Callable[[bytes], Any]) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_post("/x", answer)
    async with TestServer(app) as server:
        peer = HttpPeer(str(server.make_url("/")), api_key=None)
        try:
            return await peer.post("/x", {}, read=read, timeout_s=5)
        finally:
            await peer.close()


@pytest.mark.parametrize(
    ("size", "in_thread"), [(THREAD_FROM_BYTES - 1, False), (THREAD_FROM_BYTES, True)]
)
async def test_large_answers_are_read_off_the_event_loop(size: int, in_thread: bool) -> None:
    def read(answer: bytes) -> bool:
        assert len(answer) == size
        return threading.current_thread() is not threading.main_thread()

    assert await post(b"x" * size, read) is in_thread


async def test_an_answer_of_other_types_is_named_by_its_path() -> None:
    class Wanted(msgspec.Struct):
        a: list[int]

    read = msgspec.json.Decoder(Wanted).decode
    with pytest.raises(EngineProtocolError, match=r"unexpected values .*got `str` - at `\$.a"):
        await post(b'{"a": ["1"]}', read)
    with pytest.raises(EngineProtocolError, match="a body that is not JSON"):
        await post(b"<html>", read)
