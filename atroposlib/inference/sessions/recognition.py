"""Whether a turn in a client's history is the one that was sampled, whatever the client changed about it.

Agents strip white space, remove thoughts or move them to a field of their own, tidy the arguments of calls, add the
stop string back, and append text. Such a turn continues the sampled tokens; appended text follows them as given text,
which is never a target.
Anything else differs: its tokens are not those that were sampled, so the conversation begins another sequence.
Pure; called by `SequenceStore` for turns that were not returned exactly.
"""

from __future__ import annotations

import json
import re
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from atroposlib.inference.sessions.messages import Message, with_parsed

Reason = Literal["cut", "changed", "thoughts", "calls", "template"]

_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_NUM_SHOWN = 20
"""Characters shown on each side of the first changed one."""


class SaidTurn(NamedTuple):
    """A sampled turn as its caller got it."""

    content: str
    """Including a beginning that the caller wrote."""
    cut: str = ""
    """Sampled text behind it that the caller did not get: the stop string that ended it, and what follows."""
    calls: tuple[tuple[str, Any], ...] = ()
    """Name and parsed arguments of each tool call."""
    thoughts: str = ""
    """Those that are not in the content."""


class Difference(NamedTuple):
    """Why a conversation could not continue the tokens of a turn."""

    reason: Reason
    """cut: the end of the answer is missing; changed: another answer; thoughts, calls: other ones;
    template: the chat template rewrites the turn."""
    position: int = 0
    """Of the first changed character in the answer (`thoughts`: in the thoughts)."""
    sampled: str = ""
    """The sampled text around it."""
    given: str = ""
    """The client's text around it."""

    def __str__(self) -> str:
        if self.reason in ("calls", "template"):
            return f"{self.sampled[:200]} became {self.given[:200]}"
        return f"character {self.position}: {self.sampled!r} became {self.given!r}"


class _Split(NamedTuple):
    thoughts: str
    answer: str


def given_after(said: SaidTurn, message: Message) -> str | Difference:
    """Return the text that a client appended to a sampled turn ("" for none), or how its message differs from the turn.

    >>> said = SaidTurn("<think>Two?</think>\\n\\nIt is 2.\\n", cut="</code>")
    >>> given_after(said, {"content": "It is 2.</code>"}), given_after(said, {"content": "It is 2. Sure."})
    ('', ' Sure.')
    >>> given_after(said, {"content": "It is 3."}).position
    6
    """
    calls = called(message)
    other_calls = Difference("calls", sampled=repr(said.calls), given=repr(calls))
    may_be_text = bool(said.calls) and not calls  # some agents write calls out behind the answer
    if not (calls == said.calls or may_be_text or _is_tidied(said.calls, calls)):
        return other_calls
    sampled, given = _split(said.content), _split(message["content"])
    if said.thoughts:
        sampled = _Split(said.thoughts.strip(), sampled.answer)
    if isinstance(moved := message.get("reasoning_content") or message.get("reasoning"), str):
        given = _Split(moved.strip(), given.answer)
    if sampled.answer == given.thoughts and not (given.answer or sampled.thoughts or may_be_text):
        return ""  # cut off in thoughts that the template had opened
    if given.thoughts not in ("", sampled.thoughts):
        return _difference("thoughts", sampled.thoughts, given.thoughts)
    if given.answer == sampled.answer:
        return other_calls if may_be_text else ""
    begins = given.answer.startswith(sampled.answer)
    if calls or not begins or not (sampled.answer or may_be_text):
        is_cut = sampled.answer.startswith(given.answer)
        return _difference("cut" if is_cut else "changed", sampled.answer, given.answer)
    space = said.content[len(said.content.rstrip()) :]
    rest = message["content"].lstrip()
    rest = rest if rest.startswith(sampled.answer) else given.answer
    appended = _without_beginning(rest[len(sampled.answer) :], space + said.cut)
    if may_be_text:
        return appended if all(name in appended for name, _ in said.calls) else other_calls
    if appended[:1].isalnum() and (sampled.answer + said.cut)[-1].isalnum():
        return _difference("changed", sampled.answer, given.answer)  # another last word
    return appended if appended.strip() else ""


def called(message: Message) -> tuple[tuple[str, Any], ...]:
    """Return the name and the parsed arguments of each tool call of a message."""
    functions = [with_parsed(call)["function"] for call in message.get("tool_calls") or ()]
    return tuple((str(each.get("name")), each.get("arguments")) for each in functions)


def _is_tidied(sampled: Any, given: Any) -> bool:
    """Whether arguments are the sampled ones after a client filled in defaults, changed types and white space, or
    removed the first words, such as a `cd` into the folder where a command runs anyway.

    >>> _is_tidied({"command": "cd /a && ls"}, {"command": "ls", "timeout": 5}), _is_tidied("12", 12)
    (True, True)
    """
    if isinstance(sampled, dict) and isinstance(given, dict):
        return sampled.keys() <= given.keys() and all(
            _is_tidied(value, given[key]) for key, value in sampled.items()
        )
    if isinstance(sampled, list | tuple) and isinstance(given, list | tuple):
        return len(sampled) == len(given) and all(map(_is_tidied, sampled, given))
    before, after = (
        (value if isinstance(value, str) else json.dumps(value)).split()
        for value in (sampled, given)
    )
    return before[-len(after) :] == after if after else not before


def _split(text: str) -> _Split:
    """Split a turn into its thoughts and its answer; some templates open the first thought in the prompt."""
    opening, closing = text.find("<think>"), text.find("</think>")
    if closing >= 0 and not 0 <= opening < closing:
        text = "<think>" + text
    answer, _, unfinished = _BLOCK.sub("", text).partition("<think>")
    thoughts = [*_BLOCK.findall(text), unfinished]
    return _Split("\n".join(filter(None, map(str.strip, thoughts))), answer.strip())


def _difference(reason: Reason, sampled: str, given: str) -> Difference:
    at = len(commonprefix([sampled, given]))
    around = slice(max(0, at - _NUM_SHOWN), at + _NUM_SHOWN)
    return Difference(reason, at, sampled[around], given[around])


def _without_beginning(text: str, repeated: str) -> str:
    """Return a text without a beginning that repeats another text, white space aside; else the whole text.

    >>> _without_beginning("\\n</code> x", "</code>\\n"), _without_beginning("\\nx", "</code>")
    ('x', '\\nx')
    """
    at = other = 0
    while at < len(text) and other < len(repeated):
        if text[at] == repeated[other]:
            at, other = at + 1, other + 1
        elif text[at].isspace():
            at += 1
        elif repeated[other].isspace():
            other += 1
        else:
            return text
    return text[at:]
