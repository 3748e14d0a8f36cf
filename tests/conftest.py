"""The longest tests come first, so that several workers (`-n 2`) end at the same time."""

from __future__ import annotations

import pytest

FIRST = (
    "tests/faults/test_environment_schedule.py",
    "tests/faults/",
    "tests/e2e/",
    "tests/trainer/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.nodeid
        return next((i for i, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))

    items.sort(key=place)
