"""Replace a model's parameters in place from a safetensors checkpoint, entirely or not at all.

`read_checkpoint` reads every tensor and compares it with the model without changing it (any thread);
`copy_weights` copies the tensors read, `weight_checksums` proves it (the engine's thread, between two decode steps).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from atroposlib.errors import EngineRejected
from atroposlib.utils.tensor_checksums import describe_tensor, some_of, tensor_checksum


def read_checkpoint(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """Read `directory/*.safetensors` and return tensors by state-dict name, one name per storage of the model.

    Tied names (`lm_head.weight` and the embeddings) may be given once, or several times with equal values. Raises
    EngineRejected, naming the tensors, if the directory, a file, a name, a shape or a kind of dtype does not match.
    """
    tensors = _load_files(directory)
    state = {name: tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    tied = _names_by_storage(state)
    unknown = sorted(tensors.keys() - state.keys())
    if unknown:
        raise EngineRejected(
            f"{directory} has {len(unknown)} tensors that the model lacks: {some_of(unknown)}"
        )
    missing = [names[0] for names in tied if not any(name in tensors for name in names)]
    if missing:
        raise EngineRejected(f"{directory} lacks {len(missing)} tensors: {some_of(missing)}")
    wrong = [
        f"{name} is {describe_tensor(tensor)}, the model's is {describe_tensor(state[name])}"
        for name, tensor in tensors.items()
        if tensor.shape != state[name].shape
        or tensor.is_floating_point() != state[name].is_floating_point()
    ]
    if wrong:
        raise EngineRejected(f"{directory} does not fit the model: {some_of(wrong)}")
    chosen: dict[str, torch.Tensor] = {}
    for names in tied:
        first, *others = [name for name in names if name in tensors]
        for other in others:
            if not torch.equal(tensors[first], tensors[other]):
                raise EngineRejected(
                    f"{directory}: {first} and {other} differ, but the model ties them "
                    "(tie_word_embeddings); save the checkpoint from a model with the same config"
                )
        chosen[first] = tensors[first]
    return chosen


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy checked tensors into the model, converting to its dtype and device."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)


def weight_checksums(model: nn.Module) -> dict[str, str]:
    """Return the checksum of each floating-point tensor by its name in a checkpoint; tied names all have one."""
    floats = {
        name: value for name, value in model.state_dict().items() if value.is_floating_point()
    }
    saved = revert_weight_conversion(model, floats)
    return {name: tensor_checksum(value) for name, value in saved.items()}


def _load_files(directory: Path) -> dict[str, torch.Tensor]:
    if not directory.is_dir():
        raise EngineRejected(f"weights_path {str(directory)!r} is not a directory")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineRejected(
            f"weights_path {str(directory)!r} has no .safetensors file; "
            "save the checkpoint with save_pretrained (safe serialization)"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            loaded = load_file(file)
        except (SafetensorError, OSError) as e:
            raise EngineRejected(f"{file} cannot be read: {e}") from e
        twice = sorted(loaded.keys() & tensors.keys())
        if twice:
            raise EngineRejected(f"{directory}: several files hold {some_of(twice)}")
        tensors.update(loaded)
    return tensors


def _names_by_storage(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Group the names that share memory (tied parameters)."""
    groups: defaultdict[tuple[int, torch.Size], list[str]] = defaultdict(list)
    for name, tensor in state.items():
        groups[(tensor.data_ptr(), tensor.shape)].append(name)
    return list(groups.values())
