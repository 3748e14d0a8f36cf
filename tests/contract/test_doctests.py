"""Every example in a docstring of the library does what it says."""

import doctest
import importlib

import pytest

from tests.processes import ROOT

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("atroposlib", "example_trainer", "environments")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    if name.startswith("environments."):
        name = f"atroposlib.{name}"
    results = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert results.attempted > 0
    assert results.failed == 0
