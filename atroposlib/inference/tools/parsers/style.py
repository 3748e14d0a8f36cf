"""What every tool call style shares: its calls, its two functions, and the text around the calls.

Owns two rules: calls inside a closed thinking block are not calls, and the text outside the calls is the content.
"""

from __future__ import annotations

import bisect
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool descriptions in the OpenAI form."""

THINKING_ENDS = ("</think>", "[/THINK]")
_THINKING_END = re.compile("|".join(map(re.escape, THINKING_ENDS)))


class Call(NamedTuple):
    """One call."""

    name: str
    arguments: str
    """A JSON object as text, as the model wrote it wherever that is valid JSON."""
    id: str | None = None
    """Only where the model itself wrote one."""


class Found(NamedTuple):
    """Calls that stand together in a text."""

    start: int
    end: int
    """Where they begin and end, with the marks around them."""
    calls: tuple[Call, ...]


class Parsed(NamedTuple):
    """A text taken apart."""

    content: str
    """What is not a call; the whole text, unchanged, when there is no call."""
    calls: tuple[Call, ...]


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way of writing tool calls."""

    name: str
    split: Callable[[str, Tools], list[str | Call]]
    """Take a model's answer apart: calls, and the text between them, in order. Some styles write values without their
    types: these need the tools."""
    render: Callable[[Sequence[Call]], str]
    """Write calls as the model would."""
    markers: tuple[str, ...]
    """Texts that only an attempted call holds. Some tokenizers have them as special tokens."""
    new_id: Callable[[], str] = _new_id
    """Make an id for a call that has none."""

    def parse(self, text: str, tools: Tools = ()) -> Parsed:
        """Return the calls of a model's answer, and its content.

        >>> from atroposlib.inference.tools.parsers import style_named
        >>> style_named("hermes").parse('Hm. <tool_call>{"name": "now", "arguments": {}}</tool_call>')
        Parsed(content='Hm.', calls=(Call(name='now', arguments='{}', id=None),))
        """
        parts = self.split(text, tools)
        calls = tuple(part for part in parts if isinstance(part, Call))
        if not calls:
            return Parsed(text, ())
        pieces = [part.strip() for part in parts if isinstance(part, str)]
        return Parsed("\n".join(filter(None, pieces)), calls)


_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
"""Half of a character, as itself or as JSON writes it; pairs of the latter are a character."""


def sendable(call: Call) -> Call:
    """Replace half characters (lone surrogates), which JSON can write and no UTF-8 can hold."""
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
    find: Callable[[str, Tools], list[Found]],
) -> Callable[[str, Tools], list[str | Call]]:
    """Make a style's `split` of a function that finds the well-formed calls of a text, in order."""

    def split(text: str, tools: Tools) -> list[str | Call]:
        found = find(text, tools)
        thinking_end = _end_of_thinking(text, found)
        parts: list[str | Call] = []
        at = 0
        for one in found:
            if one.start >= thinking_end:
                parts += [text[at : one.start], *map(sendable, one.calls)]
                at = one.end
        return [*parts, text[at:]]

    return split


def _end_of_thinking(text: str, found: Sequence[Found]) -> int:
    """Return where the last thinking block ends; an end mark inside a call is an argument's text."""
    starts = [one.start for one in found]
    for match in reversed(list(_THINKING_END.finditer(text))):
        index = bisect.bisect_right(starts, match.start()) - 1
        if index < 0 or match.start() >= found[index].end:
            return match.end()
    return 0
