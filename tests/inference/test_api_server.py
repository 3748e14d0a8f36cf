"""APIServer: retries, health, limits, figures, and what third-party subclasses rely on."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from helpers_inference import FastVLLM, StockVLLM, eventually, sample

from atroposlib.errors import EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import (
    ServerHarness,
    create_chat_completion,
)
from atroposlib.inference.scripted_engine import Fault, Latency, Script
from atroposlib.inference.servers.admission import ConcurrencyController
from atroposlib.inference.servers.api_server import (
    APIServer,
    TokenCompletions,
    token_counts,
)
from tests.builders.simulated_servers import run_virtually

HELLO = [{"role": "user", "content": "hello"}]


class Fast(ServerHarness):
    """Answers "yes"; does not pause between two attempts."""

    max_backoff_s = 0.0

    def __init__(self, **config: Any) -> None:
        super().__init__(
            APIServerConfig(base_url="http://h/v1", model_name="m", **config),
            respond=lambda request: "yes",
        )


# Retries.


@pytest.fixture(autouse=True)
def pauses_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConcurrencyController, "PAUSE_S", 0.01)


@pytest.mark.parametrize("status", [429, 503])
async def test_later_means_waiting_and_uses_no_attempt(status: int) -> None:
    server = Fast()
    server.fail(EngineUnavailable("later", status=status), times=5)
    await server.chat_completion(messages=HELLO)
    assert list(server.attempts_list) == [6]


async def test_later_is_accepted_no_longer_than_a_server_may_be_down() -> None:
    server = Fast(health_wait_s=0.05)
    server.fail(EngineUnavailable("later", status=429, retry_after_s=0.0), times=10**4)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"later \(gave up after \d+ attempts\)") as caught:
        await server.chat_completion(messages=HELLO)
    assert time.monotonic() - began >= 0.05
    assert (caught.value.status, caught.value.retry_after_s) == (429, 0.0)


async def test_retry_after_is_honoured() -> None:
    server = Fast()
    server.fail(EngineUnavailable("later", status=429, retry_after_s=0.1))
    began = time.monotonic()
    await server.chat_completion(messages=HELLO)
    assert time.monotonic() - began >= 0.1


def test_retry_after_is_honoured_up_to_a_minute() -> None:
    pauses = [
        Fast().pause_s(EngineUnavailable("later", status=429, retry_after_s=seconds), 1)
        for seconds in (3.0, 1e9)
    ]
    assert pauses == [pytest.approx(3.0, abs=0.02), pytest.approx(60.0, abs=0.02)]


async def test_an_account_without_money_fails_after_three_attempts() -> None:
    server = Fast()
    server.fail(EngineUnavailable('{"code": "insufficient_quota"}', status=429), times=100)
    with pytest.raises(EngineUnavailable, match="gave up after 3 attempts"):
        await server.chat_completion(messages=HELLO)


@pytest.mark.parametrize(
    "error", [EngineUnavailable("broken", status=500), ConnectionResetError("x"), TimeoutError("x")]
)
async def test_failures_are_tried_three_times_in_all(error: Exception) -> None:
    server = Fast()
    server.fail(error, times=3)
    with pytest.raises(EngineUnavailable, match="gave up after 3 attempts") as caught:
        await server.chat_completion(messages=HELLO)
    assert caught.value.__cause__ is error
    assert len(server.requests) == 3
    await server.chat_completion(messages=HELLO)
    assert list(server.attempts_list) == [1]


@pytest.mark.parametrize("error", [EngineRejected("bad request"), ValueError("x"), KeyError("x")])
async def test_permanent_errors_are_raised_at_once(error: Exception) -> None:
    server = Fast()
    server.fail(error)
    with pytest.raises(type(error)) as caught:
        await server.chat_completion(messages=HELLO)
    assert caught.value is error
    assert len(server.requests) == 1


async def test_a_retry_goes_before_the_requests_that_wait() -> None:
    server = Fast(num_max_requests_at_once=1)
    server.fail(ConnectionResetError("x"))
    server.delay_s = 0.01
    order: list[str] = []

    async def ask(name: str) -> None:
        await server.chat_completion(messages=HELLO)
        order.append(name)

    await server.sem.acquire()
    asks = [asyncio.create_task(ask(name)) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    server.sem.release()
    await asyncio.gather(*asks)
    assert order == ["second", "first", "third"]


async def test_nothing_is_left_of_a_cancelled_request() -> None:
    server = Fast()
    server.delay_s = 60.0
    task = asyncio.create_task(server.chat_completion(messages=HELLO))
    await eventually(lambda: bool(server.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.concurrency is not None
    assert (server.concurrency.in_flight, server.sem._value) == (0, 512)
    assert server.num_assigned == {"train": 0, "eval": 0}


# Health.


async def test_health_is_asked_only_while_a_request_waits() -> None:
    async with StockVLLM() as engine:
        engine.fail(503, path="/health", times=10**6)
        server = FastVLLM(engine.config(health_wait_s=60.0))
        assert engine.counts["/health"] == 0
        task = asyncio.create_task(server.chat_completion(messages=HELLO))
        await eventually(lambda: engine.counts["/health"] > 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert server.check_task is not None
        await server.check_task
        asked = engine.counts["/health"]
        await asyncio.sleep(0.02)
        assert engine.counts["/health"] == asked
        assert not server.server_healthy
        await server.close()


async def test_a_server_that_is_down_says_why_once_and_is_shown_in_the_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with StockVLLM() as engine:
        engine.fail(503, path="/health", times=8)
        server = FastVLLM(engine.config())
        asks = [asyncio.create_task(server.chat_completion(messages=HELLO)) for _ in range(5)]
        with caplog.at_level(logging.INFO):
            await eventually(lambda: engine.counts["/health"] > 2)
            metrics = await server.wandb_metrics({}, "server_0")
            await asyncio.gather(*asks)
        assert (
            engine.counts["/health"] == 9
        )  # one probe for all five, and none once the server is up
        assert metrics["server/server_0_healthy"] == 0.0
        assert metrics["server/server_0_requests_waiting"] == 5.0
        metrics = await server.wandb_metrics({}, "server_0")
        assert metrics["server/server_0_healthy"] == 1.0
        assert metrics["server/server_0_requests_waiting"] == 0.0
        await server.close()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("is not ready: GET" in line for line in lines) == 1
    assert sum("is ready" in line for line in lines) == 1


async def test_a_server_that_stays_down_is_named_again(caplog: pytest.LogCaptureFixture) -> None:
    async with StockVLLM() as engine:
        engine.fail(503, path="/health", times=8)
        server = FastVLLM(engine.config())
        server.reminder_s = 0.0
        await server.chat_completion(messages=HELLO)
        await server.close()
    assert caplog.text.count("is not ready: GET") == 8


async def test_tokens_of_every_kind_of_answer_are_counted() -> None:
    async with StockVLLM() as engine:
        server = FastVLLM(engine.config())
        answer = await server.tokens_and_logprobs_completion(input_ids=[1, 2, 3], n=2, max_tokens=4)
        sampled = sum(map(len, answer.output_tokens))
        assert (server.num_tokens_in, server.num_tokens_out) == (3, sampled)
        chat = await server.chat_completion(messages=HELLO, n=2, max_tokens=4)
        text = await server.completion(prompt="hello", max_tokens=4)
        await server.close()
    assert server.num_tokens_in == 3 + chat.usage.prompt_tokens + text.usage.prompt_tokens
    sampled += chat.usage.completion_tokens + text.usage.completion_tokens
    assert server.num_tokens_out == sampled > 0


async def test_queued_requests_wait_when_the_server_goes_down() -> None:
    faults = (
        Fault(kind="drop_after", times=1),
        Fault(kind="status", path="/health", skip=1, times=20),
    )
    async with StockVLLM(Script(latency=Latency(first_token_s=0.02), faults=faults)) as engine:
        server = FastVLLM(engine.config(num_max_requests_at_once=1, health_wait_s=20.0))
        await asyncio.gather(*(server.chat_completion(messages=HELLO) for _ in range(4)))
        await server.close()
    assert len(engine.served) == 5  # only the one that failed was sent twice
    assert sorted(server.attempts_list) == [1, 1, 1, 2]


async def test_a_missing_server_fails_after_the_bounded_wait_with_the_url() -> None:
    server = FastVLLM(
        APIServerConfig(base_url="http://127.0.0.1:1/v1", server_type="vllm", health_wait_s=0.05)
    )
    with pytest.raises(EngineUnavailable, match=r"127.0.0.1:1/v1 is not ready after 0.05 s: GET"):
        await server.chat_completion(messages=HELLO)
    await server.close()
    assert server.num_assigned == {"train": 0, "eval": 0}


async def test_an_engine_that_restarts_loses_no_request() -> None:
    async with StockVLLM(Script(latency=Latency(first_token_s=30))) as engine:
        server = FastVLLM(engine.config(health_wait_s=20.0))
        sampling = server.tokens_and_logprobs_completion
        calls = [asyncio.create_task(sampling(input_ids=[i + 10], max_tokens=2)) for i in range(20)]
        await eventually(lambda: len(engine.served) == 20)
        await engine.stop()
        await eventually(lambda: not server.server_healthy)
        engine.set_script(Script())
        await engine.start()
        answers = await asyncio.gather(*calls)
        await server.close()
    assert [answer.output_tokens[0] for answer in answers] == [
        sample([i + 10], num_tokens=2).tokens for i in range(20)
    ]


# The limit.


async def test_evaluation_is_not_held_back_by_training() -> None:
    server = Fast(num_max_requests_at_once=1)
    await server.sem.acquire()
    async with asyncio.timeout(30):
        await server.chat_completion(messages=HELLO, split="eval")
    assert (len(server.request_timings), len(server.eval_request_timings)) == (0, 1)


async def test_refusals_lower_the_limit_and_it_is_shown() -> None:
    server = Fast()
    release = asyncio.Event()

    async def wait(**kwargs: Any) -> Any:
        await release.wait()
        raise EngineUnavailable("too many", status=429)

    server._chat_completion_wrapper = wait  # type: ignore[method-assign]
    asks = [asyncio.create_task(server.chat_completion(messages=HELLO)) for _ in range(80)]
    await eventually(lambda: server.sem.in_use == 64)
    before = await server.wandb_metrics(None, "server_0")
    release.set()
    await eventually(lambda: server.sem.capacity < 64)
    after = await server.wandb_metrics({}, "server_0")
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    assert before["server/server_0_concurrency_limit"] == 64.0
    assert after["server/server_0_concurrency_limit"] < 64.0
    assert server.sem._value == 512


async def test_without_adaptation_the_configured_number_is_used() -> None:
    server = Fast(adaptive_concurrency=False, num_max_requests_at_once=200)
    server.delay_s = 60.0
    asks = [asyncio.create_task(server.chat_completion(messages=HELLO)) for _ in range(300)]
    await eventually(lambda: len(server.requests) == 200)
    metrics = await server.wandb_metrics({}, "server_0")
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    assert "server/server_0_concurrency_limit" not in metrics


def test_the_limit_grows_to_the_configured_number_at_a_server_that_is_fine() -> None:
    async def capacity_after_600() -> int:
        server = Fast(num_max_requests_at_once=150)
        server.delay_s = 0.2
        await asyncio.gather(*(server.chat_completion(messages=HELLO) for _ in range(600)))
        return server.sem.capacity

    assert run_virtually(capacity_after_600()) == 150


async def test_evaluation_takes_its_slots_out_of_the_same_limit() -> None:
    server = Fast()
    server.delay_s = 60.0
    asks = [
        asyncio.create_task(server.chat_completion(messages=HELLO, split=split))
        for split in ["eval"] * 40 + ["train"] * 60
    ]
    await eventually(lambda: len(server.requests) == 64)
    assert (server.eval_sem.in_use, server.sem.in_use) == (40, 24)
    assert (server.eval_sem.capacity, server.sem.capacity) == (64, 24)
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    assert server.sem.capacity == 64


async def test_the_weight_share_applies_on_top_of_the_limit() -> None:
    server = Fast()
    await server.update_weight(0.25)
    assert server.sem.capacity == 16
    assert server.concurrency is not None
    assert server.concurrency.share == 0.25
    await server.update_weight(0.0)
    assert server.sem.capacity == 1


def test_tokens_of_an_answer_are_those_of_its_longest_completion() -> None:
    tokens = TokenCompletions([1], [[1] * 3, [1] * 7], [[0.0] * 3, [0.0] * 7], ["stop", "stop"])
    assert token_counts(tokens) == (1, 10, 7)
    assert token_counts({"prompt_tokens": [1, 2]}) == (2, 0, 0)
    assert token_counts(object()) == (0, 0, 0)
    chat = create_chat_completion("x", n=4)
    assert token_counts(chat).longest == 0
    chat.usage = type("Usage", (), {"completion_tokens": 40})()
    assert token_counts(chat) == (0, 40, 10)


# Figures.


async def test_figures_look_back_on_a_bounded_number_of_requests() -> None:
    server = Fast(rolling_buffer_length=5)
    for split in ["train"] * 20 + ["eval"] * 20:
        await server.chat_completion(messages=HELLO, split=split)
    lengths = {
        len(figures)
        for figures in (
            server.request_timings,
            server.attempts_list,
            server.eval_request_timings,
            server.eval_attempts_list,
        )
    }
    assert lengths == {5}
    metrics = await server.wandb_metrics({"kept": 1}, "server_3")
    assert set(metrics) == {
        "kept",
        "server/server_3_healthy",
        "server/server_3_requests_waiting",
        "server/server_3_tokens_in",
        "server/server_3_tokens_out",
        "server/server_3_concurrency_limit",
        "server/server_3_request_time_avg",
        "server/server_3_request_time_std",
        "server/server_3_request_time_99p",
        "server/server_3_average_num_attempts",
        "server/server_3_eval_request_time_avg",
        "server/server_3_eval_request_time_std",
        "server/server_3_eval_request_time_99p",
        "server/server_3_eval_retry_rate",
    }


# Third-party subclasses.


class ThirdParty(APIServer):
    """What a subclass outside this project has: the abstract methods, and a health task that never ends."""

    def __init__(self, config: Any, reasoning_config: Any = None) -> None:
        super().__init__(config, reasoning_config=reasoning_config)
        self.is_up = False
        self.num_asked = 0

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        while True:
            self.num_asked += 1
            self.server_healthy = self.is_up
            await asyncio.sleep(0.001)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        return kwargs

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        return kwargs

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        return kwargs["input_ids"], [[2]], [[-0.1]], ["stop"]


async def test_a_subclass_may_watch_its_server_for_ever() -> None:
    server = ThirdParty(APIServerConfig(base_url="http://h/v1", model_name="m"))
    ask = asyncio.create_task(server.chat_completion(messages=HELLO, split="eval"))
    await eventually(lambda: server.num_asked > 3)
    assert not ask.done()
    server.is_up = True
    assert await ask == {"messages": HELLO, "model": "m"}
    server.is_up = False
    await eventually(lambda: not server.server_healthy)
    ask = asyncio.create_task(server.completion(prompt="p"))
    server.is_up = True
    assert await ask == {"prompt": "p", "model": "m"}
    with pytest.raises(NotImplementedError, match="ThirdParty .* does not implement get_logprobs"):
        await server.get_logprobs(prompt="p")
    await server.close()
