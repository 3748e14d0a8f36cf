"""LoRA adapters on a frozen model, merging them into its weights, and the choice of layers to train.

Called by `model.py`; peft is imported only if adapters are configured.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from atroposlib.errors import ConfigError, require
from example_trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""peft's name for a model's only adapter."""


def add_adapters(model: Any, config: TrainerConfig) -> Any:
    """Freeze the model and put a trainable adapter on each target module."""
    peft = require("peft", extra="trainer")
    if config.lora_dropout:
        logger.warning(
            "--lora_dropout %g: the trainer's log-probabilities will differ from the engine's, which has no dropout",
            config.lora_dropout,
        )
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        layers_to_transform=layer_indices(config.lora_layer_indices, "lora_layer_indices"),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft calls transformers 5's gradient checkpointing by a deprecated name
            warnings.simplefilter("ignore", FutureWarning)
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"--lora_target_modules {config.lora_target_modules}: {error}") from error
    if config.gradient_checkpointing:
        model.enable_input_require_grads()  # else checkpointed layers have no input with a gradient
    return adapted


def freeze_other_layers(model: Any, indices: str, *, num_layers: int) -> None:
    """Freeze all but the given decoder layers; raise ConfigError for a layer that does not exist."""
    chosen = layer_indices(indices, "train_layer_indices") or []
    if bad := [i for i in chosen if i >= num_layers]:
        raise ConfigError(
            f"--train_layer_indices {indices}: layer {bad[0]}, but the model has layers 0 to {num_layers - 1}"
        )
    model.requires_grad_(False)
    layers = model.get_decoder().layers
    for index in chosen:
        layers[index].requires_grad_(True)


def layer_indices(text: str | None, flag: str) -> list[int] | None:
    """Parse a list of layers and ranges of layers; None stays None.

    >>> layer_indices("0-2,28-29,31", "lora_layer_indices")
    [0, 1, 2, 28, 29, 31]
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            found.update(range(int(first), int(last or first) + 1))
        except ValueError as error:
            raise ConfigError(f"--{flag} {text}: expected layers such as 0-3,28-31") from error
    return sorted(found)


def merged_weights(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Merge the adapters into the frozen weights; return the plain model's weights under its own names.

    `state` is the peft model's; an adapted matrix becomes `W + scaling * B @ A` (LoRA, arXiv 2106.09685).
    """
    scaling = {
        name: module.scaling[ADAPTER]
        for name, module in model.named_modules()
        if isinstance(module, nn.Module) and hasattr(module, "lora_A") and ADAPTER in module.lora_A
    }
    merged: dict[str, Tensor] = {}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        module, _, leaf = name.rpartition(".base_layer.")
        if leaf == "weight" and module in scaling:
            a, b = (state[f"{module}.lora_{side}.{ADAPTER}.weight"].float() for side in "AB")
            value = (value.float() + scaling[module] * (b @ a)).to(value.dtype)
        merged[plain_name(name)] = value
    return merged


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without adapters.

    >>> plain_name("base_model.model.head.base_layer.weight")
    'head.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
