"""The reference trainer: batches from the hub, a GRPO step, new weights to the engines.

`TrainerConfig` and `training.train` are the interface; the other names keep scripts written for the original working.
Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def train_legacy(config: TrainerConfig) -> None:
    """Train with an engine that the trainer starts and restarts on new weights."""
    _train(config, mode="none")


def train_shared_vllm(config: TrainerConfig) -> None:
    """Train with running engines that reload new weights in place."""
    _train(config, mode="shared_vllm")


def train_lora(config: TrainerConfig) -> None:
    """Train adapters; running engines swap them."""
    _train(config, mode="lora_only")


def train_lora_restart(config: TrainerConfig) -> None:
    """Train adapters; the engine is restarted on the merged weights."""
    _train(config, mode="lora_restart")


def _train(config: TrainerConfig, *, mode: str) -> None:
    from example_trainer.training import train

    given = config.model_dump(include=config.model_fields_set - {"bridge"})
    train(TrainerConfig(**given | {"weight_bridge_mode": mode}))
