"""Replacing a file in one step."""

import os
import stat
from pathlib import Path

import pytest

from atroposlib.utils.files import replace_file


def test_a_file_is_replaced_whole_and_its_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "notes.txt"

    replace_file(path, "first and long")
    replace_file(path, b"second", is_durable=True)

    assert path.read_text() == "second"
    assert [each.name for each in path.parent.iterdir()] == ["notes.txt"]


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    replace_file(tmp_path / "secret", "x", mode=0o600)

    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_earlier_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes.txt"
    replace_file(path, "earlier")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "later", is_durable=True)

    assert path.read_text() == "earlier"
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
