"""Measure how long one weight bridge takes to publish weights to a real engine, without training steps.

`python -m benchmarks._trainer_bridges SPEC BRIDGE`; BRIDGE may be `transfer ipc` or `transfer nccl`. Starts the vLLM of
ATROPOS_VLLM_PYTHON on the trainer's GPU, or on the second one for NCCL. A publish ends when the engine serves the new
version.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from atroposlib.cli.launch.supervisor import free_port
from benchmarks._trainer_measure import Meter
from benchmarks._trainer_work import Spec
from example_trainer.bridges import make_bridge
from example_trainer.config import TrainerConfig
from example_trainer.model import load_policy
from example_trainer.training import set_up_torch
from example_trainer.vllm_process import make_engine
from example_trainer.weights import WeightsDirectory


def config_of(spec: Spec, bridge: str) -> TrainerConfig:
    name, _, backend = bridge.partition(" ")
    return TrainerConfig(
        model_name=spec.model,
        device=spec.device,
        bridge=name,
        transfer_backend=backend or None,
        lora=name == "lora",
        vllm_python=os.environ["ATROPOS_VLLM_PYTHON"],
        vllm_port=free_port(),
        vllm_gpu=None if spec.device == "cpu" else int(backend == "nccl"),
        max_model_len=spec.seq_len,
        save_path=Path(spec.directory, bridge, "saved"),
        log_dir=Path(spec.directory, bridge, "logs"),
        threads=spec.NUM_THREADS,
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))  # the engine stops, too
    spec, bridge = Spec(**json.loads(sys.argv[1])), sys.argv[2]
    config = config_of(spec, bridge)
    set_up_torch(config)
    policy = load_policy(config)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    with ExitStack() as stack:
        weights = stack.enter_context(WeightsDirectory(config, policy))
        began_s = time.perf_counter()
        if config.bridge != "restart":
            stack.enter_context(make_engine(config, Path(spec.model)))
        way = stack.enter_context(closing(make_bridge(config, weights, is_stopping=lambda: False)))
        way.start(policy, 0)
        meter = Meter(policy.model, device=spec.device)
        meter.result.note = f"{time.perf_counter() - began_s:.1f} s to start"
        for version in range(1, 2 if bridge == "restart" else 4):
            for parameter in trained:
                parameter.data.mul_(1.01)
            with meter.step():
                torch.cuda.empty_cache()
                served = way.begin(policy, version)()
            if served != version:
                raise RuntimeError(f"the engine serves version {served} instead of {version}")
    meter.result.print()


if __name__ == "__main__":
    main()
