"""How new weights reach the engines: one Protocol, four ways.

`restart` stops the engine and starts it on the new checkpoint; `reload` lets running engines load it in place;
`transfer` hands the weights over from memory to memory; `lora` swaps the adapter only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from atroposlib.errors import EngineError, EngineUnavailable
from example_trainer.bridges.lora import LoraBridge
from example_trainer.bridges.reload import ReloadBridge
from example_trainer.bridges.restart import RestartBridge
from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy, choose_device, choose_dtype
from example_trainer.vllm_process import (
    EngineProcess,
    local_engine_command,
    vllm_command,
    vllm_environment,
)
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
        """Return when every engine samples from the policy's weights and says so; the version that they serve.

        That is `version`, or an older one where an engine could not take the new weights and went back (restart).
        """

    def check(self) -> None:
        """Return when every engine answers; one attempt, by the first process alone."""

    def close(self) -> None:
        """Stop what `start` started, and nothing else; harmless when repeated."""


class CheckpointEngines(Protocol):
    """Engines that take weights from a directory."""

    name: str

    def start(self, checkpoint_dir: Path, version: int) -> None: ...

    def publish(self, checkpoint_dir: Path, version: int) -> int: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class CheckpointBridge:
    """A `WeightBridge` that writes each version to the weights directory and has engines load it from there."""

    def __init__(self, weights: WeightsDirectory, engines: CheckpointEngines) -> None:
        self.name = engines.name
        self._weights = weights
        self._engines = engines

    def start(self, policy: Policy, version: int) -> None:
        path = self._weights.save(version)
        if policy.world.is_main:
            self._engines.start(path, version)

    def publish(self, policy: Policy, version: int) -> int:
        path = self._weights.save(version)
        return self._engines.publish(path, version) if policy.world.is_main else version

    def check(self) -> None:
        self._engines.check()

    def close(self) -> None:
        self._engines.close()


class EngineWatch:
    """Ends a run whose engines stay away: without them no batch comes, and nobody else would say why.

    Raises EngineUnavailable from `look` once an engine has not answered for `patience_s`.
    """

    INTERVAL_S = 10.0
    FORGET_S = 60.0
    """Without a look, because batches came: what was seen before says nothing of now."""

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
        self._away_since_s: float | None = None

    def look(self) -> None:
        """Ask the engines, at most every `INTERVAL_S`. Called while no batch comes."""
        now_s = self._clock()
        waited_s = now_s - self._looked_s
        if waited_s < self.INTERVAL_S:
            return
        if waited_s > self.FORGET_S:
            self._away_since_s = None
        self._looked_s = now_s
        try:
            self._bridge.check()
        except EngineError as error:
            if self._away_since_s is None:
                self._away_since_s = now_s
                logger.warning(
                    "no batch comes, and %s; waiting %g s for it", error, self._patience_s
                )
            elif now_s - self._away_since_s >= self._patience_s:
                raise EngineUnavailable(
                    f"no batch has come for {now_s - self._away_since_s:.0f} s, in which {error}"
                ) from error
        else:
            if self._away_since_s is not None:
                logger.info("the engines are back")
            self._away_since_s = None


def make_bridge(config: TrainerConfig, weights: WeightsDirectory) -> WeightBridge:
    """Build the bridge that the configuration names."""
    urls, timeout_s = config.engine_urls, config.engine_timeout_s
    retry_s = config.engine_retry_s
    api_key = config.engine_api_key or os.environ.get("ATROPOS_ENGINE_API_KEY")
    match config.bridge:
        case "restart":
            return CheckpointBridge(
                weights,
                RestartBridge(start_engine=lambda model, version: make_engine(config, model)),
            )
        case "reload":
            return CheckpointBridge(
                weights,
                ReloadBridge(urls=urls, timeout_s=timeout_s, retry_s=retry_s, api_key=api_key),
            )
        case "lora":
            return LoraBridge(
                weights,
                urls=urls,
                lora_name=config.lora_name,
                timeout_s=timeout_s,
                retry_s=retry_s,
                api_key=api_key,
            )
        case "transfer":
            return TransferBridge(
                urls=urls,
                backend=transfer_backend(config, num_gpus=torch.cuda.device_count()),
                bucket_bytes=config.transfer_bucket_mb * 2**20,
                timeout_s=timeout_s,
                api_key=api_key,
            )


def shares_gpu(config: TrainerConfig, *, num_gpus: int) -> bool:
    """Whether the engine computes on the trainer's GPU, as far as the configuration says."""
    if any(urlsplit(url).hostname not in ("localhost", "127.0.0.1") for url in config.engine_urls):
        return False
    if config.vllm_gpu is None:
        return num_gpus == 1
    return config.vllm_gpu == int(config.device.partition(":")[2] or 0)


def transfer_backend(config: TrainerConfig, *, num_gpus: int) -> str:
    """Return the configured way, else the one that can work: NCCL refuses one GPU for two processes."""
    shared = "ipc" if shares_gpu(config, num_gpus=num_gpus) else "nccl"
    return config.transfer_backend or shared


def make_engine(config: TrainerConfig, model: Path) -> EngineProcess:
    """Return the engine that the configuration describes, on `model`, not yet started."""
    device = choose_device(config)
    is_cpu = device.type == "cpu"
    # That of the published weights: vLLM's own choice for float32 weights is 16 bits.
    dtype = str(choose_dtype(config, device)).removeprefix("torch.")
    if config.engine == "vllm":
        backend = transfer_backend(config, num_gpus=torch.cuda.device_count())
        transfers = {"backend": backend} if config.bridge == "transfer" else None
        argv = vllm_command(
            python=config.vllm_python or sys.executable,
            model=model,
            port=config.vllm_port,
            served_model_name=config.model_name,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=None if is_cpu else config.gpu_memory_utilization,
            dtype=dtype,
            cpu=is_cpu,
            lora_rank=config.lora_r if config.bridge == "lora" else None,
            processed_logprobs=config.reports_processed,
            extra_args=["--weight-transfer-config", json.dumps(transfers)] if transfers else [],
        )
        env = vllm_environment(
            gpu=config.vllm_gpu,
            cpu=is_cpu,
            takes_handles=transfers is not None and backend == "ipc",
        )
    else:
        argv = local_engine_command(
            model=model,
            port=config.vllm_port,
            served_model_name=config.model_name,
            device=device.type,
            dtype=dtype,
            threads=config.num_threads or 1,
            seed=config.seed,
        )
        env = None
    return EngineProcess(
        argv,
        env=env,
        url=f"http://127.0.0.1:{config.vllm_port}",
        log_path=config.log_dir / "engine.log",
        startup_timeout_s=config.engine_timeout_s,
    )
