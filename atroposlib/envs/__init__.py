"""Environments. `from atroposlib.envs import BaseEnv` works and loads `envs.base` only then."""

from __future__ import annotations

import importlib
from typing import Any

_BASE = (
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
)
_EXPORTS = {name: "atroposlib.envs.base" for name in _BASE}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
