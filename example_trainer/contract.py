"""The publish contract: what engines load has the names and shapes of the initial checkpoint, and the trained values.

A written model holds `checksums.json`, made from the trainer's memory. `check_names` compares it with the checkpoint
that training started from, `check_files` its files with the checksums. EngineError names the tensors that differ.
Called by `model.py`, `weights.py` and the bridges.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from atroposlib.errors import EngineError
from atroposlib.utils.tensor_checksums import tensor_checksum

logger = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"

Shapes = dict[str, list[int]]
"""Shape of each tensor, by its name in a checkpoint."""

_SHOWN = 3


def write_checksums(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the checksum of each tensor in `weights` whose name is in the checkpoint in `directory`."""
    sums = {name: tensor_checksum(weights[name]) for name in shapes_in(directory)}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=0) + "\n", encoding="utf-8")


def shapes_in(directory: Path) -> Shapes:
    """Read the shapes of the checkpoint's tensors, without the tensors; {} without safetensors files."""
    shapes: Shapes = {}
    for path in filter(Path.is_file, _files(directory)):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no dict
    return shapes


def source_shapes(model: Any, name: str) -> Shapes:
    """Return the shapes that a checkpoint of `model` must have: those of `name`, a directory or a name on the hub.

    What the model does not read, such as layers of multi-token prediction, is logged and left out. Without safetensors
    files in it, the shapes are those that transformers would write.
    """
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config).state_dict()
    floats = {key: value for key, value in plain.items() if value.is_floating_point()}
    own = {key: list(value.shape) for key, value in checkpoint_form(floats, model).items()}
    path = Path(name)
    found = shapes_in(path if path.is_dir() else Path(cached_file(name, "config.json")).parent)
    unread = sorted(found.keys() - own.keys())
    if unread:
        logger.info(
            "neither published nor checked, because the model does not read it: %s", _some(unread)
        )
    return {key: shape for key, shape in found.items() if key in own} or own


def checkpoint_form(weights: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return a model's weights as a checkpoint names and shapes them; transformers fuses experts, for example."""
    return dict(revert_weight_conversion(model, dict(weights)))


def check_names(directory: Path, expected: Shapes, tied: Mapping[str, str]) -> None:
    """Raise EngineError unless the checkpoint has exactly these shapes. `tied`: one name of a tensor -> the other."""
    found = {tied.get(name, name): shape for name, shape in shapes_in(directory).items()}
    wanted = {tied.get(name, name): shape for name, shape in expected.items()}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, and {wanted.get(name, 'missing')} in the initial checkpoint"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        raise EngineError(
            f"{directory} is not published, because its tensors are not those of the initial checkpoint: {_some(wrong)}"
        )


def check_files(directory: Path) -> None:
    """Raise EngineError unless the files in `directory` hold what was in the trainer's memory.

    Call it before an engine is touched: vLLM exits when a reload fails, and a restart stops the old engine first.
    """
    if not (directory / "config.json").is_file():
        raise EngineError(f"checkpoint {directory} holds no config.json; no engine was touched")
    missing = [path.name for path in _files(directory) if not path.is_file()]
    if missing:
        raise EngineError(
            f"checkpoint {directory} lacks {', '.join(missing[:3])}; no engine was touched"
        )
    try:
        written = checksums_of(directory)
        found = {name: tensor_checksum(value) for name, value in tensors_in(directory)}
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(
            f"checkpoint {directory} cannot be read: {error}; no engine was touched"
        ) from error
    wrong = [
        f"{name} is {found.get(name)}, the trainer's {written.get(name)}"
        for name in sorted(found.keys() | written.keys())
        if found.get(name) != written.get(name)
    ]
    if wrong:
        raise EngineError(
            f"checkpoint {directory} is not what the trainer wrote; no engine was touched: {_some(wrong)}"
        )


def checksums_of(directory: Path) -> dict[str, str]:
    """Read the checksums that the trainer wrote."""
    found: dict[str, str] = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
    return found


def tensors_in(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the checkpoint's tensors one by one."""
    for path in _files(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                yield name, file.get_tensor(name)


def _files(directory: Path) -> list[Path]:
    """Return the weights files that transformers and the engines read; a directory may hold others."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [directory / name for name in sorted(set(named))]


def _some(items: Sequence[str]) -> str:
    shown = "; ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown}; ... ({len(items)} in all)"
