"""A conversation as token sequences: which tokens were sampled, with which logprobs, under which weights.

Invariant: `tokens`, `masked_tokens` and `logprobs` of a node are equally long; every sampled token keeps its id, its
position and its logprob. A turn continues the node whose turns it repeats, else it begins a new node.
Pure: no tokenizer, no network. `ManagedServer` calls `find_...`, then the engine, then `commit`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.servers.api_server import WeightSpan
from atroposlib.inference.servers.sampling_notes import oldest_version, place_spans
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.utils.number_list import first, joined, repeated


class SequenceNode(BaseModel):
    """One token sequence with its training labels."""

    full_text: str
    """The prompt text and all sampled text, special tokens included."""
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
    """[len(tracked) + 1] the template's text around those turns, up to the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledMessage:
    """What a caller sees of a sampled chat turn."""

    identity: str
    content: str
    """Text of the message, including a beginning that the caller wrote."""
    call_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """A point of a node that a later turn may continue: the end of a sampled turn."""

    num_tokens: int
    end: str
    """Text of the end-of-turn token that was sampled last; "" if the turn was cut off."""
    full_text: str
    visible_text: str
    """The text that a caller sees, without special tokens."""
    place: ChatPlace | None
    message: SampledMessage | None
    """Both None for text completions."""
    cut: str = ""
    """Sampled text that the caller does not see: the stop string or token that ended the turn, and what follows it."""


@dataclass(slots=True, kw_only=True)
class _Tracked:
    """A growing node and the stages that later turns may continue."""

    order: int
    choice: int
    """Index among the completions of the call that began it."""
    node: SequenceNode
    stages: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.node.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMatch:
    """A stage that a prompt continues, and the node that holds it."""

    tracked: _Tracked
    stage: Stage

    def tokens(self, num_kept: int) -> list[int]:
        return first(self.tracked.node.tokens, num_kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A prompt that is about to be sent."""

    order: int
    """`SequenceStore.next_order()` at the time of the call."""
    tokens: list[int]
    full_text: str
    visible_text: str
    parent: NodeMatch | None = None
    num_kept: int = 0
    """Tokens of the parent's node that this prompt begins with."""
    place: ChatPlace | None = None
    """None for text completions."""
    is_broken: bool = False
    """Whether the prompt repeats a sampled turn but not its tokens."""
    chat: dict[str, Any] | None = None
    """Messages and template inputs of a chat with images, whose tokens the engine makes and reports in its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One completion of a pending turn."""

    tokens: list[int]
    logprobs: list[float]
    full_text: str
    visible_text: str
    end: str = ""
    """Text of the last token if that ends the turn."""
    stop: str | int | None = None
    """The stop string or token id that ended the turn; None for a token that always does."""
    cut: str = ""
    """As `Stage.cut`."""
    message: SampledMessage | None = None
    """None for text completions."""
    finish_reason: str | None
    weight_versions: list[WeightSpan] | None = None


class _Point:
    """A point in the tree of all conversations, reached by their messages from the root."""

    __slots__ = ("matches", "next")

    def __init__(self) -> None:
        self.next: dict[str, _Point] = {}
        """The points after one more message, by its identity."""
        self.matches: list[NodeMatch] = []
        """Stages of chats that end here."""


class SequenceStore:
    """The nodes of one session, in the order of the calls that began them, not of the answers.

    Looking up a chat takes time linear in its messages, however many chats there are; a text prompt is compared
    with every stage.
    """

    def __init__(self, *, keep_parents: bool = False) -> None:
        self.keep_parents = keep_parents
        """Whether every turn becomes a node of its own, trained on that turn only, instead of growing its parent."""
        self._num_calls = 0
        self._continued: list[Stage] = []
        """Stages whose next turn is being sampled."""
        self.clear()

    def clear(self) -> None:
        """Remove all nodes; a turn that was prepared before is not stored later."""
        self._num_cleared = self._num_calls
        self._tracked: list[_Tracked] = []
        self._matches: list[NodeMatch] = []
        """Every stage, with the node that it was added to; branches share the stages before them."""
        self._chats = _Point()

    @property
    def nodes(self) -> list[SequenceNode]:
        return [tracked.node for tracked in self._tracked]

    def next_order(self) -> int:
        """Return the number of this call among the calls of the session."""
        self._num_calls += 1
        return self._num_calls

    @contextmanager
    def continuing(self, turn: PendingTurn) -> Iterator[None]:
        """Make turns prepared inside the block prefer another node with the same messages."""
        stages = [] if turn.parent is None else [turn.parent.stage]
        self._continued += stages
        try:
            yield
        finally:
            for stage in stages:
                self._continued.remove(stage)

    def find_messages(
        self, messages: Sequence[str], call_ids: Sequence[tuple[str, ...]] = ()
    ) -> NodeMatch | None:
        """Return the stage that matches the longest prefix of `messages`.

        `call_ids`, one per message, decide between turns that made the same tool calls.
        """
        point = self._chats
        found: list[NodeMatch] = []
        index = -1
        for i, message in enumerate(messages):
            following = point.next.get(message)
            if following is None:
                break
            point = following
            if point.matches:
                found, index = point.matches, i

        def rank(match: NodeMatch) -> tuple[bool, bool, int, int]:
            assert match.stage.message is not None
            same_ids = index < len(call_ids) and call_ids[index] == match.stage.message.call_ids
            first = match.tracked.order, match.tracked.choice
            return same_ids, self._can_grow(match), -first[0], -first[1]

        return max(found, key=rank, default=None)

    def find_opened(self, before: Sequence[str], content: str) -> tuple[NodeMatch, str] | None:
        """Return the longest turn after `before` whose text is a prefix of `content`, and the rest of `content`."""
        point: _Point | None = self._chats
        for message in before:
            point = point and point.next.get(message)
        found = []
        for following in point.next.values() if point else ():
            for match in following.matches:
                sampled = match.stage.message
                if sampled is None or sampled.call_ids or not content.startswith(sampled.content):
                    continue
                if sampled.content or not content:  # text cannot follow tokens without text
                    found.append((len(sampled.content), match))
        return self._longest(found, content)

    def find_text(self, prompt: str) -> tuple[NodeMatch, str] | None:
        """Return the longest stage whose text is a prefix of `prompt`, and the rest of the prompt."""
        found = [
            (len(text), match)
            for match in self._matches
            for text in (match.stage.full_text, match.stage.visible_text)
            if _begins(prompt, text)
        ]
        return self._longest(found, prompt)

    def _longest(
        self, found: list[tuple[int, NodeMatch]], text: str
    ) -> tuple[NodeMatch, str] | None:
        """Return the match with the longest prefix of `text`, and the rest of the text."""
        if not found:
            return None
        length, match = max(found, key=lambda each: (each[0], self._can_grow(each[1])))
        return match, text[length:]

    def commit(self, turn: PendingTurn, completions: Sequence[SampledTurn]) -> None:
        """Add a sampled turn: the first completion grows the node that was continued, the others become nodes.

        Raises EngineProtocolError, and stores nothing, when tokens and logprobs differ in number.
        """
        if turn.order <= self._num_cleared:
            return
        grown = [self._grow(turn, i, completion) for i, completion in enumerate(completions)]
        added = grown
        parent = turn.parent
        if parent is not None and not self.keep_parents and turn.num_kept == len(parent.tracked):
            first, *added = grown
            parent.tracked.node, parent.tracked.stages = first.node, first.stages
            self._index(parent.tracked)
        place = bisect_right(self._tracked, turn.order, key=lambda tracked: tracked.order)
        self._tracked[place:place] = added
        for tracked in added:
            self._index(tracked)

    def _index(self, tracked: _Tracked) -> None:
        """Add the last stage of a node to the lookup tables."""
        match = NodeMatch(tracked=tracked, stage=tracked.stages[-1])
        self._matches.append(match)
        if match.stage.place is None or match.stage.message is None:
            return
        point = self._chats
        for message in (*match.stage.place.messages, match.stage.message.identity):
            point = point.next.setdefault(message, _Point())
        point.matches.append(match)

    def _can_grow(self, match: NodeMatch) -> bool:
        # Of equally long prefixes the end of a node is preferred: continuing there grows it instead of branching.
        return match.stage is match.tracked.stages[-1] and match.stage not in self._continued

    def _grow(self, turn: PendingTurn, choice: int, sampled: SampledTurn) -> _Tracked:
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
                labels, logprobs = first(node.masked_tokens, kept), first(node.logprobs, kept)
                spans = _spans_before((node.metadata or {}).get("weight_versions"), end=kept)
        num_given = len(turn.tokens) - len(labels)
        labels = joined(labels, repeated(IGNORE_INDEX, num_given), sampled.tokens)
        given = repeated(MASKED_LOGPROB, num_given)
        logprobs = joined(logprobs, given, sampled.logprobs)
        tokens = joined(turn.tokens, sampled.tokens)
        new_spans = sampled.weight_versions
        if spans is not None and new_spans is not None:
            spans = [*spans, *place_spans(new_spans, start=len(turn.tokens))]
        else:
            spans = None
        full_text = turn.full_text + sampled.full_text
        # Validation would visit every token.
        node = SequenceNode.model_construct(
            full_text=full_text,
            tokens=tokens,
            masked_tokens=labels,
            logprobs=logprobs,
            metadata={
                "finish_reason": sampled.finish_reason,
                "policy_version": oldest_version(s["weight_version"] for s in spans or ()),
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
            cut=sampled.cut,
        )
        return _Tracked(order=turn.order, choice=choice, node=node, stages=(*stages, stage))


def _begins(prompt: str, text: str) -> bool:
    # The end first: conversations of a session have the same beginning.
    return prompt.startswith(text[-32:], max(0, len(text) - 32)) and prompt.startswith(text)


def state_of(nodes: Sequence[SequenceNode], *, track_tree: bool) -> dict[str, Any]:
    """Return `{"nodes": [SequenceNode]}`; with `track_tree`, `{"sequences": ..., "tree": ...}` by full text.

    Of two samples with the same text, the tree holds the later one; `nodes` holds both.
    """
    if not track_tree:
        return {"nodes": list(nodes)}
    by_text = {node.full_text: node for node in nodes}
    return {"sequences": by_text, "tree": dict(by_text)}


def train_once(nodes: Sequence[SequenceNode]) -> list[SequenceNode]:
    """Return the sequences with trained positions, each sampled token trained in only one of them.

    A conversation with two branches is two sequences with a common prefix; the second does not train the prefix again.
    Takes time linear in the number of tokens.
    """
    tree = _Run(nodes[0], 0, 0) if nodes else None
    kept: list[SequenceNode] = []
    for node in nodes:
        assert tree is not None
        shared = _after_last_sampled(node, tree.insert(node))
        rest = node.masked_tokens[shared:]
        if rest.count(IGNORE_INDEX) == len(rest):
            continue
        if shared:
            masks = [IGNORE_INDEX] * shared + rest
            logprobs = [MASKED_LOGPROB] * shared + node.logprobs[shared:]
            node = node.model_copy(update={"masked_tokens": masks, "logprobs": logprobs})
        kept.append(node)
    return kept


def _after_last_sampled(node: SequenceNode, end: int) -> int:
    """Return the position after the last sampled token before `end`; 0 if there is none."""
    labels = node.masked_tokens
    while end and labels[end - 1] == IGNORE_INDEX:
        end -= 1
    return end


class _Run:
    """An edge of a prefix tree of sequences: positions `start` to `end` of `node`, shared by all sequences below it.

    Positions of the same sample are shared; equal tokens of another sample differ in logprobs.
    """

    __slots__ = ("end", "next", "node", "start")

    def __init__(self, node: SequenceNode, start: int, end: int) -> None:
        self.node, self.start, self.end = node, start, end
        self.next: dict[tuple[int, int, float], _Run] = {}
        """The runs that follow, by token, label and logprob of their first position."""

    def insert(self, node: SequenceNode) -> int:
        """Add a sequence and return the length of the prefix it shares with an earlier one."""
        run, at, end = self, 0, len(node.tokens)
        while at < end:
            key = node.tokens[at], node.masked_tokens[at], node.logprobs[at]
            following = run.next.get(key)
            if following is None:
                run.next[key] = _Run(node, at, end)
                break
            parted = _first_difference(node, following.node, at, min(end, following.end))
            if parted < following.end:
                following._split(parted)
            run, at = following, parted
        return at

    def _split(self, at: int) -> None:
        rest = _Run(self.node, at, self.end)
        rest.next, self.end = self.next, at
        node = self.node
        self.next = {(node.tokens[at], node.masked_tokens[at], node.logprobs[at]): rest}


def _first_difference(node: SequenceNode, other: SequenceNode, start: int, end: int) -> int:
    """Return the first position in [start, end) at which two sequences differ; `end` if there is none."""
    while start < end:  # slices, because they are compared in C
        middle = (start + end + 1) // 2
        part = slice(start, middle)
        if (
            node.tokens[part] == other.tokens[part]
            and node.masked_tokens[part] == other.masked_tokens[part]
            and node.logprobs[part] == other.logprobs[part]
        ):
            start = middle
        else:
            end = middle - 1
    return start


def _spans_before(spans: list[dict[str, Any]] | None, *, end: int) -> list[dict[str, Any]] | None:
    if spans is None:
        return None
    return [
        {**span, "num_tokens": min(span["num_tokens"], end - span["start"])}
        for span in spans
        if span["start"] < end
    ]
