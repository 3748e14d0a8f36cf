"""A conversation as token sequences: which tokens were sampled, with which logprobs, under which weights.

Invariant: `tokens`, `masked_tokens` and `logprobs` of a node are equally long; every sampled token keeps its id, its
position and its logprob. A turn continues the node whose turns it repeats (`recognition.py`), else it begins a new one.
Memory is linear in a session's text: a stage keeps what it added and points to the one before it. So is the time of all
turns, apart from the prompts: a node grows in place, unless the caller has it.
Pure: no tokenizer, no network. `ManagedServer` calls `find_...`, then the engine, then `commit`.
"""

from __future__ import annotations

import itertools
import secrets
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import BaseModel

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.servers.api_server import WeightSpan
from atroposlib.inference.servers.sampling_notes import oldest_version, place_spans
from atroposlib.inference.sessions.recognition import Difference, SaidTurn, given_after
from atroposlib.inference.tools.messages import Message, call_ids
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.utils.number_list import first, grow, joined, repeated


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
    weight_versions (`{"start", "num_tokens", "weight_version"}` per span of sampled tokens, None if unknown);
    turns (`{"start", "num_tokens", "turn"}` per sampled turn; branches that share a turn have its id in common)."""


class VisibleText:
    """A text without special tokens, as what it adds to an earlier one: branches share their beginnings.

    >>> answer = VisibleText(" Because.", after=VisibleText("Why?"))
    >>> answer.begins("Why? Because. So?"), answer.begins("Why? Since"), answer.num_chars
    (True, False, 13)
    """

    __slots__ = ("added", "before", "num_chars")

    def __init__(self, added: str, *, after: VisibleText | None = None) -> None:
        self.before, self.added = after, added
        self.num_chars: int = len(added) + (0 if after is None else after.num_chars)

    def begins(self, text: str) -> bool:
        """Whether a text begins with this one. The end is compared first: a session's texts have the same beginning."""
        part: VisibleText | None = self
        while part is not None:
            if not text.startswith(part.added, part.num_chars - len(part.added)):
                return False
            part = part.before
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class ChatPlace:
    """Where a sampled turn stands in its conversation."""

    index: int
    """Messages before the sampled one."""
    lead: str = ""
    """The template's text between the sampled turn before it and this one, as rendered last."""
    previous: Stage | None = None
    """The sampled turn before it in this sequence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """A point of a node that a later turn may continue: the end of a sampled turn."""

    num_tokens: int
    num_chars: int
    """Length of the node's text up to here, special tokens included."""
    end: str
    """Text of the end-of-turn token that was sampled last; "" if the turn was cut off."""
    visible_text: VisibleText
    """The text that a caller sees, without special tokens."""
    place: ChatPlace | None
    said: SaidTurn | None
    """Both None for text completions."""
    cut: str = ""
    """Sampled text that the caller does not see: the stop string or token that ended the turn, and what follows it."""

    def chat_turns(self) -> Iterator[tuple[ChatPlace, str]]:
        """Yield place and `end` of this sampled turn of a chat and of those before it, the latest first."""
        stage: Stage | None = self
        while stage is not None and stage.place is not None:
            yield stage.place, stage.end
            stage = stage.place.previous


@dataclass(slots=True, kw_only=True)
class _Tracked:
    """A growing node and the stages that later turns may continue."""

    order: int
    choice: int
    """Index among the completions of the call that began it."""
    node: SequenceNode
    last: Stage
    """The end of the node."""
    is_shown: bool = False
    """Whether the caller has the node, which then stays as it is: the next turn grows a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMatch:
    """A stage that a prompt continues, and the node that holds it."""

    tracked: _Tracked
    stage: Stage
    given: str = ""
    """Text that the client appended to the sampled turn."""

    def tokens(self, num_kept: int) -> list[int]:
        """Return the first tokens of the node, which may be the node's own list."""
        return first(self.tracked.node.tokens, num_kept)

    @property
    def full_text(self) -> str:
        """The text up to the stage, special tokens included."""
        return self.tracked.node.full_text[: self.stage.num_chars]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A prompt that is about to be sent."""

    order: int
    """Of `SequenceStore.orders`, taken at the time of the call."""
    tokens: list[int]
    full_text: str
    visible_text: VisibleText
    parent: NodeMatch | None = None
    num_kept: int = 0
    """Tokens of the parent's node that this prompt begins with."""
    messages: tuple[Hashable, ...] = ()
    """Identity of each message before the sampled one; () for text completions."""
    place: ChatPlace | None = None
    """None for text completions."""
    difference: Difference | None = None
    """Why the prompt does not continue a sampled turn that it repeats."""
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
    said: SaidTurn | None = None
    """None for text completions."""
    finish_reason: str | None
    weight_versions: list[WeightSpan] | None = None


@dataclass(slots=True, eq=False)
class _Point:
    """A point in the tree of all conversations, reached by their messages from the root."""

    matches: list[NodeMatch] = field(default_factory=list)
    """Stages of chats that end here."""
    given: str = ""
    """Text that the client appended to them."""
    next: dict[Hashable, _Point] = field(default_factory=dict)
    """The points after one more message, by its identity and by those of its recognised changes."""


class Lookup(NamedTuple):
    """What the store knows of a conversation."""

    match: NodeMatch | None
    """The longest sampled prefix."""
    difference: Difference | None
    """How the message after the known ones differs from the turns that were sampled in its place."""


class SequenceStore:
    """The nodes of one session, in the order of the calls that began them, not of the answers.

    Looking up a chat takes time linear in its messages, however many chats there are; a text prompt is compared
    with every stage.
    """

    def __init__(self, *, keep_parents: bool = False) -> None:
        self.keep_parents = keep_parents
        """Whether every turn becomes a node of its own, trained on that turn only, instead of growing its parent."""
        self.orders = itertools.count(1)
        """Numbers of the session's calls."""
        self._name = secrets.token_hex(6)
        """Begins the ids of turns, so that those of several sessions differ."""
        self._continued: list[Stage] = []
        """Stages whose next turn is being sampled."""
        self.clear()

    def clear(self) -> None:
        """Remove all nodes; a turn that was prepared before is not stored later."""
        self._cleared_at = next(self.orders)
        self._tracked: list[_Tracked] = []
        self._matches: list[NodeMatch] = []
        """Every stage, with the node that it was added to; branches share the stages before them."""
        self._chats = _Point()

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def nodes(self) -> list[SequenceNode]:
        """The nodes so far; later turns do not change them."""
        for tracked in self._tracked:
            tracked.is_shown = True
        return [tracked.node for tracked in self._tracked]

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
        self, identities: Sequence[Hashable], messages: Sequence[Message] = ()
    ) -> Lookup:
        """Return the stage that matches the longest prefix of a conversation.

        `messages`, as many, are compared with sampled turns that were not returned exactly as they were sampled, and
        the ids of their calls decide between turns that made the same tool calls.
        """
        point = self._chats
        found, index = point, -1
        difference: Difference | None = None
        for i, identity in enumerate(identities):
            following = point.next.get(identity)
            if following is None and messages and messages[i]["role"] == "assistant":
                if isinstance(messages[i]["content"], str):
                    following, difference = _recognised(point, messages[i])
                if following is not None:
                    point.next[identity] = following
            if following is None:
                break
            point = following
            if point.matches:
                found, index = point, i
        ids = call_ids(messages[index]) if messages and index >= 0 else ()

        def rank(match: NodeMatch) -> tuple[bool, bool, int, int]:
            assert match.stage.said is not None
            first = match.tracked.order, match.tracked.choice
            same_ids = ids == match.stage.said.call_ids
            return same_ids, self._can_grow(match), -first[0], -first[1]

        match = max(found.matches, key=rank, default=None)
        if match is not None and found.given:
            match = replace(match, given=found.given)
        return Lookup(match, difference)

    def find_opened(self, before: Sequence[Hashable], content: str) -> tuple[NodeMatch, str] | None:
        """Return the longest turn after `before` whose text is a prefix of `content`, and the rest of `content`."""
        point: _Point | None = self._chats
        for message in before:
            point = point and point.next.get(message)
        found = []
        for following in point.next.values() if point else ():
            for match in following.matches:
                said = match.stage.said
                if said is None or said.call_ids:
                    continue
                text = said.content
                # Text cannot follow tokens without text.
                if content.startswith(text) and (text or not content):
                    found.append((len(text), match))
        return self._longest(found, content)

    def find_text(self, prompt: str) -> tuple[NodeMatch, str] | None:
        """Return the longest stage whose text is a prefix of `prompt`, and the rest of the prompt."""
        found = []
        for match in self._matches:
            num_chars, visible_text = match.stage.num_chars, match.stage.visible_text
            if _begins(prompt, match.tracked.node.full_text, num_chars):
                found.append((num_chars, match))
            if visible_text.begins(prompt):
                found.append((visible_text.num_chars, match))
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
        if turn.order < self._cleared_at:
            return
        for sampled in completions:
            if len(sampled.tokens) != len(sampled.logprobs):
                raise EngineProtocolError(
                    f"{len(sampled.logprobs)} logprobs for {len(sampled.tokens)} sampled tokens"
                )
        parent = None if self.keep_parents or turn.parent is None else turn.parent.tracked
        changed = []
        for choice, sampled in enumerate(completions):
            if choice == 0 and parent is not None and turn.num_kept == len(parent.node.tokens):
                if parent.is_shown:
                    parent.node, parent.is_shown = self._prompt_node(turn), False
                parent.last = self._append(parent.node, turn, choice, sampled)
                changed.append(parent)
            else:
                node = self._prompt_node(turn)
                last = self._append(node, turn, choice, sampled)
                changed.append(_Tracked(order=turn.order, choice=choice, node=node, last=last))
        place = bisect_right(self._tracked, turn.order, key=lambda tracked: tracked.order)
        self._tracked[place:place] = [tracked for tracked in changed if tracked is not parent]
        point = self._chats
        for message in turn.messages:
            point = point.next.setdefault(message, _Point())
        for tracked in changed:
            match = NodeMatch(tracked=tracked, stage=tracked.last)
            self._matches.append(match)
            if match.stage.said is not None:
                answer = match.stage.said.identity
                following = point.next.get(answer)
                if following is None or following.given:
                    following = point.next[answer] = _Point()
                following.matches.append(match)

    def _can_grow(self, match: NodeMatch) -> bool:
        # Of equally long prefixes the end of a node is preferred: continuing there grows it instead of branching.
        return match.stage is match.tracked.last and match.stage not in self._continued

    def _prompt_node(self, turn: PendingTurn) -> SequenceNode:
        """Return a node of a turn's prompt, labelled as in the node that it continues."""
        tokens: list[int] = []
        labels: list[int] = []
        logprobs: list[float] = []
        spans: list[dict[str, Any]] | None = []
        turns: list[dict[str, Any]] = []
        if turn.parent is not None:
            kept, node = turn.num_kept, turn.parent.tracked.node
            tokens = first(node.tokens, kept)
            if not self.keep_parents:
                labels, logprobs = first(node.masked_tokens, kept), first(node.logprobs, kept)
                metadata = node.metadata or {}
                spans = _spans_before(metadata.get("weight_versions"), end=kept)
                turns = _spans_before(metadata["turns"], end=kept) or []
        num_given = len(turn.tokens) - len(labels)
        # Validation would visit every token.
        return SequenceNode.model_construct(
            full_text=turn.full_text,
            tokens=joined(tokens, turn.tokens[len(tokens) :]),
            masked_tokens=joined(labels, repeated(IGNORE_INDEX, num_given)),
            logprobs=joined(logprobs, repeated(MASKED_LOGPROB, num_given)),
            metadata={"weight_versions": spans, "turns": turns},
        )

    def _append(
        self, node: SequenceNode, turn: PendingTurn, choice: int, sampled: SampledTurn
    ) -> Stage:
        """Add to a node what a turn adds to it, and return its end. Takes time linear in that, not in the node."""
        given = turn.tokens[len(node.tokens) :]
        grow(node.tokens, given, sampled.tokens)
        grow(node.masked_tokens, repeated(IGNORE_INDEX, len(given)), sampled.tokens)
        grow(node.logprobs, repeated(MASKED_LOGPROB, len(given)), sampled.logprobs)
        node.full_text = turn.full_text + sampled.full_text
        metadata = node.metadata or {}
        spans, turns = metadata["weight_versions"], metadata["turns"]
        if spans is not None and sampled.weight_versions is not None:
            spans += place_spans(sampled.weight_versions, start=len(turn.tokens))
        else:
            spans = None
        if sampled.tokens:
            turns.append(
                {
                    "start": len(turn.tokens),
                    "num_tokens": len(sampled.tokens),
                    "turn": f"{self._name}.{turn.order}.{choice}",
                }
            )
        node.metadata = {
            "finish_reason": sampled.finish_reason,
            "policy_version": oldest_version(s["weight_version"] for s in spans or ()),
            "weight_versions": spans,
            "turns": turns,
        }
        return Stage(
            num_tokens=len(node.tokens),
            num_chars=len(node.full_text),
            end=sampled.end,
            visible_text=VisibleText(sampled.visible_text, after=turn.visible_text),
            place=turn.place,
            said=sampled.said,
            cut=sampled.cut,
        )


def _recognised(point: _Point, message: Message) -> tuple[_Point | None, Difference | None]:
    """Return the point of the sampled turn that a changed message repeats, else the smallest difference."""
    found: list[tuple[int, _Point]] = []
    differences: list[Difference] = []
    for following in point.next.values():
        if following.given:
            continue
        for match in following.matches:
            assert match.stage.said is not None
            given = given_after(match.stage.said, message)
            if isinstance(given, Difference):
                differences.append(given)
            elif not given:
                return following, None
            else:
                found.append((len(given), _Point(following.matches, given)))
    if found:
        return min(found, key=lambda each: each[0])[1], None
    return None, max(differences, key=lambda each: each.position, default=None)


def _begins(prompt: str, text: str, num_chars: int) -> bool:
    """Whether a prompt begins with the first characters of a text."""
    # The end first: conversations of a session have the same beginning.
    tail = max(0, num_chars - 32)
    return prompt.startswith(text[tail:num_chars], tail) and prompt.startswith(text[:num_chars])


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

    A conversation with two branches is two sequences with common turns; the second does not train those again. Turns
    are the same if their ids are, not if their tokens are: equal answers of two samples are both trained. A sequence
    without the ids of its turns (`metadata["turns"]`) is kept as it is.
    """
    num_trained: dict[str, int] = {}
    kept: list[SequenceNode] = []
    for node in nodes:
        masks = node.masked_tokens
        repeated_parts: list[slice] = []
        for turn in _turns_of(node):
            num, start = num_trained.get(turn["turn"], 0), turn["start"]
            if num:
                repeated_parts.append(slice(start, start + min(num, turn["num_tokens"])))
            num_trained[turn["turn"]] = max(num, turn["num_tokens"])
        if repeated_parts:
            masks, logprobs = list(masks), list(node.logprobs)
            for part in repeated_parts:
                num = part.stop - part.start
                masks[part], logprobs[part] = [IGNORE_INDEX] * num, [MASKED_LOGPROB] * num
            node = node.model_copy(update={"masked_tokens": masks, "logprobs": logprobs})
        if masks.count(IGNORE_INDEX) < len(masks):
            kept.append(node)
    return kept


class Ledger(NamedTuple):
    """What became of the tokens that were sampled for one rollout."""

    sampled: int
    trained: int
    """Trained positions of the sequences that are sent."""
    left_out: int
    """Sampled tokens of turns that no sent sequence contains."""

    @property
    def closes(self) -> bool:
        """Whether every sampled token is trained once or left out."""
        return self.sampled == self.trained + self.left_out


def ledger_of(nodes: Sequence[SequenceNode], chosen: Sequence[SequenceNode]) -> Ledger | None:
    """Return the ledger of a session's nodes and the sequences chosen of them; None without ids of turns."""
    if any("turns" not in (node.metadata or {}) for node in (*nodes, *chosen)):
        return None
    sampled = num_sampled(nodes)
    trained = sum(
        len(node.masked_tokens) - node.masked_tokens.count(IGNORE_INDEX) for node in chosen
    )
    return Ledger(sampled, trained, sampled - num_sampled(chosen))


def num_sampled(nodes: Iterable[SequenceNode]) -> int:
    """Return the number of tokens in the turns of sequences: of each turn, the most that one of them contains."""
    found: dict[str, int] = {}
    for node in nodes:
        for turn in _turns_of(node):
            found[turn["turn"]] = max(found.get(turn["turn"], 0), turn["num_tokens"])
    return sum(found.values())


def _turns_of(node: SequenceNode) -> list[dict[str, Any]]:
    return (node.metadata or {}).get("turns") or []


def _spans_before(spans: list[dict[str, Any]] | None, *, end: int) -> list[dict[str, Any]] | None:
    if spans is None:
        return None
    return [
        {**span, "num_tokens": min(span["num_tokens"], end - span["start"])}
        for span in spans
        if span["start"] < end
    ]
