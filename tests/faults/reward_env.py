"""An environment as a process whose answers are judged by reward functions that misbehave (`bad_rewards.py`).

    reward_env.py serve --env.kinds=LIST --env.policy=drop|mask|retry --env.folder=DIR --openai.base_url=URL ...

One row per kind, each asked once; the first answer of a row is the one whose reward misbehaves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Rollout
from atroposlib.inference.servers.sampling_notes import run_together
from tests.builders.environments import Offline
from tests.faults import bad_rewards
from tests.faults.closing import MARK


class RewardEnvConfig(DatasetEnvConfig):
    """What the tests set."""

    kinds: list[str] = []
    folder: str = ""
    fails_once: bool = False
    """Only the first attempt to judge a row's first answer goes wrong."""


class RewardEnv(Offline, DatasetEnv):
    """Asks every row once."""

    name = "rewards"
    env_config_cls = RewardEnvConfig
    config: RewardEnvConfig

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        config = RewardEnvConfig(
            group_size=4,
            max_num_workers=4,
            max_token_length=6,
            total_steps=1_000_000,
            max_batches_offpolicy=0,
            steps_per_eval=0,
            num_eval_rows=0,
            max_consecutive_failures=3,
        )
        return config, [APIServerConfig(server_type="vllm", model_name="scripted")]

    def load_rows(self, split: str) -> Any:
        return self.config.kinds if split == "train" else []

    async def get_next_item(self) -> Any:
        return await super().get_next_item() if self.num_items < len(self.train_rows) else None

    def prompt(self, row: str) -> str:
        return row

    async def score_group(self, row: str, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return await run_together(
            [self.outcome_of(row, str(choice)) for choice in range(len(rollouts))]
        )

    async def score(self, row: str, answer: str) -> Outcome:
        function = bad_rewards.score_on_second_try if self.config.fails_once else bad_rewards.score
        outcome: Outcome = await self.in_worker(function, row, int(answer), self.config.folder)
        return outcome

    async def close(self) -> None:
        print(MARK + json.dumps({"reward failures": self.num_reward_failures}), flush=True)
        await super().close()


if __name__ == "__main__":
    RewardEnv.cli()
