"""Record the policy versions and temperatures that an item was sampled with.

Authors build groups by hand from nodes and leave out `policy_version` and the temperature, which the trainer and the
hub's staleness bound need. The runtime opens a `SamplingNotes` around an item, every token request of split "train"
inside it adds its temperature and the engine's versions, and the outbox reads them. An unknown version stays None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Spans = Sequence[tuple[str, int]]
"""(weight version, number of consecutive sampled tokens) in sampling order."""


class SamplingNotes:
    """The notes of one item, including its child tasks."""

    def __init__(self) -> None:
        self.temperatures: set[float] = set()
        """Of the completions so far; 1 if a request gave none."""
        self._oldest: int | None = None
        self._is_known = True

    def add(self, answers: Sequence[Spans | None]) -> None:
        """Note the spans of several completions; None or a version that is not a number makes `oldest` None."""
        for spans in answers:
            versions = [version for version, _ in spans or ()]
            if spans is None or not all(version.isdecimal() for version in versions):
                self._is_known = False
                return
            known = [] if self._oldest is None else [self._oldest]
            self._oldest = min([*map(int, versions), *known], default=None)

    @property
    def oldest(self) -> int | None:
        """The oldest version; None if one is unknown or nothing was sampled.

        >>> notes = SamplingNotes()
        >>> notes.add([[("12", 5)], [("9", 1), ("10", 4)]])
        >>> notes.oldest
        9
        >>> notes.add([None])
        >>> notes.oldest is None
        True
        """
        return self._oldest if self._is_known else None


_current: ContextVar[SamplingNotes | None] = ContextVar("sampling_notes", default=None)


@contextmanager
def noting_sampling() -> Iterator[SamplingNotes]:
    """Collect notes of what is sampled inside the block."""
    notes = SamplingNotes()
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def noted() -> SamplingNotes | None:
    """Return the notes of the current item; None outside an item."""
    return _current.get()


def note_sampling(asked: Mapping[str, Any], versions: Sequence[Spans | None] = ()) -> None:
    """Note what a request with the keywords `asked` sampled; does nothing outside an item or in evaluation.

    `versions` is one list of spans per completion.
    """
    notes = _current.get()
    if notes is None or (asked.get("split") or "train") != "train":
        return
    notes.add(versions)
    temperature = {**asked, **(asked.get("extra_body") or {})}.get("temperature")
    notes.temperatures.add(1.0 if temperature is None else float(temperature))
