"""Errors say what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atroposlib.errors import MissingDependency, require


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "absent_package", None)
    with pytest.raises(MissingDependency) as caught:
        require("absent_package.figure", extra="view")
    assert str(caught.value) == (
        "absent_package is not installed; run: pip install 'atroposlib[view]'"
    )
    assert caught.value.name == "absent_package.figure"


def test_package_that_lacks_another_keeps_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "present_package.py").write_text("import another_absent_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="another_absent_package") as caught:
        require("present_package", extra="view")
    assert not isinstance(caught.value, MissingDependency)
