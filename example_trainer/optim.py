"""The optimizers of `--optimizer`, and the learning rate of a step."""

from __future__ import annotations

from typing import Any

import torch

from atroposlib.errors import ConfigError, require
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy


def make_optimizer(policy: Policy, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; raise ConfigError if several processes cannot shard it."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw":
        # Fused: one kernel, without a temporary copy of every parameter.
        return torch.optim.AdamW(parameters, fused=True, **settings)
    if policy.world.size > 1:
        raise ConfigError(
            f"--optimizer {config.optimizer} keeps its state per whole parameter; several processes need adamw"
        )
    bitsandbytes = require("bitsandbytes", extra="gpu")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, **settings)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int) -> float:
    """Set and return the rate of the step after `step` steps: a linear warm-up, then constant."""
    lr = config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))
    for settings in optimizer.param_groups:
        settings["lr"] = lr
    return lr
