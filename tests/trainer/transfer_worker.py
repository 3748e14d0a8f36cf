"""One trainer process among those that torchrun starts: send the weights, and compare them with the checkpoint."""

import json
import sys
from pathlib import Path

from torch.distributed.fsdp import FSDPModule

from atroposlib.utils.model_choice import torch_device
from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import load_policy
from example_trainer.parallel import processes
from tests.trainer.helpers_transfer import KeptSender, assert_bit_for_bit

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    config = TrainerConfig(model_name=arguments["model"], device="cpu")
    with processes(torch_device(config.device)) as world:
        policy = load_policy(config, world)
        assert isinstance(policy.module, FSDPModule)
        bridge = TransferBridge(urls=[arguments["url"]], open_sender=KeptSender)
        bridge.start(policy, 0)
        policy.save(Path(arguments["out"]))
        if world.is_main:
            assert_bit_for_bit(bridge._sender.sent, Path(arguments["out"]))
        bridge.close()
