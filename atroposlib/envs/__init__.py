"""Environments. `from atroposlib.envs import BaseEnv` works and loads `envs.base` only then."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = ("APIServerConfig", "BaseEnv", "BaseEnvConfig")


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module("atroposlib.envs.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
