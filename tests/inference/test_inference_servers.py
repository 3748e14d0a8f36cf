"""OpenAIServer and VLLMServer against an in-process server with stock vLLM's bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers_inference import FakeEngine, sample

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.vllm import VLLMServer

PROMPT = [5, 6, 7]
HELLO = [{"role": "user", "content": "hello"}]


class FastVLLM(VLLMServer):
    max_backoff_s = 0.0
    health_poll_s = 0.001


async def test_tokens_and_logprobs_come_from_the_stock_completion_route() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config(api_key="secret"))
        answer = await server.tokens_and_logprobs_completion(
            input_ids=PROMPT, prompt="ignored", n=2, max_new_tokens=4, temperature=0.5, timeout=3
        )
        await server.close()
    prompt_tokens, tokens, logprobs, reasons = answer
    assert prompt_tokens == PROMPT
    assert (tokens, logprobs) == tuple(
        map(list, zip(sample(PROMPT, 0, 4), sample(PROMPT, 1, 4), strict=True))
    )
    assert reasons == ["length", "length"]
    assert answer.weight_versions == [None, None]
    path, body = engine.requests[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "tiny",
        "prompt": PROMPT,
        "n": 2,
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    assert engine.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_base_url_may_end_in_v1_or_not(suffix: str) -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config(base_url=engine.url + suffix))
        await server.tokens_and_logprobs_completion(input_ids=PROMPT)
        await server.close()
    assert engine.requests[0][0] == "/v1/completions"


async def test_a_server_without_spans_is_asked_which_weights_a_request_starts_under() -> None:
    async with FakeEngine() as engine:
        engine.weight_version = "7"
        server = FastVLLM(engine.config())
        first = await server.tokens_and_logprobs_completion(input_ids=PROMPT, n=2, max_tokens=3)
        engine.weight_version = "8"
        second = await server.tokens_and_logprobs_completion(input_ids=PROMPT, n=1, max_tokens=3)
        await server.close()
    assert first.weight_versions == [[("7", 3)], [("7", 3)]]
    assert second.weight_versions == [[("8", 3)]]


async def test_no_version_is_claimed_for_a_request_during_which_weights_changed() -> None:
    async with FakeEngine() as engine:
        engine.weight_version, engine.swaps_weights = "7", True
        server = FastVLLM(engine.config())
        sampled = await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=3)
        await server.close()
    assert sampled.weight_versions == [None]


async def test_a_server_that_keeps_no_versions_is_asked_once() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config())
        for _ in range(3):
            sampled = await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=3)
        await server.close()
    assert sampled.weight_versions == [None]
    assert engine.num_weight_info == 1


async def test_weight_version_spans_are_read() -> None:
    async with FakeEngine() as engine:
        engine.spans = [
            {"weight_version": "7", "num_tokens": 1},
            {"weight_version": "8", "num_tokens": 3},
        ]
        server = FastVLLM(engine.config())
        answer = await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=4)
        assert answer.weight_versions == [[("7", 1), ("8", 3)]]
        with pytest.raises(EngineProtocolError, match="cover 4 tokens of 5"):
            await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=5)
        await server.close()


async def test_lengths_that_disagree_are_an_error_not_padded() -> None:
    async with FakeEngine() as engine:
        engine.drop_logprobs = 1
        server = FastVLLM(engine.config())
        with pytest.raises(EngineProtocolError, match="3 logprobs for 4 token ids"):
            await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=4)
        await server.close()
    assert len(engine.requests) == 1


@pytest.mark.parametrize("routes", ["generate", "both"])
async def test_the_originals_generate_route_is_used_where_it_is_the_only_way(routes: str) -> None:
    async with FakeEngine(routes=routes) as engine:
        engine.gives_token_ids = False
        server = FastVLLM(engine.config())
        for _ in range(2):
            answer = await server.tokens_and_logprobs_completion(
                input_ids=PROMPT, n=2, max_tokens=3
            )
        await server.close()
    assert answer[1:3] == (
        [sample(PROMPT, i, 3)[0] for i in range(2)],
        [sample(PROMPT, i, 3)[1] for i in range(2)],
    )
    generate = [body for path, body in engine.requests if path == "/generate"]
    assert (
        generate
        == [{"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "max_tokens": 3}] * 2
    )


async def test_a_server_without_token_ids_and_without_generate_is_named() -> None:
    async with FakeEngine() as engine:
        engine.gives_token_ids = False
        server = FastVLLM(engine.config())
        with pytest.raises(EngineProtocolError, match="must support return_token_ids"):
            await server.tokens_and_logprobs_completion(input_ids=PROMPT)
        await server.close()


async def test_prompt_logprobs_keep_the_k_most_likely() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config())
        answer = await server.get_logprobs(input_ids=PROMPT, top_k=1)
        await server.close()
    assert answer == {
        "prompt_tokens": PROMPT,
        "prompt_topk_token_ids": [[], [7], [8]],
        "prompt_topk_logprobs": [[], [-0.25], [-0.25]],
    }


@pytest.mark.parametrize("make", [OpenAIServer, VLLMServer])
async def test_chat_and_text_give_openai_objects(make: Any) -> None:
    async with FakeEngine() as engine:
        server = make(engine.config())
        chat = await server.chat_completion(
            messages=HELLO, n=2, extra_body={"min_p": 0.1}, extra_headers={"X-Me": "1"}, timeout=5
        )
        text = await server.completion(prompt="abc", max_tokens=2, stop=None)
        await server.close()
    assert [c.message.content for c in chat.choices] == ["echo hello"] * 2
    assert chat.choices[0].finish_reason == "abort"  # an engine's own reason is kept
    assert chat.usage.total_tokens == 5
    assert len(text.choices[0].text) == 2
    assert engine.requests[0][1] == {"model": "tiny", "messages": HELLO, "n": 2, "min_p": 0.1}
    assert engine.headers[0]["X-Me"] == "1"
    assert engine.requests[1][1] == {"model": "tiny", "prompt": "abc", "max_tokens": 2}


async def test_a_reply_can_be_appended_to_the_messages_as_it_is() -> None:
    async with FakeEngine() as engine:
        server = OpenAIServer(engine.config())
        first = await server.chat_completion(messages=HELLO)
        await server.chat_completion(messages=[*HELLO, first.choices[0].message])
        await server.close()
    assert engine.requests[1][1]["messages"][1] == {"role": "assistant", "content": "echo hello"}


@pytest.mark.parametrize("flagged", [False, True])
async def test_a_server_that_ignores_n_is_asked_n_times(flagged: bool) -> None:
    async with FakeEngine(ignores_n=True) as engine:
        server = OpenAIServer(engine.config(n_kwarg_is_ignored=flagged))
        first = await server.chat_completion(messages=HELLO, n=3)
        single = await server.chat_completion(messages=HELLO)
        await server.close()
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(single.choices) == 1
    assert [body.get("n") for _, body in engine.requests] == [1 if flagged else 3, 1, 1, None]
    assert first.usage.completion_tokens == 3


async def test_openai_servers_have_no_token_ids() -> None:
    server = OpenAIServer(APIServerConfig(base_url="http://127.0.0.1:1/v1", health_check=False))
    with pytest.raises(NotImplementedError, match="server_type to 'vllm'"):
        await server.tokens_and_logprobs_completion(input_ids=PROMPT)


# Failures.


async def test_5xx_is_retried_three_times_in_all_and_the_cause_is_shown() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config())
        engine.statuses = [503, 500]
        answer = await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=1)
        assert len(answer.output_tokens) == 1
        assert list(server.attempts_list) == [3]
        engine.statuses = [500] * 9
        with pytest.raises(
            EngineUnavailable, match=r"answered 500: scripted failure 500 \(gave up after 3"
        ):
            await server.chat_completion(messages=HELLO)
        await server.close()
    assert len(engine.requests) == 6


async def test_4xx_is_not_retried_and_shows_the_servers_words() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config())
        engine.statuses = [400]
        with pytest.raises(EngineRejected, match="answered 400: scripted failure 400"):
            await server.chat_completion(messages=HELLO)
        await server.close()
    assert len(engine.requests) == 1


async def test_429_counts_as_busy_and_is_retried() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config())
        engine.statuses = [429]
        await server.chat_completion(messages=HELLO)
        await server.close()
    assert len(engine.requests) == 2


async def test_a_missing_server_fails_after_the_bounded_wait_with_the_url() -> None:
    server = FastVLLM(
        APIServerConfig(base_url="http://127.0.0.1:1/v1", server_type="vllm", health_wait_s=0.05)
    )
    with pytest.raises(EngineUnavailable, match=r"127.0.0.1:1/v1 is not ready after 0.05 s: GET"):
        await server.chat_completion(messages=HELLO)
    await server.close()
    assert server.num_assigned == {"train": 0, "eval": 0}


async def test_requests_wait_for_a_server_that_comes_back() -> None:
    async with FakeEngine() as engine:
        engine.health_statuses = [503] * 5
        server = FastVLLM(engine.config())
        chats = [server.chat_completion(messages=HELLO) for _ in range(10)]
        assert len(await asyncio.gather(*chats)) == 10
        await server.close()
    assert engine.num_health == 6  # one poller for ten requests, and none once it is up


async def test_a_healthy_server_is_asked_for_its_health_once() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config())
        for _ in range(3):
            await server.chat_completion(messages=HELLO)
        await server.close()
    assert engine.num_health == 1


async def test_timeouts_name_the_seconds() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config(health_check=False))

        server.max_attempts = 1
        with pytest.raises(EngineUnavailable, match="no answer within 1e-06 s"):
            await server.chat_completion(messages=HELLO, timeout=1e-6)
        await server.close()


async def test_training_and_evaluation_have_budgets_and_figures_of_their_own() -> None:
    async with FakeEngine() as engine:
        server = FastVLLM(engine.config(num_max_requests_at_once=1))
        await server.sem.acquire()  # training is full
        async with asyncio.timeout(5):
            await server.chat_completion(messages=HELLO, split="eval")
        server.sem.release()
        await server.chat_completion(messages=HELLO)
        metrics = await server.wandb_metrics({}, "server_0")
        await server.close()
    assert (len(server.request_timings), len(server.eval_request_timings)) == (1, 1)
    assert metrics["server/server_0_average_num_attempts"] == 1.0
    assert metrics["server/server_0_eval_retry_rate"] == 0.0
    assert metrics["server/server_0_eval_request_time_avg"] > 0


async def test_an_engine_that_restarts_loses_no_request() -> None:
    first = FakeEngine()
    await first.server.start_server()
    port = first.server.port
    server = FastVLLM(first.config(health_wait_s=20.0))
    release = asyncio.Event()
    first.hold = release
    calls = [
        asyncio.create_task(server.tokens_and_logprobs_completion(input_ids=[i + 1], max_tokens=2))
        for i in range(20)
    ]
    while len(first.requests) < 20:  # noqa: ASYNC110 - the fake engine only counts
        await asyncio.sleep(0.001)
    for transport in [handler.transport for handler in first.server.handler.connections]:
        transport.abort()  # as a killed process's sockets
    await first.server.close()
    release.set()
    await asyncio.sleep(0.02)
    assert not server.server_healthy
    second = FakeEngine()
    second.server.port = port
    await second.server.start_server()
    answers = await asyncio.gather(*calls)
    await server.close()
    await second.server.close()
    assert [answer.output_tokens[0] for answer in answers] == [
        sample([i + 1], 0, 2)[0] for i in range(20)
    ]
