"""SECURITY.md is found, and names files and settings that exist."""

import re

from atroposlib.envs import sandbox
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.runtime.env_command import ManagerFlags
from tests.processes import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()


def test_it_is_linked() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        assert "`SECURITY.md`" in (ROOT / name).read_text()


def test_what_it_names_exists() -> None:
    named = set(re.findall(r"`([^`]+)`", TEXT))
    paths = {name for name in named if name.startswith("atroposlib/")}
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert f"{sandbox.ISOLATION_VARIABLE}=1" in named
    assert "--require-isolation" in named
    assert "require_isolation" in ManagerFlags.model_fields
    for owner, name in (
        (BaseEnv, "runs_model_code"),
        (DatasetEnv, "isolates_graders"),
        (DatasetEnvConfig.model_fields, "child_variables"),
    ):
        assert name in named
        assert name in owner if isinstance(owner, dict) else hasattr(owner, name)
