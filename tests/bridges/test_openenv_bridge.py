"""OpenEnv's own example and an environment with MCP tools run in OpenEnv's interpreter; their groups reach a hub."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from atroposlib.environments.openenv_env import OpenEnvEnv

from atroposlib.envs.collecting import close
from atroposlib.inference.harness import HarnessRequest
from tests.bridges.helpers_bridges import TASKS, checked, python_of
from tests.environments.helpers_environments import make_env
from tests.envs.helpers_envs import trained_texts
from tests.runtime.helpers_runtime import LoopbackHub, produced, serving, until

pytestmark = [pytest.mark.bridges, pytest.mark.timeout(120)]


def make(monkeypatch: pytest.MonkeyPatch, app: str, respond: Any, **settings: Any) -> Any:
    return make_env(
        OpenEnvEnv,
        monkeypatch,
        respond=respond,
        weight_version="1",
        python=python_of("openenv"),
        app=app,
        group_size=4,
        **settings,
    )


class Says:
    """Says a word of four letters, then, in every other episode, one of eight."""

    def __init__(self) -> None:
        self.num_second_turns = 0

    def __call__(self, request: HarnessRequest) -> str:
        if request.prompt.count("<assistant>") <= 1:
            return "<action>word</action>"
        self.num_second_turns += 1
        return f"<action>{'word' if self.num_second_turns % 2 else 'longword'}</action>"


async def test_groups_of_the_example_of_openenv_reach_the_hub_with_its_rewards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`openenv init` writes an environment that repeats a message and rewards its length."""
    monkeypatch.chdir(tmp_path)
    openenv = str(Path(python_of("openenv")).with_name("openenv"))
    init = await asyncio.create_subprocess_exec(
        openenv, "init", "repeat_env", stdout=asyncio.subprocess.DEVNULL
    )
    assert await init.wait() == 0
    async with LoopbackHub(batch_size=8, max_token_len=10_000) as hub:
        env = make(
            monkeypatch,
            "repeat_env.server.app:app",
            Says(),
            rollout_server_url=hub.url,
            max_turns=2,
            max_num_workers=1,
            num_eval_rows=2,
            steps_per_eval=0,
        )
        async with serving(env):
            await until(lambda: produced(hub) >= 2)
            group, _ = await env.collect_trajectories(3)
    assert checked(group).num_sequences == 4
    for text, score in zip(trained_texts(group), group["scores"], strict=True):
        assert score == pytest.approx(1.2 if "longword" in text else 0.8)
    # The example allows one session at a time.
    assert env.total("waits_for_session") > 0


def shop(request: HarnessRequest) -> str:
    """Ask for the price, then pay it, on every other call one more."""
    price = re.search(r"<tool>(\d+)", request.prompt)
    if price is None:
        return '<tool_call>{"name": "price", "arguments": {}}</tool_call>'
    amount = int(price[1]) + request.call % 2
    return f'<tool_call>{{"name": "buy", "arguments": {{"amount": {amount}}}}}</tool_call>'


async def test_the_model_calls_the_mcp_tools_of_an_openenv_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(TASKS)
    env = make(monkeypatch, "openenv_shop:app", shop)
    await env.setup()
    assert set(env.tools_by_name) == {"price", "buy"}
    group, _ = await env.collect_trajectories(5)
    await close(env)
    assert checked(group).num_sequences == 4
    for text, score in zip(trained_texts(group), group["scores"], strict=True):
        assert score == (1.0 if '"amount": 15' in text else -1.0)
    assert set(group["scores"]) == {1.0, -1.0}


OWN_RUNNER = """
import json, sys, threading, time
sys.path.insert(0, ".")
import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import MCPHarnessAdapter, ModelStepResult, StepEnvSessionAdapter
from openenv.core.llm_client import LLMResponse, ToolCall
from openenv_shop import app

server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.01)
url = "http://127.0.0.1:%d" % server.servers[0].sockets[0].getsockname()[1]

def sample(messages, tools, sampling):
    seen = [json.loads(each["content"]) for each in messages if each["role"] == "tool"]
    call = ToolCall("c", "price", {})
    if seen:
        price = seen[-1]["observation"]["result"]["data"]
        call = ToolCall("c", "buy", {"amount": price + price % 2})
    return ModelStepResult(LLMResponse("", [call]))

for seed in range(4):
    session = StepEnvSessionAdapter(
        GenericEnvClient(base_url=url),
        seed=seed,
        tool_specs=[Tool(name=n, description="", input_schema={}) for n in ("price", "buy")],
        action_builder=lambda name, given: {
            "type": "call_tool", "tool_name": name, "arguments": given
        },
        initial_messages_builder=lambda result, task: [{"role": "user", "content": "Buy."}],
    )
    found = MCPHarnessAdapter().run_white_box(sample, session)
    print(json.dumps([session.verify(found.messages).env_reward, len(found.tool_trace)]))
    session.close()
"""


async def test_rewards_and_turns_are_those_of_the_own_runner_of_openenv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both pay one too many where the price is odd."""
    num_turns = 0

    def pay(request: HarnessRequest) -> str:
        nonlocal num_turns
        num_turns += 1
        price = re.search(r"<tool>(\d+)", request.prompt)
        amount = int(price[1]) + int(price[1]) % 2 if price else 0
        call = {"name": "buy", "arguments": {"amount": amount}}
        return f"<tool_call>{json.dumps(call if price else {'name': 'price', 'arguments': {}})}</tool_call>"

    monkeypatch.chdir(TASKS)
    env = make(monkeypatch, "openenv_shop:app", pay)
    env.config.group_size = 1
    await env.setup()
    ours = []
    for seed in range(4):
        num_turns = 0
        group, _ = await env.collect_trajectories(seed)
        ours.append([*group["scores"], num_turns])
    await close(env)
    command = [python_of("openenv"), "-c", OWN_RUNNER]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ours == [json.loads(line) for line in ran.stdout.splitlines()]
    assert ours == [[1.0, 2], [-1.0, 2], [1.0, 2], [-1.0, 2]]
