"""Start and finish a Weights & Biases run; wandb is imported only if `use_wandb` is true."""

from __future__ import annotations

import random
import string
import time
from typing import Any

from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import ConfigError, MissingDependency, require
from atroposlib.runtime.masking import without_secrets


def run_name(prefix: str) -> str:
    """Return `<prefix>-<YYYY-MM-DD>-<6 letters>`."""
    letters = "".join(random.choices(string.ascii_lowercase, k=6))  # a label, not a secret
    return f"{prefix}-{time.strftime('%Y-%m-%d')}-{letters}"


def require_wandb() -> Any:
    """Return the wandb module; MissingDependency names the flag that turns it off."""
    try:
        return require("wandb", extra="wandb")
    except MissingDependency as error:
        raise MissingDependency(f"{error} (or turn it off: --env.use_wandb false)") from error


def start_wandb(env: EnvHooks, *, project: str | None, group: str | None) -> None:
    """Start the run that `EnvHooks.wandb_log` writes to."""
    wandb = require_wandb()
    env.wandb_project, env.wandb_group = project, group
    try:
        env.wandb_run = wandb.init(
            name=run_name(env.registered_name),
            project=project or None,
            group=group or None,
            config=without_secrets(env.config.model_dump(mode="json", fallback=str)),
        )
    except wandb.Error as error:
        raise ConfigError(f"wandb: {error} (or turn it off: --env.use_wandb false)") from error


def finish_wandb(env: EnvHooks) -> None:
    """Finish the run, if there is one."""
    if env.wandb_run is not None:
        env.wandb_run.finish()
        env.wandb_run = None
