"""Train on any environment of the old verifiers (0.1, `load_environment`), by its own rollouts and rubric.

As `verifiers_env.py`, for the generation before v1: an environment's package has a function `load_environment`.

    python -m venv vf && vf/bin/pip install 'verifiers<0.2' && vf/bin/pip install -e my_environment
    python environments/verifiers_server.py serve --env.python vf/bin/python --env.vf_env_name my_environment \\
        --env.env_args '{"num_train_examples": 100}' ...

Data: the environment's.
Needs: verifiers 0.1.9 to 0.1.14 in an environment of its own.
"""

from __future__ import annotations

import contextvars
import json
import uuid
from typing import Any, NamedTuple

from atroposlib.environments.verifiers_env import BridgedConfig, BridgedEnv

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import Rollout, Split
from atroposlib.errors import ConfigError


class VfEnvConfig(BridgedConfig):
    vf_env_name: str = ""
    """Name of the environment's module."""
    env_args: str = "{}"
    """Arguments of its `load_environment`, as a JSON object."""


class GroupOfRollouts(NamedTuple):
    """The rollouts that may be judged together."""

    group: str
    num_in_group: int


GROUP: contextvars.ContextVar[GroupOfRollouts] = contextvars.ContextVar("GROUP")


class VerifiersEnv(BridgedEnv):
    """One environment."""

    name = "verifiers"
    env_config_cls = VfEnvConfig
    config: VfEnvConfig
    script = "verifiers_old.py"
    aliases = {
        **BridgedEnv.aliases,
        "metrics/avg_num_turns": "metrics/num_turns",
        "metrics/groups_total": "train/groups",
        "metrics/groups_with_identical_scores": "train/identical_groups",
    }
    remedy = "; install 'verifiers<0.2' in a virtual environment and give --env.python"

    def settings(self) -> dict[str, Any]:
        """Return name and arguments."""
        if not self.config.vf_env_name:
            raise ConfigError("which environment? Give its name by --env.vf_env_name")
        try:
            arguments = json.loads(self.config.env_args)
        except ValueError as error:
            raise ConfigError(f"--env.env_args {self.config.env_args!r}: {error}") from error
        return {"env_id": self.config.vf_env_name, "env_args": arguments}

    async def roll_out(self, row: Any, n: int, *, split: Split) -> list[Rollout]:
        """Run `n` rollouts, which the rubric may judge against each other."""
        GROUP.set(GroupOfRollouts(uuid.uuid4().hex, n))
        return await super().roll_out(row, n, split=split)

    def shape_group(self, row: Any, group: ScoredDataGroup) -> ScoredDataGroup:
        is_identical = len(set(group["scores"])) == 1
        self.counts["groups"] += 1
        self.counts["identical_groups"] += is_identical
        self.record("metrics/identical_score_rate", is_identical)
        return group

    def call_arguments(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, **GROUP.get()._asdict(), "timeout_s": self.config.agent_timeout_s}


if __name__ == "__main__":
    VerifiersEnv.cli()
