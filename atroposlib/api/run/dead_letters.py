"""Dead groups: kept, but not delivered, until they are requeued or their bytes are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atroposlib.api.run.types import GroupHeader


class DeadLetter(NamedTuple):
    header: GroupHeader
    reason: str


class DeadLetters:
    """Dead groups in the order in which they were set aside; payloads are in the store."""

    def __init__(self) -> None:
        self._by_number: dict[int, DeadLetter] = {}
        self._num_bytes = 0
        self._reasons: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[DeadLetter]:
        return iter(self._by_number.values())

    def add(self, header: GroupHeader, reason: str) -> None:
        self._by_number[header.number] = DeadLetter(header, reason)
        self._num_bytes += header.num_bytes
        self._reasons[_kind(reason)] += 1

    def reasons(self) -> dict[str, int]:
        """Count the groups by reason, without the part after the colon, which is about one group."""
        return {reason: count for reason, count in self._reasons.items() if count}

    def take(self, numbers: Iterable[int]) -> list[GroupHeader]:
        """Remove and return those of `numbers` that are here, in the order given."""
        taken = []
        for number in numbers:
            letter = self._by_number.pop(number, None)
            if letter is not None:
                self._num_bytes -= letter.header.num_bytes
                self._reasons[_kind(letter.reason)] -= 1
                taken.append(letter.header)
        return taken

    def take_beyond(self, max_bytes: int) -> list[GroupHeader]:
        """Remove and return the oldest until the payloads of the rest take at most `max_bytes`."""
        taken: list[GroupHeader] = []
        while self._num_bytes > max_bytes:
            taken += self.take([next(iter(self._by_number))])
        return taken


def _kind(reason: str) -> str:
    return reason.partition(":")[0]
