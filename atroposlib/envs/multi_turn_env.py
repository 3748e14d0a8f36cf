"""`MultiTurnEnv`: conversations. Define `load_rows`, `prompt` and `step`; `reset` if an episode needs state.

Every episode is one managed session, so each turn sends the earlier tokens verbatim and all answers are trained.
An episode ends when `step` returns `done`, or by a limit; `done_reason` names it and each is counted. The score is the
sum of the turns' rewards. `ToolEnv` builds on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.dataset_env import (
    ABORTED,
    ChatSession,
    DatasetEnv,
    DatasetEnvConfig,
    Outcome,
    Rollout,
    Row,
    Split,
    awaited,
)
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.rollouts import noting, number_of
from atroposlib.errors import EnvError
from atroposlib.inference.servers.sampling_notes import run_together

_TEMPLATE_TOKENS = 16
"""Assumed upper bound of the tokens that a chat template adds to one message."""


class MultiTurnEnvConfig(DatasetEnvConfig):
    max_turns: int = Field(default=8, ge=1)
    """Limit of the model's answers in one episode."""
    max_gen_per_turn: int = Field(default=0, ge=0)
    """Token limit of one answer; 0: max_token_length."""
    max_episode_tokens: int = Field(default=0, ge=0)
    """Token limit of one episode, prompts included; 0: the trainer's limit, if known. At most the engine's context."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """One conversation in progress."""

    row: Row
    messages: list[dict[str, Any]]
    """All messages so far."""
    state: dict[str, Any] = field(default_factory=dict)
    """For the author's use."""
    rewards: list[float] = field(default_factory=list)
    """One per answer of the model."""
    done_reason: str | None = None
    """Why it ended: the `reason` of `Step` (default "done"), or max_turns, length (an answer was cut off), tokens (no
    room for another turn), abort (the engine did not complete an answer; no score), unjudged (a reward was None, not a
    finite number or a failure, or `step` raised; no score). None while in progress."""

    @property
    def num_turns(self) -> int:
        """Answers of the model so far."""
        return len(self.rewards)


class Step(NamedTuple):
    """The environment's reaction to an answer."""

    reply: str | Sequence[Mapping[str, Any]] = ()
    """The next user message's text, or messages. Not sent when done."""
    reward: Outcome = 0.0
    """For this answer; None or a `RewardFailure` if it could not be judged, which ends the episode without a score."""
    done: bool = False
    reason: str = "done"
    """`Episode.done_reason` if `done`."""


class MultiTurnEnv(DatasetEnv):
    """Conversations with rewards."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = MultiTurnEnvConfig
    config: MultiTurnEnvConfig

    unfinished_score: ClassVar[float] = 0.0
    """Added to the score of an episode that a limit ended."""

    def reset(self, row: Row) -> Any:
        """Return a new `Episode` for a row (or an awaitable of one); the default starts with `prompt(row)`."""
        return Episode(row=row, messages=self.conversation(row))

    @abstractmethod
    def step(self, episode: Episode, answer: str) -> Any:
        """Return a `Step` (or an awaitable of one) for the model's answer, the last of `episode.messages`."""

    def final_score(self, episode: Episode) -> Outcome:
        """Return the score of an ended episode."""
        unfinished = episode.done_reason in ("max_turns", "length", "tokens")
        return sum(episode.rewards) + (self.unfinished_score if unfinished else 0.0)

    def end(self, episode: Episode) -> Any:
        """Close what `reset` opened (or return an awaitable that does); called once per episode, also a failed one."""

    async def roll_out(self, row: Row, n: int, *, split: Split) -> list[Rollout]:
        """Run `n` episodes of a row concurrently; an engine error in one cancels the others."""
        return await run_together([self._play(row, split) for _ in range(n)])

    rescore = BaseEnv.rescore  # rollouts are judged while they run

    @asynccontextmanager
    async def chat_session(self, split: Split) -> AsyncIterator[ChatSession]:
        """Open a conversation whose answers have at most `max_gen_per_turn` tokens."""
        async with super().chat_session(split) as chat:
            limit = self.config.max_gen_per_turn or chat.max_tokens
            yield replace(chat, max_tokens=min(limit, chat.max_tokens))

    async def score_group(self, row: Row, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return [rollout.outcome for rollout in rollouts]

    async def _play(self, row: Row, split: Split) -> Rollout:
        episode: Episode = await awaited(self.reset(row))
        notes: dict[str, Any] = {}
        try:
            async with self.chat_session(split) as chat:
                with noting(notes):
                    outcome = await self.run_episode(episode, chat)
                nodes = chat.nodes()
        finally:
            await awaited(self.end(episode))
        if split == "train":
            self.counts[f"done_{episode.done_reason}"] += 1
            self.counts["turns"] += episode.num_turns
        return Rollout(
            messages=episode.messages,
            nodes=nodes,
            finish_reason=episode.done_reason,
            outcome=outcome,
            overrides={
                **notes,
                "turn_rewards": list(episode.rewards),
                "done_reason": episode.done_reason,
            },
        )

    async def run_episode(self, episode: Episode, chat: ChatSession) -> Outcome:
        """Run the episode, set its `done_reason` and return its score; override it for another protocol."""
        max_tokens: int | None = None
        while True:
            completion = await chat.ask(episode.messages, max_tokens=max_tokens)
            choice = completion.choices[0]
            answer = choice.message.content or ""
            episode.messages.append({"role": "assistant", "content": answer})
            if choice.finish_reason == "length":
                episode.rewards.append(0.0)
                episode.done_reason = "length"
                break
            if choice.finish_reason == ABORTED:
                episode.done_reason = ABORTED
                return None
            judged = await self.guarded(self.step, episode, answer)
            step = Step(reward=judged) if isinstance(judged, RewardFailure) else judged
            reward = number_of(step.reward)
            if reward is None:
                episode.done_reason = "unjudged"
                return step.reward
            episode.rewards.append(reward)
            if step.done:
                episode.done_reason = step.reason
                break
            if episode.num_turns >= self.config.max_turns:
                episode.done_reason = "max_turns"
                break
            reply = _messages(step.reply, self)
            episode.messages.extend(reply)
            used = completion.usage.total_tokens if completion.usage is not None else 0
            max_tokens = self.room(used, reply, chat.max_tokens)
            if max_tokens < 1:
                episode.done_reason = "tokens"
                break
        outcome: Outcome = await self.guarded(self.final_score, episode)
        return outcome

    def room(self, num_used: int, reply: Sequence[Mapping[str, Any]], wanted: int) -> int:
        """Return the token limit of the next answer that keeps the episode within its own limit."""
        own = self.config.max_episode_tokens or self.max_token_len - 1
        known = [limit for limit in (own, self.server.context_len or 0) if limit > 0]
        if not known:
            return wanted
        texts = [str(message["content"]) for message in reply]
        added = sum(len(self.tokenizer.encode(text)) + _TEMPLATE_TOKENS for text in texts)
        return min(wanted, min(known) - num_used - added)


def in_turns(turns: Sequence[str]) -> Callable[[str], str]:
    """Return a function from the prompt to the next of these answers, for `example_answers`.

    It is the first one that the conversation does not contain yet, in order; at the end the last one.

    >>> right = in_turns(["look", "take it"])
    >>> right("<user>Go."), right("<user>Go.<assistant>look<user>A key.")
    ('look', 'take it')
    """

    def next_turn(prompt: str) -> str:
        start = 0
        for turn in turns:
            found = prompt.find(turn, start)
            if found < 0:
                return turn
            start = found + len(turn)
        return turns[-1]

    return next_turn


def _messages(reply: str | Sequence[Mapping[str, Any]], env: MultiTurnEnv) -> list[dict[str, Any]]:
    if isinstance(reply, str):
        reply = [{"role": "user", "content": reply}] if reply else []
    if not reply or not all(isinstance(message, Mapping) for message in reply):
        raise EnvError(
            f"{type(env).__name__}.step() neither ended the episode nor replied: return Step('...'),"
            f" Step([{{...}}]) or Step(done=True), not Step({reply!r:.200})"
        )
    return [dict(message) for message in reply]
