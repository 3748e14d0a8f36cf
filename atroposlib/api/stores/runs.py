"""Where the stores of runs come from: one per run, in memory or as a directory each.

A run's directory holds everything about it, so it can be copied, archived or deleted as one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from atroposlib.api.stores.base import GroupStore
from atroposlib.api.stores.memory import MemoryStore


class RunStores(Protocol):
    """Makes, lists and forgets the stores of runs, by run name."""

    def names(self) -> list[str]:
        """Runs that something is stored of."""
        ...

    def store(self, name: str) -> GroupStore:
        """Return the store of a run, not yet opened. Called once per run, again after `forget`."""
        ...

    def forget(self, name: str) -> None:
        """Delete what a closed store left behind."""
        ...


class MemoryRuns:
    """Every run lives and ends with the process."""

    def names(self) -> list[str]:
        return []

    def store(self, name: str) -> GroupStore:
        return MemoryStore()

    def forget(self, name: str) -> None:
        pass


class DirectoryRuns:
    """One sub-directory of `root` per run."""

    def __init__(self, root: Path, make_store: Callable[[Path], GroupStore]) -> None:
        self._root = root
        self._make_store = make_store

    def names(self) -> list[str]:
        if not self._root.is_dir():
            return []
        # A store makes its lock file first. Other directories, such as lost+found, are none of the hub's business.
        return sorted(path.parent.name for path in self._root.glob("*/lock"))

    def store(self, name: str) -> GroupStore:
        return self._make_store(self._root / name)

    def forget(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=False)
