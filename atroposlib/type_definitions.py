"""Names of the original's public types, for environments that annotate with them. No behaviour."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

Content = str | list[dict[str, Any]]
"""A message's text, or its parts as in the OpenAI API."""

Item = Any
"""What an environment is asked; only the environment looks inside."""

number = int | float
UUID = str
Observation = str


class Message(TypedDict):
    """One chat message."""

    role: str
    content: Content
    reward: NotRequired[float | None]


class AgentStep(TypedDict, total=False):
    """One turn of an agent: what it saw, what it did, what that was worth."""

    step: int
    messages: list[Message]
    reward: float


AgentHistory = dict[str, list[AgentStep]]


class GameStep(TypedDict, total=False):
    """One step of a game: the agents' histories and the game's own record."""

    step: int
    agent_histories: AgentHistory


GameHistory = list[GameStep]


class EvaluationConfigGeneral(TypedDict, total=False):
    """Head of `metrics.json`."""

    model_name: str
    total_evaluation_time_seconds: str
    generation_parameters: dict[str, Any]


EvaluationMetrics = dict[str, float]
EvaluationSample = dict[str, Any]


class EvaluationResults(TypedDict):
    """The whole of `metrics.json`."""

    config_general: EvaluationConfigGeneral
    results: dict[str, EvaluationMetrics]
