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
        """The segment that new payloads go to from now on; None: as before."""
        self.document: bytes | None = None
        """What replaces the run's document; None: nothing."""

    def __contains__(self, number: object) -> bool:
        return number not in self.ended and (number in self.located or number in self._before)

    def end(self, change: Change) -> None:
        """Note what `change` ends. Raises KeyError, with nothing noted, if it names unknown groups."""
        change.check(self)
        self.ended |= change.ends.keys()


class Segments:
    """The places of all held groups. Only the writer changes them; any thread may read them."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        """Bytes of each segment, kept by the store."""
        self.places: dict[int, Location] = {}
        """By group number. A group that is moved has a place at every moment."""
        self._held: dict[int, _Segment] = {}
        """Segments with held groups."""

    def take_over(self, effects: Effects) -> None:
        """Apply what a committed transaction did."""
        for number, place in effects.located.items():
            self.note(number, place)
        for number in effects.ended:
            self.end(number)

    def note(self, number: int, place: Location) -> None:
        """Record where a group is, and that it left where it was before."""
        before = self.places.get(number)
        self.places[number] = place
        segment = self._held.setdefault(place.segment, _Segment())
        segment.num_groups += 1
        segment.live_bytes += place.length
        if before is not None:
            self._leave(before)

    def end(self, number: int) -> None:
        """Forget a group."""
        self._leave(self.places.pop(number))

    def _leave(self, place: Location) -> None:
        segment = self._held[place.segment]
        segment.num_groups -= 1
        segment.live_bytes -= place.length
        if not segment.num_groups:
            del self._held[place.segment]

    def payload_bytes(self) -> int:
        return sum(segment.live_bytes for segment in list(self._held.values()))

    def empty(self, *, current: int | None) -> list[int]:
        """The segments without a held group, except `current`, to which groups are still added."""
        return [n for n in self.sizes if n not in self._held and n != current]

    def sparse(self, now_s: float, *, current: int | None) -> Iterator[int]:
        """Yield segments of which little has been held for `_SPARSE_S`; each again only after the same time."""
        for number, segment in list(self._held.items()):
            if number == current or segment.live_bytes >= _SPARSE_SHARE * self.sizes.get(number, 0):
                segment.sparse_since_s = None
            elif segment.sparse_since_s is None:
                segment.sparse_since_s = now_s
            elif now_s - segment.sparse_since_s >= _SPARSE_S:
                segment.sparse_since_s = now_s
                yield number
