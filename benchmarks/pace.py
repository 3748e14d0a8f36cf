"""How long does the trainer wait for batches, how old are the groups it gets, and how many are thrown away?

`PYTHONPATH=. python benchmarks/pace.py` (ten minutes) runs the hub, a scripted engine whose answers take time, an
environment and a trainer whose steps take time as processes, with default settings. The first third of the steps is not
counted. `tests/runtime/test_capacity_sweeps.py` has the same cases in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from atroposlib.client import TrainerClient, TrainerRegistration
from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.inference.scripted_engine import ByteTokenizer
from benchmarks._hub_process import listening, running, running_hub
from benchmarks._table import Table

EXPONENTIAL = {"first_token_s": 2.0, "distribution": "exponential"}


class Case(NamedTuple):
    """How long an answer, the steps in turn, and an item beside its four answers take, the last one at random."""

    latency: dict[str, Any]
    steps_s: list[float]
    tools_s: list[float]


CASES = {
    "answers of 2 s, exponential; steps of 3 s": Case(EXPONENTIAL, [3.0], [0.0]),
    "tools of 1 s, a tenth 60 s; steps of 5 s": Case({}, [5.0], [1.0] * 9 + [60.0]),
    "answers of 2 s, exponential; steps of 1 s and 9 s": Case(EXPONENTIAL, [1.0, 9.0], [0.0]),
    "answers of 2 s; steps of 1 s": Case({"first_token_s": 2.0}, [1.0], [0.0]),
}


class PaceConfig(BaseEnvConfig):
    tools_s: list[float] = [0.0]


class PaceEnv(BaseEnv):
    name = "pace"
    env_config_cls = PaceConfig
    config: PaceConfig

    def load_tokenizer(self) -> Any:
        return ByteTokenizer()

    async def get_next_item(self) -> list[int]:
        return [1, 2, 3]

    async def setup(self) -> None: ...

    async def evaluate(self) -> None: ...

    async def collect_trajectories(self, item: list[int]) -> tuple[ScoredDataGroup, list[Any]]:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[0.0, 1.0, 2.0, 3.0])
        group["policy_version"] = self.status_dict.get("policy_version") or 0
        ask = self.server.tokens_and_logprobs_completion
        for answer in await asyncio.gather(*(ask(input_ids=item, max_tokens=16) for _ in range(4))):
            group["tokens"].append(item + answer[1][0])
            group["masks"].append([-100] * len(item) + answer[1][0])
        await asyncio.sleep(random.choice(self.config.tools_s))
        return group, []


def measure(case: Case, num_steps: int = 36) -> list[str]:
    """Run the processes; return the share of the time that the trainer waits, staleness, and groups thrown away."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub = stack.enter_context(running_hub("memory", directory=directory))
        log_path, script = directory / "engine.log", json.dumps({"latency": case.latency})
        argv = ["-m", "atroposlib.inference.scripted_engine", f"--script={script}", "--port=0"]
        url = listening(stack.enter_context(running(argv, log_path=log_path)), log_path)
        trainer = stack.enter_context(TrainerClient(hub.base_url))
        known = {"batch_size": 64, "max_token_len": 64, "num_steps": -1, "max_staleness": 4}
        known |= {"starting_step": 0, "checkpoint_dir": "", "save_checkpoint_interval": 0}
        trainer.register(TrainerRegistration.model_validate(known))
        env = {"rollout_server_url": hub.base_url, "group_size": 4, "tools_s": case.tools_s}
        env |= {"use_wandb": False, "total_steps": 10**6, "steps_per_eval": 0}
        server = {"server_type": "vllm", "model_name": "scripted", "base_url": f"{url}/v1"}
        config_path = directory / "env.yaml"
        config_path.write_text(json.dumps({"env": env, "openai": [server]}))
        argv, env_log = [__file__, "serve", f"--config={config_path}"], directory / "env.log"
        environment = stack.enter_context(running(argv, log_path=env_log))
        staleness: list[int] = []
        waited_s = began = 0.0
        for step in range(num_steps):
            if step == num_steps // 3:
                staleness, waited_s, began = [], 0.0, time.monotonic()
            asked = time.monotonic()
            while (batch := trainer.lease_batch(wait_s=10.0)) is None:
                assert environment.poll() is None, env_log.read_text()[-2000:]
            waited_s += time.monotonic() - asked
            staleness += [step - (group.policy_version or 0) for group in batch.groups]
            time.sleep(case.steps_s[step % len(case.steps_s)])
            trainer.ack(batch)
            trainer.publish_policy(step + 1)
        waits = waited_s / (time.monotonic() - began)
        ledger = httpx.get(f"{hub.base_url}/ledger").raise_for_status().json()
    expired = ledger["expired"] / (ledger["expired"] + ledger["trained"])
    return [f"{waits:.0%}", f"{statistics.fmean(staleness):.2f}", f"{expired:.0%}"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        PaceEnv.cli()
    table = Table("Waiting for batches", "", "waits", "staleness", "thrown away")
    for name, case in CASES.items():
        table.row(name, *measure(case))
