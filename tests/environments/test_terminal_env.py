"""Commands in the sandbox of an episode: what they leave, and what the files at the end earn."""

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs import hooks
from atroposlib.envs.sandbox import ProcessSandbox, local_sandbox
from atroposlib.envs.tool_env import hermes_call
from atroposlib.errors import ConfigError, EnvError
from tests.environments.helpers_environments import load

terminal = load("terminal_env")

has_namespaces = pytest.mark.skipif(
    isinstance(local_sandbox(), ProcessSandbox),
    reason="bubblewrap is missing or may not create namespaces",
)
TASK = {"task": "Rename a to b.", "files": {"a": "1\n"}, "wanted": {"b": "1"}}


def call(command: str) -> str:
    return hermes_call("shell", command=command)


@pytest.fixture
def played(started: Any) -> Any:
    """Return the score of one episode with these answers, and what the commands printed."""

    async def play(*answers: str, **settings: Any) -> Any:
        settings = {"dataset_path": None, "group_size": 1, "num_eval_rows": 0, **settings}
        env = await started(terminal.TerminalEnv, lambda r: answers[r.call], **settings)
        group, _ = await env.collect_trajectories(env.parse_row(TASK))
        messages = group["messages"][0]
        return group["scores"][0], [m["content"] for m in messages if m["role"] == "tool"]

    return play


@has_namespaces
async def test_files_last_from_command_to_command_and_are_compared_at_the_end(played: Any) -> None:
    answers = [call("mkdir x; mv a x/c; cat none"), call("cd x && mv c ../b && ls .."), "Done."]
    score, printed = await played(*answers)
    assert score == 1.0
    assert printed == ["exit status 1\ncat: none: No such file or directory", "exit status 0\nb\nx"]


@has_namespaces
@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (["I renamed it."], 0.0),
        ([call("mv a b"), call("touch b"), "Done."], 1.0),
        ([call("cp a b"), "Done."], 0.0),
        ([call("mv a b; echo 2 >> b"), "Done."], 0.0),
        ([call("ln -s a b"), "Done."], 0.0),
        ([call("mv a b") + call("mv a b"), "Done."], 0.0),
    ],
)
async def test_the_files_decide_and_not_the_answer(
    played: Any, answers: list[str], score: float
) -> None:
    assert (await played(*answers))[0] == score


@has_namespaces
async def test_a_command_that_reaches_a_limit_leaves_the_files_as_they_were(played: Any) -> None:
    answers = [
        call("mv a b; sleep 60"),
        call("mv a b; head -c 300000 /dev/zero > big"),
        call("yes"),
        call("rm -rf /usr /tmp/* 2> /dev/null; kill -9 -1"),
        call("while :; do sleep 9 & done"),
        "Done.",
    ]
    score, printed = await played(*answers, command_timeout_s=2.0)
    assert score == 0.0
    assert printed[0] == "Error: the command was stopped (timeout). The files are unchanged."
    assert printed[1] == "Error: the files are too large. The files are unchanged."
    assert len(printed) == 5


async def test_without_a_sandbox_that_starts_processes_setup_says_what_to_install(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "local_sandbox", ProcessSandbox)
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        await started(terminal.TerminalEnv)


@has_namespaces
@pytest.mark.parametrize("starts", [True, False])
async def test_a_machine_that_starts_while_its_episode_is_cancelled_is_closed(
    started: Any, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    env = await started(terminal.TerminalEnv, dataset_path=None, num_eval_rows=0)
    may_start, closed = threading.Event(), []

    def machine(row: Any) -> Any:
        may_start.wait(10)
        if not starts:
            raise EnvError("no image")
        return SimpleNamespace(close=lambda: closed.append(row))

    monkeypatch.setattr(env, "machine", machine)
    starting = asyncio.ensure_future(env.reset(env.train_rows[0]))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.sleep(0)
    may_start.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert closed == ([env.train_rows[0]] if starts else [])


def test_generated_tasks_are_not_solved_from_the_start() -> None:
    rng = random.Random(0)
    tasks = [terminal.make_task(rng) for _ in range(200)]
    assert len({task["task"].split()[0] for task in tasks}) >= 4
    assert sum(task["files"] == task["wanted"] for task in tasks) < 5
