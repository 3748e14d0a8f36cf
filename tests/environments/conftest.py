"""Environments that are closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

import pytest

from atroposlib.envs.collecting import close
from atroposlib.inference.harness import HarnessRequest, Respond
from tests.environments.helpers_environments import make_env

Answers: TypeAlias = Respond | Sequence[str]
"""The model's answers: one, one for each choice, or a function of the request."""


@pytest.fixture
async def made(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Make environments: (class, answers, **settings) -> environment."""
    envs = []

    def make(env_cls: Any, answers: Answers = "", **settings: Any) -> Any:
        choices = [answers] if isinstance(answers, str) else answers

        def respond(request: HarnessRequest) -> str:
            return str(
                choices(request) if callable(choices) else choices[request.choice % len(choices)]
            )

        settings = {"num_reward_workers": 1, **settings}
        envs.append(make_env(env_cls, monkeypatch, respond=respond, **settings))
        return envs[-1]

    yield make
    for env in envs:
        await close(env)


@pytest.fixture
def started(made: Callable[..., Any]) -> Callable[..., Any]:
    """Make and set up environments, by default on their sample."""

    async def start(env_cls: Any, answers: Answers = "", **settings: Any) -> Any:
        env = made(env_cls, answers, **{"dataset_path": "sample", **settings})
        await env.setup()
        return env

    return start
