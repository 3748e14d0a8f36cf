"""liger-kernel's Triton kernels for norms, rotary positions and SwiGLU in place of the model's own: CUDA only.

Log-probabilities and loss stay ours (`head.py`), so liger's cross entropy is left out. The rotary kernel replaces a
function of transformers for the whole process, the frozen reference included. Called by `model.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from atroposlib.errors import ConfigError, require


def apply_liger(model: Any, device: torch.device) -> None:
    """Exchange the kernels of a loaded model; ConfigError for a device or a model that liger has none for."""
    if device.type != "cuda":
        raise ConfigError(
            f"--use_liger: its kernels run on CUDA alone, and this is {device}; leave it out"
        )
    patches = require("liger_kernel.transformers.monkey_patch", extra="gpu")
    known = patches.MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in known:
        raise ConfigError(
            f"--use_liger: liger-kernel has no kernels for model type {kind!r}, only for {', '.join(sorted(known))}"
        )
    patches._apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
