"""Runs environments of the old verifiers (0.1.9 to 0.1.14) for `verifiers_server.py`, in the interpreter that has it.

Every rollout talks to its own base URL, which is a session of our proxy. Rubrics that judge the rollouts of a group
against each other get the whole group: its rollouts wait for each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI

COLUMNS = ("prompt", "answer", "task", "info", "example_id")
"""Of a data set's row, what a rollout gets."""
ROLLOUT_SHARE = 0.9
"""Share of a rollout's time for the rollout itself, in a group that is judged together; the rest is for judging."""


class RolloutFailed(Exception):
    """A rollout that cannot be judged."""


@dataclass
class Group:
    """Rollouts that are judged together."""

    num_left: int
    states: list[Any] = field(default_factory=list)
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None


@asynccontextmanager
async def bridge(*, env_id: str, env_args: dict[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """Load an environment by its name."""
    env = vf.load_environment(env_id, **env_args)
    splits = {"train": env.dataset or env.eval_dataset, "eval": env.dataset and env.eval_dataset}
    rows = {
        split: [{name: row[name] for name in COLUMNS if name in row} for row in data]
        for split, data in splits.items()
        if data is not None
    }
    is_judged_together = _judges_groups(env.rubric)
    groups: dict[str, Group] = {}

    async def rollout(
        split: str,
        index: int,
        key: str,
        base_url: str,
        model: str,
        group: str,
        num_in_group: int,
        timeout_s: float,
    ) -> dict[str, Any]:
        row = rows[split][index]
        if key_of(row) != key:
            raise ValueError(f"row {index} of the {split} split has changed")
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(
                AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=timeout_s)
            )
            client = client_for(env, connection)
            if not is_judged_together:
                state = await env.rollout(row, client, model, dict(env.sampling_args))
                check(state)
                await score(env.rubric.score_rollout, state)
                return result_of(state)
            group_state = groups.setdefault(group, Group(num_in_group))
            try:
                async with asyncio.timeout(ROLLOUT_SHARE * timeout_s):
                    state = await env.rollout(row, client, model, dict(env.sampling_args))
                check(state)
                group_state.states.append(state)
            finally:
                group_state.num_left -= 1
                if not group_state.num_left:
                    del groups[group]
                    await _judge(env, group_state)
            await group_state.judged.wait()
            if group_state.failure is not None:
                raise group_state.failure
            return result_of(state)

    description = {
        split: [{"split": split, "index": i, "key": key_of(row)} for i, row in enumerate(listed)]
        for split, listed in rows.items()
    }
    yield {"eval": None, **description}, {"rollout": rollout}


def client_for(env: Any, connection: AsyncOpenAI) -> Any:
    """Return what the installed version takes as a client: from 0.1.11 on, one of its own."""
    kind = (
        "OpenAIChatCompletionsClient" if env.message_type == "chat" else "OpenAICompletionsClient"
    )
    return getattr(vf, kind)(connection) if hasattr(vf, kind) else connection


async def score(call: Any, states: Any) -> None:
    """Call a rubric; that of older versions takes a semaphore as well."""
    parameters = inspect.signature(call).parameters
    await call(states, **{"score_sem": nullcontext()} if "score_sem" in parameters else {})


async def _judge(env: Any, group: Group) -> None:
    try:
        if group.states:
            await score(env.rubric.score_group, group.states)
    except Exception as error:  # noqa: BLE001 - raised by every rollout of the group
        group.failure = error
    group.judged.set()


def _judges_groups(rubric: Any) -> bool:
    """Whether a rubric, or one inside it, has a reward function of a whole group."""
    inner = [*getattr(rubric, "rubrics", [])]
    inner += [env.rubric for env in getattr(rubric, "env_map", {}).values()]
    return bool(rubric._get_group_reward_funcs()) or any(map(_judges_groups, inner))


def check(state: Any) -> None:
    """Raise the failure of a rollout; one whose conversation got too long is judged."""
    error = state.get("error")
    if error is not None and not isinstance(error, vf.OverlongPromptError):
        cause = error.__cause__ or error
        raise RolloutFailed(f"{type(cause).__name__}: {cause}")


def result_of(state: Any) -> dict[str, Any]:
    completion = state.get("completion")
    answer = completion if isinstance(completion, str) else ""
    if completion and not isinstance(completion, str):
        answer = str(completion[-1].get("content") or "")
    num_turns = len(state["trajectory"])
    metrics = {**(state["metrics"] or {}), "num_turns": num_turns}
    return {"reward": state["reward"], "metrics": metrics, "answer": answer}


def key_of(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
