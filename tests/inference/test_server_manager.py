"""ServerManager: which servers there are, which of them gets a call, and sessions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers_inference import FastVLLM, StockVLLM
from pydantic import ValidationError

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.harness import ByteTokenizer, ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.scripted_engine.script import Script
from atroposlib.inference.servers import admission
from atroposlib.inference.servers.admission import EngineDown
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.sampling_notes import noting_sampling
from atroposlib.inference.servers.vllm import VLLMServer
from atroposlib.inference.sessions import proxy_client
from tests.fake_packages import register

HELLO = [{"role": "user", "content": "hello"}]
NOWHERE = "http://127.0.0.1:1/v1"


class Harness(ServerHarness):
    """Answers at once; the test sets whether it is up."""

    def __init__(self, config: APIServerConfig, reasoning_config: Any = None) -> None:
        super().__init__(config, reasoning_config, respond=lambda request: "yes")

    def go_down(self) -> None:
        self.server_healthy = False


def harnesses(num_servers: int, **config: Any) -> tuple[ServerManager, list[Harness]]:
    entries = [
        APIServerConfig(base_url=f"http://h{i}/v1", model_name="m", **config)
        for i in range(num_servers)
    ]
    manager = ServerManager(entries, server_class=Harness)
    return manager, manager.servers  # type: ignore[return-value]


def num_requests(servers: list[Harness]) -> list[int]:
    return [len(server.requests) for server in servers]


# Choosing.


async def test_calls_follow_the_free_slots() -> None:
    manager, servers = harnesses(2, num_max_requests_at_once=40, adaptive_concurrency=False)
    servers[0].sem.update_limit(10)
    for server in servers:
        server.delay_s = 0.2  # all calls start before the first ends
    await asyncio.gather(*(manager.chat_completion(messages=HELLO) for _ in range(50)))
    assert num_requests(servers) == [10, 40]


async def test_evaluation_has_slots_of_its_own_and_makes_a_server_less_free_for_training() -> None:
    manager, servers = harnesses(2, num_requests_for_eval=4)
    for server in servers:
        server.delay_s = 0.02
    await servers[0].sem.acquire()  # training does not matter to evaluation
    evaluations = [
        asyncio.create_task(manager.chat_completion(messages=HELLO, split="eval")) for _ in range(8)
    ]
    for _ in range(4):  # a few begin in each round
        await asyncio.sleep(0)
    assert [server.num_assigned["eval"] for server in servers] == [4, 4]
    assert servers[0].load("train") == 5 / 64
    assert servers[0].load("eval") == 5 / 4
    await asyncio.gather(*evaluations)


@pytest.mark.parametrize("is_training", [True, False])
async def test_wait_for_sem_returns_once_a_slot_of_that_budget_is_free(is_training: bool) -> None:
    manager, servers = harnesses(2, num_max_requests_at_once=1, num_requests_for_eval=1)
    limiters = [server.sem if is_training else server.eval_sem for server in servers]
    for limiter in limiters:
        await limiter.acquire()
    await asyncio.wait_for(manager.wait_for_sem(is_training=not is_training), 30)
    waiting = asyncio.create_task(manager.wait_for_sem(is_training=is_training))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    limiters[1].release()
    await asyncio.wait_for(waiting, 30)
    assert [limiter.in_use for limiter in limiters] == [1, 0]
    assert not any(limiter._waiters for limiter in limiters)


async def test_a_share_of_all_servers_can_be_set() -> None:
    manager, servers = harnesses(2)
    await manager.update_weight(0.5)
    assert [server.sem.capacity for server in servers] == [32, 32]


async def test_all_figures_are_shown_under_the_number_of_their_server() -> None:
    manager, servers = harnesses(2)
    servers[1].go_down()
    metrics = await manager.wandb_metrics({"kept": 1})
    assert metrics["kept"] == 1
    assert (metrics["server/server_0_healthy"], metrics["server/server_1_healthy"]) == (1.0, 0.0)


async def test_prompt_logprobs_come_from_one_server_as_any_call() -> None:
    manager, servers = harnesses(2)

    async def get_logprobs(**kwargs: Any) -> Any:
        return kwargs

    servers[0].go_down()
    servers[1]._get_logprobs_wrapper = get_logprobs  # type: ignore[method-assign]
    answer = await manager.get_logprobs(input_ids=[1], top_k=2)
    assert answer == {"input_ids": [1], "top_k": 2, "model": "m"}


async def test_many_completions_are_split_and_merged_in_order() -> None:
    manager, servers = harnesses(2)
    reply = await manager.chat_completion(messages=HELLO, n=20)
    assert [choice.index for choice in reply.choices] == list(range(20))
    assert sorted(r["n"] for server in servers for r in server.requests) == [4, 8, 8]
    tokens = await manager.tokens_and_logprobs_completion(input_ids=[5, 6], n=9)
    assert [len(part) for part in tokens[1:]] == [9, 9, 9]
    assert len(tokens.weight_versions) == 9


async def test_equal_seeds_are_counted_on_over_the_parts_of_a_call() -> None:
    manager, servers = harnesses(2)
    await manager.chat_completion(messages=HELLO, n=20, seed=5)
    asked = [(r["n"], r["seed"]) for server in servers for r in server.requests]
    assert sorted(asked) == [(4, 21), (8, 5), (8, 13)]


async def test_split_is_forwarded_and_never_reaches_the_engine() -> None:
    async with StockVLLM() as engine:
        manager = ServerManager(engine.config())
        await manager.chat_completion(messages=HELLO, split="eval", timeout=9)
        metrics = await manager.wandb_metrics()
        await manager.close()
    assert set(engine.served[0].body) == {"model", "messages"}
    assert "server/server_0_eval_request_time_avg" in metrics
    assert "server/server_0_request_time_avg" not in metrics


# Servers that go down.


async def test_a_call_moves_on_when_its_server_goes_down() -> None:
    async with StockVLLM() as first, StockVLLM() as second:
        configs = [engine.config(health_wait_s=30.0) for engine in (first, second)]
        manager = ServerManager(configs, server_class=FastVLLM)
        second.fail(503, path="/health")
        await manager.chat_completion(messages=HELLO)  # only the first is up
        assert manager.servers[0].server_healthy
        first.fail(500)
        first.fail(503, path="/health", times=10**4)
        manager.servers[1].server_healthy = True
        manager.servers[0].num_assigned["train"] -= 1  # the freer one
        async with asyncio.timeout(10):
            await manager.chat_completion(messages=HELLO)
        await manager.close()
    assert (len(first.served), len(second.served)) == (2, 1)


async def test_a_server_that_came_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HEALTH_REMINDER_S", 0.01)
    async with StockVLLM() as first, StockVLLM() as second:
        first.fail(503, path="/health", times=3)
        manager = ServerManager([first.config(), second.config()], server_class=FastVLLM)
        async with asyncio.timeout(10):
            while not first.served:
                await asyncio.gather(*(manager.chat_completion(messages=HELLO) for _ in range(2)))
                await asyncio.sleep(0.005)
        await manager.close()
    assert second.served


async def test_a_server_that_stays_down_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first answer takes seconds: it imports openai.
    monkeypatch.setattr(admission, "HEALTH_REMINDER_S", 60.0)
    async with StockVLLM() as first, StockVLLM() as second:
        first.fail(503, path="/health", times=10**4)
        manager = ServerManager([first.config(), second.config()], server_class=FastVLLM)
        for _ in range(50):
            await manager.chat_completion(messages=HELLO)
        await manager.close()
    assert len(second.served) == 50
    assert first.counts["/health"] == 1


async def test_no_request_is_sent_while_no_server_is_ready_and_the_reasons_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with StockVLLM() as engine:
        engine.fail(503, path="/health", times=10**4)
        configs = [
            engine.config(base_url=NOWHERE, health_wait_s=0.1),
            engine.config(health_wait_s=0.1),
        ]
        urls = [config.base_url for config in configs]
        manager = ServerManager(configs, server_class=FastVLLM)
        calls = [manager.chat_completion(messages=HELLO) for _ in range(20)]
        with caplog.at_level(logging.INFO):
            errors = await asyncio.gather(*calls, return_exceptions=True)
        metrics = await manager.wandb_metrics()
        await manager.close()
    assert not engine.served
    assert {type(error) for error in errors} == {EngineDown}
    assert "no inference server is ready" in str(errors[0])
    assert f"{NOWHERE}: GET" in str(errors[0])
    assert "answered 503" in str(errors[0])
    lines = [record.getMessage() for record in caplog.records]
    assert [sum(f"{url} is not ready: GET" in line for line in lines) for url in urls] == [1, 1]
    assert metrics["server/server_0_healthy"] == metrics["server/server_1_healthy"] == 0.0


async def test_calls_go_to_whichever_server_comes_up_first() -> None:
    async with StockVLLM() as first, StockVLLM() as second:
        first.fail(503, path="/health", times=10**4)
        second.fail(503, path="/health", times=3)
        manager = ServerManager([first.config(), second.config()])
        for server in manager.servers:
            server.health_poll_s = 0.001
        await asyncio.gather(*(manager.chat_completion(messages=HELLO) for _ in range(4)))
        await manager.close()
    assert (len(first.served), len(second.served)) == (0, 4)


# Sessions.


async def test_a_session_stays_on_its_server_for_all_turns() -> None:
    manager, servers = harnesses(3)
    async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
        mine = servers.index(managed.server)
        managed.server.num_assigned["train"] += 100  # every other server is freer
        messages = list(HELLO)
        for _ in range(4):
            reply = await managed.chat_completion(messages=messages, n=1)
            messages += [reply.choices[0].message, *HELLO]
        managed.server.num_assigned["train"] -= 100
        assert len(managed.get_state()["nodes"]) == 1
    assert num_requests(servers)[mine] == sum(num_requests(servers)) == 4


async def test_a_session_whose_engine_is_down_moves_and_stays_where_it_is_answered() -> None:
    async with StockVLLM() as first, StockVLLM() as second:
        engines = [first, second]
        configs = [engine.config(health_wait_s=30.0) for engine in engines]
        manager = ServerManager(configs, server_class=FastVLLM)
        async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
            await managed.chat_completion(messages=HELLO, max_tokens=2)
            mine = manager.servers.index(managed.server)
            engines[mine].fail(500, times=10)
            engines[mine].fail(503, path="/health", times=10**4)
            first_answer = await managed.chat_completion(messages=HELLO, max_tokens=2)
            assert managed.server is manager.servers[1 - mine]
            said = [*HELLO, first_answer.choices[0].message, {"role": "user", "content": "on"}]
            engines[mine].set_script(Script())
            await managed.chat_completion(messages=said, max_tokens=2)
            assert managed.server is manager.servers[1 - mine]
            assert len(managed.get_state()["nodes"]) == 2
        assert len(engines[1 - mine].served) == 2
        async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
            assert managed.server is manager.servers[1 - mine]
        await manager.close()


async def test_a_session_resumes_when_its_engine_is_back() -> None:
    async with StockVLLM() as first, StockVLLM() as second:
        engines = [first, second]
        manager = ServerManager([e.config() for e in engines], server_class=FastVLLM)
        async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
            mine = manager.servers.index(managed.server)
            engines[mine].fail(500)
            await managed.chat_completion(messages=HELLO, max_tokens=2)
        await manager.close()
    assert (len(engines[mine].served), len(engines[1 - mine].served)) == (2, 0)


async def test_calls_inside_a_dedicated_server_cannot_block_each_other() -> None:
    manager, servers = harnesses(1, num_max_requests_at_once=1)
    async with asyncio.timeout(30), manager.dedicated_server() as server:
        assert server is servers[0]
        await asyncio.gather(*(server.chat_completion(messages=HELLO) for _ in range(3)))
        await manager.chat_completion(messages=HELLO)
        async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
            await managed.chat_completion(messages=HELLO)
    assert num_requests(servers) == [5]
    assert server.num_assigned == {"train": 0, "eval": 0}


async def test_openai_servers_refuse_managed_sessions_unless_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    async with StockVLLM() as engine:
        manager = ServerManager(engine.config(server_type="openai"))
        with pytest.raises(NotImplementedError, match="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"):
            async with manager.managed_server():
                pass
        monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "YES")
        for _ in range(2):
            async with manager.managed_server() as managed:
                await managed.chat_completion(messages=HELLO)
                assert managed.get_state()["nodes"][0].metadata["dummy_tokens"]
        assert caplog.text.count("made up") == 1
        await manager.close()


async def test_a_session_counts_as_load_while_it_is_open() -> None:
    manager, _ = harnesses(2)
    async with manager.managed_server(tool_call_parser="hermes") as first:
        async with manager.managed_server() as second:
            assert {first.server, second.server} == set(manager.servers)
            metrics = await manager.wandb_metrics()
            assert metrics["server/server_0_requests_waiting"] == 0.0
        async with manager.dedicated_server() as third:
            assert third is second.server
    assert all(server.num_assigned["train"] == 0 for server in manager.servers)


async def test_sessions_of_an_item_share_a_server_up_to_an_eighth_of_its_slots() -> None:
    manager, _ = harnesses(4, num_max_requests_at_once=32)

    async def sessions(stack: AsyncExitStack, num: int) -> list[Any]:
        return [
            (
                await stack.enter_async_context(manager.managed_server(tokenizer=ByteTokenizer()))
            ).server
            for _ in range(num)
        ]

    async with AsyncExitStack() as stack:
        with noting_sampling():
            first = await sessions(stack, 3)
        with noting_sampling():
            second = await sessions(stack, 3)
        alone = await sessions(stack, 2)
    assert {*first, *second, *alone} == set(manager.servers)
    assert [len(set(group)) for group in (first, second, alone)] == [1, 1, 2]
    async with AsyncExitStack() as stack:
        with noting_sampling():
            many = await sessions(stack, 40)
    assert max(Counter(map(id, many)).values()) <= 10 + 4


async def test_a_session_can_be_bound_to_a_server_by_url() -> None:
    manager, _ = harnesses(3)
    async with manager.managed_server(base_url="http://h2/v1") as managed:
        assert managed.server is manager.servers[2]
    with pytest.raises(ConfigError, match="no server at base_url"):
        async with manager.managed_server(base_url="http://elsewhere/v1"):
            pass


# A proxy.


@pytest.mark.parametrize("by", ["argument", "variable", "attribute"])
async def test_sessions_are_opened_at_a_proxy_where_one_is_configured(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []

    class Session:
        closed = False

        async def cleanup(self) -> None:
            self.closed = True

    async def create(**kwargs: Any) -> Session:
        opened.append(kwargs)
        return Session()

    monkeypatch.setattr(proxy_client, "create_proxy_session", create)
    monkeypatch.delenv("ATROPOS_PROXY_URL", raising=False)
    if by == "variable":
        monkeypatch.setenv("ATROPOS_PROXY_URL", "http://proxy")
    config = APIServerConfig(base_url="http://h/v1", model_name="m", server_type="vllm")
    manager = ServerManager(config, proxy_url="http://proxy" if by == "argument" else None)
    if by == "attribute":
        assert not manager.use_proxy
        manager.proxy_url = "http://proxy"
    assert manager.use_proxy
    with pytest.raises(RuntimeError, match="author"):
        async with manager.managed_server(base_url="http://e/v1", tool_parser="llama3") as first:
            raise RuntimeError("author")
    async with manager.managed_server(ByteTokenizer()):
        pass
    assert first.closed
    common = {"proxy_url": "http://proxy", "track_tree": False, "model_name": "m", "counts": {}}
    assert opened == [
        {**common, "base_url": "http://e/v1", "tool_parser": "llama3"},
        {**common, "base_url": None, "tool_parser": "hermes"},
    ]


async def test_use_proxy_needs_to_know_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_PROXY_URL", raising=False)
    with pytest.raises(ConfigError, match="ATROPOS_PROXY_URL"):
        ServerManager(APIServerConfig(base_url="http://h/v1"), use_proxy=True)
    monkeypatch.setenv("ATROPOS_PROXY_URL", "http://p")
    assert ServerManager(APIServerConfig(base_url="http://h/v1")).proxy_url == "http://p"


# What servers there are.


def test_one_class_speaks_to_all_servers_and_the_first_entry_decides() -> None:
    entries = [
        APIServerConfig(base_url="http://a/v1", server_type="vllm"),
        APIServerConfig(base_url="http://b/v1", server_type="openai"),
    ]
    assert [type(server) for server in ServerManager(entries).servers] == [VLLMServer] * 2
    own = ServerManager(entries, server_class=Harness)
    assert [type(server) for server in own.servers] == [Harness] * 2


def test_a_list_is_one_server_per_entry_as_given() -> None:
    entries = [APIServerConfig(base_url=f"http://h{i}/v1", api_key="k") for i in range(3)]
    manager = ServerManager(entries)
    assert [server.config for server in manager.servers] == entries


def test_a_bare_config_means_four_local_servers_with_all_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    baseline = ServerBaseline(
        timeout=7,
        num_max_requests_at_once=11,
        num_requests_for_eval=3,
        model_name="m",
        rolling_buffer_length=9,
        server_type="vllm",
        tokenizer_name="t",
    )
    configs = [server.config for server in ServerManager(baseline).servers]
    assert [config.base_url for config in configs] == [
        f"http://localhost:{port}/v1" for port in (9004, 9005, 9006, 9007)
    ]
    for config in configs:
        assert config.model_dump(include=set(ServerBaseline.model_fields)) == baseline.model_dump()
        assert config.api_key == "x"


async def test_server_type_chooses_the_class() -> None:
    config = {"base_url": "http://h/v1"}
    assert isinstance(ServerManager(APIServerConfig(**config)).servers[0], OpenAIServer)
    vllm = ServerManager([APIServerConfig(server_type="vllm", **config)])
    assert isinstance(vllm.servers[0], VLLMServer)
    for server_type, name in (("sglang", "SGLangServer"), ("trl", "TrlVllmServer")):
        [server] = ServerManager(APIServerConfig(server_type=server_type, **config)).servers
        assert type(server).__name__ == name
    for name, hint in (("tgi", "valid"), ("vlm", r"did you mean vllm\? valid")):
        refusal = f"server_type '{name}' is unknown; {hint}: openai, sglang, trl, vllm"
        with pytest.raises(ValidationError, match=refusal):
            APIServerConfig(server_type=name, **config)


def test_a_package_registers_a_server_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_engine.py").write_text(
        "from atroposlib.inference.servers.vllm import VLLMServer\nclass OwnServer(VLLMServer): ...\n"
    )
    register(
        tmp_path,
        monkeypatch,
        group="atroposlib.engines",
        points={
            "own": "own_engine:OwnServer",
            "gone": "own_engine:Gone",
            "vllm": "own_engine:Gone",
        },
    )
    config = {"base_url": "http://h/v1"}
    own, own_vllm = (
        ServerManager(APIServerConfig(server_type=name, **config)).servers[0]
        for name in ("own", "vllm")
    )
    assert (type(own).__name__, type(own_vllm)) == ("OwnServer", VLLMServer)
    with pytest.raises(
        ConfigError, match="server_type 'gone' cannot be loaded from own_engine:Gone"
    ):
        ServerManager(APIServerConfig(server_type="gone", **config))
    with pytest.raises(
        ValidationError, match=r"did you mean own\? valid: gone, openai, own, sglang"
    ):
        APIServerConfig(server_type="owm", **config)


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
