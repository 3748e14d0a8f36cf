"""CITATION.cff is valid and names this version."""

from pathlib import Path

import pytest
import yaml

from atroposlib import __version__
from tests.builders.programs import run_python

CITATION = Path(__file__).resolve().parents[2] / "CITATION.cff"


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load(CITATION.read_text())["version"] == __version__


def test_the_citation_follows_the_citation_file_format() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install 'atroposlib[dev]'")
    schema = ["--builtin-schema", "vendor.citation-file-format"]
    run_python("-m", "check_jsonschema", *schema, CITATION)
