"""The publish contract: what engines load has the names and shapes of the initial checkpoint, and the trained values.

A written model holds `checksums.json`, made from the trainer's memory. `check_names` compares it with the checkpoint
that training started from, `check_files` its files with the checksums, `EngineCheck` an engine's checksums with the
published tensors. EngineError names the tensors that differ. Called by `model.py`, `weights.py` and the bridges.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from atroposlib.errors import EngineError, EngineProtocolError
from atroposlib.utils.tensor_checksums import some_of, tensor_bytes, tensor_checksum

logger = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"

Shapes = dict[str, list[int]]
"""Shape of each tensor, by its name in a checkpoint."""

_OF_ADAPTER = "adapter_config.json"


def write_checksums(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the checksums of the tensors that the files in `directory` must hold, by their names there."""
    sums = {name: tensor_checksum(value) for name, value in weights.items()}
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

    What the model does not read, such as layers of multi-token prediction, is logged and left out. If it is
    quantized or has no safetensors files, the shapes are those that transformers would write.
    """
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config).state_dict()
    floats = {key: value for key, value in plain.items() if value.is_floating_point()}
    own = {key: list(value.shape) for key, value in checkpoint_form(floats, model).items()}
    is_quantized = getattr(AutoConfig.from_pretrained(name), "quantization_config", None)
    path = Path(name) if Path(name).is_dir() else Path(cached_file(name, "config.json")).parent
    found = {} if is_quantized else shapes_in(path)
    unread = sorted(found.keys() - own.keys())
    if unread:
        logger.info("not published or checked, as the model does not read it: %s", some_of(unread))
    return {key: shape for key, shape in found.items() if key in own} or own


def checkpoint_form(weights: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return a model's weights as a checkpoint names and shapes them; transformers fuses experts, for example."""
    return dict(revert_weight_conversion(model, dict(weights)))


def check_names(directory: Path, expected: Shapes, tied: Mapping[str, str]) -> None:
    """Raise EngineError unless the checkpoint has exactly these shapes. `tied`: one name of a tensor -> the other."""
    found = {tied.get(name, name): shape for name, shape in shapes_in(directory).items()}
    wanted = {tied.get(name, name): shape for name, shape in expected.items()}
    wrong = _differences(found, wanted, "in the initial checkpoint")
    if wrong:
        raise EngineError(
            f"{directory} is not published, because its tensors are not those of the initial checkpoint: "
            f"{some_of(wrong)}"
        )


def check_files(directory: Path) -> None:
    """Raise EngineError unless the files in `directory` hold what was in the trainer's memory.

    Call it before an engine is touched: vLLM exits when a reload fails, and a restart stops the old engine first.
    """
    try:
        config = [] if (directory / _OF_ADAPTER).is_file() else [directory / "config.json"]
        read = config + _files(directory)
        if lacking := [path.name for path in read if not path.is_file()]:
            raise FileNotFoundError(f"it lacks {', '.join(lacking)}")
        written = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        found = {name: tensor_checksum(value) for name, value in tensors_in(directory)}
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(
            f"checkpoint {directory} cannot be read: {error}; no engine was touched"
        ) from error
    wrong = _differences(found, written, "in the trainer")
    if wrong:
        raise EngineError(
            f"checkpoint {directory} is not what the trainer wrote; no engine was touched: {some_of(wrong)}"
        )


class EngineCheck:
    """Compares what one engine says it has loaded with what was published.

    atropos-engine must agree on every tensor, in its own dtype. vLLM keeps some tensors in a form of its own (padded,
    split over GPUs, packed for a kernel): those whose checksum is another after the first publication are logged and
    not compared after the second; a warning, if they are all. Later publications are not compared: vLLM answers no
    request while it computes SHA-256, about a second per GB.
    """

    NUM_CHECKED = 2

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._own_form: set[str] = set()
        self._num_checked = 0
        self.is_due = True
        """Whether the next publication is compared."""

    def check(self, found: Mapping[str, str], published: Mapping[str, Tensor]) -> None:
        """Raise EngineProtocolError if checksums of the engine (name in the engine -> checksum) are others.

        `published`: tensors by their names in a checkpoint. Without checksums, nothing is compared from then on.
        """
        expected = {key: _expected_checksum(key, line, published) for key, line in found.items()}
        different = {key for key, line in found.items() if expected[key] not in (None, line)}
        is_ours = any(" " in line for line in found.values())
        if self._num_checked == 0:
            self._own_form = set() if is_ours else different
            unknown = [key for key in found if expected[key] is None or key in self._own_form]
            is_blind = found and len(unknown) == len(found)
            logger.log(
                logging.WARNING if is_blind else logging.INFO,
                "engine %s: %d loaded tensors are compared with the published ones; not compared: %s",
                *(self._engine, len(found) - len(unknown)),
                some_of(unknown) or ("none" if found else "all, because it reports no checksums"),
            )
        self._num_checked += 1
        self.is_due = is_ours or (bool(found) and self._num_checked < self.NUM_CHECKED)
        wrong = [
            f"{key} is {found[key]}, and {expected[key]} was published"
            for key in sorted(different - self._own_form)
        ]
        if wrong:
            raise EngineProtocolError(
                f"engine {self._engine} has not loaded what was published: {some_of(wrong)}"
            )


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers whose matrices vLLM stacks."""


def _expected_checksum(key: str, line: str, published: Mapping[str, Tensor]) -> str | None:
    """Return the checksum, of the same kind as `line`, that an engine's tensor should have; None if unknown.

    vLLM's keys are like `dp0:pp0:pcp0:tp0:model.norm.weight`, its checksums the SHA-256 of the tensor's bytes.
    """
    stem, _, leaf = key.rpartition(":")[2].rpartition(".")
    layer, _, last = stem.rpartition(".")
    parts = [
        published.get(".".join(filter(None, (layer, part, leaf))))
        for part in _FUSED.get(last, (last,))
    ]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    if " " in line:
        return tensor_checksum(whole[0].to(getattr(torch, line.partition("[")[0])))
    digest = hashlib.sha256()
    for part in whole:
        digest.update(tensor_bytes(part))
    return digest.hexdigest()


def tensors_in(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the checkpoint's tensors one by one."""
    for path in _files(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                yield name, file.get_tensor(name)


def _files(directory: Path) -> list[Path]:
    """Return the weights files that transformers and the engines read; a directory may hold others."""
    if (directory / _OF_ADAPTER).is_file():
        return [directory / "adapter_model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [directory / name for name in sorted(set(named))]


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> list[str]:
    return [
        f"{name} is {found.get(name, 'missing')}, and {expected.get(name, 'missing')} {where}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
