"""Environments on a scripted engine."""

from collections.abc import Callable
from typing import Any

from atroposlib.envs.base import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.scored_data import IGNORE_INDEX

ENGINE = APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1", server_type="vllm")


def make_env(
    env_cls: type[Any],
    *,
    respond: Callable[[HarnessRequest], str],
    weight_version: str | None = None,
    **settings: Any,
) -> Any:
    """Return an environment whose one server answers with `respond`; `settings` are fields of its configuration."""
    config = env_cls.env_config_cls(**{"group_size": 2, "use_wandb": False, **settings})
    env = env_cls(config, [ENGINE])
    env.server.servers = [ServerHarness(ENGINE, respond=respond, weight_version=weight_version)]
    return env


async def group_of(env: Any, row: Any) -> Any:
    """Set up, return the group of one row, and close."""
    try:
        await env.setup()
        group, backlog = await env.collect_trajectories(row)
    finally:
        await env.close()
    assert backlog == []
    return group


def trained_texts(group: Any) -> list[str]:
    """Return the text of the trained positions, by sequence."""
    decode = ByteTokenizer().decode
    return [decode([t for t in labels if t != IGNORE_INDEX]) for labels in group["masks"]]
