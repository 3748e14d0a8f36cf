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
from collections.abc import Hashable
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from atroposlib.inference.tools.messages import Message, with_parsed
from atroposlib.inference.tools.thoughts import THINK, Spoken, ThinkTags

Reason = Literal["cut", "changed", "thoughts", "calls", "template"]

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
    tags: ThinkTags = THINK
    """Around the thoughts in its content."""
    thoughts: str = ""
    """Those that are not in the content."""
    identity: Hashable = None
    """`messages.identity` of the turn."""
    call_ids: tuple[str, ...] = ()


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


def given_after(said: SaidTurn, message: Message) -> str | Difference:
    """Return the text that a client appended to a sampled turn ("" for none), or how its message differs from the turn.

    >>> said = SaidTurn("<think>Two?</think>\\n\\nIt is 2.\\n", cut="</code>")
    >>> given_after(said, {"content": "It is 2.</code>"}), given_after(said, {"content": "It is 2. Sure."})
    ('', ' Sure.')
    >>> given_after(said, {"content": "It is 3."}).position
    6
    """
    tags = said.tags
    sampled, given = _split(said.content, tags), _split(message["content"], tags)
    if said.thoughts:
        sampled = Spoken(said.thoughts.strip(), sampled.content)
    found = _given_after(said, message, sampled, given)
    if isinstance(found, Difference) and not said.thoughts:
        # Only the first thought is one where an answer mentions the tags; the client may have removed it.
        sampled = tags.divide(said.content.strip(), is_opened=tags.closing in said.content)
        text = message["content"].strip()
        for given in (tags.divide(text, is_opened=False), Spoken("", text)):
            again = _given_after(said, message, sampled, given)
            if isinstance(again, str) and not any(tag in again for tag in tags):
                return again
    return found


def _given_after(
    said: SaidTurn, message: Message, sampled: Spoken, given: Spoken
) -> str | Difference:
    calls = called(message)
    other_calls = Difference("calls", sampled=repr(said.calls), given=repr(calls))
    may_be_text = bool(said.calls) and not calls  # some agents write calls out behind the answer
    if not (calls == said.calls or may_be_text or _is_tidied(said.calls, calls)):
        return other_calls
    if isinstance(moved := message.get("reasoning_content") or message.get("reasoning"), str):
        given = Spoken(moved.strip(), given.content)
    if sampled.content == given.thought and not (given.content or sampled.thought or may_be_text):
        return ""  # cut off in thoughts that the template had opened
    if given.thought not in ("", sampled.thought):
        return _difference("thoughts", sampled.thought, given.thought)
    if given.content == sampled.content:
        return other_calls if may_be_text else ""
    begins = given.content.startswith(sampled.content)
    if calls or not begins or not (sampled.content or may_be_text):
        is_cut = sampled.content.startswith(given.content)
        return _difference("cut" if is_cut else "changed", sampled.content, given.content)
    space = said.content[len(said.content.rstrip()) :]
    rest = message["content"].lstrip()
    rest = rest if rest.startswith(sampled.content) else given.content
    appended = _without_beginning(rest[len(sampled.content) :], space + said.cut)
    if may_be_text:
        return appended if all(name in appended for name, _ in said.calls) else other_calls
    before = said.cut or rest.removesuffix(appended)
    if appended[:1].isalnum() and before[-1].isalnum():
        return _difference("changed", sampled.content, given.content)  # another last word
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


def _split(text: str, tags: ThinkTags) -> Spoken:
    """Split a turn into all of its thoughts and its answer; some templates open the first thought in the prompt."""
    opening, closing = map(text.find, tags)
    if closing >= 0 and not 0 <= opening < closing:
        text = tags.opening + text
    block = re.compile("(.*?)".join(map(re.escape, tags)), re.DOTALL)
    answer, _, unfinished = block.sub("", text).partition(tags.opening)
    thoughts = [*block.findall(text), unfinished]
    return Spoken("\n".join(filter(None, map(str.strip, thoughts))), answer.strip())


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
