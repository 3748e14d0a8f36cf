"""Four bridges that bring new weights to the engines, with the same methods.

`restart` stops the engine and starts it on the new checkpoint; `reload` makes running engines load it in place; `lora`
swaps the adapter; `transfer` sends weights from memory to memory. `start` and `begin` must be called by every
process; only the first talks to the engines. Every method raises EngineError if it cannot do what it promises.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from atroposlib.errors import EngineError, EngineUnavailable
from atroposlib.utils.model_choice import torch_device
from example_trainer.bridges.restart import RestartBridge
from example_trainer.bridges.running import LoraBridge, ReloadBridge
from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy
from example_trainer.vllm_process import (
    make_engine,
    require_gpu_for_engine,
    shares_gpu,
    transfer_backend,
)
from example_trainer.weights import WeightsDirectory

logger = logging.getLogger(__name__)


class CheckpointBridge:
    """Saves each version to disk, from which engines load it.

    `check` makes one attempt; it raises unless every engine answers, and with reload and lora loads the published
    weights into a restarted engine again. `close` stops only what `start` started and may be called again.
    """

    def __init__(
        self,
        take: Callable[[int], Callable[[], Path]],
        engines: RestartBridge | ReloadBridge | LoraBridge,
        *,
        overlaps: bool = False,
    ) -> None:
        """`take`: see `WeightsDirectory.take`. `overlaps`: whether training may continue while engines load."""
        self._take = take
        self._overlaps = overlaps
        self._engines = engines
        self.check, self.close = engines.check, engines.close

    def start(self, policy: Policy, version: int) -> None:
        """Return when every engine serves the policy as `version`."""
        write = self._take(version)
        if policy.world.is_main:
            self._engines.start(write(), version)

    def begin(self, policy: Policy, version: int) -> Callable[[], int]:
        """Copy the weights and return what publishes them, for any thread; if that cannot overlap, publish at once.

        It returns the version that every engine then serves: an older one if an engine did not start on it (restart).
        """
        write = self._take(version)

        def publish() -> int:
            return self._engines.publish(write(), version) if policy.world.is_main else version

        if self._overlaps:
            return publish
        served = publish()
        return lambda: served


WeightBridge: TypeAlias = CheckpointBridge | TransferBridge


class EngineWatch:
    """Ends a run without batches whose engines do not answer, because nothing else would report the cause.

    `look` raises EngineUnavailable once an engine has not answered for `patience_s`.
    """

    INTERVAL_S = 10.0
    FORGET_S = 60.0
    """After this long without a check, because batches came, an earlier outage is forgotten."""

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
        """Check the engines, at most every `INTERVAL_S`. Called while no batch comes."""
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
    """Raises ConfigError if the engine would be started on a GPU of torchrun's processes."""
    if torch_device(config.device).type == "cuda":
        require_gpu_for_engine(config)
    if config.bridge == "restart":
        return CheckpointBridge(
            weights.take,
            RestartBridge(start_engine=partial(make_engine, config), is_stopping=is_stopping),
        )
    running: dict[str, Any] = {
        "urls": config.engine_urls,
        "timeout_s": config.engine_timeout_s,
        "retry_s": config.engine_retry_s,
        "api_key": config.engine_api_key or os.environ.get("ATROPOS_ENGINE_API_KEY"),
        "is_stopping": is_stopping,
    }
    num_gpus = torch.cuda.device_count()
    # An engine on the trainer's GPU needs memory to load.
    overlaps = not num_gpus or not shares_gpu(config, num_gpus=num_gpus)
    if config.bridge == "reload":
        return CheckpointBridge(weights.take, ReloadBridge(**running), overlaps=overlaps)
    if config.bridge == "lora":
        adapters = LoraBridge(lora_name=config.lora_name, **running)
        take = partial(weights.take, merged=False)
        return CheckpointBridge(take, adapters, overlaps=overlaps)
    return TransferBridge(
        backend=transfer_backend(config, num_gpus=num_gpus),
        bucket_bytes=config.transfer_bucket_mb * 2**20,
        **running,
    )
