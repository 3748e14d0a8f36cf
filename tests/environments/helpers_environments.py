"""Import an environment and put a scripted engine under it."""

import asyncio
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.reward_fns.math_worker import BlockingWorkers
from atroposlib.envs.rewards import JsonValue, RewardFailure, RewardWorkers
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, Respond, ServerHarness


def load(name: str) -> ModuleType:
    """Import a module of `environments/`; a folder is followed by a dot."""
    return importlib.import_module(f"atroposlib.environments.{name}")


@functools.cache
def _worker(preload: tuple[str, ...]) -> BlockingWorkers:
    return BlockingWorkers(num_workers=1, preload=preload)


class SharedWorkers(RewardWorkers):
    """A pool whose process serves all tests: to start one that preloads math-verify takes a second of CPU."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        super().__init__(preload=preload)
        self._worker = _worker(preload)

    async def run(
        self,
        function: Callable[..., JsonValue] | str,
        *args: JsonValue,
        timeout_s: float,
        scope: str | None = None,
    ) -> JsonValue | RewardFailure:
        [outcome] = await asyncio.to_thread(self._worker.run, function, [args], timeout_s=timeout_s)
        if isinstance(outcome, RewardFailure):
            self._count(outcome)
        return outcome


def make_env(
    env_cls: Any,
    monkeypatch: Any,
    *,
    respond: Respond,
    weight_version: str | None = None,
    **settings: Any,
) -> Any:
    """Return an environment whose one server is a `ServerHarness` and whose tokenizer needs no files."""
    module = sys.modules["atroposlib.envs.hooks"]
    monkeypatch.setattr(module, "load_tokenizer", lambda name: ByteTokenizer())
    config = env_cls.config_init()[0].model_copy(update={"use_wandb": False, **settings})
    env = env_cls(config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")])
    harness = ServerHarness(respond=respond, weight_version=weight_version)
    env.server.servers = [harness]
    if isinstance(env, DatasetEnv):
        env.reward_workers = SharedWorkers(env.preload)
    return env


async def logged(env: Any) -> dict[str, Any]:
    """Return the metrics of the environment's next log."""
    found: dict[str, Any] = {}
    env.wandb_run = SimpleNamespace(log=lambda metrics, step: found.update(metrics))
    await env.wandb_log()
    return found


def restore(env: Any, started: Any, folder: Path) -> Any:
    """Save a checkpoint of one environment and load it into another; return that."""
    env.checkpoint_dir = started.checkpoint_dir = str(folder)
    env.save_checkpoint(1)
    started.curr_step = 1
    started.load_checkpoint()
    return started
