"""AgentEnv: unmodified agents over a scripted engine; what is trained is what was sampled; failures are not scores."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import select
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from atroposlib.envs.agent_env import AgentEnv, AgentEnvConfig, AgentFailed, agent_variables
from atroposlib.errors import ConfigError, EngineUnavailable, EnvError
from atroposlib.frontend.view_groups import view_of_row
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, create_chat_completion
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.sampling_notes import ItemRecord, SamplingNotes, noting_sampling
from atroposlib.inference.sessions.sequences import train_once
from atroposlib.proxy.command import create_app
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.process import process
from atroposlib.runtime.progress import RunStatus, with_servers
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.local_server import serve_locally
from environments.agents.arithmetic_agents import ArithmeticAgents
from tests.builders.environments import Offline
from tests.envs.helpers_envs import ENGINE, group_of, make_env, trained_texts


class Doubling(Offline, AgentEnv):
    """The agent asks once, in this process; the row is a number."""

    name = "doubling"

    def load_rows(self, split: str) -> Any:
        return range(1, 9) if split == "train" else [3, 4]

    async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
        return await asyncio.to_thread(ask, base_url, api_key, f"Double {row}.")

    def score(self, row: Any, answer: Any) -> float:
        return float(answer == str(2 * row))


class Refused(Exception):
    """The API's answer is an error; its argument is the code."""


def ask(base_url: str, api_key: str, text: str, history: Sequence[dict[str, str]] = ()) -> str:
    """Call the API as any program would."""
    body = {"messages": [*history, {"role": "user", "content": text}], "temperature": 0}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {api_key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: str = json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(json.load(error)["error"]["code"]) from None
    return answer


def double(request: HarnessRequest) -> str:
    """Right on every other call."""
    found = re.search(r"Double (\d+)", request.prompt)
    assert found
    return str(int(found[1]) * 2 + request.call % 2)


def make(
    env_cls: type[AgentEnv] = Doubling,
    *,
    respond: Callable[[HarnessRequest], str] = double,
    **settings: Any,
) -> Any:
    return make_env(env_cls, respond=respond, weight_version="3", **settings)


class Calculates:
    """Calls the tool with the expression of the question and says what it answered; every other time off by one."""

    def __init__(self) -> None:
        self.num_answers = 0

    def __call__(self, request: HarnessRequest) -> str:
        found = re.search(r"What is (\d+) (.) (\d+)", request.prompt)
        assert found
        result = re.search(r"<tool>(-?\d+)<eos>", request.prompt)
        if result is None:
            call = {"name": "calculate", "arguments": {"expression": " ".join(found.groups())}}
            return f"I calculate.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        self.num_answers += 1
        return f"It is {int(result[1]) + self.num_answers - 1}"


class Reviews:
    """Drafts, and corrects the draft in a second conversation; every other time wrongly."""

    def __init__(self) -> None:
        self.num_reviews = 0

    def __call__(self, request: HarnessRequest) -> str:
        found = re.search(r"Another model answered: (\d+)", request.prompt)
        if found is None:
            return "390"
        self.num_reviews += 1
        return str(int(found[1]) + self.num_reviews)


def gold_of(prompt: str) -> str:
    found = re.search(r"What is (\d+) ([*+]) (\d+)", prompt)
    assert found
    left, right = int(found[1]), int(found[3])
    return str(left * right if found[2] == "*" else left + right)


class OfflineArithmetic(Offline, ArithmeticAgents):
    pass


async def test_agent_on_openais_sdk_trains_what_was_sampled_over_its_turns_with_tools() -> None:
    env = make(OfflineArithmetic, respond=Calculates(), agent="openai_sdk")
    group = await group_of(env, "17 * 23")
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.num_sequences == 2
    assert sorted(group["scores"]) == [0.0, 1.0]
    call = '{"name": "calculate", "arguments": {"expression": "17 * 23"}}'
    first = f"I calculate.\n<tool_call>\n{call}\n</tool_call><eos>"
    assert sorted(trained_texts(group)) == [f"{first}It is 391<eos>", f"{first}It is 392<eos>"]
    requests = env.server.servers[0].requests
    assert len(requests) == 4
    for request in requests:
        sent = request["input_ids"]
        assert any(tokens[: len(sent)] == sent for tokens in group["tokens"])
        assert request["temperature"] == 1.0  # the agent asks for 0
    assert group["policy_version"] == 3
    right = group["scores"].index(1.0)
    assert group["messages"][right][-1] == {"role": "assistant", "content": "It is 391"}


async def test_agent_on_plain_http_with_two_conversations_makes_two_sequences() -> None:
    env = make(OfflineArithmetic, respond=Reviews(), agent="http")
    group = await group_of(env, "17 * 23")
    check_group(group, strictness=Strictness.MEANING)
    assert len(group["scores"]) == 4
    texts = trained_texts(group)
    assert texts[0] == texts[2] == "390<eos>"
    assert {texts[1], texts[3]} == {"391<eos>", "392<eos>"}
    scores = dict(zip(texts, group["scores"], strict=True))
    assert scores["391<eos>"] == 1.0
    assert scores["392<eos>"] == 0.0
    assert env.counts["agent_sequences"] == 4


class Changes(Doubling):
    """Changes the answer before it sends it back, and trains only what came after."""

    async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
        text = f"Double {row}."
        answer = await asyncio.to_thread(ask, base_url, api_key, text)
        history = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"not {answer}"},
        ]
        return await asyncio.to_thread(ask, base_url, api_key, text, history)

    def choose_sequences(self, row: Any, nodes: Any, answer: Any) -> Any:
        return train_once(nodes)[-1:]


@pytest.mark.parametrize("is_remote", [False, True])
async def test_turns_that_an_agent_changed_and_tokens_that_it_left_out_are_counted(
    is_remote: bool,
) -> None:
    behind, env = make(Changes), make(Changes)
    async with serve_locally(create_app(behind.server, ByteTokenizer(), "m")) as url:
        env.server.proxy_url = url if is_remote else None
        with noting_sampling() as notes:
            group = await group_of(env, 21)
        shown = await env.server.wandb_metrics({})
    assert len(group["scores"]) == 2
    assert notes.broken_prefixes == {"changed": 2}
    assert [value for name, value in shown.items() if name.endswith("broken_by_changed")] == [2]
    assert with_servers(RunStatus(num_made=0), env.server).broken_prefixes == {"changed": 2}
    assert env.counts["agent_sampled_tokens"] == 2 * len("42.42.")
    assert env.counts["agent_left_out_tokens"] == len("42.42.")
    assert env.counts["agent_open_ledgers"] == 0


async def test_the_file_and_the_page_name_turns_that_were_not_continued(tmp_path: Any) -> None:
    path = tmp_path / "groups.jsonl"
    env = make(Changes, total_steps=1, max_num_workers=1, data_path_to_save_groups=str(path))
    await process(env)
    row = json.loads(path.read_text())
    assert row["turns_not_continued"] == {"changed": 2}
    view = view_of_row(row, name="1")
    assert view is not None
    assert view["facts"]["turns_not_continued"] == {"changed": 2}


async def test_a_selection_that_trains_tokens_twice_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Repeats(Doubling):
        def choose_sequences(self, row: Any, nodes: Any, answer: Any) -> Any:
            return [*nodes, *nodes]

    env = make(Repeats)
    await group_of(env, 21)
    assert env.counts["agent_open_ledgers"] == 2
    [warning] = [each for each in caplog.messages if "trained" in each]
    assert "sampled 3 tokens, but 6 are trained and 0 left out" in warning


async def test_groups_of_agents_reach_the_file_and_the_page_with_their_messages(
    tmp_path: Any,
) -> None:
    path = tmp_path / "groups.jsonl"
    reviews = itertools.count()

    def every_other(request: HarnessRequest) -> str:
        is_right = "Another model answered" in request.prompt and next(reviews) % 2
        return gold_of(request.prompt) if is_right else "no idea"

    env = make(
        OfflineArithmetic,
        respond=every_other,
        agent="http",
        total_steps=1,
        max_num_workers=1,
        include_messages=True,
        data_path_to_save_groups=str(path),
    )
    result = await process(env)
    assert (result.num_groups, env.group_sink.dropped) == (1, {})
    (line,) = result.path.read_text().splitlines()
    group = json.loads(line)
    assert len(group["messages"]) == len(group["scores"]) == 4
    assert group["messages"][0][0]["role"] == "user"
    assert group["messages"][0][-1]["role"] == "assistant"
    answers = [answer["text"] for call in group["calls"] for answer in call["answers"]]
    assert set(group["completions"]) <= set(answers)
    assert group["usage"]["num_requests"] == len(group["calls"]) >= 4


async def test_async_agent_is_scored_by_what_it_returns() -> None:
    env = make()
    group = await group_of(env, 4)
    assert sorted(zip(group["scores"], trained_texts(group), strict=True)) == [
        (0.0, "9<eos>"),
        (1.0, "8<eos>"),
    ]
    assert env.server.servers[0].num_assigned["train"] == 0


async def test_plain_agent_runs_in_a_thread_of_its_own() -> None:
    class Plain(Doubling):
        threads: list[str] = []

        def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            self.threads.append(threading.current_thread().name)
            return ask(base_url, api_key, f"Double {row}.")

    env = make(Plain)
    group = await group_of(env, 4)
    assert sorted(group["scores"]) == [0.0, 1.0]
    assert threading.main_thread().name not in Plain.threads
    assert len(Plain.threads) == 2


async def test_agent_that_takes_too_long_is_dropped_and_counted_not_scored_zero() -> None:
    class Slow(Doubling):
        runs = 0

        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            Slow.runs += 1
            if Slow.runs == 1:
                await asyncio.Event().wait()
            return await super().run_agent(row, base_url, api_key)

    env = make(Slow, group_size=3, agent_timeout_s=0.5)
    group = await group_of(env, 4)
    assert len(group["scores"]) == 2
    assert env.counts["agent_timeout"] == 1
    assert env.num_reward_failures == 1


async def test_failed_agent_has_the_score_that_the_environment_gives_it() -> None:
    class Fragile(Doubling):
        agent_failure_score = -1.0

        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            answer = await super().run_agent(row, base_url, api_key)
            if answer != str(2 * row):
                raise ValueError("lost the thread")
            return answer

    env = make(Fragile)
    group = await group_of(env, 4)
    assert sorted(group["scores"]) == [-1.0, 1.0]
    assert env.counts["agent_failed"] == 1


async def test_item_fails_when_all_its_agents_failed() -> None:
    class Broken(Doubling):
        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            raise KeyError("typo")

    env = make(Broken, num_eval_samples=3)
    with pytest.raises(EnvError, match="all 2 runs of the agent failed.*typo"):
        await group_of(env, 4)
    env.agent_failure_score, env.eval_rows = -1.0, [4]
    await env.evaluate()
    await env.close()
    assert [env._counts[split]["agent_failed"] for split in ("train", "eval")] == [2, 3]


async def test_failure_of_the_engine_is_the_items_not_the_agents() -> None:
    env = make()
    env.server.servers[0].fail(EngineUnavailable("the engine is down"), times=100)
    with pytest.raises(EngineUnavailable, match="the engine is down"):
        await group_of(env, 4)


async def test_a_failure_of_the_engine_that_the_agent_got_over_is_not_its_last_word() -> None:
    class Persistent(Doubling):
        agent_failure_score = -1.0

        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            with contextlib.suppress(Refused):
                return await super().run_agent(row, base_url, api_key)
            await super().run_agent(row, base_url, api_key)
            raise ValueError("lost the thread")

    env = make(Persistent)
    env.server.servers[0].max_attempts = 1
    env.server.servers[0].fail(EngineUnavailable("a moment, please"))
    group = await group_of(env, 4)
    assert group is not None
    assert env.counts["agent_failed"] == 1


async def test_an_agent_reaches_its_own_session_and_nothing_else() -> None:
    answers: dict[str, int] = {}

    class Curious(Doubling):
        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            answer = await super().run_agent(row, base_url, api_key)
            root = base_url.removesuffix(f"/{api_key}/v1")
            async with httpx.AsyncClient(base_url=root, timeout=30) as client:
                for method, path in [
                    ("GET", "/sessions"),
                    ("POST", "/sessions/create"),
                    ("POST", "/setup"),
                    ("GET", "/servers"),
                    ("GET", f"/{api_key}/nodes"),
                    ("DELETE", f"/{api_key}/nodes"),
                    ("DELETE", f"/{api_key}"),
                ]:
                    body = {"model_name": "m", "servers": [{"base_url": "http://127.0.0.1:1/v1"}]}
                    answered = await client.request(method, path, json=body)
                    answers[f"{method} {path.replace(api_key, 'uuid')}"] = answered.status_code
            return answer

    group = await group_of(make(Curious), 4)
    assert set(answers.values()) == {404}
    assert len(group["tokens"]) == 2


async def test_an_agents_filters_and_penalties_do_not_reach_the_engine() -> None:
    class Filters(Doubling):
        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            body = {"messages": [{"role": "user", "content": f"Double {row}."}], "top_p": 0.1}
            body |= {"top_k": 1, "min_p": 0.9, "logit_bias": {"5": 100}, "presence_penalty": 2}
            async with httpx.AsyncClient(timeout=30) as client:
                answered = await client.post(f"{base_url}/chat/completions", json=body)
            dropped = answered.headers["X-Atropos-Dropped"].split(", ")
            assert set(dropped) == body.keys() - {"messages"}
            return answered.json()["choices"][0]["message"]["content"]

    env = make(Filters)
    group = await group_of(env, 4)
    assert len(group["scores"]) == 2
    for request in env.server.servers[0].requests:
        assert request["top_p"] == 1.0
        assert not {"top_k", "min_p", "logit_bias", "presence_penalty"} & request.keys()


async def test_request_that_the_engine_refuses_is_the_agents_failure() -> None:
    class Careless(Doubling):
        agent_failure_score = -1.0

    env = make(Careless)
    refusal = EngineHttpRejected("This model's maximum context length is 8 tokens", status=400)
    env.server.servers[0].fail(refusal, times=1)
    group = await group_of(env, 4)
    # The other agent's answer is the second one, which is wrong; the failed one sampled nothing.
    assert group is None
    assert env.counts["agent_failed"] == 1
    assert env.num_too_short == 1


async def test_evaluation_asks_with_its_own_temperature_and_budget() -> None:
    env = make(respond=lambda request: "no")
    await env.setup()
    metrics = await env.evaluate()
    await env.close()
    assert metrics["eval/pass@1"] == 0.0
    assert [r["temperature"] for r in env.server.servers[0].requests] == [0.0, 0.0]
    assert len(env.server.servers[0].eval_request_timings) == 2


async def test_evaluation_is_not_recorded_as_part_of_the_item_that_started_the_proxy() -> None:
    env = make()
    await env.setup()
    try:
        with noting_sampling(ItemRecord()) as record:
            await env.collect_trajectories(4)
        assert isinstance(record, ItemRecord)
        num_calls = len(record.calls)
        assert num_calls == 2
        await env.evaluate()
        assert len(record.calls) == num_calls
    finally:
        await env.close()


async def test_api_without_token_ids_can_be_evaluated_but_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    text_only = ENGINE.model_copy(update={"server_type": "openai"})
    server = OpenAIServer(text_only)

    async def answer_six(**kwargs: Any) -> Any:
        assert (kwargs["temperature"], kwargs["split"]) == (0.0, "eval")
        return create_chat_completion("6")

    server.chat_completion = answer_six  # type: ignore[method-assign]

    class WithoutTokenizer(Doubling):
        def load_tokenizer(self) -> Any:
            raise ConfigError("such a run needs no tokenizer")

    with pytest.raises(ConfigError, match="no tokenizer"):
        make(WithoutTokenizer)
    config = AgentEnvConfig(group_size=2, use_wandb=False)
    env = WithoutTokenizer(config, [text_only])
    env.server.servers = [server]
    await env.setup()
    metrics = await env.evaluate()
    assert metrics["eval/pass@1"] == 0.5
    with pytest.raises(NotImplementedError, match="no token ids"):
        await env.collect_trajectories(4)
    await env.close()


async def test_agent_is_told_when_its_conversation_is_longer_than_the_trainer_takes() -> None:
    class Talkative(Doubling):
        async def run_agent(self, row: Any, base_url: str, api_key: str) -> Any:
            try:
                return await asyncio.to_thread(ask, base_url, api_key, "x" * 100)
            except Refused as refused:
                return refused.args[0]

        def score(self, row: Any, answer: Any) -> float:
            return float(answer == "context_length_exceeded")

    env = make(Talkative)
    env.max_token_len = 60
    await env.setup()
    rollouts = await env.roll_out(4, 1, split="train")
    await env.close()
    assert [(rollout.outcome, rollout.nodes) for rollout in rollouts] == [(1.0, [])]


async def test_sessions_are_opened_at_the_proxy_that_the_environment_is_given() -> None:
    behind = make()
    async with serve_locally(create_app(behind.server, ByteTokenizer(), "m")) as url:
        env = make()
        env.server.proxy_url = url
        group = await group_of(env, 4)
        assert sorted(trained_texts(group)) == ["8<eos>", "9<eos>"]
        assert env.server.servers[0].requests == []
        assert len(behind.server.servers[0].requests) == 2
        assert behind.server.servers[0].num_assigned["train"] == 0


class Rebuilds(Changes):
    def choose_sequences(self, row: Any, nodes: Any, answer: Any) -> Any:
        chosen = super().choose_sequences(row, nodes, answer)
        return [node.model_copy(update={"metadata": None}) for node in chosen]


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("env_cls", [Changes, Rebuilds])
async def test_the_tokens_of_agents_are_counted_by_what_became_of_them(
    env_cls: type[AgentEnv], is_remote: bool
) -> None:
    behind = make(env_cls)
    async with serve_locally(create_app(behind.server, ByteTokenizer(), "m")) as url:
        env = make(env_cls)
        env.server.proxy_url = url if is_remote else None
        outbox = Outbox(env)
        await env.setup()
        try:
            with outbox.item(SamplingNotes()):
                group, _ = await env.collect_trajectories(4)
                await outbox.accept(group)
        finally:
            await env.close()
    assert outbox.tokens == {"trained": len("8.9."), "in no group": len("8.9.")}


async def run_program(agents: Any, code: str, **options: Any) -> str:
    argv = [sys.executable, "-c", code]
    text: str = await agents.run_command(argv, base_url="http://h/u/v1", api_key="k", **options)
    return text


async def test_program_finds_its_address_where_sdks_look_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    monkeypatch.setenv("HUB_TOKEN", "hush")
    found = agent_variables("http://h/u/v1", "k")
    assert "hush" not in found.values()
    assert found["PATH"] == os.environ["PATH"]
    code = "import os, sys; print([os.environ[n] for n in sys.stdin.read().split()])"
    names = "OPENAI_BASE_URL OPENAI_API_KEY ANTHROPIC_BASE_URL ANTHROPIC_API_KEY MINE"
    printed = await run_program(make(), code, stdin=names, env={"MINE": "x"})
    assert printed == "['http://h/u/v1', 'k', 'http://h/u', 'k', 'x']\n"


async def test_program_that_fails_says_so_with_the_end_of_its_stderr() -> None:
    with pytest.raises(AgentFailed, match=r"exit code 3: .*oh no"):
        await run_program(make(), "import sys; print('oh no', file=sys.stderr); sys.exit(3)")


async def test_program_that_prints_without_end_is_stopped() -> None:
    with pytest.raises(AgentFailed, match="more than 1000 bytes"):
        await run_program(make(max_agent_output_bytes=1000), "while True: print('x' * 99)")


async def test_program_is_killed_with_its_children_when_it_is_cancelled(tmp_path: Any) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    code = (
        "import os, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}');"
        "child.wait()"
    )
    run = asyncio.create_task(run_program(make(), code))
    started = (await asyncio.to_thread(pids.read_text)).split()
    handles = [os.pidfd_open(int(pid)) for pid in started]
    assert len(handles) == 2
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    for ended in handles:
        assert await asyncio.to_thread(select.select, [ended], [], [], 10) == ([ended], [], [])
        os.close(ended)


async def test_program_ends_although_what_it_left_running_holds_its_output() -> None:
    code = (
        "import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print('done')"
    )
    async with asyncio.timeout(30):
        assert await run_program(make(), code) == "done\n"


async def test_every_item_is_noted_to_be_sampled_at_the_environments_temperature() -> None:
    env = make(temperature=0.7)
    await env.setup()
    try:
        for row in (1, 2):  # the proxy that the first item starts serves the second, too
            with noting_sampling() as notes:
                await env.collect_trajectories(row)
            assert notes.temperatures == {0.7}
        with noting_sampling() as notes:
            await env.roll_out(3, 1, split="eval")
        assert notes.temperatures == set()
    finally:
        await env.close()
