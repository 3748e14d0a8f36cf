"""One trainer process among those that torchrun starts: hand the weights over, and save them for comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import choose_device, load_policy
from example_trainer.parallel import is_sharded, processes
from tests.trainer.helpers_transfer import meet_over_gloo

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    config = TrainerConfig(model_name=arguments["model"], device="cpu")
    with processes(choose_device(config)) as world:
        policy = load_policy(config, world)
        assert is_sharded(policy.module)
        bridge = TransferBridge(
            urls=[arguments["url"]], bucket_bytes=arguments["bucket"], meet=meet_over_gloo
        )
        bridge.start(policy, 0)
        policy.save(Path(arguments["out"]))
        bridge.close()
