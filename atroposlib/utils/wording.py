"""Words of messages: counts with their noun, hints for unknown names, URLs without passwords, lines of a terminal."""

from __future__ import annotations

import difflib
import logging
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

MAX_NAMES = 30
"""Valid names listed in a message."""

MIN_COLUMNS = 40
"""Narrower terminals break the lines themselves."""

_LEFT_COLUMN = re.compile(r"\s*\S.{0,36}\s{2,}")
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


def main_loss(losses: Mapping[str, int], *, num_kept: int) -> str | None:
    """Return what most of an environment's work came to, if not to groups: the words of every place that shows it.

    `losses` are those of `RunStatus.losses`, `num_kept` the groups that it made and kept.

    >>> main_loss({"dropped_equal_scores": 6599, "failed_TimeoutError": 1}, num_kept=0)
    'dropped 6,599 of 6,599 groups: equal_scores'
    >>> main_loss({"items_without_groups": 12, "failed_TimeoutError": 9, "lost_unjudged": 4}, num_kept=3)
    'made no group of 12 of 15 items: failed_TimeoutError'
    >>> main_loss({"failed_OSError": 30, "items_without_groups": 2}, num_kept=1)
    'failed 30 attempts, made 1 group: OSError'
    >>> main_loss({"dropped_equal_scores": 3}, num_kept=4) is None
    True
    """
    dropped, failed = (
        {name.removeprefix(kind): n for name, n in losses.items() if name.startswith(kind)}
        for kind in ("dropped_", "failed_")
    )
    num_dropped, num_empty = sum(dropped.values()), losses.get("items_without_groups", 0)
    num_failed = sum(failed.values())
    if num_failed > max(num_kept, num_empty, num_dropped):
        reason = max(failed, key=lambda name: failed[name])
        return f"failed {num_failed:,} attempts, made {counted(num_kept, 'group')}: {reason}"
    if num_dropped > max(num_kept, num_empty):
        reason = max(dropped, key=lambda name: dropped[name])
        return f"dropped {num_dropped:,} of {num_dropped + num_kept:,} groups: {reason}"
    if num_empty > num_kept:
        causes = {name: n for name, n in losses.items() if name.startswith(("failed_", "lost_"))}
        reason = max(causes, key=lambda name: causes[name], default="no group")
        return f"made no group of {num_empty:,} of {num_empty + num_kept:,} items: {reason}"
    return None


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


def similar_path(path: Path, *, otherwise: str) -> str:
    """Return a hint for a file that does not exist: the one of its folder most like it, else `otherwise`."""
    names = [each.name for each in path.parent.glob(f"*{path.suffix}")]

    def show(name: str) -> str:
        return str(path.with_name(name))

    return nearest(path.name, names, otherwise=otherwise, show=show, cutoff=0.7)


def columns_of(stream: TextIO) -> int | None:
    """Return the width of a terminal; None if `stream` is none, or says no width."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):  # closed, or without a descriptor
        return None


def wrapped(text: str, columns: int | None) -> str:
    """Return a text whose lines are broken between words; None leaves it. What continues a line is indented.

    In a line with two columns, a gap of two spaces or more between them, it continues below the second.

    >>> print(wrapped("error: the file is not there; give another", 40))
    error: the file is not there; give
      another
    >>> print(wrapped("  step   the trainer is at its third step of twelve", 40))
      step   the trainer is at its third
             step of twelve
    """
    if columns is None or columns < MIN_COLUMNS:
        return text
    lines = []
    for line in text.splitlines():
        left = _LEFT_COLUMN.match(line)
        hang = left.end() if left else len(line) - len(line.lstrip()) + 2
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


class TerminalFormatter(logging.Formatter):
    """Breaks lines between words where `stream` is a terminal, which shows the time and not the module."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if columns_of(stream) is None:
            super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        else:
            super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    @classmethod
    def install(cls, level: int) -> None:
        """Log to stderr in this format, unless logging is configured."""
        handler = logging.StreamHandler()
        handler.setFormatter(cls(handler.stream))
        logging.basicConfig(level=level, handlers=[handler])

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.exc_info else wrapped(text, columns_of(self._stream))
