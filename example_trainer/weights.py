"""The directory from which engines load published weights: one checkpoint or adapter per version."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from torch import Tensor

from example_trainer.config import TrainerConfig
from example_trainer.contract import Shapes, check_names, source_shapes
from example_trainer.model import Policy, base_model

logger = logging.getLogger(__name__)

KEEP = 2
"""Checkpoints on disk: engines may still read one while the next is written."""

KEEP_ADAPTERS = 16
"""Adapters on disk: vLLM reads an evicted adapter again for a request in flight, and crashes if it is missing."""

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "atropos-weights-"
_LOCK = "lock"
_LEFT_BEHIND = re.compile(r"version_\d+$|\.(version|adapter)_\d+-")


class Published(NamedTuple):
    directory: Path
    version: int


class WeightsDirectory:
    """Saves versions and removes old ones; on exit removes a directory that was not configured."""

    def __init__(self, config: TrainerConfig, policy: Policy) -> None:
        self._policy = policy
        self._lock: int | None = None
        self._is_temporary = config.weights_dir is None and policy.world.is_main
        self.path = config.weights_dir or config.save_path / "weights"
        num_values = sum(p.numel() for p in policy.model.parameters())
        needed = 2 * (KEEP + 1) * num_values * policy.dtype.itemsize
        has_room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > needed
        if self._is_temporary and has_room:
            self.path = _new_directory(_SHARED_MEMORY)
            self._lock = _lock(self.path)
        self._model_name = config.model_name
        self._shapes: Shapes | None = None
        """Of the checkpoint that training started from; None before the first save."""
        self._saved: list[Path] = []
        """Versions on disk, oldest first."""
        found = self.path.glob("*") if policy.world.is_main else ()
        self._stale = [path for path in found if _LEFT_BEHIND.match(path.name)]
        """Left by a killed trainer; removed after the next save."""

    def take(self, version: int, *, merged: bool = True) -> Callable[[], Path]:
        """Copy the policy's weights as `version`, or the adapter alone; every process must call it.

        The returned function is for the first process. It writes the copy, removes versions beyond the last `KEEP` and
        returns the directory; any thread may call it while the policy is trained. It raises EngineError if names or
        shapes are not those of the initial checkpoint.
        """
        target = self.path / f"{'version' if merged else 'adapter'}_{version}"
        return partial(self._write, target, self._policy.gather(merged=merged), merged=merged)

    def _write(self, target: Path, weights: dict[str, Tensor], *, merged: bool) -> Path:
        # Engines read it at once, and a trainer that starts again publishes anew: waiting for the disk gains nothing.
        self._policy.put(target, weights, merged=merged, is_durable=False)
        for path in self._stale:
            if path != target:
                shutil.rmtree(path, ignore_errors=True)
        self._stale = []
        self._saved.append(target)
        while len(self._saved) > (KEEP if merged else KEEP_ADAPTERS):
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)
        if merged:
            model = base_model(self._policy.model)
            self._shapes = self._shapes or source_shapes(model, self._model_name)
            check_names(target, self._shapes, model.all_tied_weights_keys)
        return target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _new_directory(parent: Path) -> Path:
    """Create a directory in shared memory and remove those of killed trainers, which would fill it."""
    for path in parent.glob(f"{_PREFIX}*"):
        _remove_if_abandoned(path)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _lock(directory: Path) -> int:
    """Hold a lock in the directory while this process lives; return its descriptor."""
    unlocked = directory / "new_lock"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(directory / _LOCK)  # a file named `lock` is always locked
    return descriptor


def _remove_if_abandoned(path: Path) -> None:
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or not locked yet
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s, which a killed trainer left", path)
    except BlockingIOError:
        return  # its trainer lives
    finally:
        os.close(descriptor)
