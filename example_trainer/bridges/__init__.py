"""How new weights reach the engines: one Protocol, two ways.

`restart` stops the engine and starts it on the new checkpoint; `reload` lets running engines load it in place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from example_trainer.bridges.reload import ReloadBridge
from example_trainer.bridges.restart import RestartBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import choose_device, choose_dtype
from example_trainer.vllm_process import (
    EngineProcess,
    local_engine_command,
    vllm_command,
    vllm_environment,
)


class WeightBridge(Protocol):
    """Brings checkpoints to engines. Every method raises EngineError when the engines are not as it promises."""

    name: str

    def start(self) -> None:
        """Return when every engine serves the initial model as version 0."""

    def publish(self, checkpoint_dir: Path, version: int) -> None:
        """Return when every engine samples from `checkpoint_dir` and says so."""

    def close(self) -> None:
        """Stop what `start` started, and nothing else; harmless when repeated."""


def make_bridge(config: TrainerConfig, *, initial_model: Path) -> WeightBridge:
    """Build the bridge that the configuration names; `initial_model` is version 0."""
    if config.bridge == "reload":
        return ReloadBridge(
            urls=config.engine_urls,
            initial_model=initial_model,
            timeout_s=config.engine_timeout_s,
        )
    return RestartBridge(
        start_engine=lambda model, version: make_engine(config, model),
        initial_model=initial_model,
    )


def make_engine(config: TrainerConfig, model: Path) -> EngineProcess:
    """Return the engine that the configuration describes, on `model`, not yet started."""
    device = choose_device(config)
    is_cpu = device.type == "cpu"
    # That of the published weights: vLLM's own choice for float32 weights is 16 bits.
    dtype = str(choose_dtype(config, device)).removeprefix("torch.")
    if config.engine == "vllm":
        argv = vllm_command(
            python=config.vllm_python or sys.executable,
            model=model,
            port=config.vllm_port,
            served_model_name=config.model_name,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=None if is_cpu else config.gpu_memory_utilization,
            dtype=dtype,
            cpu=is_cpu,
        )
        env = vllm_environment(gpu=config.vllm_gpu, cpu=is_cpu)
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
