"""The environments of other libraries, with a stand-in on the other side of the bridge or of the socket."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from atroposlib.environments.openenv_env import OpenEnvEnv, action_of
from atroposlib.environments.verifiers_env import VerifiersV1Env
from atroposlib.environments.verifiers_server import VerifiersEnv
from fastapi import FastAPI, WebSocket

from atroposlib.errors import ConfigError, EnvError
from atroposlib.inference.harness import HarnessRequest
from atroposlib.scored_data import Strictness, check_group
from tests.api.helpers_api import serving
from tests.environments.helpers_environments import logged
from tests.envs.helpers_envs import trained_texts

THEIR_SIDE = """
import asyncio, json, urllib.request
from contextlib import asynccontextmanager

def ask(base_url, model, text):
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json"}
    url = f"{base_url}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

@asynccontextmanager
async def bridge(**settings):
    async def rollout(index, base_url, model, **more):
        answer = await asyncio.to_thread(ask, base_url, model, f"Say {index}.")
        if answer == "nothing":
            raise ValueError("no answer")
        reward = 2.0 * (answer == str(index))
        return {"reward": reward, "metrics": {"given": len(more)}, "answer": answer}

    rows = [{"index": i} for i in range(4)]
    yield {"train": rows, "eval": EVAL}, {"rollout": rollout}
"""


@pytest.fixture
def bridged(started: Any, tmp_path: Path) -> Any:
    """Start an environment whose other side is `THEIR_SIDE`."""
    path = tmp_path / "their_side.py"

    def start(base: Any, respond: Any, *, own: str = "rows[:1]", **settings: Any) -> Any:
        path.write_text(THEIR_SIDE.replace("EVAL", own))
        env_cls = type(base.__name__, (base,), {"script": str(path), "__module__": base.__module__})
        return started(env_cls, respond, weight_version="1", group_size=4, **settings)

    return start


@pytest.mark.parametrize(
    ("num_eval_rows", "own", "num_trained", "num_evaluated"),
    [(0, "None", 4, 4), (1, "None", 3, 1), (0, "rows[:1]", 4, 1)],
)
async def test_without_an_evaluation_split_every_task_is_trained(
    bridged: Any, num_eval_rows: int, own: str, num_trained: int, num_evaluated: int
) -> None:
    env = await bridged(
        VerifiersV1Env, lambda r: "", own=own, taskset="x", num_eval_rows=num_eval_rows
    )
    assert (len(env.train_rows), len(env.eval_rows)) == (num_trained, num_evaluated)


@pytest.mark.parametrize(
    ("base", "settings", "num_more"),
    [(VerifiersV1Env, {"taskset": "x"}, 0), (VerifiersEnv, {"vf_env_name": "x"}, 3)],
)
async def test_a_rollout_of_the_other_side_is_trained_with_its_reward(
    bridged: Any, base: Any, settings: Any, num_more: int
) -> None:
    env = await bridged(base, lambda request: "23x"[request.call % 3], **settings)
    group, _ = await env.collect_trajectories({"index": 3})
    assert check_group(group, strictness=Strictness.MEANING).num_sequences == 4
    assert set(group["scores"]) == {0.0, 2.0}
    for text, score in zip(trained_texts(group), group["scores"], strict=True):
        assert (text == "3<eos>") == (score == 2.0)
    metrics = await logged(env)
    assert metrics["metrics/given"] == num_more
    assert metrics["metrics/mean_reward"] == sum(group["scores"]) / 4
    if base is VerifiersEnv:
        assert metrics["metrics/groups_total"] == 1
        assert metrics["metrics/groups_with_identical_scores"] == 0
        assert metrics["metrics/identical_score_rate"] == 0.0


async def test_a_rollout_that_fails_on_the_other_side_has_no_score(bridged: Any) -> None:
    def respond(request: HarnessRequest) -> str:
        return "nothing" if request.call == 0 else str(request.call)

    env = await bridged(VerifiersV1Env, respond, taskset="x")
    group, _ = await env.collect_trajectories({"index": 3})
    assert sorted(group["scores"]) == [0.0, 0.0, 2.0]
    assert env.counts["agent_failed"] == 1


def test_missing_names_are_refused(made: Any) -> None:
    for env_cls, flag in (
        (VerifiersV1Env, "--env.taskset"),
        (VerifiersEnv, "--env.vf_env_name"),
        (OpenEnvEnv, "--env.app"),
    ):
        with pytest.raises(ConfigError, match=flag):
            made(env_cls)


def make_counting_server() -> FastAPI:
    """An OpenEnv server with one session at a time: count to three; "raise" raises, letters are no actions."""
    app = FastAPI()
    app.state.num_open = 0

    @app.get("/metadata")
    def metadata() -> Any:
        return {"name": "counting", "description": "Count to three."}

    @app.get("/schema")
    def schema() -> Any:
        fields = {"number": {"type": "integer"}, "metadata": {"type": "object"}}
        return {"action": {"properties": fields}, "observation": {}, "state": {}}

    @app.websocket("/ws")
    async def session(socket: WebSocket) -> None:
        await socket.accept()
        if app.state.num_open:
            refused = {"code": "CAPACITY_REACHED", "message": "full", "max_sessions": 1}
            await socket.send_json({"type": "error", "data": refused})
            await socket.close()
            return
        app.state.num_open += 1
        try:
            last = 0
            async for message in socket.iter_json():
                answer = play(message, last)
                last = answer["data"].get("observation", {}).get("last", last)
                await socket.send_json(answer)
        finally:
            app.state.num_open -= 1

    return app


def play(message: dict[str, Any], last: int) -> dict[str, Any]:
    if message["type"] == "reset":
        return seen(0, 0.0)
    if message["type"] == "mcp":
        return {"type": "mcp", "data": {"error": {"message": "no tools"}}}
    number = message["data"]["number"]
    if number == "raise":
        return {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "out of memory"}}
    if not isinstance(number, int):
        faults = [{"loc": ["number"], "msg": "should be an integer"}]
        details = {"code": "VALIDATION_ERROR", "message": "Invalid", "errors": faults}
        return {"type": "error", "data": details}
    return seen(number, 1.0 if number == last + 1 else -1.0)


def seen(last: int, reward: float) -> dict[str, Any]:
    observation = {"last": last, "metadata": {"hint": "hidden"}}
    data = {"observation": observation, "reward": reward, "done": last == 3}
    return {"type": "observation", "data": data}


@pytest.fixture
def counting_url() -> Iterator[str]:
    with serving(make_counting_server()) as url:
        yield url


def count_on(request: HarnessRequest) -> str:
    found = re.findall(r'{"last": (\d+)}', request.prompt)
    return f'<action>{{"number": {int(found[-1]) + 1}}}</action>'


async def test_an_episode_of_openenv_has_the_sum_of_its_rewards_and_waits_for_a_session(
    started: Any, counting_url: str
) -> None:
    env = await started(OpenEnvEnv, count_on, url=counting_url, group_size=2)
    group, _ = await env.collect_trajectories(1)
    assert group["scores"] == [3.0, 3.0]
    assert env.counts["done_done"] == 2
    assert env.counts["waits_for_session"] > 0
    prompt = json.dumps(group["messages"][0])
    assert "Count to three." in prompt
    assert "hidden" not in prompt
    assert "metadata" not in prompt


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("I do not know.", "has no action"),
        ("<action>[1]</action>", "not an object"),
        ('<action>{"number": "one"}</action>', "number: should be an integer"),
    ],
)
async def test_a_wrong_action_of_openenv_is_told_to_the_model(
    answer: str, fault: str, started: Any, counting_url: str
) -> None:
    def respond(request: HarnessRequest) -> str:
        return count_on(request) if "Error: " in request.prompt else answer

    env = await started(OpenEnvEnv, respond, url=counting_url, group_size=1)
    group, _ = await env.collect_trajectories(1)
    assert group["scores"] == [3.0]
    assert env.counts["invalid_action"] == 1
    assert fault in json.dumps(group["messages"][0])


async def test_an_exception_of_an_openenv_environment_is_no_score(
    started: Any, counting_url: str
) -> None:
    answer = '<action>{"number": "raise"}</action>'
    env = await started(OpenEnvEnv, answer, url=counting_url, group_size=1)
    assert await env.collect_trajectories(1) == (None, [])
    assert env.num_reward_failures == 1


async def test_an_absent_openenv_server_is_an_error(started: Any) -> None:
    with pytest.raises(EnvError, match="127.0.0.1:9"):
        await started(OpenEnvEnv, count_on, url="http://127.0.0.1:9")


def test_an_action_that_is_nested_too_deeply_is_a_fault_of_the_answer() -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        action_of(f"<action>{'[' * 100_000}</action>", {})
