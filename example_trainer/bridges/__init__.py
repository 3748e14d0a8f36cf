"""How new weights reach the engines: one Protocol, four bridges.

`restart` stops the engine and starts it on the new checkpoint; `reload` lets running engines load it in place; `lora`
swaps the adapter only; `transfer` sends weights from memory to memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from atroposlib.errors import EngineError, EngineUnavailable
from example_trainer.bridges.restart import RestartBridge
from example_trainer.bridges.running import LoraBridge, ReloadBridge
from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy
from example_trainer.vllm_process import make_engine, transfer_backend
from example_trainer.weights import WeightsDirectory

logger = logging.getLogger(__name__)


class WeightBridge(Protocol):
    """Brings the weights of a policy to engines; every process calls it, the first talks to the engines.

    Every method raises EngineError when the engines are not as it promises.
    """

    name: str

    def start(self, policy: Policy, version: int) -> None:
        """Return when every engine serves the policy as `version`."""

    def publish(self, policy: Policy, version: int) -> int:
        """Return the version that every engine samples from and reports by now.

        That is `version`, or an older one where an engine did not start on the new weights (restart).
        """

    def check(self) -> None:
        """Return when every engine answers; one attempt, by the first process alone."""

    def close(self) -> None:
        """Stop what `start` started, and nothing else; harmless when repeated."""


class CheckpointBridge:
    """A `WeightBridge` that saves each version to disk, in every process, and has engines load it from there."""

    def __init__(
        self, save: Callable[[int], Path], engines: RestartBridge | ReloadBridge | LoraBridge
    ) -> None:
        self._save = save
        self._engines = engines
        self.name, self.check, self.close = engines.name, engines.check, engines.close

    def start(self, policy: Policy, version: int) -> None:
        path = self._save(version)
        if policy.world.is_main:
            self._engines.start(path, version)

    def publish(self, policy: Policy, version: int) -> int:
        path = self._save(version)
        return self._engines.publish(path, version) if policy.world.is_main else version


class EngineWatch:
    """Ends a run whose engines do not answer: without them no batch comes, and no other part would report why.

    Raises EngineUnavailable from `look` once an engine has not answered for `patience_s`.
    """

    INTERVAL_S = 10.0
    FORGET_S = 60.0
    """After so long without a look, because batches came, an earlier outage does not count."""

    def __init__(
        self,
        bridge: WeightBridge,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bridge = bridge
        self._patience_s = patience_s
        self._clock = clock
        self._looked_s = float("-inf")
        self._failing_since_s: float | None = None

    def look(self) -> None:
        """Ask the engines, at most every `INTERVAL_S`. Called while no batch comes."""
        now_s = self._clock()
        waited_s = now_s - self._looked_s
        if waited_s < self.INTERVAL_S:
            return
        if waited_s > self.FORGET_S:
            self._failing_since_s = None
        self._looked_s = now_s
        try:
            self._bridge.check()
        except EngineError as error:
            if self._failing_since_s is None:
                self._failing_since_s = now_s
                logger.warning("no batch comes, and %s; retrying for %g s", error, self._patience_s)
            failing_s = now_s - self._failing_since_s
            if failing_s >= self._patience_s:
                raise EngineUnavailable(
                    f"no batch has come for {failing_s:.0f} s, in which {error}"
                ) from error
        else:
            if self._failing_since_s is not None:
                logger.info("the engines answer again")
            self._failing_since_s = None


def make_bridge(
    config: TrainerConfig, weights: WeightsDirectory, *, is_stopping: Callable[[], bool]
) -> WeightBridge:
    """Build the bridge that the configuration names."""
    if config.bridge == "restart":
        return CheckpointBridge(
            weights.save,
            RestartBridge(start_engine=partial(make_engine, config), is_stopping=is_stopping),
        )
    running: dict[str, Any] = {
        "urls": config.engine_urls,
        "timeout_s": config.engine_timeout_s,
        "retry_s": config.engine_retry_s,
        "api_key": config.engine_api_key or os.environ.get("ATROPOS_ENGINE_API_KEY"),
        "is_stopping": is_stopping,
    }
    if config.bridge == "reload":
        return CheckpointBridge(weights.save, ReloadBridge(**running))
    if config.bridge == "lora":
        return CheckpointBridge(
            weights.save_adapter, LoraBridge(lora_name=config.lora_name, **running)
        )
    return TransferBridge(
        backend=transfer_backend(config, num_gpus=torch.cuda.device_count()),
        bucket_bytes=config.transfer_bucket_mb * 2**20,
        **running,
    )
