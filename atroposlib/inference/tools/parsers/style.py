"""What all tool call styles share: calls, the two functions of a style, and the text around calls.

Two rules: calls inside a closed thinking block are not calls, and the text outside the calls is the content.
"""

from __future__ import annotations

import bisect
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from atroposlib.inference.tools.messages import as_dict
from atroposlib.inference.tools.thoughts import THINK_TAGS

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool descriptions in the OpenAI form."""

_THINKING_END = re.compile("|".join(re.escape(tags.closing) for tags in THINK_TAGS))


class Call(NamedTuple):
    """One call."""

    name: str
    arguments: str
    """The text of a JSON object, verbatim if the model wrote valid JSON."""
    id: str | None = None
    """The id that the model wrote; None if it wrote none."""


class ToolCallParser(Protocol):
    """An author's parser of tool calls."""

    def parse(self, text: str) -> tuple[str | None, Sequence[Any] | None]:
        """Return the content of an answer and its calls in the OpenAI form; None for none."""


def call_from(tool_call: Any) -> Call:
    """Convert a call in the OpenAI form, with arguments as text or as an object."""
    function = as_dict(as_dict(tool_call).get("function") or {})
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return Call(str(function.get("name", "")), arguments.strip() or "{}")


class FoundCalls(NamedTuple):
    """Adjacent calls in a text."""

    start: int
    end: int
    """Their positions in the text, including delimiters."""
    calls: tuple[Call, ...]


class Parsed(NamedTuple):
    """The content and calls of a text."""

    content: str
    """The text outside the calls; the whole text, unchanged, if there are none."""
    calls: tuple[Call, ...]


class Read(NamedTuple):
    """An answer without its end of turn, and what was parsed."""

    text: str
    parsed: Parsed
    thoughts: str
    """Of formats that mark them by more than think tags, which are content."""


class Thought(NamedTuple):
    """A thought that is no content."""

    text: str


Part: TypeAlias = str | Call | Thought


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One format of tool calls."""

    name: str
    split: Callable[[str, Tools], list[Part]]
    """Split a model's answer into calls, thoughts and text, in order. Formats without types need the tools."""
    render: Callable[[Sequence[Call]], str]
    """Write calls as the model would."""
    markers: tuple[str, ...]
    """Texts that occur only in (attempted) calls. Some tokenizers have them as special tokens."""
    opens: tuple[str, ...] | None = None
    """Texts one of which begins every call; None if the markers do, or if any text may when there are no markers."""
    new_id: Callable[[], str] = _new_id
    """Return an id for a call that has none."""
    begun: Callable[[str], str] | None = None
    """Return what of an unfinished answer `split` reads as in the whole one. Only for formats with markers around
    thoughts and content (channels): their answers are read with special tokens, with or without tools."""

    @property
    def starts(self) -> tuple[str, ...] | None:
        """Texts before the first of which an answer has no call; None if a call may begin anywhere."""
        return self.opens or self.markers or None

    def parse(self, text: str, tools: Tools = ()) -> Parsed:
        """Return the calls and the content of a model's answer.

        >>> from atroposlib.inference.tools.parsers import style_named
        >>> style_named("hermes").parse('Hm. <tool_call>{"name": "now", "arguments": {}}</tool_call>')
        Parsed(content='Hm.', calls=(Call(name='now', arguments='{}', id=None),))
        """
        return self.read(text, tools).parsed

    def read(self, text: str, tools: Tools = ()) -> Read:
        """Return the content, the calls and the thoughts of an answer."""
        parts = self.split(text, tools)
        calls = tuple(part for part in parts if isinstance(part, Call))
        pieces = [part.strip() if calls else part for part in parts if isinstance(part, str)]
        thoughts = [part.text for part in parts if isinstance(part, Thought)]
        content, thought = ("\n".join(filter(None, texts)) for texts in (pieces, thoughts))
        return Read(text, Parsed(content, calls), thought)


_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
"""A lone surrogate, or the JSON escape of a surrogate, which may be half of a valid pair."""


def sendable(call: Call) -> Call:
    """Replace lone surrogates, which JSON can express but UTF-8 cannot."""
    if not any(text and _SURROGATE.search(text) for text in call):
        return call
    arguments = call.arguments
    try:
        value = json.loads(arguments, strict=False)
        written = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        written = arguments
    if _repaired(written) != written:
        arguments = _repaired(written)
    return Call(_repaired(call.name), arguments, call.id and _repaired(call.id))


def _repaired(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def by_places(
    find: Callable[[str, Tools], list[FoundCalls]],
) -> Callable[[str, Tools], list[Part]]:
    """Return a style's `split` for a function that finds the well-formed calls of a text, in order."""

    def split(text: str, tools: Tools) -> list[Part]:
        found = find(text, tools)
        thinking_end = _end_of_thinking(text, found)
        parts: list[Part] = []
        at = 0
        for one in found:
            if one.start >= thinking_end:
                parts += [text[at : one.start], *map(sendable, one.calls)]
                at = one.end
        return [*parts, text[at:]]

    return split


def _end_of_thinking(text: str, found: Sequence[FoundCalls]) -> int:
    """Return where the last thinking block ends; an end tag inside a call is part of an argument."""
    starts = [one.start for one in found]
    for match in reversed(list(_THINKING_END.finditer(text))):
        index = bisect.bisect_right(starts, match.start()) - 1
        if index < 0 or match.start() >= found[index].end:
            return match.end()
    return 0
