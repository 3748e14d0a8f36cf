"""Cached completions: the same answers in a later run, and still different samples within one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers_peer import Peer, Reply
from test_openai_server import HELLO, chat

from atroposlib.errors import EngineRejected
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.usage import Usage, usage_of

pytest.importorskip("diskcache", reason="extra `cache`")


async def said(server: OpenAIServer, **changes: Any) -> str:
    completion = await server.chat_completion(messages=HELLO, temperature=1.0, **changes)
    return str(completion.choices[0].message.content)


async def test_a_later_run_gets_the_same_answers_without_requests(tmp_path: Path) -> None:
    async with Peer(chat("one"), chat("two"), chat("three")) as peer:
        config = peer.config(answer_cache=str(tmp_path))
        first = OpenAIServer(config)
        assert sorted(await asyncio.gather(said(first), said(first))) == ["one", "two"]
        await first.close()
        later = OpenAIServer(config)
        assert sorted([await said(later), await said(later)]) == ["one", "two"]
        assert len(peer.asked) == 2
        assert await said(later) == "three"
        assert await said(later, max_tokens=5) == "three"  # another request
        assert len(peer.asked) == 4
        await later.close()


async def test_a_failed_request_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    async with Peer(Reply({"error": "no"}, 400), chat("one"), chat("two")) as peer:
        config = peer.config(answer_cache=str(tmp_path))
        server = OpenAIServer(config)
        with pytest.raises(EngineRejected):
            await said(server)
        assert await said(server) == "one"
        await server.close()
        later = OpenAIServer(config)
        assert await said(later) == "one"
        await later.close()


async def test_a_cached_answer_costs_nothing_and_is_no_fast_answer(tmp_path: Path) -> None:
    async with Peer(chat("one")) as peer:
        config = peer.config(answer_cache=str(tmp_path), prompt_price=1.0)
        for expected in (Usage(1, 2, 3, 2e-6), Usage(0, 0, 0, 0.0)):
            server = OpenAIServer(config)
            answer = await server.chat_completion(messages=HELLO)
            assert usage_of(answer, config) == expected
            assert answer.usage.total_tokens == 5
            assert server.recent.num == expected.num_requests
            await server.close()
