"""Errors say what to do."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from atroposlib import errors
from atroposlib.errors import MissingDependency, install_command, require

ROOT = Path(__file__).parents[1]
INSTRUCTIONS = [
    *(ROOT / name for name in ("README.md", "MIGRATING.md", "CONTRIBUTING.md")),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("atroposlib/*/README.md"),
]


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "absent_package", None)
    with pytest.raises(MissingDependency) as caught:
        require("absent_package.figure", extra="view")
    assert str(caught.value) == (
        f"absent_package is not installed; run: pip install -e '{ROOT}[view]'"
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


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ('{"url": "file:///src/it"}', "pip install 'atroposlib[math] @ file:///src/it'"),
        (None, "pip install 'atroposlib[math]'"),  # from the package index
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: str | None, expected: str
) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "atroposlib" / "errors.py"))
    found = SimpleNamespace(read_text=lambda name: {"direct_url.json": origin}[name])
    monkeypatch.setattr(errors.metadata, "distribution", lambda name: found)
    assert install_command("math") == expected


def test_every_install_line_of_the_documents_works_in_this_folder() -> None:
    """Under its plain name the package index has another package: the archived original."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = [
        line
        for path in INSTRUCTIONS
        for line in re.findall(r"pip install ([^`\n#]*)", path.read_text())
    ]
    ours = [line for line in found if line.startswith("-e ")]
    assert len(ours) >= 5
    for line in ours:
        folder, _, extras = line.removeprefix("-e ").strip(" ';)").partition("[")
        assert folder == "."
        assert {extra for extra in extras.strip("]").split(",") if extra} <= known.keys()
    assert [line for line in found if re.match("'atroposlib", line)] == []
