"""The places of payloads in segments, each a table that is dropped as a whole.

A segment holds payloads until all of its groups have ended, or until the few that are left are moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from atroposlib.api.stores.base import Change

_SPARSE_SHARE: Final = 0.2
_SPARSE_S: Final = 600.0


class Location(NamedTuple):
    """Where a payload is stored."""

    segment: int
    length: int
    crc: int


@dataclass(slots=True)
class _Segment:
    """What the writer knows of one segment."""

    num_groups: int = 0
    """Held groups."""
    live_bytes: int = 0
    sparse_since_s: float | None = None


class Effects:
    """What a transaction does to the memory of the store, once it is committed. Contains the groups that it leaves."""

    def __init__(self, segments: Segments) -> None:
        self._before = segments.places
        self.located: dict[int, Location] = {}
        """Groups that were added or moved."""
        self.ended: set[int] = set()
        self.segment: int | None = None
        """The segment that was created for new payloads; None: none was."""
        self.document: bytes | None = None
        """What replaces the run's document; None: nothing."""

    def __contains__(self, number: object) -> bool:
        return number not in self.ended and (number in self.located or number in self._before)

    def end(self, change: Change) -> None:
        """Note what `change` ends. Raises KeyError, with nothing noted, if it names unknown groups."""
        change.check(self)
        self.ended |= change.ends.keys()


class Segments:
    """The segments, and the places of all held groups. Only the writer changes them; any thread may read them."""

    def __init__(self, *, max_bytes: int) -> None:
        """A segment of `max_bytes` gets no more payloads."""
        self.sizes: dict[int, int] = {}
        """Bytes of each segment."""
        self.current: int | None = None
        """The segment that new payloads go to; None: the next, to be created."""
        self.last = -1
        self.places: dict[int, Location] = {}
        """By group number. A group that is moved has a place at every moment."""
        self._max_bytes = max_bytes
        self._held: dict[int, _Segment] = {}
        """Segments with held groups."""

    def load(self, sizes: Mapping[int, int], places: Mapping[int, Location]) -> None:
        """Take over what the database says."""
        self.sizes |= sizes
        self.last = max(sizes, default=-1)
        for number, place in places.items():
            self._note(number, place)

    def take_over(self, effects: Effects) -> None:
        """Apply what a committed transaction did."""
        if effects.segment is not None:
            self.current = self.last = effects.segment
            self.sizes[effects.segment] = 0
        for number, place in effects.located.items():
            self.sizes[place.segment] += place.length
            self._note(number, place)
        for number in effects.ended:
            self._leave(self.places.pop(number))
        if self.current is not None and self.sizes[self.current] >= self._max_bytes:
            self.current = None

    def _note(self, number: int, place: Location) -> None:
        """Record where a group is, and that it left where it was before."""
        before = self.places.get(number)
        self.places[number] = place
        segment = self._held.setdefault(place.segment, _Segment())
        segment.num_groups += 1
        segment.live_bytes += place.length
        if before is not None:
            self._leave(before)

    def _leave(self, place: Location) -> None:
        segment = self._held[place.segment]
        segment.num_groups -= 1
        segment.live_bytes -= place.length
        if not segment.num_groups:
            del self._held[place.segment]

    def payload_bytes(self) -> int:
        return sum(segment.live_bytes for segment in list(self._held.values()))

    def close_empty(self) -> None:
        """Let new payloads go to another segment if the current one holds no group."""
        if self.current not in self._held:
            self.current = None

    def empty(self) -> list[int]:
        """The segments without a held group, except the current one."""
        return [n for n in self.sizes if n not in self._held and n != self.current]

    def sparse(self, now_s: float) -> Iterator[int]:
        """Yield segments of which little has been held for `_SPARSE_S`; each again only after the same time."""
        for number, segment in list(self._held.items()):
            is_full = segment.live_bytes >= _SPARSE_SHARE * self.sizes.get(number, 0)
            if number == self.current or is_full:
                segment.sparse_since_s = None
            elif segment.sparse_since_s is None:
                segment.sparse_since_s = now_s
            elif now_s - segment.sparse_since_s >= _SPARSE_S:
                segment.sparse_since_s = now_s
                yield number
