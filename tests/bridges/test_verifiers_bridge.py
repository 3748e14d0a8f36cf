"""Environments of verifiers v1 and of the old verifiers run in their own interpreters; their groups reach a hub."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atroposlib.environments.verifiers_env import VerifiersV1Env
from atroposlib.environments.verifiers_server import VerifiersEnv
from fastapi import FastAPI

from atroposlib.envs.collecting import close
from atroposlib.errors import EnvError
from atroposlib.inference.harness import HarnessRequest
from atroposlib.runtime.process import process
from tests.api.helpers_api import serving as serving_api
from tests.bridges.helpers_bridges import TASKS, checked, python_of
from tests.environments.helpers_environments import logged, make_env
from tests.envs.helpers_envs import trained_texts
from tests.runtime.helpers_runtime import LoopbackHub, produced, serving, until

pytestmark = [pytest.mark.bridges, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def in_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TASKS)


def repeat(request: HarnessRequest) -> str:
    """Repeat the word, on every other call with a mistake, and say goodbye."""
    if "Thank you." in request.prompt:
        return "Bye!"
    found = re.search(r"Repeat (\w+)", request.prompt)
    assert found
    return found[1] + "s" * (request.call % 2)


def make_v1(monkeypatch: pytest.MonkeyPatch, respond: Any = repeat, **settings: Any) -> Any:
    block = {"agent": {"harness": {"id": "repeat_words"}}}
    given = {"taskset": "repeat_words", "block": block, "group_size": 4, **settings}
    return make_env(
        VerifiersV1Env,
        monkeypatch,
        respond=respond,
        weight_version="1",
        python=python_of("verifiers"),
        **given,
    )


async def test_groups_of_a_v1_taskset_have_its_rewards_and_aligned_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env = make_v1(monkeypatch, total_steps=3, data_path_to_save_groups=str(tmp_path / "g.jsonl"))
    result = await process(env)
    groups = [json.loads(line) for line in result.path.read_text().splitlines()]
    assert len(groups) == 3
    for group in groups:
        assert checked(group).num_sequences == 4
        assert set(group["scores"]) == {0.0, 2.0}
        for text, score in zip(trained_texts(group), group["scores"], strict=True):
            assert ("s<eos>" in text) == (score == 0.0)
            assert text.endswith("Bye!<eos>")


async def test_serve_sends_the_groups_of_a_v1_taskset_and_evaluates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with LoopbackHub(batch_size=8, max_token_len=10_000) as hub:
        env = make_v1(
            monkeypatch,
            rollout_server_url=hub.url,
            data_dir_to_save_evals=str(tmp_path),
            num_eval_rows=2,
        )
        async with serving(env):
            await until(lambda: produced(hub) >= 2)
            metrics = await env.evaluate()
    assert metrics["eval/mean_score"] in (0.0, 1.0, 2.0)


def num_open_files(pid: int) -> int:
    """Open files of a process and its descendants."""
    own = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    children = [
        int(child)
        for listed in Path(f"/proc/{pid}/task").glob("*/children")
        for child in listed.read_text().split()
    ]
    return own + sum(map(num_open_files, children))


async def test_v1_rollouts_leave_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_v1(monkeypatch)
    await env.setup()
    counts = []
    for row in env.train_rows[:3]:
        await env.collect_trajectories(row)
        counts.append(num_open_files(os.getpid()))
    await close(env)
    assert len(counts) == 3
    assert counts[0] == counts[1] == counts[2]


async def test_a_v1_rollout_that_cannot_be_judged_has_no_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def respond(request: HarnessRequest) -> str:
        return "unjudged" if request.call == 0 else repeat(request)

    env = make_v1(monkeypatch, respond)
    await env.setup()
    group, _ = await env.collect_trajectories(env.train_rows[0])
    await close(env)
    assert len(group["scores"]) == 3
    assert env.num_reward_failures == 1
    assert env.counts["agent_failed"] == 1


async def test_a_crash_of_verifiers_costs_the_group_and_the_next_one_gets_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(["crash"])
    env = make_v1(monkeypatch, lambda request: next(answers, None) or repeat(request))
    await env.setup()
    with pytest.raises(EnvError, match="exit status 3"):
        await env.collect_trajectories(env.train_rows[0])
    group, _ = await env.collect_trajectories(env.train_rows[0])
    await close(env)
    assert len(group["scores"]) == 4
    assert env.bridge.num_ended == 1


async def test_the_default_harness_of_a_v1_taskset_is_a_chat_without_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The harness `null` installs its program with uv, from the package index."""
    env = make_v1(monkeypatch, block={"taskset": {"num_tasks": 3}}, num_eval_rows=0)
    await env.setup()
    group, _ = await env.collect_trajectories(env.train_rows[0])
    shown = await logged(env)
    await close(env)
    assert len(env.train_rows) == 3
    assert checked(group).num_sequences == 4
    assert set(group["scores"]) == {0.0, 2.0}
    assert {f"metrics/{name}" for name in ("length", "num_turns", "repeated")} <= shown.keys()


def use_the_tool(request: HarnessRequest) -> str:
    """Call the tool, then give its result, with a dot on every other call."""
    found = re.search(r"<tool>([\w-]+)", request.prompt)
    if found:
        return found[1] + "." * (request.call % 2)
    asked = re.search(r"Spell (\w+)", request.prompt)
    assert asked
    return f'<tool_call>{{"name": "spell", "arguments": {{"word": "{asked[1]}"}}}}</tool_call>'


OLD = pytest.mark.parametrize("version", ["verifiers_old", "verifiers_newest_old"])


def make_old(monkeypatch: pytest.MonkeyPatch, version: str, **arguments: Any) -> Any:
    return make_env(
        VerifiersEnv,
        monkeypatch,
        respond=use_the_tool,
        weight_version="1",
        python=python_of(version),
        vf_env_name="repeat-words-old",
        env_args=json.dumps(arguments),
        group_size=4,
    )


@OLD
async def test_groups_of_an_old_environment_with_a_tool_reach_the_hub(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    env = make_old(monkeypatch, version)
    async with LoopbackHub(batch_size=8, max_token_len=10_000) as hub:
        env.config.rollout_server_url = hub.url
        async with serving(env):
            await until(lambda: produced(hub) >= 2)
    shown = {name.partition("metrics/")[2] for name in await logged(env)}
    assert {"num_turns", "repeated", "spell_calls"} <= shown


@OLD
async def test_an_old_rollout_is_trained_over_its_turns(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    env = make_old(monkeypatch, version)
    await env.setup()
    group, _ = await env.collect_trajectories(env.train_rows[0])
    await close(env)
    assert checked(group).num_sequences == 4
    assert sorted(group["scores"]) == [0.0, 0.0, 2.0, 2.0]
    for text, score in zip(trained_texts(group), group["scores"], strict=True):
        assert text.startswith("<tool_call>")
        assert text.endswith(".<eos>") == (score == 0.0)


@OLD
async def test_an_old_rubric_judges_the_rollouts_of_a_group_against_each_other(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    env = make_old(monkeypatch, version, judges_groups=True)
    await env.setup()
    group, _ = await env.collect_trajectories(env.train_rows[0])
    await close(env)
    # Half of the answers are one character longer than the others.
    assert sorted(group["scores"]) == [0.25, 0.25, 2.0, 2.0]


OWN_RUNNER = """
import asyncio, inspect, json, sys
import verifiers as vf
from openai import AsyncOpenAI

async def main():
    env = vf.load_environment("repeat-words-old")
    kind = getattr(vf, "OpenAIChatCompletionsClient", lambda connection: connection)
    client = kind(AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
    found = await env.evaluate(client, "m", num_examples=6, rollouts_per_example=1)
    outputs = found["outputs"] if "outputs" in found else found["state"]
    print(json.dumps({each["prompt"][-1]["content"]: each["reward"] for each in outputs}))

asyncio.run(main())
"""


def spoken(asked: str, seen: str | None) -> str | None:
    """Return the final answer to a question after the tool's result, with a mistake for some words; None: call it."""
    return None if seen is None else seen + "." * (int(asked.rstrip(".")[-1]) % 3 == 1)


def call_then_tell(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Call the tool, then give its result."""
    asked = next(each["content"] for each in messages if each["role"] == "user")
    seen = next((each["content"] for each in messages if each["role"] == "tool"), None)
    message: dict[str, Any] = {"role": "assistant", "content": spoken(asked, seen)}
    if seen is None:
        arguments = json.dumps({"word": asked.rstrip(".").split()[1]})
        function = {"name": "spell", "arguments": arguments}
        message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    return message


def model_api(reply: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> FastAPI:
    """Imitate an engine that answers with the message that `reply` returns."""
    app = FastAPI()

    @app.post("/chat/completions")
    async def answer(body: dict[str, Any]) -> Any:
        message = reply(body["messages"])
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        kind = "chat.completion"
        return {
            "id": "i", "object": kind, "created": 0, "model": "m", "choices": [choice], "usage": usage
        }  # fmt: skip

    return app


async def rewards_of(env: Any) -> list[float]:
    """Return the reward of one rollout of each training row."""
    env.config.group_size = 1
    await env.setup()
    found = [await env.collect_trajectories(row) for row in env.train_rows]
    await close(env)
    return [score for group, _ in found for score in group["scores"]]


def repeated(question: str) -> str:
    """Repeat every word with an even number, the others with a mistake."""
    found = re.search(r"Repeat (\w+)", question)
    return "Bye!" if found is None else found[1] + "s" * (int(found[1][-1]) % 2)


async def test_rewards_and_turns_of_a_v1_taskset_are_those_of_its_own_runner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "assistant", "content": repeated(messages[-1]["content"])}

    def respond(request: HarnessRequest) -> str:
        asked.append(request.prompt.rpartition("<user>")[2])
        return repeated(asked[-1])

    ours = await rewards_of(make_v1(monkeypatch, respond, num_eval_rows=0))
    code = (
        "import sys; sys.path.insert(0, '.'); from verifiers.v1.cli.eval.main import main; main()"
    )
    with serving_api(model_api(reply)) as url:
        flags = {
            "env.agent.harness.id": "repeat_words",
            "env.agent.runtime.type": "subprocess",
            "model": "m",
            "client.base_url": url,
            "run.name": "own",
            "output_dir": tmp_path,
        }
        argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [python_of("verifiers"), "-c", code, "repeat_words", *argv]
        ran = await asyncio.to_thread(
            subprocess.run,
            [*command, "-n", str(len(ours)), "--no-rich", "--no-push"],
            capture_output=True,
            text=True,
            env={**os.environ, "PRIME_API_KEY": "none", "NO_PROXY": "127.0.0.1"},
        )
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "own" / "traces.jsonl").read_text().splitlines()
    theirs = {}
    num_turns = 0
    for [trace] in (json.loads(line)["traces"] for line in lines):
        reward = trace["rewards"]["repeated"]
        theirs[trace["task"]["data"]["word"]] = reward["score"] * reward["weight"]
        num_turns += sum(node["sampled"] for node in trace["nodes"])
    assert ours == [theirs[f"word{i}"] for i in range(len(ours))]
    assert set(ours) == {0.0, 2.0}
    assert len(asked) == num_turns == 2 * len(ours)


@OLD
async def test_rewards_of_an_old_environment_are_those_of_its_own_runner(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    def respond(request: HarnessRequest) -> str:
        asked = re.search(r"Spell (\w+)", request.prompt)
        seen = re.search(r"<tool>([\w-]+)", request.prompt)
        assert asked
        return spoken(asked[1], seen[1] if seen else None) or use_the_tool(request)

    env = make_old(monkeypatch, version)
    env.server.servers[0].respond = respond
    ours = await rewards_of(env)
    with serving_api(model_api(call_then_tell)) as url:
        command = [python_of(version), "-c", OWN_RUNNER, url]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    theirs = json.loads(ran.stdout.splitlines()[-1])
    assert ours == [theirs[f"Spell word{i}."] for i in range(6)]
    assert sorted(ours) == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0]
