"""The directory through which published weights reach the engines: one checkpoint, or one adapter, per version."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from atroposlib.errors import EngineError
from example_trainer.adapters import ADAPTER
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy

logger = logging.getLogger(__name__)

KEEP = 2
"""Checkpoints on disk: engines may still read the last one while the next is written."""

KEEP_ADAPTERS = 16
"""Adapters on disk. An engine that has evicted an adapter from its memory reads it again for a request in flight, and
vLLM does not survive its absence; adapters are small."""

_SHARED_MEMORY = Path("/dev/shm")


class WeightsDirectory:
    """Saves versions and removes old ones; a context manager that removes what it created."""

    def __init__(self, config: TrainerConfig, policy: Policy) -> None:
        self._policy = policy
        self._temporary = config.weights_dir is None and policy.world.is_main
        if not policy.world.is_main:
            self.path = Path()
        elif config.weights_dir is not None:
            self.path = config.weights_dir
        elif _has_room(_SHARED_MEMORY, (KEEP + 1) * policy.num_bytes):
            self.path = Path(tempfile.mkdtemp(prefix="atropos-weights-", dir=_SHARED_MEMORY))
        else:
            self.path = config.save_path / "weights"
        self._versions: list[int] = []
        self._adapters: list[int] = []

    def save(self, version: int) -> Path:
        """Write the policy's weights as `version`, remove versions beyond the last two, return the directory.

        Every process must call it; the first writes.
        """
        target = self.directory(version)
        self._policy.save(target, merged=True)
        if self._policy.world.is_main:
            self._versions.append(version)
            while len(self._versions) > KEEP:
                shutil.rmtree(self.directory(self._versions.pop(0)))
        return target

    def save_adapter(self, version: int) -> Path:
        """Write the adapter as `version`, remove old ones, return the directory; every process must call it."""
        target = self.path / f"adapter_{version}"
        self._policy.save(target)
        if self._policy.world.is_main:
            self._adapters.append(version)
            while len(self._adapters) > KEEP_ADAPTERS:
                shutil.rmtree(self.path / f"adapter_{self._adapters.pop(0)}")
        return target

    def directory(self, version: int) -> Path:
        return self.path / f"version_{version}"

    def holds(self, version: int) -> bool:
        """Whether the whole model of `version` is on disk."""
        return version in self._versions

    def parameters(self, version: int, device: torch.device) -> dict[str, Tensor] | None:
        """Return what was handed over as `version` by the policy's own names; None where that is not on disk.

        Of an adapted policy these are the adapter's, which are all that differ between versions.
        """
        if not self._policy.is_adapted:
            return _load(self.directory(version), device) if self.holds(version) else None
        if version not in self._adapters:
            return None
        found = _load(self.path / f"adapter_{version}", device)
        return {re.sub(r"(\.lora_[AB])\.", rf"\1.{ADAPTER}.", name): t for name, t in found.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def require_checkpoint(directory: Path) -> None:
    """Raise EngineError unless `directory` holds a config and every weights file that it should.

    An engine must not find out: vLLM ends when a reload fails, and a restart has stopped the old engine by then.
    """
    if not (directory / "config.json").is_file():
        raise EngineError(f"checkpoint {directory} holds no config.json; no engine was touched")
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(n for n in names if not (directory / n).is_file())
    if missing:
        raise EngineError(
            f"checkpoint {directory} lacks {', '.join(missing[:3])}; no engine was touched"
        )


def _load(directory: Path, device: torch.device) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path, device=str(device)))
    return tensors


def _has_room(directory: Path, num_bytes: int) -> bool:
    return directory.is_dir() and shutil.disk_usage(directory).free > 2 * num_bytes
