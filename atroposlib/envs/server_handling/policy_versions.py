"""Which policy versions an item's tokens were sampled under, whatever the environment makes of the answers.

Authors build groups by hand from nodes and leave `policy_version` out; the trainer and the hub's staleness bound want
it. The runtime opens a `VersionNotes` around an item, every token request inside notes what the engine said, and the
outbox asks for the oldest. Unknown stays None: no version is claimed that the engine did not tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class _Span(Protocol):
    @property
    def weight_version(self) -> str: ...


class VersionNotes:
    """The versions noted within one item, its child tasks included."""

    def __init__(self) -> None:
        self._oldest: int | None = None
        self._is_known = True

    def add(self, answers: Sequence[Sequence[_Span] | None]) -> None:
        """Note the spans of several completions; None or a version that is no number makes the oldest unknown."""
        for spans in answers:
            versions = [span.weight_version for span in spans or ()]
            if spans is None or not all(version.isdecimal() for version in versions):
                self._is_known = False
                return
            self._oldest = min(
                [*map(int, versions), *([] if self._oldest is None else [self._oldest])],
                default=None,
            )

    @property
    def oldest(self) -> int | None:
        """The oldest version; None if one is unknown or nothing was sampled.

        >>> from collections import namedtuple
        >>> span, notes = namedtuple("span", "weight_version"), VersionNotes()
        >>> notes.add([[span("12")], [span("9"), span("10")]])
        >>> notes.oldest
        9
        >>> notes.add([None])
        >>> notes.oldest is None
        True
        """
        return self._oldest if self._is_known else None


_current: ContextVar[VersionNotes | None] = ContextVar("policy_versions", default=None)


@contextmanager
def noting_versions() -> Iterator[VersionNotes]:
    """Note what is sampled inside the block."""
    notes = VersionNotes()
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def note_versions(answers: Sequence[Sequence[_Span] | None]) -> None:
    """Note the versions of an answer, one list of spans per completion; nothing happens outside an item."""
    notes = _current.get()
    if notes is not None:
        notes.add(answers)


def oldest_noted() -> int | None:
    """Return the oldest version of the item under way; None outside an item."""
    notes = _current.get()
    return None if notes is None else notes.oldest
