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


class _Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("size", [0, 100_000])  # in the table, in a file
async def test_what_another_program_wrote_to_the_folder_is_no_answer_and_runs_nothing(
    tmp_path: Path, size: int
) -> None:
    import diskcache

    folder, canary = tmp_path / "cache", tmp_path / "canary"
    planted: list[Any] = [
        [_Planted(canary), b" " * size],
        *("x" * (size + 1), b"no JSON" + b" " * size, 5, 1.5, b"[1]", b"\xff", None),
    ]
    async with Peer(*[chat(str(i)) for i in range(len(planted))]) as peer:
        config = peer.config(answer_cache=str(folder))
        server = OpenAIServer(config)
        await asyncio.gather(*(said(server) for _ in planted))
        await server.close()
        with diskcache.Cache(str(folder)) as cache:
            keys = sorted(cache)
            for key, value in zip(keys[:-1], planted, strict=False):
                cache.set(key, value)
        later = OpenAIServer(config)
        answers = [await said(later) for _ in planted]
        await later.close()
        assert len(peer.asked) == len(planted) + len(keys) - 1
        again = OpenAIServer(config)
        assert [await said(again) for _ in planted] == answers
        await again.close()
        assert len(peer.asked) == len(planted) + len(keys) - 1
    assert not canary.exists()
    with diskcache.Cache(str(folder)) as cache:
        cache.set("x", planted[0])
        cache.get("x")
    assert canary.exists()  # a cache that unpickles would have run it


async def test_answers_of_an_earlier_version_are_found_in_table_and_file(tmp_path: Path) -> None:
    for text in ("short", "long " * 20_000):
        async with Peer(chat(text), chat("another")) as peer:
            config = peer.config(answer_cache=str(tmp_path))
            for _ in range(2):
                server = OpenAIServer(config)
                assert await said(server) == text
                await server.close()
            assert len(peer.asked) == 1
