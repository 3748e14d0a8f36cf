"""What of an unfinished text can be told already.

Pure. `certain` returns only what `ThinkTags.divide`, and a parser of tool calls, will also say of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.inference.sessions.sampled_text import before_any
from atroposlib.inference.tools.thoughts import Spoken, ThinkTags


def certain(
    text: str, *, tags: ThinkTags | None, is_opened: bool, markers: Sequence[str] | None
) -> Spoken:
    """Return what is certain of an answer that begins with `text`; `tags` None: it has no thoughts.

    `markers` are the texts with which a tool call may begin: () if nothing is a call, None if anything may be one. A
    parser removes the white space around calls, so that around the text is withheld as well.

    >>> certain("Let me see.\\n<tool_", tags=None, is_opened=False, markers=("<tool_call>",))
    Spoken(thought='', content='Let me see.')
    """
    if markers is None:
        return Spoken("", "")
    text = before_any(text, markers)
    if tags is None:
        spoken = Spoken("", text)
    else:
        begin = text.lstrip()
        if begin != tags.opening and tags.opening.startswith(begin):
            return Spoken("", "")  # it may become the tag
        spoken = tags.divide(
            before_any(text, (tags.closing,), cuts_whole=False), is_opened=is_opened
        )
    if markers:
        is_kept = not spoken.content[:1].isspace()
        return Spoken(spoken.thought, spoken.content.rstrip() if is_kept else "")
    return spoken
