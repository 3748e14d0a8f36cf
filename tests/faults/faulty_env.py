"""An environment as a process, some of whose items go wrong; which ones and how, their numbers alone decide.

    faulty_env.py serve --env.run=NAME --env.rollout_server_url=URL --openai.base_url=URL ...

Every group can be recognised: its prompt is `NAME/NUMBER`. At its end it prints, as one JSON line after `author:`, what
it handed out and what it did, to be compared with what the runtime counted and the hub was given.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from tests.builders.environments import Offline
from tests.faults.closing import MARK

PROMPT_END = ";"
KINDS = {
    3: "raises once",
    5: "exits once",
    9: "exits in a task once",
    7: "raises always",
    11: "gives none",
    13: "scores are equal",
    17: "hangs once",
    19: "malformed once",
    23: "asks for more",
}
"""By the remainder of an item's number after division by `PERIOD`."""
PERIOD = 29
WORKER_TIMEOUT_S = 8.0


def kind_of(number: int) -> str:
    kind = KINDS.get(number % PERIOD, "good")
    # One that hangs occupies a worker until its deadline.
    return "good" if kind == "hangs once" and number // PERIOD % 5 else kind


async def interrupted() -> None:
    raise KeyboardInterrupt


class FaultyEnvConfig(BaseEnvConfig):
    """What the tests set."""

    run: str = "run"
    """Names this process; part of every prompt."""
    has_faults: bool = True


class FaultyEnv(Offline, BaseEnv):
    """Counts upwards."""

    name = "faulty"
    env_config_cls = FaultyEnvConfig
    config: FaultyEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = FaultyEnvConfig(
            group_size=4,
            max_num_workers=6,
            max_token_length=64,
            use_wandb=False,
            total_steps=1_000_000,
            steps_per_eval=0,
            worker_timeout=WORKER_TIMEOUT_S,
        )
        return config, [APIServerConfig(server_type="vllm", model_name="scripted")]

    async def setup(self) -> None:
        self.num_given = 0
        self.attempts: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    async def get_next_item(self) -> int:
        self.num_given += 1
        return self.num_given - 1

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        self.attempts[item] += 1
        is_first = self.attempts[item] == 1
        kind = kind_of(item) if self.config.has_faults else "good"
        if kind == "raises always" or (kind == "raises once" and is_first):
            self.counts["raised"] += 1
            raise RuntimeError(f"item {item} is bad")
        if kind == "exits once" and is_first:
            self.counts["exited"] += 1
            sys.exit(3)
        if kind == "exits in a task once" and is_first:
            self.counts["exited"] += 1
            await asyncio.gather(interrupted(), asyncio.sleep(0.1))
        if kind == "hangs once" and is_first:
            await asyncio.sleep(3600)
        if kind == "gives none":
            self.counts["gave none"] += 1
            return None, []
        group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(
                prompt=f"{self.config.run}/{item}{PROMPT_END}",
                n=self.config.group_size,
                max_tokens=6,
            )
            nodes = managed.get_state()["nodes"]
        for choice, node in enumerate(nodes):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(0.5 if kind == "scores are equal" else float(choice))
        if kind == "malformed once" and is_first:
            self.counts["malformed"] += 1
            group["masks"][0] = group["masks"][0][:-1]
        self.counts["equal"] += kind == "scores are equal"
        backlog = [item + PERIOD * 1_000_000 + 1] if kind == "asks for more" else []
        self.counts["asked for more"] += len(backlog)
        return group, backlog

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is held out."""

    def close(self) -> Any:
        attempts = Counter(
            n for item, n in self.attempts.items() if kind_of(item) == "raises always"
        )
        record = {"attempts at the hopeless": attempts, **self.counts}
        print(MARK + json.dumps(record), flush=True)
        return super().close()


if __name__ == "__main__":
    FaultyEnv.cli()
