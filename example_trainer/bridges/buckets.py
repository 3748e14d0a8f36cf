"""The weights of a policy as engines load them, some parameters at a time: what the transfer bridge hands over.

Called by `transfer.py` in every process; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from atroposlib.errors import ConfigError
from example_trainer.adapters import ADAPTER, merged_weights
from example_trainer.model import Policy, base_model
from example_trainer.parallel import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some whole parameters, in order, under the names of the checkpoint."""

    names: list[str]
    tensors: list[Tensor]

    @property
    def dtypes(self) -> list[str]:
        return [str(t.dtype).removeprefix("torch.") for t in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(t.shape) for t in self.tensors]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [t.numel() * t.element_size() for t in self.tensors]

    def packed(self) -> Tensor:
        """Return the bytes of all, one after the other."""
        return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in self.tensors])


def whole_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, whole and in the published dtype; adapters are merged into what they adapt.

    Every process must go through all of it: gathering is collective. Tied parameters come once, as in a checkpoint.
    """
    parameters = dict(policy.model.named_parameters())
    for name, parameter in parameters.items():
        if not policy.is_adapted:
            yield name, whole(parameter.detach().to(policy.dtype))  # cast first: half the traffic
        elif ".lora_" not in name:
            module = name.rpartition(".base_layer.")[0]
            parts = [name, *(f"{module}.lora_{side}.{ADAPTER}.weight" for side in "AB")]
            state = {n: whole(parameters[n].detach()) for n in parts if n in parameters}
            for plain_name, value in merged_weights(state, policy.model).items():
                yield plain_name, value.to(policy.dtype)


def buckets(policy: Policy, num_bytes: int) -> Iterator[Bucket]:
    """Pack `whole_weights` in buckets of at most `num_bytes`; a parameter larger than that is alone in one."""
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    for name, tensor in whole_weights(policy):
        added = tensor.numel() * tensor.element_size()
        if names and size + added > num_bytes:
            yield Bucket(names=names, tensors=tensors)
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += added
    if names:
        yield Bucket(names=names, tensors=tensors)


def require_plain_names(policy: Policy) -> None:
    """Raise ConfigError for models whose checkpoint is laid out differently from their memory (fused experts)."""
    if getattr(base_model(policy.model), "_weight_conversions", None):
        raise ConfigError(
            f"--bridge transfer: the parameters of {type(base_model(policy.model)).__name__} are named and shaped "
            "differently in a checkpoint, which is what engines load; use --bridge reload"
        )
