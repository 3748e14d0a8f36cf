"""Train agents that are separate programs: arithmetic, by an agent that uses OpenAI's SDK or plain HTTP.

    python environments/agents/arithmetic_agents.py serve --env.agent http --openai.model_name M ...

The agents next to this file are unmodified programs; each run is a process that gets a base URL and a key.

Needs: nothing.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any, Literal

from atroposlib.envs.agent_env import AgentEnv, AgentEnvConfig

NUM_ROWS = {"train": 1000, "eval": 16}


class ArithmeticAgentsConfig(AgentEnvConfig):
    agent: Literal["openai_sdk", "http"] = "openai_sdk"
    """Program next to this file: `<agent>_agent.py`."""


class ArithmeticAgents(AgentEnv):
    """Products and sums of two-digit numbers."""

    name = "arithmetic_agents"
    env_config_cls = ArithmeticAgentsConfig
    config: ArithmeticAgentsConfig

    def load_rows(self, split: str) -> list[str]:
        rng = random.Random(f"arithmetic:{split}")
        numbers = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(NUM_ROWS[split])]
        return [f"{a} {rng.choice('*+')} {b}" for a, b in numbers]

    async def run_agent(self, row: str, base_url: str, api_key: str) -> str:
        program = Path(__file__).with_name(f"{self.config.agent}_agent.py")
        argv = [sys.executable, str(program), f"What is {row}?"]
        return await self.run_command(argv, base_url=base_url, api_key=api_key)

    def gold_answer(self, row: str) -> str:
        left, sign, right = row.split()
        return str(int(left) * int(right) if sign == "*" else int(left) + int(right))

    def score(self, row: str, answer: Any) -> float:
        numbers = re.findall(r"-?\d+", str(answer))
        return float(numbers[-1:] == [self.gold_answer(row)])


if __name__ == "__main__":
    ArithmeticAgents.cli()
