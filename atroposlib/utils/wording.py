"""Words of messages: counts with their noun, and hints for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAMES = 30
"""Valid names listed in a message."""


def counted(count: int, noun: str) -> str:
    """Return `1 group` or `2 groups`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint for an unknown name.

    >>> nearest("hbu", ["hub", "engine"]), nearest("x", ["hub", "engine"])
    ('did you mean hub?', 'valid: hub, engine')
    """
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    if close:
        return f"did you mean {close[0]}?"
    return f"valid: {', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''}"
