"""A conversation as token sequences: which tokens were sampled, with which logprobs, under which weights.

Invariant: `tokens`, `masked_tokens` and `logprobs` of a node are equally long; every sampled token keeps its id, its
position and its logprob for ever. A turn continues the node whose turns it repeats, else it begins a new node.
Pure: no tokenizer, no network. `ManagedServer` calls `find_...`, asks the engine, then `commit`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from atroposlib.envs.server_handling.api_server import WeightSpan
from atroposlib.errors import EngineProtocolError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB


class SequenceNode(BaseModel):
    """One token sequence with its training labels."""

    full_text: str
    """The prompt as it was written and everything sampled, special tokens included."""
    tokens: list[int]
    """[T] prompt and sampled token ids."""
    masked_tokens: list[int]
    """[T] labels: -100 where the token was given, the token id where it was sampled."""
    logprobs: list[float]
    """[T] logprob of each sampled token, 1.0 elsewhere."""
    metadata: dict[str, Any] | None = None
    """finish_reason; policy_version (the oldest that sampled a token, None if unknown);
    weight_versions (`{"start", "num_tokens", "weight_version"}` per span of sampled tokens, None if unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A point of a node where a later turn may go on: the end of a sampled turn."""

    num_tokens: int
    full_text: str
    visible_text: str
    """The text as a caller sees it, who never gets special tokens to see."""
    messages: tuple[str, ...] | None
    """Identity of each message up to and including the sampled one; None for text completions."""
    tracked: frozenset[int]
    """Indexes of the messages that were sampled here."""
    history: str
    """The template's rendering of the messages before the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tracked:
    order: int
    node: SequenceNode
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A stage that a prompt continues, and the node that holds it."""

    tracked: _Tracked
    stage: Stage

    @property
    def tokens(self) -> list[int]:
        return self.tracked.node.tokens[: self.stage.num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A prompt that is about to be sent."""

    order: int
    """`SequenceStore.next_order()` at the time of the call."""
    tokens: list[int]
    full_text: str
    visible_text: str
    parent: Match | None
    messages: tuple[str, ...] | None = None
    """Identity of the messages before the one to be sampled."""
    tracked: frozenset[int] = frozenset()
    history: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One completion of a pending turn."""

    tokens: list[int]
    logprobs: list[float]
    full_text: str
    visible_text: str
    message: str | None = None
    """Identity of the sampled message; None for text completions."""
    finish_reason: str | None
    weight_versions: list[WeightSpan] | None = None


@dataclass(slots=True)
class SequenceStore:
    """The nodes of one session, in the order of the calls that began them, whichever was answered first."""

    keep_parents: bool = False
    """Add every turn as a node of its own instead of growing the node it continues."""
    _tracked: list[_Tracked] = field(default_factory=list)
    _num_calls: int = 0

    @property
    def nodes(self) -> list[SequenceNode]:
        return [tracked.node for tracked in self._tracked]

    def clear(self) -> None:
        self._tracked.clear()

    def next_order(self) -> int:
        """Return the place of a call among all calls of the session."""
        self._num_calls += 1
        return self._num_calls

    def find_messages(self, messages: Sequence[str]) -> Match | None:
        """Return the longest stage whose messages begin `messages`."""
        best: Match | None = None
        for match in self._stages():
            prefix = match.stage.messages
            if prefix is None or tuple(messages[: len(prefix)]) != prefix:
                continue
            if best is None or self._rank(match, len(prefix)) > self._rank(
                best, len(best.stage.messages or ())
            ):
                best = match
        return best

    def find_text(self, prompt: str) -> tuple[Match, str] | None:
        """Return the longest stage whose text begins `prompt`, and the rest of the prompt."""
        best: Match | None = None
        best_length = 0
        for match in self._stages():
            for text in (match.stage.full_text, match.stage.visible_text):
                if prompt.startswith(text) and (
                    best is None or self._rank(match, len(text)) > self._rank(best, best_length)
                ):
                    best, best_length = match, len(text)
        return None if best is None else (best, prompt[best_length:])

    def commit(self, turn: PendingTurn, completions: Sequence[SampledTurn]) -> None:
        """Add a sampled turn: the first completion grows the node that was continued, the others become nodes.

        Raises EngineProtocolError, and stores nothing, when tokens and logprobs differ in number.
        """
        grown = [self._grow(turn, completion) for completion in completions]
        parent = turn.parent
        if parent is not None and not self.keep_parents:
            at = next((i for i, t in enumerate(self._tracked) if t is parent.tracked), None)
            if at is not None and parent.stage is parent.tracked.stages[-1]:
                self._tracked[at] = replace(grown.pop(0), order=parent.tracked.order)
        place = bisect_right(self._tracked, turn.order, key=lambda tracked: tracked.order)
        self._tracked[place:place] = grown

    def _stages(self) -> Iterator[Match]:
        for tracked in self._tracked:
            for stage in tracked.stages:
                yield Match(tracked=tracked, stage=stage)

    @staticmethod
    def _rank(match: Match, length: int) -> tuple[int, bool]:
        # Of equally long prefixes the end of a node is preferred: going on there grows it instead of branching off.
        return length, match.stage is match.tracked.stages[-1]

    @staticmethod
    def _grow(turn: PendingTurn, sampled: SampledTurn) -> _Tracked:
        if len(sampled.tokens) != len(sampled.logprobs):
            raise EngineProtocolError(
                f"{len(sampled.logprobs)} logprobs for {len(sampled.tokens)} sampled tokens"
            )
        labels: list[int] = []
        logprobs: list[float] = []
        spans: list[dict[str, Any]] | None = []
        stages: tuple[Stage, ...] = ()
        if turn.parent is not None:
            node, end = turn.parent.tracked.node, turn.parent.stage.num_tokens
            labels, logprobs = node.masked_tokens[:end], node.logprobs[:end]
            known = (node.metadata or {}).get("weight_versions")
            spans = None if known is None else [span for span in known if span["start"] < end]
            all_stages = turn.parent.tracked.stages
            stages = all_stages[: all_stages.index(turn.parent.stage) + 1]
        num_given = len(turn.tokens) - len(labels)
        labels = [*labels, *[IGNORE_INDEX] * num_given, *sampled.tokens]
        logprobs = [*logprobs, *[MASKED_LOGPROB] * num_given, *sampled.logprobs]
        tokens = [*turn.tokens, *sampled.tokens]
        new_spans = place_spans(sampled.weight_versions, start=len(turn.tokens))
        spans = None if spans is None or new_spans is None else [*spans, *new_spans]
        full_text = turn.full_text + sampled.full_text
        node = SequenceNode(
            full_text=full_text,
            tokens=tokens,
            masked_tokens=labels,
            logprobs=logprobs,
            metadata={
                "finish_reason": sampled.finish_reason,
                "policy_version": oldest_version(spans),
                "weight_versions": spans,
            },
        )
        stage = Stage(
            num_tokens=len(tokens),
            full_text=full_text,
            visible_text=turn.visible_text + sampled.visible_text,
            messages=(*turn.messages, sampled.message)
            if turn.messages is not None and sampled.message is not None
            else None,
            tracked=turn.tracked | ({len(turn.messages)} if turn.messages is not None else set()),
            history=turn.history,
        )
        return _Tracked(order=turn.order, node=node, stages=(*stages, stage))


def place_spans(spans: Sequence[WeightSpan] | None, *, start: int) -> list[dict[str, Any]] | None:
    """Give spans of sampled tokens their position in the whole sequence.

    >>> place_spans([WeightSpan("3", 2), WeightSpan("4", 1)], start=10)
    [{'start': 10, 'num_tokens': 2, 'weight_version': '3'}, {'start': 12, 'num_tokens': 1, 'weight_version': '4'}]
    """
    if spans is None:
        return None
    placed = []
    for span in spans:
        placed.append(
            {"start": start, "num_tokens": span.num_tokens, "weight_version": span.weight_version}
        )
        start += span.num_tokens
    return placed


def oldest_version(spans: Sequence[dict[str, Any]] | None) -> int | None:
    """Return the smallest numeric policy version of the spans; None when there is none.

    >>> oldest_version([{"weight_version": "12"}, {"weight_version": "9"}, {"weight_version": "default"}])
    9
    """
    versions = [span["weight_version"] for span in spans or ()]
    return min((int(version) for version in versions if version.isdecimal()), default=None)
