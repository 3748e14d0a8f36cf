"""Tables of cases that are data: YAML files in the folder `data` beside the tests that read them."""

from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]


def table(name: str) -> Any:
    """Return the content of a table; `envs/choices` is tests/envs/data/choices.yaml."""
    folder, _, file = name.rpartition("/")
    return yaml.safe_load((TESTS / folder / "data" / f"{file}.yaml").read_text(encoding="utf-8"))
