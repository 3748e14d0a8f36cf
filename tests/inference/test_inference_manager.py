"""ServerManager: which server gets which call, and what comes back."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from helpers_inference import FakeEngine, sample

from atroposlib.errors import ConfigError, EngineProtocolError, EngineUnavailable
from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.harness import (
    ServerHarness,
    create_chat_completion,
    create_completion,
)
from atroposlib.inference.manager import ServerManager, server_class_for
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.vllm import VLLMServer

HELLO = [{"role": "user", "content": "hello"}]


class Answering(ServerHarness):
    def __init__(self, config: APIServerConfig, reasoning_config: Any = None) -> None:
        super().__init__(config, reasoning_config, respond=lambda request: f"a{request.choice}")


def manager_of(num_servers: int, **config: Any) -> ServerManager:
    entries = [
        APIServerConfig(base_url=f"http://h{i}/v1", model_name="m", **config)
        for i in range(num_servers)
    ]
    return ServerManager(entries, server_class=Answering)


async def test_concurrent_calls_spread_over_the_servers() -> None:
    manager = manager_of(3)
    for server in manager.servers:
        server.delay_s = 0.001  # type: ignore[attr-defined]
    await asyncio.gather(*(manager.chat_completion(messages=HELLO) for _ in range(30)))
    assert [len(server.requests) for server in manager.servers] == [10, 10, 10]  # type: ignore[attr-defined]


async def test_a_dead_server_gets_nothing() -> None:
    async with FakeEngine() as engine:
        dead = engine.config(base_url="http://127.0.0.1:1/v1")
        manager = ServerManager([dead, engine.config()])
        await asyncio.gather(*(manager.chat_completion(messages=HELLO) for _ in range(4)))
        assert [server.server_healthy for server in manager.servers] == [False, True]
        await manager.close()
    assert len(engine.requests) == 4


async def test_calls_go_to_whichever_server_comes_up_first() -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        first.health_statuses = [503] * 10**4
        second.health_statuses = [503] * 3
        manager = ServerManager([first.config(), second.config()])
        for server in manager.servers:
            server.health_poll_s = 0.001
        await asyncio.gather(*(manager.chat_completion(messages=HELLO) for _ in range(4)))
        await manager.close()
    assert (len(first.requests), len(second.requests)) == (0, 4)


async def test_many_completions_are_split_and_merged_in_order() -> None:
    manager = manager_of(2)
    reply = await manager.chat_completion(messages=HELLO, n=20)
    assert [choice.index for choice in reply.choices] == list(range(20))
    sizes = sorted(r["n"] for s in manager.servers for r in s.requests)  # type: ignore[attr-defined]
    assert sizes == [4, 8, 8]
    tokens = await manager.tokens_and_logprobs_completion(input_ids=[5, 6], n=9)
    assert [len(part) for part in tokens[1:]] == [9, 9, 9]
    assert len(tokens.weight_versions) == 9


async def test_split_is_forwarded_and_never_reaches_the_engine() -> None:
    async with FakeEngine() as engine:
        manager = ServerManager(engine.config())
        await manager.chat_completion(messages=HELLO, split="eval", timeout=9)
        metrics = await manager.wandb_metrics()
        await manager.close()
    assert set(engine.requests[0][1]) == {"model", "messages"}
    assert "server/server_0_eval_request_time_avg" in metrics
    assert "server/server_0_request_time_avg" not in metrics


async def test_server_type_chooses_the_class() -> None:
    config = {"base_url": "http://h/v1"}
    assert isinstance(ServerManager(APIServerConfig(**config)).servers[0], OpenAIServer)
    vllm = ServerManager([APIServerConfig(server_type="vllm", **config)])
    assert isinstance(vllm.servers[0], VLLMServer)
    for server_type, name in (("sglang", "SGLangServer"), ("trl", "TrlVllmServer")):
        [server] = ServerManager(APIServerConfig(server_type=server_type, **config)).servers
        assert type(server).__name__ == name
    with pytest.raises(ConfigError, match="'tgi' is unknown; use 'openai', 'vllm', 'sglang'"):
        server_class_for("tgi")


async def test_managed_sessions_end_to_end_over_http_are_token_exact() -> None:
    class Tokenizer:
        """Ids are code points; ids of the fake engine are 3..252."""

        eos_token_id = 0
        bos_token_id = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(chr(token) for token in tokens)

        def apply_chat_template(self, messages: Any, tokenize: bool, **options: Any) -> str:
            text = "".join(f"<{m['role']}>{m['content']}|" for m in messages)
            return text + ("<assistant>" if options["add_generation_prompt"] else "")

    async with FakeEngine() as engine:
        manager = ServerManager(engine.config())
        async with manager.managed_server(tokenizer=Tokenizer()) as managed:
            first = await managed.chat_completion(messages=HELLO, max_tokens=5)
            messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
            await managed.chat_completion(messages=messages, max_tokens=4)
            [node] = managed.get_state()["nodes"]
        await manager.close()
    prompts = [body["prompt"] for _, body in engine.requests]
    tokens, logprobs = zip(sample(prompts[0], 0, 5), sample(prompts[1], 0, 4), strict=True)
    assert node.tokens == prompts[1] + tokens[1]
    assert prompts[1][: len(prompts[0]) + 5] == prompts[0] + tokens[0]
    trained = [i for i, label in enumerate(node.masked_tokens) if label != -100]
    assert [node.tokens[i] for i in trained] == [*tokens[0], *tokens[1]]
    assert [node.logprobs[i] for i in trained] == [*logprobs[0], *logprobs[1]]


async def test_openai_servers_refuse_managed_sessions_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    async with FakeEngine() as engine:
        manager = ServerManager(engine.config(server_type="openai"))
        with pytest.raises(NotImplementedError, match="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"):
            async with manager.managed_server():
                pass
        monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "YES")
        async with manager.managed_server() as managed:
            await managed.chat_completion(messages=HELLO)
            assert managed.get_state()["nodes"][0].metadata["dummy_tokens"]
        await manager.close()


async def test_a_session_counts_as_load_while_it_is_open() -> None:
    manager = manager_of(2)
    async with manager.managed_server(tool_call_parser="hermes") as first:
        async with manager.managed_server() as second:
            assert {first.server, second.server} == set(manager.servers)
        async with manager.dedicated_server() as third:
            assert third is second.server
    assert all(server.num_assigned["train"] == 0 for server in manager.servers)


async def test_a_session_can_be_bound_to_a_server_by_url() -> None:
    manager = manager_of(3)
    async with manager.managed_server(base_url="http://h2/v1") as managed:
        assert managed.server is manager.servers[2]
    with pytest.raises(ConfigError, match="no server at base_url"):
        async with manager.managed_server(base_url="http://elsewhere/v1"):
            pass


async def test_testing_gives_a_usable_server() -> None:
    manager = ServerManager(ServerBaseline(model_name="m"), testing=True)
    replies = [await manager.chat_completion(messages=HELLO, n=2) for _ in range(2)]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content
    async with manager.managed_server() as managed:
        await managed.chat_completion(messages=HELLO, n=2)
        assert len(managed.get_state()["nodes"]) == 2
    assert manager.servers[0].config.model_name == "m"
    await manager.update_weight(0.5)
    await manager.close()


async def test_use_proxy_needs_to_know_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_PROXY_URL", raising=False)
    with pytest.raises(ConfigError, match="ATROPOS_PROXY_URL"):
        ServerManager(APIServerConfig(base_url="http://h/v1"), use_proxy=True)
    monkeypatch.setenv("ATROPOS_PROXY_URL", "http://p")
    assert ServerManager(APIServerConfig(base_url="http://h/v1")).proxy_url == "http://p"


# The harness.


async def test_the_harness_answers_exact_scripts_and_none_otherwise() -> None:
    harness = ServerHarness()
    chat, text = create_chat_completion(["a", "b"]), create_completion("c", n=2)
    harness.set_desired_response(HELLO, chat)
    harness.set_desired_completion("p", text)
    harness.set_tokens_and_logprobs_response("p", [1], [[2]], [[-0.5]], ["stop"])
    assert await harness.chat_completion(messages=HELLO) is chat
    assert await harness.completion(prompt="p") is text
    assert await harness.tokens_and_logprobs_completion(prompt="p") == (
        [1],
        [[2]],
        [[-0.5]],
        ["stop"],
    )
    assert await harness.chat_completion(messages=[*HELLO, *HELLO]) is None
    assert await harness.completion(prompt="q") is None
    assert [choice.text for choice in text.choices] == ["c", "c"]


@pytest.mark.parametrize("error", [EngineUnavailable("down"), ConnectionResetError("gone")])
async def test_harness_faults_take_the_retry_path(error: Exception) -> None:
    harness = ServerHarness(respond=lambda request: "yes")
    harness.fail(error, times=2)
    await harness.chat_completion(messages=HELLO)
    assert list(harness.attempts_list) == [3]
    harness.fail(error, times=3)
    with pytest.raises(EngineUnavailable, match="gave up after 3 attempts"):
        await harness.chat_completion(messages=HELLO)
    harness.misalign()
    with pytest.raises(EngineProtocolError):
        await harness.tokens_and_logprobs_completion(input_ids=[5])


async def test_third_party_servers_may_return_plain_tuples() -> None:
    class Plain(ServerHarness):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            return [1], [[2]], [[-0.1]], ["stop"]

    answer = await Plain().tokens_and_logprobs_completion(input_ids=[1])
    assert answer.weight_versions == [None]


def test_importing_the_layer_loads_no_heavy_package() -> None:
    import subprocess

    code = (
        "import sys; import atroposlib.inference.manager;"
        "print([m for m in ('openai', 'transformers', 'torch') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr
