"""Requests and tokens per minute: no minute exceeds them, estimates are corrected."""

from __future__ import annotations

import asyncio

from helpers_peer import Peer
from test_openai_server import HELLO, chat

from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.rate_limit import RateLimiter, Spacing


def test_no_minute_has_more_than_the_limit() -> None:
    spacing = Spacing(per_minute=30)
    now, sent = 5.0, []
    for _ in range(100):
        now += spacing.wait_s(now)
        spacing.take(1, now)
        sent.append(now)
    assert max(sum(begin <= t < begin + 60 for t in sent) for begin in sent) == 30


def test_time_without_requests_is_not_saved_up() -> None:
    spacing = Spacing(per_minute=60)
    spacing.take(1, 0.0)
    spacing.take(1, 1000.0)
    assert spacing.wait_s(1000.0) == 1.0


async def test_an_answer_replaces_the_estimate_and_lets_the_next_request_go() -> None:
    limiter = RateLimiter(requests_per_minute=None, tokens_per_minute=60)
    body = {"messages": HELLO, "max_tokens": 10_000, "n": 1}
    estimated = await limiter.wait(body)
    assert estimated == 10_001
    waiting = asyncio.create_task(limiter.wait(body))
    await asyncio.sleep(0)
    assert not waiting.done()  # it would wait for hours
    limiter.correct(
        {"usage": {"prompt_tokens": 0, "completion_tokens": 0}}, body, estimated=estimated
    )
    assert await waiting == 1  # the mean completion is now the estimate


def test_a_limiter_is_not_bound_to_an_event_loop() -> None:
    limiter = RateLimiter(requests_per_minute=600_000, tokens_per_minute=None)

    async def wait_together() -> list[int]:
        return await asyncio.gather(*(limiter.wait({}) for _ in range(3)))

    assert [asyncio.run(wait_together()) for _ in range(2)] == [[0] * 3] * 2


async def test_a_server_sends_no_more_requests_than_its_limit() -> None:
    async with Peer(chat("4")) as peer:
        server = OpenAIServer(peer.config(requests_per_minute=1))
        calls = [asyncio.create_task(server.chat_completion(messages=HELLO)) for _ in range(3)]
        await calls[0]
        _, waiting = await asyncio.wait(calls, timeout=0.05)
        assert waiting == {*calls[1:]}
        assert len(peer.asked) == 1
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await server.close()
