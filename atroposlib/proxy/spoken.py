"""What of an unfinished text can be told already.

Pure. `certain` returns only what `ThinkTags.divide`, and a parser of tool calls, will also say of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atroposlib.inference.sessions.sampled_text import before_any
from atroposlib.inference.tools.parsers import Style
from atroposlib.inference.tools.thoughts import Spoken, ThinkTags


def certain(
    text: str,
    *,
    tags: ThinkTags | None,
    is_opened: bool,
    style: Style | None,
    tools: Sequence[Any] = (),
) -> Spoken:
    """Return what is certain of an answer that begins with `text`; `tags` None: it has no thoughts between tags.

    `style` is the format of calls, which only an answer with `tools` has. A parser removes the white space around
    calls, so that around the text is withheld as well.

    >>> from atroposlib.inference.tools.parsers import STYLES
    >>> certain("Let me see.\\n<tool_", tags=None, is_opened=False, style=STYLES["hermes"], tools=[{}])
    Spoken(thought='', content='Let me see.')
    """
    if style and style.begun:
        read = style.read(style.begun(before_any(text, style.markers, cuts_whole=False)), tools)
        return Spoken(read.thoughts, read.parsed.content.rstrip())
    starts = style.starts if style and tools else ()
    if starts is None:
        return Spoken("", "")
    text = before_any(text, starts)
    if tags is None:
        spoken = Spoken("", text)
    else:
        begin = text.lstrip()
        if begin != tags.opening and tags.opening.startswith(begin):
            return Spoken("", "")  # it may become the tag
        spoken = tags.divide(
            before_any(text, (tags.closing,), cuts_whole=False), is_opened=is_opened
        )
    if starts:
        is_kept = not spoken.content[:1].isspace()
        return Spoken(spoken.thought, spoken.content.rstrip() if is_kept else "")
    return spoken
