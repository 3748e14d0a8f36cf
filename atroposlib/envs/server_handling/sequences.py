"""A conversation as token sequences: which tokens were sampled, with which logprobs, under which weights.

Invariant: `tokens`, `masked_tokens` and `logprobs` of a node are equally long; every sampled token keeps its id, its
position and its logprob for ever. A turn continues the node whose turns it repeats, else it begins a new node.
Pure: no tokenizer, no network. `ManagedServer` calls `find_...`, asks the engine, then `commit`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
class ChatPlace:
    """Where a sampled turn stands in its conversation."""

    messages: tuple[str, ...]
    """Identity of each message before the sampled one."""
    tracked: dict[int, str]
    """Index of each earlier turn sampled here -> the end-of-turn text that was sampled with it, "" if cut off."""
    pieces: tuple[str, ...]
    """[len(tracked) + 1] what the template wrote around those turns, up to the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledMessage:
    """What a caller sees of a sampled chat turn."""

    identity: str
    content: str
    """Text of the message, with what it was begun with."""
    call_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A point of a node where a later turn may go on: the end of a sampled turn."""

    num_tokens: int
    end: str
    """Text of the end-of-turn token that was sampled last; "" if the turn was cut off."""
    full_text: str
    visible_text: str
    """The text as a caller sees it, who never gets special tokens to see."""
    place: ChatPlace | None
    message: SampledMessage | None
    """Both None for text completions."""

    def begins(self, messages: Sequence[str]) -> bool:
        """Whether the chat up to and including this turn begins `messages`."""
        if self.place is None or self.message is None:
            return False
        num_before = len(self.place.messages)
        return (
            len(messages) > num_before
            and messages[num_before] == self.message.identity
            and tuple(messages[:num_before]) == self.place.messages
        )


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

    def tokens(self, num_kept: int) -> list[int]:
        return self.tracked.node.tokens[:num_kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A prompt that is about to be sent."""

    order: int
    """`SequenceStore.next_order()` at the time of the call."""
    tokens: list[int]
    full_text: str
    visible_text: str
    parent: Match | None = None
    num_kept: int = 0
    """Tokens of the parent's node that this prompt begins with."""
    place: ChatPlace | None = None
    """None for text completions."""
    is_broken: bool = False
    """The prompt repeats a sampled turn, but not its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One completion of a pending turn."""

    tokens: list[int]
    logprobs: list[float]
    full_text: str
    visible_text: str
    end: str = ""
    """Text of the last token if that ends the turn."""
    message: SampledMessage | None = None
    """None for text completions."""
    finish_reason: str | None
    weight_versions: list[WeightSpan] | None = None


@dataclass(slots=True)
class SequenceStore:
    """The nodes of one session, in the order of the calls that began them, whichever was answered first."""

    keep_parents: bool = False
    """Add every turn as a node of its own, trained on that turn only, instead of growing the node it continues."""
    _tracked: list[_Tracked] = field(default_factory=list)
    _num_calls: int = 0
    _continued: list[Stage] = field(default_factory=list)
    """Stages whose next turn is being sampled."""

    @property
    def nodes(self) -> list[SequenceNode]:
        return [tracked.node for tracked in self._tracked]

    def clear(self) -> None:
        self._tracked.clear()

    def next_order(self) -> int:
        """Return the place of a call among all calls of the session."""
        self._num_calls += 1
        return self._num_calls

    @contextmanager
    def continuing(self, turn: PendingTurn) -> Iterator[None]:
        """Let turns that are prepared in the meantime prefer another node with the same messages."""
        if turn.parent is None:
            yield
            return
        stage = turn.parent.stage
        self._continued.append(stage)
        try:
            yield
        finally:
            at = next(i for i, continued in enumerate(self._continued) if continued is stage)
            del self._continued[at]

    def find_messages(
        self, messages: Sequence[str], call_ids: Sequence[tuple[str, ...]] = ()
    ) -> Match | None:
        """Return the longest stage whose messages begin `messages`.

        `call_ids`, one per message, decide between turns that made the same tool calls.
        """

        def rank(match: Match) -> tuple[int, bool, bool]:
            assert match.stage.place is not None
            assert match.stage.message is not None
            index = len(match.stage.place.messages)
            same_ids = index < len(call_ids) and call_ids[index] == match.stage.message.call_ids
            return index, same_ids, self._can_grow(match)

        return max(
            (match for match in self._stages() if match.stage.begins(messages)),
            key=rank,
            default=None,
        )

    def find_opened(self, before: Sequence[str], content: str) -> tuple[Match, str] | None:
        """Return the longest turn sampled after `before` whose text begins `content`, and the rest of `content`."""
        before = tuple(before)
        best: Match | None = None
        best_rank = (-1, False)
        for match in self._stages():
            place, message = match.stage.place, match.stage.message
            if place is None or message is None or message.call_ids or place.messages != before:
                continue
            is_begun = message.content != "" and content.startswith(message.content)
            if is_begun or message.content == content:
                rank = (len(message.content), self._can_grow(match))
                if rank > best_rank:
                    best, best_rank = match, rank
        return None if best is None else (best, content[best_rank[0] :])

    def find_text(self, prompt: str) -> tuple[Match, str] | None:
        """Return the longest stage whose text begins `prompt`, and the rest of the prompt."""
        best: Match | None = None
        best_rank = (-1, False)
        for match in self._stages():
            for text in (match.stage.full_text, match.stage.visible_text):
                if prompt.startswith(text):
                    rank = (len(text), self._can_grow(match))
                    if rank > best_rank:
                        best, best_rank = match, rank
        return None if best is None else (best, prompt[best_rank[0] :])

    def commit(self, turn: PendingTurn, completions: Sequence[SampledTurn]) -> None:
        """Add a sampled turn: the first completion grows the node that was continued, the others become nodes.

        Raises EngineProtocolError, and stores nothing, when tokens and logprobs differ in number.
        """
        grown = [self._grow(turn, completion) for completion in completions]
        parent = turn.parent
        if parent is not None and not self.keep_parents:
            at = next((i for i, t in enumerate(self._tracked) if t is parent.tracked), None)
            if at is not None and turn.num_kept == len(parent.tracked.node.tokens):
                self._tracked[at] = replace(grown.pop(0), order=parent.tracked.order)
        place = bisect_right(self._tracked, turn.order, key=lambda tracked: tracked.order)
        self._tracked[place:place] = grown

    def _stages(self) -> Iterator[Match]:
        for tracked in self._tracked:
            for stage in tracked.stages:
                yield Match(tracked=tracked, stage=stage)

    def _can_grow(self, match: Match) -> bool:
        # Of equally long prefixes the end of a node is preferred: going on there grows it instead of branching off.
        is_last = match.stage is match.tracked.stages[-1]
        return is_last and not any(stage is match.stage for stage in self._continued)

    def _grow(self, turn: PendingTurn, sampled: SampledTurn) -> _Tracked:
        if len(sampled.tokens) != len(sampled.logprobs):
            raise EngineProtocolError(
                f"{len(sampled.logprobs)} logprobs for {len(sampled.tokens)} sampled tokens"
            )
        labels: list[int] = []
        logprobs: list[float] = []
        spans: list[dict[str, Any]] | None = []
        stages: tuple[Stage, ...] = ()
        if turn.parent is not None:
            kept = turn.num_kept
            stages = tuple(s for s in turn.parent.tracked.stages if s.num_tokens <= kept)
            if not self.keep_parents:
                node = turn.parent.tracked.node
                labels, logprobs = node.masked_tokens[:kept], node.logprobs[:kept]
                spans = _spans_before((node.metadata or {}).get("weight_versions"), end=kept)
        num_given = len(turn.tokens) - len(labels)
        labels = [*labels, *[IGNORE_INDEX] * num_given, *sampled.tokens]
        logprobs = [*logprobs, *[MASKED_LOGPROB] * num_given, *sampled.logprobs]
        tokens = [*turn.tokens, *sampled.tokens]
        new_spans = place_spans(sampled.weight_versions, start=len(turn.tokens))
        spans = None if spans is None or new_spans is None else [*spans, *new_spans]
        full_text = turn.full_text + sampled.full_text
        # Validation would visit every token.
        node = SequenceNode.model_construct(
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
            end=sampled.end,
            full_text=full_text,
            visible_text=turn.visible_text + sampled.visible_text,
            place=turn.place,
            message=sampled.message,
        )
        return _Tracked(order=turn.order, node=node, stages=(*stages, stage))


def _spans_before(spans: list[dict[str, Any]] | None, *, end: int) -> list[dict[str, Any]] | None:
    if spans is None:
        return None
    return [
        {**span, "num_tokens": min(span["num_tokens"], end - span["start"])}
        for span in spans
        if span["start"] < end
    ]


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
    """Return the smallest policy version of the spans; None when one of them is unknown or there is none.

    Engines call the weights they were started with by a name ("default"): those may be older than any number.

    >>> oldest_version([{"weight_version": "12"}, {"weight_version": "9"}])
    9
    >>> oldest_version([{"weight_version": "12"}, {"weight_version": "default"}]) is None
    True
    """
    versions = [span["weight_version"] for span in spans or ()]
    if not versions or not all(version.isdecimal() for version in versions):
        return None
    return min(int(version) for version in versions)
