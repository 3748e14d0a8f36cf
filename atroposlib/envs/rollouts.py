"""What the model answered to one row: the session it used, the rollout, its outcome, and the group of several rollouts.

Plain data and functions of `DatasetEnv`, which exports them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from atroposlib.envs.lengths import num_trained
from atroposlib.envs.rewards import RewardFailure
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.sessions.sequences import SequenceNode
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB, ScoredDataGroup

Row: TypeAlias = Any
"""One task, in any form; only the environment reads it."""

Split: TypeAlias = Literal["train", "eval"]

Outcome: TypeAlias = float | bool | RewardFailure | None
"""Result of judging an answer: a number, or None / `RewardFailure` if it could not be judged."""

ABORTED = "abort"
"""Finish reason of an answer that the engine did not complete, for example because of a weight update."""

INSTRUCTIONS = frozenset(
    ("sft", "set_advantage_to_zero", "temperature", "teacher_top_k", "skip_teacher_top_k")
)
"""Names in `overrides` that change how a sequence is trained: a field that is shown never sets one."""

MAX_NOTE_CHARS = 2000
"""Of a text that is shown with an answer; of a longer one the end is kept, where judges give their verdict."""

_notes: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


@contextmanager
def noting(notes: dict[str, Any] | None) -> Iterator[None]:
    """Within the block, add the values that this task passes to `note` to `notes`; None: discard them."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def note(**values: Any) -> None:
    """Note JSON values about the score of the answer that this task judges, if it judges one."""
    notes = _notes.get()
    if notes is not None:
        notes |= shown_fields(values)


def shown_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of an author's fields is shown with an answer: no instructions, and the end of long texts.

    >>> shown_fields({"explanation": "no", "sft": True})
    {'explanation': 'no'}
    """
    return {
        name: value[-MAX_NOTE_CHARS:] if isinstance(value, str) else value
        for name, value in values.items()
        if name not in INSTRUCTIONS
    }


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One answer or conversation of the model for one row."""

    messages: list[dict[str, Any]]
    """The conversation, including the last answer."""
    nodes: list[SequenceNode]
    """Its token sequences: one, or several if the chat template rewrites earlier turns. Empty without token ids."""
    finish_reason: str | None = None
    """Of the last answer: stop, length or abort; in `MultiTurnEnv` the episode's `done_reason`."""
    outcome: Outcome = None
    """Set if the rollout was judged while it ran (multi-turn, agent)."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Sent as the `overrides` of each of its sequences: instructions to the trainer, and notes about the score."""

    @property
    def completion(self) -> str:
        """The last answer of the model."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        return str(answers[-1]["content"]) if answers else ""

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens; 0 without token ids."""
        return sum(num_trained(node.masked_tokens) for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSession:
    """One conversation with the policy; the same calls in training and evaluation."""

    target: Any
    """A managed server; in evaluation with an API without token ids, the server manager."""
    split: Split
    temperature: float
    max_tokens: int

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Any:
        """Return a `ChatCompletion` with `n` choices, which end before a text of `stop`; the model may call `tools`."""
        return await self.target.chat_completion(
            messages=list(messages),
            n=n,
            **({"stop": list(stop)} if stop else {}),
            **({"tools": list(tools)} if tools else {}),
            max_tokens=max_tokens or self.max_tokens,
            temperature=self.temperature,
            split=self.split,
        )

    def nodes(self) -> list[SequenceNode]:
        """Return the token sequences so far; [] for an API without token ids."""
        has_tokens = not isinstance(self.target, ServerManager)
        return list(self.target.get_state()["nodes"]) if has_tokens else []


def number_of(outcome: Outcome) -> float | None:
    """Return the score as a float; None if there is none or it is not a finite number.

    >>> number_of(True), number_of(float("nan")), number_of(None)
    (1.0, None, None)
    """
    if outcome is None or isinstance(outcome, RewardFailure):
        return None
    try:
        number = float(outcome)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def raise_if_all_raised(outcomes: Sequence[Outcome]) -> None:
    """Raise the first exception if judging raised for every answer: the answers are not the cause."""
    errors = [o.error for o in outcomes if isinstance(o, RewardFailure) and o.error is not None]
    if errors and len(errors) == len(outcomes):
        raise errors[0]


def join_rollouts(
    rollouts: Sequence[Rollout], scores: Sequence[float | None], *, masks_unjudged: bool
) -> ScoredDataGroup:
    """Return the group of the rollouts; at least one of them has a score.

    Those without a score are left out, or with `masks_unjudged` kept without trained positions. The group's policy
    version is the oldest one, None if one is unknown. `rollout` is set if one of the rollouts has several sequences.
    """
    judged = [score for score in scores if score is not None]
    # The score of masked sequences; a rounded mean of equal scores could differ from them.
    stand_in = judged[0] if min(judged) == max(judged) else sum(judged) / len(judged)
    kept = [
        (number, rollout, score, node)
        for number, (rollout, score) in enumerate(zip(rollouts, scores, strict=True))
        if score is not None or masks_unjudged
        for node in rollout.nodes
    ]
    versions = [(node.metadata or {}).get("policy_version") for _, _, _, node in kept]
    known = [version for version in versions if version is not None]
    group = ScoredDataGroup(
        tokens=[node.tokens for _, _, _, node in kept],
        masks=[
            [IGNORE_INDEX] * len(node.tokens) if score is None else node.masked_tokens
            for _, _, score, node in kept
        ],
        inference_logprobs=[
            [MASKED_LOGPROB] * len(node.tokens) if score is None else node.logprobs
            for _, _, score, node in kept
        ],
        scores=[stand_in if score is None else score for _, _, score, _ in kept],
        messages=[rollout.messages for _, rollout, _, _ in kept],
        policy_version=min(known, default=None) if len(known) == len(kept) else None,
    )
    numbers = [number for number, _, _, _ in kept]
    if len(set(numbers)) < len(numbers):
        group["rollout"] = numbers
    if any(rollout.overrides for _, rollout, _, _ in kept):
        group["overrides"] = [rollout.overrides for _, rollout, _, _ in kept]
    return group
