"""The optimizers of `--optimizer`, and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Any

import torch

from atroposlib.errors import ConfigError, require
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy

WSD_DECAY = 0.2
"""Share of all steps over which wsd falls: enough to equal cosine (arXiv 2405.18392)."""


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
    """Set and return the rate of the step after `step` steps; it depends on nothing else, so a resume continues it."""
    lr = config.lr * rate_share(config, step)
    for settings in optimizer.param_groups:
        settings["lr"] = lr
    return lr


def rate_share(config: TrainerConfig, step: int) -> float:
    """Return the rate as a share of `lr`: a linear warm-up, then `lr_schedule` towards `lr_min_fraction`.

    The end is reached one step after the last, so that no step is without effect.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    num_left = max(0, config.num_steps - step)
    left = num_left / max(1, config.num_steps - config.warmup_steps)
    shape = {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
        "wsd": min(1.0, num_left / (WSD_DECAY * config.num_steps)),
    }[config.lr_schedule]
    return config.lr_min_fraction + (1 - config.lr_min_fraction) * shape
