"""Save an environment's checkpoint, and compare an environment that loaded it. Used by `check.py` only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atroposlib.envs import checkpoint
from atroposlib.envs.hooks import EnvHooks

STEP = 1
_REGISTERED_NAME = "check"


def attach_checkpoints(env: EnvHooks, folder: Path) -> None:
    """Set the environment's checkpoint directory and step 1, as registering with a hub does."""
    env.curr_step, env.checkpoint_dir, env.wandb_prepend = STEP, str(folder), _REGISTERED_NAME


def save(env: EnvHooks, folder: Path) -> dict[str, Any] | None:
    """Save a checkpoint of `env` and return its content; None if it saves nothing."""
    attach_checkpoints(env, folder)
    env.save_checkpoint(STEP)
    place = checkpoint.checkpoint_folder(str(folder), _REGISTERED_NAME)
    return checkpoint.load(place, STEP) or None


def restore_faults(
    env: EnvHooks, fresh: EnvHooks, saved: Mapping[str, Any], again: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a fault for each value of `saved` that a fresh environment does not have after loading it.

    A value is compared with the attribute of its name and with what the fresh environment saves (`again`).
    """
    for key, value in saved.items():
        wanted, got = vars(env).get(key, value), vars(fresh).get(key, value)
        if not is_same(wanted, got):
            yield f"{key} was {wanted!r:.80} and came back as {got!r:.80}"
        elif not is_same(value, again.get(key)):
            yield f"{key!r} was saved as {value!r:.60}, loaded, and saved as {again.get(key)!r:.60}"


def is_same(first: Any, second: Any) -> bool:
    """Whether two values are equal; a tuple equals a list, because JSON has only lists."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(
            is_same(a, b) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(is_same(first[k], second[k]) for k in first)
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return type(first) is type(second) and bool(np.array_equal(first, second))
    return bool(first == second)
