"""A package that counts as installed: what registers entry points, without installing anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def register(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, group: str, points: Mapping[str, str]
) -> None:
    """Put `folder` on the path, with a distribution that registers `points` (name -> `module:name`)."""
    package = folder / "foreign-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (package / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
