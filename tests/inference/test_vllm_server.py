"""VLLMServer's choice among vLLM's routes, against scripted engines that offer some of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from helpers_inference import FastVLLM, StockVLLM, sample
from helpers_peer import Peer, Reply

from atroposlib.errors import EngineProtocolError, EngineRejected
from atroposlib.inference.scripted_engine import Fault, Script
from atroposlib.inference.servers.http_peer import THREAD_FROM_BYTES, HttpPeer
from atroposlib.inference.servers.vllm import ORIGINAL_ROUTE, TOKENS_ROUTE

PROMPT = [5, 6, 7]


COMPLETION = {
    "choices": [
        {
            "index": 0,
            "text": "",
            "token_ids": [8],
            "prompt_token_ids": PROMPT,
            "logprobs": {"token_logprobs": [-0.25]},
            "finish_reason": "length",
        }
    ]
}
WITHOUT_TOKENS = (TOKENS_ROUTE, ORIGINAL_ROUTE)


@pytest.mark.parametrize("missing", [(), WITHOUT_TOKENS, ("/openapi.json",)])
async def test_a_missing_model_is_not_a_missing_route(missing: tuple[str, ...]) -> None:
    async with StockVLLM(missing=missing) as engine, client_of(engine) as client:
        client.config.model_name = "other"
        for _ in range(2):
            with pytest.raises(EngineRejected, match="model `other` does not exist"):
                await client.tokens_and_logprobs_completion(input_ids=PROMPT)
        assert engine.counts[ORIGINAL_ROUTE] == 0
        client.config.model_name = "tiny"
        await client.tokens_and_logprobs_completion(input_ids=PROMPT)
        assert engine.counts[TOKENS_ROUTE] == (3 if missing == () else 0)


@asynccontextmanager
async def client_of(engine: StockVLLM | Peer) -> AsyncIterator[FastVLLM]:
    client = FastVLLM(engine.config(server_type="vllm"))
    try:
        yield client
    finally:
        await client.close()


def num_asked(engine: StockVLLM) -> dict[str, int]:
    paths = ("/openapi.json", TOKENS_ROUTE, "/v1/completions")
    return {path: engine.counts[path] for path in paths if engine.counts[path]}


async def test_the_tokens_route_is_used_where_it_is_listed() -> None:
    script = Script(faults=(Fault(kind="swap_weights"),))
    async with StockVLLM(script, missing=()) as engine, client_of(engine) as client:
        answer = await client.tokens_and_logprobs_completion(
            input_ids=PROMPT, n=2, max_new_tokens=2, stop=["\n"]
        )
    spans = [("7", 1), ("8", 1)]
    wanted = [sample(PROMPT, choice, spans=spans) for choice in range(2)]
    tokens, logprobs = map(list, zip(*wanted, strict=True))
    assert answer == (PROMPT, tokens, logprobs, ["length"] * 2)
    assert answer.weight_versions == [spans] * 2
    assert num_asked(engine) == {"/openapi.json": 1, TOKENS_ROUTE: 1}
    assert [served.body for served in engine.served] == [
        {
            "model": "tiny",
            "token_ids": PROMPT,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "n": 2,
                "stop": ["\n"],
                "max_tokens": 2,
                "logprobs": 0,
            },
        }
    ]


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_a_tokens_route_that_refuses_is_asked_once(status: int) -> None:
    async with StockVLLM(missing=()) as engine, client_of(engine) as client:
        engine.fail(status, path=TOKENS_ROUTE, times=9)
        for _ in range(2):
            answer = await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
            assert answer.output_logprobs == [sample(PROMPT, num_tokens=1).logprobs]
    assert num_asked(engine) == {"/openapi.json": 1, TOKENS_ROUTE: 1, "/v1/completions": 2}


async def test_a_bad_request_at_the_tokens_route_is_the_callers() -> None:
    async with StockVLLM(missing=()) as engine, client_of(engine) as client:
        engine.fail(400, path=TOKENS_ROUTE)
        with pytest.raises(EngineRejected, match="answered 400"):
            await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert engine.counts["/v1/completions"] == 0


async def test_only_keywords_that_completions_alone_support_are_sent_to_completions() -> None:
    async with StockVLLM(missing=()) as engine, client_of(engine) as client:
        sampling = client.tokens_and_logprobs_completion
        await sampling(input_ids=PROMPT, max_tokens=1, extra_body={"response_format": {}})
        await sampling(input_ids=PROMPT, max_tokens=1)
    assert [served.path for served in engine.served] == ["/v1/completions", TOKENS_ROUTE]
    assert "response_format" in engine.served[0].body


async def test_many_first_requests_ask_once_what_the_server_offers() -> None:
    async with StockVLLM() as engine, client_of(engine) as client:
        calls = [
            client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1) for _ in range(20)
        ]
        await asyncio.gather(*calls)
    assert num_asked(engine) == {"/openapi.json": 1, "/v1/completions": 20}


async def test_a_server_that_is_starting_is_asked_again_what_it_offers() -> None:
    async with StockVLLM(missing=()) as engine, client_of(engine) as client:
        engine.fail(503, path="/openapi.json")
        await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert num_asked(engine) == {"/openapi.json": 2, TOKENS_ROUTE: 1}


async def test_completions_of_large_answers_keep_their_order_over_several_requests() -> None:
    script = Script(lengths=(9, 9), reports_spans=False)
    async with StockVLLM(script) as engine, client_of(engine) as client:
        answer = await client.tokens_and_logprobs_completion(
            input_ids=PROMPT, n=5, max_tokens=16_000, seed=3
        )
    wanted = [
        sample(PROMPT, choice, num_tokens=8, seed=seed).tokens
        for seed, choice in [(3, 0), (3, 1), (5, 0), (5, 1), (7, 0)]
    ]
    assert [tokens[:-1] for tokens in answer.output_tokens] == wanted
    bodies = [served.body for served in engine.served]
    assert sorted((body["seed"], body["n"]) for body in bodies) == [(3, 2), (5, 2), (7, 1)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="status", path="/weight_info", status=500, skip=1),
        Fault(kind="status", path="/weight_info", status=500, times=1),
        Fault(kind="status", path="/weight_info", status=503, skip=1),
        Fault(kind="status", path="/weight_info", status=429, skip=1),
        Fault(kind="swap_weights"),
    ],
)
async def test_a_sample_is_kept_when_its_version_is_unknown(fault: Fault) -> None:
    script = Script(reports_spans=False, faults=(fault,))
    async with (
        StockVLLM(script, missing=WITHOUT_TOKENS) as engine,
        client_of(engine) as client,
    ):
        answer = await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert answer.weight_versions == [None]
    assert engine.counts["/v1/completions"] == 1


async def test_a_server_that_reports_versions_with_its_answers_is_asked_for_none() -> None:
    spans = [{"weight_version": "8", "num_tokens": 1}]
    answered = {"choices": [{**COMPLETION["choices"][0], "weight_versions": spans}]}
    gets = {"/weight_info": Reply({"weight_version": "7"})}
    async with Peer(answered, gets=gets) as peer, client_of(peer) as client:
        for _ in range(3):
            answer = await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
            assert answer.weight_versions == [[("8", 1)]]
    assert peer.gotten.count("/weight_info") == 1


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


@pytest.mark.parametrize(
    "reply", [*map(Reply, SOMETHING_ELSE), *[Reply({}, status) for status in (403, 404, 405)]]
)
async def test_a_server_with_another_answer_has_no_version_and_is_asked_once(
    reply: Reply,
) -> None:
    async with Peer(COMPLETION, gets={"/weight_info": reply}) as peer, client_of(peer) as client:
        for _ in range(2):
            answer = await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
            assert answer.weight_versions == [None]
    assert peer.gotten.count("/weight_info") == 1
    assert peer.paths == ["/v1/completions"] * 2


async def test_a_version_that_is_not_set_yet_is_asked_for_again() -> None:
    versions = []
    async with Peer(COMPLETION) as peer, client_of(peer) as client:
        for version in (None, "7", "8"):
            peer.gets["/weight_info"] = Reply({"weight_version": version})
            answer = await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
            versions.append(answer.weight_versions)
    assert versions == [[None], [[("7", 1)]], [[("8", 1)]]]


@pytest.mark.parametrize("body", SOMETHING_ELSE)
async def test_a_server_that_describes_something_else_is_asked_at_completions(body: bytes) -> None:
    gets = {"/openapi.json": Reply(body)}
    async with Peer(COMPLETION, gets=gets) as peer, client_of(peer) as client:
        for _ in range(2):
            await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
    assert peer.gotten.count("/openapi.json") == 1
    assert peer.paths == ["/v1/completions"] * 2


async def test_prompts_may_be_any_integers_and_lists_are_not_copied() -> None:
    import numpy as np

    async with StockVLLM() as engine, client_of(engine) as client:
        same = await client.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
        other = await client.tokens_and_logprobs_completion(
            input_ids=np.array(PROMPT), max_tokens=1
        )
    assert same.prompt_tokens is PROMPT
    assert other.prompt_tokens == PROMPT
    assert [type(token) for token in other.prompt_tokens] == [int] * 3


@pytest.mark.parametrize(
    ("keywords", "asked"),
    [
        ({}, 1),
        ({"top_k": 0, "top_logprobs": 2}, 0),
    ],
)
async def test_top_k_zero_asks_for_the_prompts_own_tokens_only(
    keywords: dict[str, Any], asked: int
) -> None:
    async with Peer(COMPLETION) as peer, client_of(peer) as client:
        with pytest.raises(EngineProtocolError, match="must have 3 positions, got nothing"):
            await client.get_logprobs(input_ids=PROMPT, **keywords)
    assert peer.bodies == [
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
    scored = {"prompt_logprobs": [None, {"6": -2.0, "9": -0.5}]}
    async with Peer(Reply({}, 404), scored) as peer, client_of(peer) as client:
        answer = await client.get_logprobs(input_ids=[5, 6], top_k=top_k)
    assert answer["prompt_topk_token_ids"] == [[], ids]
    assert peer.paths[-1] == "/generate"
    assert peer.bodies[1:] == [
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
    async with Peer(body) as server:
        peer = HttpPeer(server.url, api_key=None)
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
