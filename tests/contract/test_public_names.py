"""Every package says what is public, and what authors and trainers import stays where it is."""

import importlib
import pkgutil

import pytest

import atroposlib
import atroposlib.checker
import atroposlib.client
import atroposlib.envs
import atroposlib.wire

PACKAGES = [
    module.name
    for module in pkgutil.walk_packages(atroposlib.__path__, "atroposlib.")
    if module.ispkg and not any(part.startswith("_") for part in module.name.split("."))
]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_declares_names_that_exist(name: str) -> None:
    package = importlib.import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    missing = [
        each for each in package.__all__ if each not in modules and not hasattr(package, each)
    ]
    assert missing == []


def test_authors_and_trainers_find_these_names() -> None:
    assert {*atroposlib.envs.__all__} >= {
        *("AgentEnv", "BaseEnv", "BaseEnvConfig", "DatasetEnv", "JudgeEnv", "MultiTurnEnv"),
        *("APIServerConfig", "ScoredDataGroup", "ScoredDataItem", "ServerBaseline", "ToolEnv"),
    }
    assert {*atroposlib.checker.__all__} >= {"RULES", "Report", "check_env"}
    assert {*atroposlib.client.__all__} >= {"HubClient", "Sample", "TrainerClient", "samples"}
    assert {*atroposlib.wire.__all__} >= {"join_packed", "pack_group", "split_packed"}
