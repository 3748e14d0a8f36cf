"""The optimizers, by the names that the flags have, and the learning rate of a step."""

from __future__ import annotations

import torch

from atroposlib.errors import ConfigError, require
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy


def make_optimizer(policy: Policy, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the optimizer over what is trained; ConfigError where several processes cannot share it."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,  # one kernel, and no second copy of every parameter on the way
        )
    if policy.world.size > 1:
        raise ConfigError(
            f"--optimizer {config.optimizer} keeps its state per whole parameter; several processes need adamw"
        )
    if config.optimizer == "adamw_8bit":
        bitsandbytes = require("bitsandbytes", extra="gpu")
        optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
            parameters,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        return optimizer
    from transformers import Adafactor

    return Adafactor(  # type: ignore[no-untyped-call, no-any-return]
        parameters,
        lr=None if config.adafactor_relative_step else config.lr,
        weight_decay=config.weight_decay,
        scale_parameter=config.adafactor_scale_parameter,
        relative_step=config.adafactor_relative_step,
        warmup_init=False,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int) -> float:
    """Set and return the rate of the step after `step` steps: a linear warm-up, then constant.

    Adafactor with `--adafactor_relative_step` follows its own schedule.
    """
    lr = config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))
    if not (config.optimizer == "adafactor" and config.adafactor_relative_step):
        for settings in optimizer.param_groups:
            settings["lr"] = lr
    return lr
