"""The optimizers of `--optimizer`, and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atroposlib.errors import require
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy

WSD_DECAY = 0.2
"""Share of all steps over which wsd falls: enough to equal cosine (arXiv 2405.18392)."""
BLOCK = 128
"""Values with a common scale in an 8-bit state; it divides the widths of models, as 256 does not divide 896."""


def make_optimizer(policy: Policy, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; its state is sharded as they are."""
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
    optimizer: torch.optim.Optimizer = _adamw_8bit()(parameters, **settings, block_size=BLOCK)
    return optimizer


def _adamw_8bit() -> Any:
    """Return torchao's AdamW with 8-bit moments (arXiv 2110.02861), in blocks that lie within a row of the parameter.

    Blocks across rows would lie across processes, and a checkpoint's scales would not fit another number of them.
    """
    low_bit = require("torchao.optim", extra="gpu")
    state = require("torchao.optim.subclass_8bit", extra="gpu").OptimState8bit

    class AdamW8bit(low_bit.AdamW8bit):  # type: ignore[name-defined]
        def step(self, closure: Any = None) -> Any:
            for settings in self.param_groups:  # its compiled step takes no number
                settings["lr"] = torch.as_tensor(settings["lr"], dtype=torch.float32)
            return super().step(closure)

        def _new_buffer(self, parameter: Tensor, signed: bool) -> Tensor:
            is_sharded = isinstance(parameter, DTensor)
            size = parameter.device_mesh.size() if is_sharded else 1
            # With fewer rows a process may hold none, of which there is no 8-bit state.
            if parameter.dim() < 2 or parameter[0].numel() % BLOCK or len(parameter) < size**2:
                return torch.zeros_like(parameter)
            local = parameter.to_local() if is_sharded else parameter
            moments = state.zeros(local.shape, signed, BLOCK, local.device)
            return _sharded_like(parameter, moments) if is_sharded else moments

    return AdamW8bit


def stored_parts(value: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors behind a tensor of the optimizer's state, by the suffix of their names.

    They share its memory, so that loading them loads it.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "codes"):
        return {"": value}
    parts = {".codes": local.codes, ".scale": local.scale.view(len(local), -1)}
    if isinstance(value, DTensor):
        parts = {suffix: _sharded_like(value, part) for suffix, part in parts.items()}
    return parts


def _sharded_like(value: DTensor, local: Tensor) -> Tensor:
    """Return a tensor of which every process holds as many rows as of `value`; `local` is this process's part."""
    where = (value.device_mesh, value.placements)
    shape = torch.Size([len(value), *local.shape[1:]])
    return DTensor.from_local(local, *where, run_check=False, shape=shape, stride=local.stride())


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int) -> float:
    """Set and return the rate of the step after `step` steps; it depends on nothing else, so a resume continues it.

    A linear warm-up, then `lr_schedule` towards `lr_min_fraction`. The end is reached one step after the last, so that
    no step is without effect.
    """
    num_left = max(0, config.num_steps - step)
    left = num_left / max(1, config.num_steps - config.warmup_steps)
    falling = {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
        "wsd": min(1.0, num_left / (WSD_DECAY * config.num_steps)),
    }[config.lr_schedule]
    share = config.lr_min_fraction + (1 - config.lr_min_fraction) * falling
    if step < config.warmup_steps:
        share = (step + 1) / config.warmup_steps
    for settings in optimizer.param_groups:
        settings["lr"] = config.lr * share
    return config.lr * share
