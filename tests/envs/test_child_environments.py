"""No process beside a model's text or an agent's gets a secret of this process, whatever its name is."""

import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.bridge import Bridge
from atroposlib.envs.sandbox import DockerSandbox, run_code
from tests.builders.environments import Offline
from tests.envs.helpers_envs import make_env

SECRETS = (
    *("ATROPOS_DATABASE", "DATABASE_URL", "SENTRY_DSN", "GITHUB_PAT", "PGPASSWD", "SLACK_WEBHOOK"),
    *("WANDB_API_KEY", "HF_TOKEN", "AWS_SESSION", "NETRC", "MY_COOKIE", "PASSPHRASE"),
)
NAMED = "OPENAI_BASE_URL_OF_THE_JUDGE"

PRINTED = "import json, os; print(json.dumps(dict(os.environ)))"
IN_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PRINTED!r}])"
THEIR_SIDE = """
import os
from contextlib import asynccontextmanager

@asynccontextmanager
async def bridge():
    yield dict(os.environ), {}
"""
DOCKER = """#!{python}
import json, os, subprocess, sys
if sys.argv[1] == "run":
    json.dump(dict(os.environ), open({log!r}, "w"))
    os.execv({python!r}, [{python!r}, *sys.argv[sys.argv.index("python3") + 1 :]])
"""

Variables = dict[str, str]


class Agents(Offline, AgentEnv):
    """Its agent starts another process."""

    def load_rows(self, split: str) -> Any:
        return [1, 2]

    async def run_agent(self, row: Any, base_url: str, api_key: str) -> str:
        argv = [sys.executable, "-c", IN_CHILD]
        return await self.run_command(argv, base_url=base_url, api_key=api_key)

    def score(self, row: Any, answer: Any) -> float:
        return 0.0


async def agent(_: Path) -> Variables:
    env: Any = make_env(Agents, respond=lambda request: "", child_variables=[NAMED])
    try:
        found: Variables = json.loads(await env.run_agent(1, "http://h/u/v1", "k"))
    finally:
        await env.close()
    assert found["OPENAI_API_KEY"] == "k"
    return found


async def bridge(tmp_path: Path) -> Variables:
    script = tmp_path / "theirs.py"
    script.write_text(THEIR_SIDE)
    child = Bridge(python="", script=script, settings={}, variables=[NAMED])
    try:
        found: Variables = await child.open()
    finally:
        await child.close()
    return found


async def docker_client(tmp_path: Path) -> Variables:
    program, log = tmp_path / "docker", tmp_path / "log"
    program.write_text(DOCKER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    assert run_code("print(1)", sandbox=DockerSandbox("i", program=str(program))).stdout == "1\n"
    found: Variables = json.loads(log.read_text())
    return {**found, NAMED: found["DOCKER_HOST"]}


async def program(_: Path) -> Variables:
    found: Variables = json.loads(run_code(PRINTED).stdout)
    return {**found, NAMED: "given"}  # it gets no variable of this process


@pytest.mark.parametrize("started", [agent, bridge, docker_client, program])
async def test_a_child_has_no_secret_and_what_the_author_names(
    started: Callable[[Path], Coroutine[Any, Any, Variables]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hush@proxy:1")
    for name in (NAMED, "DOCKER_HOST"):
        monkeypatch.setenv(name, "given")
    found = await started(tmp_path)
    assert [name for name, value in found.items() if "hush" in value] == []
    assert found[NAMED] == "given"
    assert "PATH" in found
