"""Where a hub keeps its runs, by the name in `run-api --store`. PostgreSQL, which hubs share, is `--database`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atroposlib.api.stores.base import Durability, GroupStore
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.runs import DirectoryRuns, MemoryRuns, RunStores
from atroposlib.api.stores.space import Bound, DiskSpace, Space, mib
from atroposlib.errors import ConfigError
from atroposlib.utils.entry_points import Registry

STORES = Registry(
    "--store",
    group="atroposlib.stores",
    own={"disk": f"{__name__}:on_disk", "memory": f"{__name__}:in_memory"},
)
"""Functions that take `StoreSettings` and return `RunStores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What `run-api` says about the place of its runs; a store takes what it can use."""

    data_dir: Path
    durability: Durability
    min_free_bytes: int | None
    """Of the disk; None: the store's default."""
    max_memory_bytes: int | None = None
    """Of a store in memory; None: half of the machine's."""
    on_failure: Callable[[BaseException], None]
    """To be called once if the store breaks; the hub then ends."""


def in_memory(settings: StoreSettings) -> RunStores:
    """Runs that end with the process."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    max_bytes = settings.max_memory_bytes or machine_bytes // 2
    text = f"all groups in memory may take {mib(max_bytes)} MiB"
    flag = f"--max-memory-bytes (now {max_bytes})"
    return MemoryRuns(Space([Bound(text=text, left_bytes=max_bytes, flag=flag)]))


def on_disk(settings: StoreSettings) -> RunStores:
    """One directory per run below `data_dir`, which is made. Raises `ConfigError` if it cannot be."""
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--data-dir {settings.data_dir}: {e.strerror}") from e
    space = DiskSpace(settings.data_dir, min_free_bytes=settings.min_free_bytes)

    def make_store(directory: Path) -> GroupStore:
        return DiskStore(
            directory, durability=settings.durability, space=space, on_failure=settings.on_failure
        )

    return DirectoryRuns(settings.data_dir, make_store)
