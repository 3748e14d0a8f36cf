"""The virtual environments that `.ci/bridges_env.sh` makes, and a hub that collects what an environment serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from atroposlib.scored_data import Strictness, check_group

TASKS = Path(__file__).with_name("tasks")
"""Working directory of the tests: the other libraries import its modules by name."""


def python_of(name: str) -> str:
    """Return the interpreter of one library's virtual environment; skips without it."""
    path = Path(os.environ.get("ATROPOS_BRIDGES_VENVS", "no"), name, "bin/python").absolute()
    if not path.is_file():
        pytest.skip(f"{name} WAS NOT TESTED: set ATROPOS_BRIDGES_VENVS, see .ci/bridges_env.sh")
    return str(path)


def checked(group: dict[str, Any]) -> Any:
    """Return the group as the strict gate reads it: tokens, masks and logprobs are aligned."""
    return check_group(group, strictness=Strictness.MEANING)
