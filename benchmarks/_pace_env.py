"""An environment whose items only take time, for pace.py: `_pace_env.py serve FLAGS`."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, Literal

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class PaceConfig(BaseEnvConfig):
    shape: Literal["exponential", "log-normal"] = "exponential"
    """Distribution of the time an answer takes; an item takes as long as the slowest of its group."""
    mean_s: float = 2.0
    """Mean of an answer's time, seconds."""
    useful: float = 1.0
    """Probability that a group's scores differ, so that it is sent."""


class PaceEnv(BaseEnv):
    """Items that wait as long as a group of answers would; the first token is the policy version at the start."""

    name = "pace"
    env_config_cls = PaceConfig
    config: PaceConfig

    @classmethod
    def config_init(cls) -> tuple[PaceConfig, list[APIServerConfig]]:
        config = PaceConfig(use_wandb=False, total_steps=10**6, steps_per_eval=0)
        return config, [
            APIServerConfig(server_type="vllm", base_url="http://127.0.0.1:9", health_check=False)
        ]

    def load_tokenizer(self) -> Any:
        return None

    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> int:
        return 0  # every item is alike

    async def collect_trajectories(self, item: int) -> tuple[ScoredDataGroup, list[Any]]:
        version = self.status_dict.get("policy_version") or 0
        await asyncio.sleep(max(self._answer_s() for _ in range(self.config.group_size)))
        is_useful = self.random.random() < self.config.useful
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for index in range(self.config.group_size):
            group["tokens"].append([version, 2, 3])
            group["masks"].append([-100, 2, 3])
            group["scores"].append(float(index) if is_useful else 0.0)
        return group, []

    def _answer_s(self) -> float:
        if self.config.shape == "exponential":
            return self.random.expovariate(1 / self.config.mean_s)
        return self.random.lognormvariate(math.log(self.config.mean_s) - 0.5, 1.0)

    async def evaluate(self) -> None:
        pass


if __name__ == "__main__":
    PaceEnv.cli()
