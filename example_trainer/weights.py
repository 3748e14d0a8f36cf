"""The directory through which published weights reach the engines: one checkpoint per policy version."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from example_trainer.config import TrainerConfig
from example_trainer.model import Policy

logger = logging.getLogger(__name__)

KEEP = 2
"""Versions on disk: engines may still read the last one while the next is written."""

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

    def save(self, version: int) -> Path:
        """Write the policy's weights as `version`, remove versions beyond the last two, return the directory.

        Every process must call it; the first writes.
        """
        self._policy.save(self.directory(version), merged=True)
        if not self._policy.world.is_main:
            return self.directory(version)
        self._versions.append(version)
        while len(self._versions) > KEEP:
            shutil.rmtree(self.directory(self._versions.pop(0)))
        return self.directory(version)

    def directory(self, version: int) -> Path:
        return self.path / f"version_{version}"

    def holds(self, version: int) -> bool:
        return version in self._versions

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


def _has_room(directory: Path, num_bytes: int) -> bool:
    return directory.is_dir() and shutil.disk_usage(directory).free > 2 * num_bytes
