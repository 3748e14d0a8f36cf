"""Solve tasks of Harbor and Terminal-Bench with the commands of a shell; the task's own tests decide.

--env.dataset_path is a folder with task folders in it: of Harbor (`task.toml`, `instruction.md`, `environment/`,
`tests/test.sh`, which writes /logs/verifier/reward.txt or reward.json) or of Terminal-Bench (`task.yaml`, `Dockerfile`,
`run-tests.sh`, whose exit status 0 is the reward 1). /tests and /logs/verifier are emptied when the episode ends, then
the tests run where the model worked. The reward is the one that they write, 0 if they write none from 0 to 1 or are
killed. A program of the model that the tests run can write the reward itself: only the tests can prevent that.

With Docker each episode has a container of the task's image: processes and programs that the model left stay while the
tests run, as in Harbor. Without a running Docker, or with --env.runs_in sandbox, tasks run in bubblewrap whose
Dockerfile has only FROM one of `sandbox_bases`, WORKDIR and COPY: only the files below the working folder last, and the
programs are those of this machine. Other tasks are then skipped, always those of several containers or steps. Models
and tests have a network only with --env.allow_network true.

Data: task folders; `sample` has three.
Needs: Docker or bubblewrap.

    python environments/harbor_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from atroposlib.envs.dataset_env import Outcome, Split
from atroposlib.envs.harbor_tasks import Task, built, read_task, reward_of, sandboxed
from atroposlib.envs.multi_turn_env import Episode, in_turns
from atroposlib.envs.rows import SAMPLE
from atroposlib.envs.sandbox import BubblewrapSandbox, SandboxLimits
from atroposlib.envs.shell import Container, Folder, Machine, docker
from atroposlib.envs.shell_env import ShellEnv, ShellEnvConfig
from atroposlib.envs.tool_env import hermes_call
from atroposlib.errors import ConfigError, EnvError

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Size of a task's files in a sandbox."""


_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError)
"""What a broken task raises."""


class HarborConfig(ShellEnvConfig):
    tokenizer_name: str = "Qwen/Qwen2.5-Coder-7B-Instruct"
    group_size: int = 8
    max_token_length: int = 8192
    max_turns: int = Field(default=30, ge=1)
    command_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of a command, in seconds."""
    num_eval_rows: int = Field(default=0, ge=0)
    runs_in: Literal["auto", "docker", "sandbox"] = "auto"
    """auto: in Docker if it is running, else in sandboxes."""
    sandbox_bases: list[str] = Field(default=["python:3.11-slim", "python:3.12-slim", "bash"])
    """Images that a sandbox stands for."""
    allow_network: bool = False
    """Let containers whose task does not forbid it use the network."""


class HarborEnv(ShellEnv):
    """Several turns, reward by the task's tests."""

    name = "harbor"
    env_config_cls = HarborConfig
    config: HarborConfig

    @functools.cached_property
    def uses_docker(self) -> bool:
        """Whether tasks run in containers."""
        if self.config.runs_in != "auto":
            return self.config.runs_in == "docker"
        try:
            docker("version")
        except EnvError:
            return False
        return True

    def is_isolated(self) -> bool:
        """Whether commands run in containers or in namespaces."""
        return self.uses_docker or super().is_isolated()

    def load_rows(self, split: Split) -> list[Task] | None:
        """Return the tasks below a folder that can run here."""
        config = self.config
        path = config.dataset_path if split == "train" else config.eval_dataset_path
        if path is None and split == "eval":
            return None
        top = Path(__file__).with_name("samples") / "harbor" if path == SAMPLE else Path(path or "")
        found = sorted({*top.rglob("task.toml"), *top.rglob("task.yaml")}) if path else []
        if not found:
            raise ConfigError(f"--env.dataset_path {path}: give a folder with tasks in it")
        tasks = []
        for each in found:
            try:
                task = read_task(each)
                if not self.uses_docker:
                    sandboxed(task, config.sandbox_bases)
                tasks.append(task)
            except (*_UNREADABLE, OSError) as error:
                logger.warning("%s is skipped: %s: %s", each, type(error).__name__, error)
        return tasks

    def prompt(self, row: Task) -> str:
        return row.instruction

    def machine(self, row: Task) -> Machine:
        """Return a container of the task, or its files in sandboxes."""
        if self.uses_docker:
            return Container(
                row.image or built(row.context),
                memory_mb=row.memory_mb,
                num_cpus=row.num_cpus,
                has_network=row.needs_network and self.config.allow_network,
            )
        return self.folder(row, None)

    def folder(self, row: Task, files: dict[str, str] | None) -> Folder:
        """Return the files in the working folder: those given, with the tests' folders, or the Dockerfile's."""
        workdir, copied = sandboxed(row, self.config.sandbox_bases)
        folders = (workdir, *([] if files is None else ["/tests", "/logs"]))
        sandbox = self.sandbox()
        if not isinstance(sandbox, BubblewrapSandbox):
            raise EnvError("without bubblewrap a task needs Docker")
        return Folder(
            copied if files is None else files,
            sandbox=sandbox.with_folders(*folders),
            limits=SandboxLimits(memory_mb=row.memory_mb, cpu_s=60),
            folders=folders,
            max_bytes=MAX_BYTES,
        )

    async def final_score(self, episode: Episode) -> Outcome:
        reward = await asyncio.to_thread(self._reward, episode.row, episode.state["machine"])
        if reward is None:
            self.counts["no_reward"] += 1
        return reward or 0.0

    def _reward(self, task: Task, machine: Machine) -> float | None:
        if isinstance(machine, Folder):
            return _run_tests(task, self.folder(task, machine.files))
        machine.run("rm -rf /tests /logs/verifier", timeout_s=60.0)
        try:
            return _run_tests(task, machine)
        except EnvError:
            docker("version")  # raises if it was not the model that broke the container
            return None

    def example_answers(self, item: Task) -> list[str | Callable[[str], str]]:
        if item.solution is None:
            return []
        command = f"bash <<'END_OF_SOLUTION'\n{item.solution}\nEND_OF_SOLUTION"
        return [in_turns([hermes_call("shell", command=command), "Done."])]


def _run_tests(task: Task, machine: Machine) -> float | None:
    machine.write(task.tests)
    command = f"mkdir -p /logs/verifier; {task.test_command}"
    ended = machine.run(command, timeout_s=task.tests_timeout_s)
    if "/tests/run-tests.sh" in task.tests:
        return float(ended.status == 0)
    if ended.status is None or not 0 <= ended.status < 128:  # stopped, or killed by a signal
        return None
    return reward_of(*(machine.read(f"/logs/verifier/reward.{kind}") for kind in ("txt", "json")))


if __name__ == "__main__":
    HarborEnv.cli()
