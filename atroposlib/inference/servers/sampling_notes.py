"""Record how an item was sampled: policy versions, temperatures and, for `process`, every answered request.

Authors build groups by hand from nodes and leave out `policy_version` and the temperature, which the trainer and the
hub's staleness bound need. The runtime opens a `SamplingNotes` around an item, every token request of split "train"
inside it adds its temperature and the engine's versions, and the outbox reads them. An unknown version stays None.
`ItemRecord` also keeps what the rows of `process` describe: no environment has to pass it along.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

Spans = Sequence[tuple[str, int]]
"""(weight version, number of consecutive sampled tokens) in sampling order."""

Position = int | str | None
"""Where code of an item is: the number of the request that was answered to it last, before that the member of the
group that it makes, None for other code."""

position: ContextVar[Position] = ContextVar("position", default=None)


class Turn(NamedTuple):
    """One sampled completion."""

    start: int
    """Tokens before it."""
    tokens: Sequence[int]
    spans: Spans


class SamplingNotes:
    """The notes of one item, including its child tasks."""

    def __init__(self) -> None:
        self.temperatures: set[float] = set()
        """Of the completions so far; 1 if a request gave none."""
        self.key = uuid.uuid4().hex
        """Names the item to a proxy."""
        self.servers: list[Any] = []
        """Of the item's sessions so far."""
        self.turns: list[Turn] = []
        """Completions of known versions."""
        self.broken_prefixes: Counter[str] = Counter()
        """Turns that could not reuse the tokens of earlier turns, by reason."""
        self.num_asking = 0
        """Requests that wait for their answer."""
        self.num_sampled = 0
        """Sampled tokens."""
        self.fates: Counter[str] = Counter()
        """Trained positions of the item's groups: `trained`, or by the reason for which the group was dropped."""
        self._versions: set[str] = set()

    def add(self, answers: Sequence[Spans | None]) -> None:
        """Note the spans of several completions; None: their versions are unknown."""
        for spans in answers:
            self._versions.update(["unknown"] if spans is None else [span[0] for span in spans])

    @property
    def oldest(self) -> int | None:
        """The oldest version; None if one is unknown or nothing was sampled."""
        return oldest_version(self._versions)

    @property
    def has_several_versions(self) -> bool:
        """Whether several known versions sampled the item."""
        return len({version for turn in self.turns for version, _ in turn.spans}) > 1

    def versions_in(self, sequences: Iterable[Sequence[int]]) -> list[list[dict[str, Any]]]:
        """Return the spans of each sequence (`place_spans`).

        Of equal completions, each sequence gets one.

        >>> notes = SamplingNotes()
        >>> notes.turns = [Turn(1, [7, 8], [("3", 2)]), Turn(1, [7, 8], [("4", 2)])]
        >>> [[span["weight_version"] for span in spans] for spans in notes.versions_in([[5, 7, 8], [5, 7, 8], [5]])]
        [['3'], ['4'], []]
        """
        found: list[list[dict[str, Any]]] = []
        used: set[int] = set()
        for tokens in sequences:
            by_start: dict[int, int] = {}
            for number, turn in enumerate(self.turns):
                other = by_start.get(turn.start)
                is_better = other is None or (other in used and number not in used)
                if is_better and _is_at(turn, tokens):
                    by_start[turn.start] = number
            used.update(by_start.values())
            turns = [self.turns[by_start[start]] for start in sorted(by_start)]
            found.append(
                [span for turn in turns for span in place_spans(turn.spans, start=turn.start)]
            )
        return found


def _is_at(turn: Turn, tokens: Sequence[int]) -> bool:
    end = turn.start + len(turn.tokens)
    return end <= len(tokens) and list(tokens[turn.start : end]) == list(turn.tokens)


def oldest_version(versions: Iterable[str]) -> int | None:
    """Return the smallest version; None if one is unknown or there are none.

    Engines give their initial weights a name ("default"); those may be older than any number.

    >>> oldest_version(["12", "9"])
    9
    >>> oldest_version(["12", "default"]) is None
    True
    """
    known = set(versions)
    if not known or not all(version.isdecimal() for version in known):
        return None
    return min(map(int, known))


def place_spans(spans: Spans, *, start: int) -> list[dict[str, Any]]:
    """Return spans of sampled tokens with their positions in the whole sequence.

    >>> place_spans([("3", 2), ("4", 1)], start=10)
    [{'start': 10, 'num_tokens': 2, 'weight_version': '3'}, {'start': 12, 'num_tokens': 1, 'weight_version': '4'}]
    """
    placed = []
    for version, num_tokens in spans:
        placed.append({"start": start, "num_tokens": num_tokens, "weight_version": version})
        start += num_tokens
    return placed


@dataclass(slots=True, kw_only=True, eq=False)
class AnsweredRequest:
    """One answered request."""

    config: Any
    """The `APIServerConfig` of its server."""
    asked: Mapping[str, Any]
    """Its keywords."""
    answer: Any
    """A `ChatCompletion`, a `Completion` or `TokenCompletions`."""
    began_at: float
    """`time.time()`"""
    duration_s: float
    number: int
    """In the order in which the item's requests were asked."""
    after: Position
    """Where the code was that asked it."""
    messages: Sequence[Any] | None = None
    """The conversation behind a token request."""
    texts: Sequence[str] | None = None
    """The text of each completion of a token request."""


class Text(NamedTuple):
    """An episode at an API without token ids."""

    messages: list[dict[str, Any]]
    """The conversation, the last answer included."""
    completion: str
    """The last answer."""
    finish_reason: str | None


class ItemRecord(SamplingNotes):
    """The notes of one item that also hold its requests."""

    def __init__(
        self, item_id: int | None = None, item: Any = None, *, takes_text: bool = True
    ) -> None:
        super().__init__()
        self.takes_text = takes_text
        """Whether the item may be sampled from an API without token ids: its groups are not trained on."""
        self.item = item
        """As JSON."""
        self.item_id = item_id
        """Its number in the order of `get_next_item`; None for an item from the backlog."""
        self.began_at = self.duration_s = 0.0
        """Of collecting its groups; the first is `time.time()`."""
        self.num_asked = 0
        self.calls: list[AnsweredRequest] = []
        self.texts: list[Text] = []
        """Episodes at an API without token ids; a made-up sequence begins with its index (`TextSession`)."""

    def describe(self, answer: Any, *, messages: Sequence[Any] | None, texts: list[str]) -> None:
        """Add the text of a token request, which only its session knows."""
        for call in reversed(self.calls):
            if call.answer is answer or call.answer == answer:
                call.messages, call.texts = messages, texts
                return


item_notes: ContextVar[SamplingNotes | None] = ContextVar("item_notes", default=None)
"""Those of the current item; None outside an item."""


@contextmanager
def noting_sampling(notes: SamplingNotes | None = None) -> Iterator[SamplingNotes]:
    """Collect notes of what is sampled inside the block, in `notes` if given."""
    notes = SamplingNotes() if notes is None else notes
    token = item_notes.set(notes)
    try:
        yield notes
    finally:
        item_notes.reset(token)


async def run_together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order; the first failure cancels the rest and is raised.

    The first such calls of an item make the members of its group.
    """
    if len(calls) == 1:
        return [await calls[0]]
    is_group = position.get() is None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for i, call in enumerate(calls):
                context = copy_context()
                if is_group:
                    context.run(position.set, f"member {i}")
                tasks.append(group.create_task(call, context=context))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def recorded() -> ItemRecord | None:
    """Return the record of the current item; None if its requests are not recorded."""
    notes = item_notes.get()
    return notes if isinstance(notes, ItemRecord) else None


def note_sampling(
    asked: Mapping[str, Any],
    versions: Sequence[Spans | None] = (),
    *,
    prompt: Sequence[int] = (),
    outputs: Sequence[Sequence[int]] = (),
    num_sampled: int = 0,
) -> None:
    """Note what a request with the keywords `asked` sampled; does nothing outside an item or in evaluation.

    `versions` is one list of spans per completion; `outputs` are the tokens of each, sampled after `prompt`;
    `num_sampled` counts tokens without `outputs`.
    """
    notes = item_notes.get()
    if notes is None or (asked.get("split") or "train") != "train":
        return
    notes.add(versions)
    notes.num_sampled += num_sampled + sum(map(len, outputs))
    notes.turns += [
        Turn(len(prompt), tokens, spans)
        for tokens, spans in zip(outputs, versions, strict=False)
        if spans is not None
    ]
    temperature = {**asked, **(asked.get("extra_body") or {})}.get("temperature")
    notes.temperatures.add(1.0 if temperature is None else float(temperature))
