"""Words of messages: counts with their noun, hints for unknown names, URLs without passwords."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

MAX_NAMES = 30
"""Valid names listed in a message."""

_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]+@")


def without_users(text: str) -> str:
    """Return a text with the users and passwords of its URLs masked.

    >>> without_users("engine down http://me:p@ss@host:9001/v1")
    'engine down http://***@host:9001/v1'
    """
    return _USER_IN_URL.sub("***@", text)


def counted(count: int, noun: str) -> str:
    """Return `1 group` or `2 groups`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nearest(
    name: str,
    valid: Iterable[str],
    *,
    otherwise: str | None = None,
    show: Callable[[str], str] = str,
    cutoff: float = 0.5,
) -> str:
    """Return a hint for an unknown name: the valid one most like it, as `show` writes it.

    If no likeness (`difflib`) reaches `cutoff`, return `otherwise`; None lists the valid names.

    >>> nearest("hbu", ["hub", "engine"]), nearest("x", ["hub", "engine"])
    ('did you mean hub?', 'valid: hub, engine')
    """
    names = list(valid)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
        return f"did you mean {show(close[0])}?"
    if otherwise is not None:
        return otherwise
    return f"valid: {', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''}"
