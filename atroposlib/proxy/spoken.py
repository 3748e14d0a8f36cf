"""Which part of a sampled text is a thought, and what of an unfinished text can be told already.

Pure. `divide` reads a whole text; `certain` reads its beginning and returns only what `divide`, and a parser of tool
calls, will also say of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atroposlib.inference.sessions.sampled_text import before_any

THINK, END_OF_THINK = "<think>", "</think>"


class Spoken(NamedTuple):
    """A text without the tags around its thought."""

    thought: str
    content: str


def is_opened_in(prompt: str) -> bool:
    """Whether a prompt ends with the beginning of a thought, as the templates of some models do."""
    return prompt.rstrip().endswith(THINK)


def divide(text: str, *, is_opened: bool) -> Spoken:
    """Return the thought at the beginning of a text and the rest; a thought that does not end is all there is.

    White space around the thought belongs to neither.

    >>> divide("<think>2 + 2</think>\\n\\n4", is_opened=False)
    Spoken(thought='2 + 2', content='4')
    >>> divide("2 + 2</think>4", is_opened=True)
    Spoken(thought='2 + 2', content='4')
    """
    begin = text.lstrip()
    if begin.startswith(THINK):
        begin = begin.removeprefix(THINK)
    elif not is_opened:
        return Spoken("", text)
    thought, _, content = begin.partition(END_OF_THINK)
    return Spoken(thought.strip(), content.lstrip())


def certain(
    text: str, *, has_thoughts: bool, is_opened: bool, markers: Sequence[str] | None
) -> Spoken:
    """Return what is certain of an answer that begins with `text`.

    `markers` are the texts with which a tool call may begin: () if nothing is a call, None if anything may be one. A
    parser removes the white space around calls, so that around the text is withheld as well.

    >>> certain("Let me see.\\n<tool_", has_thoughts=False, is_opened=False, markers=("<tool_call>",))
    Spoken(thought='', content='Let me see.')
    """
    if markers is None:
        return Spoken("", "")
    text = before_any(text, markers)
    if not has_thoughts:
        spoken = Spoken("", text)
    else:
        begin = text.lstrip()
        if not is_opened and (not begin or (len(begin) < len(THINK) and THINK.startswith(begin))):
            return Spoken("", "")  # it may become the tag
        spoken = divide(before_any(text, (END_OF_THINK,), cuts_whole=False), is_opened=is_opened)
        if is_opened and len(begin) < len(THINK) and THINK.startswith(begin):
            return Spoken("", "")
    if markers:
        is_kept = not spoken.content[:1].isspace()
        return Spoken(spoken.thought, spoken.content.rstrip() if is_kept else "")
    return spoken
