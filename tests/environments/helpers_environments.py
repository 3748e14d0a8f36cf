"""Load an environment's file and put a scripted engine under it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, Respond, ServerHarness

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


def load(name: str) -> ModuleType:
    """Import `environments/<name>.py`, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ENVIRONMENTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def make_env(
    env_cls: Any,
    monkeypatch: Any,
    *,
    respond: Respond,
    weight_version: str | None = None,
    **settings: Any,
) -> Any:
    """Return an environment whose one server is a `ServerHarness` and whose tokenizer needs no files."""
    module = sys.modules["atroposlib.envs.base"]
    monkeypatch.setattr(module, "load_tokenizer", lambda name: ByteTokenizer())
    config = env_cls.config_init()[0].model_copy(update={"use_wandb": False, **settings})
    env = env_cls(config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")])
    harness = ServerHarness(respond=respond, weight_version=weight_version)
    env.server.servers = [harness]
    return env
