"""The environment process that env.py measures, and the probe in its event loop.

`_env_process.py serve FLAGS`, like any environment. SIGUSR1 switches the probe, which costs a few per cent, on and off;
at the end it writes its measurements to the file PROBE_PATH, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from benchmarks._hub_probe import scheduling

TICK_S = 0.01
QUESTION = "Which group of sequences is cut into the next batch, and why? " * 8


class BenchmarkConfig(BaseEnvConfig):
    path: Literal["managed", "chat"] = "managed"
    """Source of the tokens: sampled ones, or completion text that is tokenised again."""


class BenchmarkEnv(BaseEnv):
    """Asks one question repeatedly; scores are the indices, so that no group is dropped."""

    name = "benchmark"
    env_config_cls = BenchmarkConfig
    config: BenchmarkConfig

    @classmethod
    def config_init(cls) -> tuple[BenchmarkConfig, list[APIServerConfig]]:
        config = BenchmarkConfig(
            group_size=8, use_wandb=False, total_steps=10**6, steps_per_eval=0, max_num_workers=8
        )
        return config, [APIServerConfig(server_type="vllm", model_name="bench")]

    async def setup(self) -> None:
        self.probe = Probe(Path(os.environ["PROBE_PATH"]))
        self.probe_task = asyncio.create_task(self.probe.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.probe.switch)

    async def get_next_item(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": QUESTION}]

    async def collect_trajectories(
        self, item: list[dict[str, str]]
    ) -> tuple[ScoredDataGroup, list[Any]]:
        collect = self._managed if self.config.path == "managed" else self._chat
        return await collect(item), []

    async def _managed(self, messages: list[dict[str, str]]) -> ScoredDataGroup:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length
            )
            nodes = managed.get_state()["nodes"]
        for index, node in enumerate(nodes):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(float(index))
        return group

    async def _chat(self, messages: list[dict[str, str]]) -> ScoredDataGroup:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        completion = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length
        )
        for index, choice in enumerate(completion.choices):
            answer = {"role": "assistant", "content": choice.message.content}
            tokenized = tokenize_for_trainer(self.tokenizer, [*messages, answer])
            group["tokens"].append(tokenized["tokens"])
            group["masks"].append(tokenized["masks"])
            group["scores"].append(float(index))
        return group

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    async def close(self) -> None:
        self.probe_task.cancel()
        await asyncio.gather(self.probe_task, return_exceptions=True)
        self.probe.write()


class Probe:
    """Measures a task that sleeps for `TICK_S` at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_on = asyncio.Event()
        self.loop_cpu_ms: list[float] = []
        """CPU time of the loop's thread between two ticks."""
        self.late_ms: list[float] = []
        """Lateness of a tick, minus the longest time that one of the process's threads waited for a core: a thread that
        holds the GIL shows here, other processes do not."""

    def switch(self) -> None:
        if self._is_on.is_set():
            self._is_on.clear()
        else:
            self._is_on.set()

    async def run(self) -> None:
        while True:
            await self._is_on.wait()
            before, began = scheduling(os.getpid()), time.perf_counter()
            await asyncio.sleep(TICK_S)
            now, after = time.perf_counter(), scheduling(os.getpid())
            waited_s = max(
                after_s - before.delays_s.get(thread, 0.0)
                for thread, after_s in after.delays_s.items()
            )
            cpu_s = after.loop_cpu_s - before.loop_cpu_s
            self.loop_cpu_ms.append(1e3 * cpu_s)
            self.late_ms.append(1e3 * max(0.0, now - began - TICK_S - waited_s))

    def write(self) -> None:
        self._path.write_text(
            json.dumps({"loop_cpu_ms": self.loop_cpu_ms, "late_ms": self.late_ms})
        )


if __name__ == "__main__":
    BenchmarkEnv.cli()
