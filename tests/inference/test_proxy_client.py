"""`ProxyManagedServer` against a proxy on a real socket: what an environment sees is what a `ManagedServer` shows."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import Any

import pytest

from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.errors import EngineProtocolError, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.inference.servers.sampling_notes import noting_sampling, run_together
from atroposlib.inference.sessions.proxy_client import ProxyManagedServer, create_proxy_session
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.local_server import serve_locally
from tests.inference.helpers_peer import Peer, Reply
from tests.proxy.helpers_proxy import (
    ENGINE_URL,
    WEATHER,
    Held,
    Proxy,
    call_text,
    trained_text,
    weather_agent,
)

HELLO = [{"role": "user", "content": "hi"}]


async def test_state_is_known_after_a_call_without_another_request() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        completion = await managed.chat_completion(messages=HELLO, n=2, max_tokens=3)
        assert [choice.message.content for choice in completion.choices] == ["hel", "hel"]
        nodes = managed.get_state()["nodes"]
        session = await proxy.sessions.get(managed.session_uuid)
        assert nodes == session.nodes()
        assert [trained_text(node.model_dump()) for node in nodes] == ["hel", "hel"]
        assert (managed.model_name, managed.base_url) == ("tiny", "http://127.0.0.1:9/v1")
        assert managed.get_url() == f"{url}/{managed.session_uuid}/v1"
        await managed.cleanup()
        assert proxy.sessions.open_sessions() == []
        await managed.cleanup()


async def test_tool_calls_survive_the_proxy_and_can_be_sent_back() -> None:
    async with Proxy(weather_agent) as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        messages: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
        first = await managed.chat_completion(messages=messages, tools=[WEATHER])
        message = first.choices[0].message
        call = message.tool_calls[0]
        assert first.choices[0].finish_reason == "tool_calls"
        assert call["function"]["name"] == call.function.name == "weather"
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "2 C"}]
        second = await managed.chat_completion(messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "It is 2 degrees."
        (node,) = managed.get_state()["nodes"]
        assert trained_text(node.model_dump()) == (
            f"Let me look.\n{call_text('Oslo')}<eos>It is 2 degrees.<eos>"
        )
        await managed.cleanup()


async def test_text_completions_and_eval_requests_work_through_the_proxy() -> None:
    async with Proxy(lambda request: "bc") as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        completion = await managed.completion(prompt="a", max_tokens=2, split="eval")
        assert completion.choices[0].text == "bc"
        assert len(proxy.engine.eval_request_timings) == 1
        assert len(managed.get_state()["nodes"]) == 1
        await managed.cleanup()


async def test_temperature_of_training_calls_is_noted_for_the_item() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        async with await create_proxy_session(url) as managed:
            with noting_sampling() as notes:
                await managed.chat_completion(messages=HELLO, temperature=0.7)
                await managed.chat_completion(messages=HELLO, temperature=0.0, split="eval")
            assert notes.temperatures == {0.7}
            with noting_sampling() as notes:
                await managed.completion(prompt="a")
            assert notes.temperatures == {1.0}


async def test_calls_that_an_agent_sent_to_the_proxy_are_fetched() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url, track_tree=True)
        await proxy.post(f"/{managed.session_uuid}/v1/chat/completions", {"messages": HELLO})
        assert managed.get_state() == {"sequences": {}, "tree": {}}
        state = await managed.fetch_state()
        assert list(state["sequences"]) == ["<user>hi<eos><assistant>hello<eos>"]
        await managed.cleanup()


async def test_leaving_a_with_block_closes_the_session() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        async with await create_proxy_session(url) as managed:
            await managed.chat_completion(messages=HELLO)
        with pytest.raises(EngineHttpRejected):
            await managed.fetch_state()
        await managed.cleanup()  # closes the connection of the question above


async def test_reset_clears_the_client_and_the_proxy() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        await managed.chat_completion(messages=HELLO)
        managed.reset()
        assert managed.get_state() == {"nodes": []}
        await managed.chat_completion(messages=[{"role": "user", "content": "again"}])
        assert len(managed.get_state()["nodes"]) == 1
        assert len(await proxy.nodes(managed.session_uuid)) == 1
        await managed.cleanup()


async def test_a_reset_that_failed_is_sent_again() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        await managed.chat_completion(messages=HELLO)
        managed.reset()
        broken = ProxyManagedServer("http://127.0.0.1:9", managed.session_uuid)
        managed._peer, working = broken._peer, managed._peer
        with pytest.raises(EngineUnavailable):
            await managed.fetch_state()
        await broken._peer.close()
        managed._peer = working
        assert await managed.fetch_state() == {"nodes": []}
        await managed.cleanup()


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]", b'{"nodes": [{"tokens": 1}]}'])
async def test_an_answer_without_sequences_is_an_error_of_the_protocol(body: bytes) -> None:
    async with Peer({}, gets={"/u/nodes": Reply(body)}) as peer:
        managed = ProxyManagedServer(peer.url, "u")
        with pytest.raises(EngineProtocolError, match="/u/nodes"):
            await managed.fetch_state()
        await managed._peer.close()


async def test_token_is_needed_and_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Proxy(token="let-me-in") as proxy, serve_locally(proxy.app) as url:
        monkeypatch.delenv("ATROPOS_PROXY_TOKEN", raising=False)
        with pytest.raises(EngineHttpRejected) as refused:
            await create_proxy_session(url)
        assert refused.value.status == 401
        monkeypatch.setenv("ATROPOS_PROXY_TOKEN", "let-me-in")
        managed = await create_proxy_session(url, options={"max_tokens": 2})
        completion = await managed.chat_completion(messages=HELLO)
        assert completion.choices[0].message.content == "he"
        await managed.cleanup()


async def test_environment_that_was_not_written_for_a_proxy_works_with_one() -> None:
    class Once(DatasetEnv):
        def load_tokenizer(self) -> Any:
            return ByteTokenizer()

        def load_rows(self, split: str) -> Any:
            return ["a", "b"]

        def prompt(self, row: Any) -> str:
            return f"say {row}"

        def score(self, row: Any, answer: str) -> float:
            return float(answer == "yes")

    answers = ["yes", "no"]
    async with (
        Proxy(lambda request: answers[request.choice]) as proxy,
        serve_locally(proxy.app) as url,
    ):
        config = APIServerConfig(model_name="tiny", base_url=ENGINE_URL, server_type="vllm")
        env = Once(DatasetEnvConfig(group_size=2), [config])
        env.server = ServerManager([config], proxy_url=url)
        await env.setup()
        group, _ = await env.collect_trajectories("a")
        await env.close()
        assert group is not None
        check_group(group, strictness=Strictness.MEANING)
        assert group["scores"] == [1.0, 0.0]
        assert group["policy_version"] == 7
        assert [ByteTokenizer().decode(tokens) for tokens in group["tokens"]] == [
            f"<user>say a<eos><assistant>{answer}<eos>" for answer in answers
        ]
        assert proxy.sessions.open_sessions() == []


async def test_sessions_of_an_item_share_an_engine_of_the_proxy() -> None:
    configs = [
        APIServerConfig(model_name="tiny", base_url=f"http://h{i}/v1", server_type="vllm")
        for i in range(4)
    ]
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        proxy.sessions.manager = manager = ServerManager(configs)
        manager.servers = [
            ServerHarness(config, respond=lambda request: "hello", weight_version="7")
            for config in configs
        ]
        opened = []
        for num in (3, 3, 1):
            with noting_sampling():
                opened.append(await run_together([create_proxy_session(url) for _ in range(num)]))
        alone = await run_together([create_proxy_session(url) for _ in range(2)])
        groups = [{managed.base_url for managed in managed_group} for managed_group in opened]
        assert list(map(len, groups)) == [1, 1, 1]
        assert len(set().union(*groups)) == 3
        assert len({managed.base_url for managed in alone}) == 2
        await opened[0][0].chat_completion(messages=[{"role": "user", "content": "hi"}])
        assert not any(group.turns for group in proxy.sessions._groups.values())
        for managed in [*sum(opened, []), *alone]:
            await managed.cleanup()
        gc.collect()
        assert not proxy.sessions._groups
        await manager.close()


async def test_changed_turns_are_counted_once_however_often_they_are_fetched() -> None:
    counts: Counter[str] = Counter()
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url, counts=counts)
        for content in ("hello", "hullo", "hallo"):
            said = {"role": "assistant", "content": content}
            await managed.chat_completion(messages=HELLO)
            await managed.chat_completion(messages=[*HELLO, said, *HELLO])
            await managed.fetch_state()
        assert managed.broken_prefixes == counts == {"changed": 2}
        await managed.cleanup()


async def test_an_answer_gets_what_its_prompt_leaves_of_the_limit() -> None:
    async with Proxy(lambda request: "x" * 100) as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        for limit, prompt in ((40, "some room"), (2, "no room at all")):
            managed.max_context_tokens = limit
            await managed.completion(prompt=prompt, max_tokens=100)
        nodes = managed.get_state()["nodes"]
        assert [len(node.tokens) for node in nodes] == [40, len("<no room at all") + 1]
        await managed.cleanup()


async def test_failures_are_the_errors_of_an_engine() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = ProxyManagedServer(url, "nobody")
        with pytest.raises(EngineHttpRejected, match="no session"):
            await managed.chat_completion(messages=HELLO)
        await managed.cleanup()
        managed = await create_proxy_session(url)
        proxy.engine.fail(EngineUnavailable("the engine is down"), times=3)
        with pytest.raises(EngineUnavailable, match="the engine is down"):
            await managed.chat_completion(messages=HELLO)
        await managed.cleanup()


async def test_closing_the_connection_cancels_the_engines_work() -> None:
    async with Proxy() as proxy, serve_locally(proxy.app) as url:
        managed = await create_proxy_session(url)
        held = Held(proxy.engine)
        call = asyncio.create_task(managed.chat_completion(messages=HELLO))
        await held.asked.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(10):
            await held.cancelled.wait()
        await managed.cleanup()
