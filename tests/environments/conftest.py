"""Environments that are closed after the test."""

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
    """Make environments, by default on their sample: (class, answers, **settings) -> environment."""
    envs = []

    def make(env_cls: Any, answers: Answers = "", **settings: Any) -> Any:
        choices = [answers] if isinstance(answers, str) else answers

        def respond(request: HarnessRequest) -> str:
            return str(
                choices(request) if callable(choices) else choices[request.choice % len(choices)]
            )

        defaults = {"dataset_path": "sample", "num_reward_workers": 1}
        known = {
            name: defaults[name] for name in defaults if name in env_cls.env_config_cls.model_fields
        }
        envs.append(make_env(env_cls, monkeypatch, respond=respond, **{**known, **settings}))
        return envs[-1]

    yield make
    for env in envs:
        await close(env)


@pytest.fixture
def started(made: Callable[..., Any]) -> Callable[..., Any]:
    """Make and set up environments."""

    async def start(env_cls: Any, answers: Answers = "", **settings: Any) -> Any:
        env = made(env_cls, answers, **settings)
        await env.setup()
        return env

    return start
