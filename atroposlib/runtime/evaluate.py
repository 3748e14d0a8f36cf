"""Run an environment's `evaluate` once, without a hub."""

from __future__ import annotations

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import close
from atroposlib.runtime.metrics import finish_wandb, require_wandb, start_wandb


async def evaluate(env: BaseEnv) -> None:
    """Call `setup`, then `evaluate`; raises whatever they raise."""
    if env.config.use_wandb:
        require_wandb(env)
    await env.setup()
    try:
        if env.config.use_wandb:
            start_wandb(env, project=None, group=None)
        await env.evaluate()
    finally:
        await close(env)
        finish_wandb(env)
