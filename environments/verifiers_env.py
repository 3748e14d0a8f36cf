"""Train on any environment of verifiers v1, by its own harness, tools and rewards.

verifiers runs in an interpreter of its own, because its pins exclude others. Its model calls go to a session of our
proxy, which records the tokens; the score is its reward. `--env.taskset` names an installed taskset, or a built-in one
(harbor, nemo_gym, openenv, textarena; they need extras of verifiers). `--env.block` is the `[env]` block of its
configuration, as JSON. An only seat plays with the harness `null` in a subprocess, unless the block says otherwise. Of
several seats only one may play the policy: the others need a `client`.

    python -m venv vf && vf/bin/pip install verifiers==0.4.0 uv && vf/bin/pip install -e my_taskset
    python environments/verifiers_env.py serve --env.python vf/bin/python --env.taskset my_taskset \\
        --env.block '{"taskset": {"num_tasks": 100}, "agent": {"max_turns": 4}}' ...

Data: the taskset's.
Needs: verifiers 0.4 in an environment of its own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.agent_env import AgentEnv, AgentEnvConfig, AgentFailed
from atroposlib.envs.bridge import Bridge
from atroposlib.envs.dataset_env import Split
from atroposlib.errors import ConfigError, EnvError

logger = logging.getLogger(__name__)

NUM_EVALUATED = 100
BRIDGES = Path(__file__).with_name("bridges")


class BridgedConfig(AgentEnvConfig):
    """Settings of an environment whose agent and rewards are another library's."""

    python: str = ""
    """Interpreter that has the library; "": this one."""
    num_eval_rows: int = Field(default=0, ge=0)
    """Tasks held out if the library has no evaluation split, at most half. 0: none; the first `NUM_EVALUATED` tasks are
    trained and evaluated."""


class BridgedEnv(AgentEnv):
    """Tasks, agent and rewards of another library, which a child process runs."""

    env_config_cls = BridgedConfig
    config: BridgedConfig
    aliases = {"metrics/mean_reward": "train/mean_score"}
    trains_on_evaluation = True

    script: ClassVar[str]
    """File in `bridges/` that the child loads."""
    remedy: ClassVar[str] = ""
    """Added to the error if the interpreter lacks the library."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the script's `bridge`."""
        raise NotImplementedError

    def __init__(self, config: BridgedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.bridge = Bridge(
            python=config.python,
            script=BRIDGES / self.script,
            settings=self.settings(),
            remedy=self.remedy,
            variables=config.child_variables,
        )

    async def load_rows(self, split: Split) -> Any:
        """Start the child and return the tasks, by index and content hash."""
        splits = await self.bridge.open()
        if split == "eval" and splits["eval"] is None and not self.config.num_eval_rows:
            logger.warning(
                "%s has no evaluation split: evaluation measures tasks that are trained; to hold some out, give "
                "--env.num_eval_rows",
                self.name,
            )
            return splits["train"][:NUM_EVALUATED]
        return splits[split]

    async def run_agent(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Let the child run one rollout."""
        model = self.server.servers[0].config.model_name
        try:
            result: dict[str, Any] = await self.bridge.call(
                "rollout", base_url=base_url, model=model, **self.call_arguments(row)
            )
        except EnvError as error:
            raise AgentFailed(str(error)) from error
        for name, value in result["metrics"].items():
            self.record(f"metrics/{name}", float(value))
        return result

    def call_arguments(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the script's `rollout`, besides base URL and model."""
        return row

    def score(self, row: Any, answer: Any) -> float:
        return float(answer["reward"])

    def train_metrics(self) -> dict[str, float]:
        return {"train/bridge_ended": self.bridge.num_ended}

    async def close(self) -> None:
        await self.bridge.close()
        await super().close()


class VerifiersConfig(BridgedConfig):
    taskset: str = ""
    """Id of the taskset."""
    block: dict[str, Any] = Field(default_factory=dict)
    """The `[env]` block of verifiers, as JSON."""
    max_tasks: int = Field(default=10_000, ge=1)
    """Tasks to load at most; some tasksets are infinite."""


class VerifiersV1Env(BridgedEnv):
    """One taskset."""

    name = "verifiers_v1"
    env_config_cls = VerifiersConfig
    config: VerifiersConfig
    script = "verifiers_v1.py"
    remedy = "; install verifiers==0.4.0 in a virtual environment and give --env.python"

    def settings(self) -> dict[str, Any]:
        """Return the block with the taskset's id."""
        given = self.config.block.get("taskset", {})
        taskset = {**given, **({"id": self.config.taskset} if self.config.taskset else {})}
        if not taskset.get("id"):
            raise ConfigError("which taskset? Give its id by --env.taskset")
        return {
            "block": {**self.config.block, "taskset": taskset},
            "max_tasks": self.config.max_tasks,
        }


if __name__ == "__main__":
    VerifiersV1Env.cli()
