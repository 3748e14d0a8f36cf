"""An environment on a scripted engine that takes 20 ms a request; tests run it as a process and kill it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.inference.harness import HarnessRequest, ServerHarness
from tests.builders.environments import Offline


def add(request: HarnessRequest) -> str:
    """Right for about two answers of three, the same in every process."""
    a, b = map(int, re.findall(r"\d+", request.prompt)[-2:])
    return str(a + b + ((a + request.choice) % 3 == 0))


class SlowSums(Offline, DatasetEnv):
    name = "slow_sums"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = ServerHarness(self.server.servers[0].config, respond=add)
        engine.delay_s = 0.02
        self.server.servers = [engine]

    def load_rows(self, split: str) -> Any:
        return [(i, i * i) for i in range(100 if split == "train" else 60)]

    def prompt(self, row: Any) -> str:
        return f"{row[0]} + {row[1]} = ?"

    def score(self, row: Any, answer: str) -> float:
        return float(answer == str(sum(row)))


if __name__ == "__main__":
    SlowSums.cli()
