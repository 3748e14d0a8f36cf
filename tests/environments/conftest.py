"""Environments that are started on their sample and closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from atroposlib.envs.collecting import close
from atroposlib.inference.harness import HarnessRequest, Respond
from tests.environments.helpers_environments import make_env

Start = Callable[..., Any]
"""(environment class, answers, **settings) -> started environment."""


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start environments; the model's answers are one, one for each choice, or a function of the request."""
    envs = []

    async def start(env_cls: Any, answers: Respond | Sequence[str] = "", **settings: Any) -> Any:
        if isinstance(answers, str):
            answers = [answers]

        def respond(request: HarnessRequest) -> str:
            chosen = (
                answers(request) if callable(answers) else answers[request.choice % len(answers)]
            )
            return str(chosen)

        settings = {"dataset_path": "sample", "num_reward_workers": 1, **settings}
        env = make_env(env_cls, monkeypatch, respond=respond, **settings)
        envs.append(env)
        await env.setup()
        return env

    yield start
    for env in envs:
        await close(env)
