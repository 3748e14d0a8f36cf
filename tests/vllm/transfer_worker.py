"""A trainer beside vLLM, run by vLLM's Python: hand over a model, change it, hand it over again, save it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.bridges.transfer import EngineClient, TransferBridge, vllm_sender
from example_trainer.config import TrainerConfig
from example_trainer.model import load_policy
from tests.trainer.helpers_engine import recorded_engine
from tests.vllm.store_collective import install


def require_readable_handles() -> None:
    """Have vLLM's class read what its trainer side would send of CUDA IPC; there is no GPU to run that on."""
    sent = IPCWeightTransferUpdateInfo(
        names=["a"],
        dtype_names=["float32"],
        shapes=[[2]],
        ipc_handles={"GPU-1": ("handle",)},
        tensor_sizes=[8],
    )
    with recorded_engine() as engine:
        control = Control(engine.url, timeout_s=5.0)
        EngineClient([VllmEngine(control)], backend="ipc").update_weights(asdict(sent))
        assert IPCWeightTransferUpdateInfo(**engine.bodies[-1][1]["update_info"]) == sent


if __name__ == "__main__":
    require_readable_handles()
    arguments = json.loads(sys.argv[1])
    install()
    policy = load_policy(TrainerConfig(model_name=arguments["model"], device="cpu"))
    bridge = TransferBridge(
        urls=[arguments["url"]],
        bucket_bytes=20_000,  # a few tensors; the embedding is larger
        timeout_s=120,
        open_sender=lambda *sides, **settings: vllm_sender(*sides, **settings),  # on the CPU, too
    )
    bridge.start(policy, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    bridge.publish(policy, 1)
    policy.save(Path(arguments["out"]))
    bridge.close()
