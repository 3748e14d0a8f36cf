"""CITATION.cff is valid and names this version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atroposlib import __version__

CITATION = Path(__file__).resolve().parents[2] / "CITATION.cff"


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load(CITATION.read_text())["version"] == __version__


def test_the_citation_follows_the_citation_file_format() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install 'atroposlib[dev]'")
    schema = ["--builtin-schema", "vendor.citation-file-format"]
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(CITATION)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
