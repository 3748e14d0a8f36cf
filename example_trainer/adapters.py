"""LoRA adapters on a frozen model, merging them into its weights, and the choice of layers to train.

Called by `model.py`; peft is imported only if adapters are configured.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atroposlib.errors import ConfigError, require
from example_trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

_INSIDE = re.compile(r"\.(?=base_layer\.|lora_)")
"""Splits a parameter's name into that of its adapted layer, the outermost one, and its own name in that layer."""

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
    targets: Any = config.lora_target_modules
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,  # peft's shorthand
        layers_to_transform=layer_indices(config.lora_layer_indices, "lora_layer_indices"),
        task_type="CAUSAL_LM",
    )
    try:
        # peft calls transformers 5's gradient checkpointing by a deprecated name,
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            # and looks for the fused experts among the modules, where they are not.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern", RuntimeWarning)
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"--lora_target_modules {targets}: {error}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_tied = model.config.get_text_config().tie_word_embeddings
    if is_tied and any(hasattr(end, "lora_A") for end in ends):
        raise ConfigError(
            f"--lora_target_modules {targets}: embedding and head of this model are one matrix, and "
            "with an adapter on one of them no checkpoint could hold both"
        )
    if config.gradient_checkpointing:
        model.enable_input_require_grads()  # else checkpointed layers have no input with a gradient
    return adapted


def freeze_other_layers(model: Any, indices: str, layers: Sequence[nn.Module]) -> None:
    """Freeze all but the given decoder layers; raise ConfigError for a layer that does not exist."""
    chosen = layer_indices(indices, "train_layer_indices") or []
    if bad := [i for i in chosen if i >= len(layers)]:
        raise ConfigError(
            f"--train_layer_indices {indices}: layer {bad[0]}, but the model has layers 0 to {len(layers) - 1}"
        )
    model.requires_grad_(False)
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


@torch.no_grad()
def merged_weights(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Merge the adapters into the frozen weights; return the plain model's weights under its own names.

    `state` is the peft model's, or that of some of its layers. peft merges a float32 copy of each adapted layer: a
    matrix becomes `W + scaling * B @ A` (LoRA, arXiv 2106.09685).
    """
    merged: dict[str, Tensor] = {}
    for names in by_layer(state):
        layer, *inside = _INSIDE.split(names[0], maxsplit=1)
        if not inside:
            merged[plain_name(layer)] = state[layer]
            continue
        copies = {
            name.replace(layer, "layer", 1): state[name].to(torch.float32, copy=True)
            for name in names
        }
        functional_call(_Merging(model.get_submodule(layer)), copies, strict=True)
        for name, value in zip(names, copies.values(), strict=True):
            if ".lora_" not in name:
                merged[plain_name(name)] = value.to(state[name].dtype)
    return merged


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group a peft model's parameters: those of one adapted layer together, any other alone; in the order given.

    >>> by_layer(["norm.weight", "q.base_layer.weight", "q.lora_A.default.weight"])
    [['norm.weight'], ['q.base_layer.weight', 'q.lora_A.default.weight']]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_INSIDE.split(name, maxsplit=1)[0], []).append(name)
    return list(groups.values())


class _Merging(nn.Module):
    """An adapted layer whose forward pass merges, in place, into the tensors that `functional_call` gives it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> None:
        for module in self.layer.modules():  # fused experts: one wrapper around another
            if hasattr(module, "merged_adapters"):
                module.merge(adapter_names=[ADAPTER])
                module.merged_adapters.clear()  # what the model itself holds is not merged


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without adapters.

    >>> plain_name("base_model.model.experts.base_layer.base_layer.down_proj")
    'experts.down_proj'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer", "")
