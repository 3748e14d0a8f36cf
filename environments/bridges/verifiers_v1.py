"""Runs environments of verifiers v1 for `verifiers_env.py`, in the interpreter that has verifiers.

Every rollout is one episode against its own base URL, which is a session of our proxy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""A chat without a shell, on this machine; the defaults of verifiers are a shell, in Prime's cloud."""


class EpisodeFailed(Exception):
    """An episode that has no reward."""


@asynccontextmanager
async def bridge(*, block: dict[str, Any], max_tasks: int) -> AsyncIterator[tuple[Any, Any]]:
    """Load the environment of an `[env]` block and hold what it serves open."""
    # Harnesses install their programs with `uv`, which pip puts next to the interpreter.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
    seats = agent_config_fields(resolve_env_config(block))
    if len(seats) == 1:
        [(name, seat)] = seats.items()
        unset = {
            field: value for field, value in LOCAL.items() if field not in seat.model_fields_set
        }
        block = {**block, name: {**unset, **block.get(name, {})}}
    env = load_environment(resolve_env_config(block))
    policy_seats = [
        name for name, seat in agent_config_fields(env.config).items() if seat.client is None
    ]
    if len(policy_seats) != 1:
        raise ValueError(
            f"the seats {policy_seats} would play the policy; give all but one of them a `client`"
        )
    tasks = list(env.taskset.take(max_tasks))

    async def rollout(index: int, key: str, base_url: str, model: str) -> dict[str, Any]:
        task = tasks[index]
        if task.key != key:
            raise ValueError(f"task {index} has changed: its key is {task.key}, not {key}")
        context = ModelContext(
            model=model,
            client=EvalClientConfig(base_url=base_url, api_key_var="ATROPOS_NO_KEY"),
            sampling=SamplingConfig(),
        )
        [slot] = env.slots(task)
        episode = await env.run_slot(slot, context)
        if not episode.ok:
            errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
            last = errors[-1] if errors else None
            raise EpisodeFailed(f"{last.type}: {last.message}" if last else "no reason is given")
        played = [trace for trace in episode.traces if trace.agent.name == policy_seats[0]]
        if len(played) != 1:
            raise EpisodeFailed(f"the policy played {len(played)} times; a rollout has one score")
        [trace] = played
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {
            "reward": trace.reward,
            "metrics": {**metrics, **rewards, "num_turns": trace.num_turns},
            "answer": trace.last_reply,
        }

    async with env.serving():
        # The shared interception server keeps a client per base URL until it is closed, and every rollout has its own
        # URL. Without it, each rollout starts a server and closes it.
        env._interception = None
        rows = [{"index": i, "key": task.key} for i, task in enumerate(tasks)]
        yield {"train": rows, "eval": None}, {"rollout": rollout}
