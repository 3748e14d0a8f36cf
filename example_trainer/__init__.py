"""The reference trainer: batches from the hub, a GRPO step, new weights to the engines.

`TrainerConfig` and `training.train` are the interface; the other names keep scripts written for the original working.
Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from atroposlib.config import parse_flags
from example_trainer.config import TrainerConfig

__all__ = [
    "TrainerConfig",
    "TrainingConfig",
    "config_from_args",
    "parse_args",
    "train_legacy",
    "train_lora",
    "train_lora_restart",
    "train_shared_vllm",
]

TrainingConfig = TrainerConfig


def parse_args(argv: Sequence[str] | None = None) -> TrainerConfig:
    """Parse the flags of `atropos-grpo`; raise ConfigError for an invalid one."""
    return parse_flags(TrainerConfig, argv, prog="atropos-grpo")


def config_from_args(args: TrainerConfig) -> TrainerConfig:
    """Return `args`: `parse_args` already returns the configuration."""
    return args


def _train(config: TrainerConfig, *, mode: str) -> None:
    """Train with the original's `--weight-bridge-mode`, which the configuration describes."""
    from example_trainer.training import train

    given = config.model_dump(include=config.model_fields_set - {"bridge"})
    train(TrainerConfig(**given | {"weight_bridge_mode": mode}))


train_legacy = partial(_train, mode="none")
train_shared_vllm = partial(_train, mode="shared_vllm")
train_lora = partial(_train, mode="lora_only")
train_lora_restart = partial(_train, mode="lora_restart")
