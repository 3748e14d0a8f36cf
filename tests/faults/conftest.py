"""The disk store of one test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.stores.base import SavedRun
from atroposlib.api.stores.disk import DiskStore
from tests.faults.store_faults import open_store

Open = Callable[..., Awaitable[tuple[DiskStore, SavedRun]]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Open the store in a directory, by default `run` in `tmp_path`, with the options of `open_store`.

    Every store is closed at the end of the test.
    """
    stores = []

    async def open_here(name: str | Path = "run", **options: Any) -> tuple[DiskStore, SavedRun]:
        store = open_store(tmp_path / name, **options)
        saved = await store.open()
        stores.append(store)
        return store, saved

    yield open_here
    for store in stores:
        await store.close()
