"""The queued groups of one run, indexed so that no query scans the queue; and its dead groups.

Invariant: every queued group is in the line of its size, in that of its environment (both oldest first), and in the
index of its version. Used from one thread. `RunState` decides what leaves the queue, `batching` which groups form a
batch.

>>> queue = GroupQueue()
>>> for number, size in enumerate([3, 4, 4]):
...     queue.add(GroupHeader(number=number, env_id=0, num_sequences=size))
>>> batch = queue.plan(batch_size=8, floors={})
>>> [group.number for group in batch.groups]
[1, 2]
>>> queue.remove(batch.groups)
>>> queue.num_sequences(0)
3
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from atroposlib.api.run.batching import NoBatch, Plan, plan_lines
from atroposlib.scored_data import GroupHeader


class GroupQueue:
    """Headers of queued groups in arrival order, which is the order of their numbers."""

    def __init__(self) -> None:
        self.total_sequences = 0
        self.total_bytes = 0
        self.total_tokens = 0
        self.version = 0
        """Increases with every change."""
        self.supplies: dict[int | None, int] = {}
        """Queued sequences by environment; only of those that have some. Read-only for others."""
        self._num_supplying: dict[int, int] = {}
        """How many environments have so many sequences queued."""
        self._num_groups = 0
        self._lines: defaultdict[int, _Line] = defaultdict(_Line)
        self._environments: defaultdict[int | None, _Line] = defaultdict(_Line)
        self._versions: defaultdict[int, dict[int, GroupHeader]] = defaultdict(dict)

    def __len__(self) -> int:
        return self._num_groups

    def __iter__(self) -> Iterator[GroupHeader]:
        """In arrival order; scans the queue."""
        return heapq.merge(*self._lines.values(), key=_number)

    def add(self, header: GroupHeader) -> None:
        """Queue a group. A returning group, with a lower number than others, gets its old position."""
        same_version = self._versions[header.version]
        assert header.number not in same_version, f"group {header.number} is queued already"
        same_version[header.number] = header
        self._lines[header.num_sequences].add(header)
        self._environments[header.env_id].add(header)
        self._count(header, +1)

    def remove(self, headers: Iterable[GroupHeader]) -> None:
        """Take groups out. Raises KeyError for one that is not queued."""
        for header in headers:
            version, size, env_id = header.version, header.num_sequences, header.env_id
            del self._versions[version][header.number]
            self._lines[size].remove(header)
            self._environments[env_id].remove(header)
            if not self._versions[version]:
                del self._versions[version]
            if not self._lines[size]:
                del self._lines[size]
            if not self._environments[env_id]:
                del self._environments[env_id]
            self._count(header, -1)

    def _count(self, header: GroupHeader, sign: int) -> None:
        self._num_groups += sign
        self.total_sequences += sign * header.num_sequences
        self.total_bytes += sign * header.num_bytes
        self.total_tokens += sign * header.num_tokens
        self.version += 1
        before = self.supplies.pop(header.env_id, 0)
        after = before + sign * header.num_sequences
        if after:
            self.supplies[header.env_id] = after
            self._num_supplying[after] = self._num_supplying.get(after, 0) + 1
        if before:
            self._num_supplying[before] -= 1
            if not self._num_supplying[before]:
                del self._num_supplying[before]

    # Counts

    def num_sequences(self, env_id: int | None) -> int:
        return self.supplies.get(env_id, 0)

    def num_rounded(self, multiple: int) -> int:
        """Sequences, those of each environment rounded up to a `multiple`."""
        counts = self._num_supplying.items()
        return sum(rounded(supply, multiple) * num for supply, num in counts)

    def largest(self, env_id: int | None) -> int:
        """Sequences of the environment's largest queued group; 0 without any."""
        own = self._environments.get(env_id)
        return 0 if own is None else max(own.sizes)

    def num_of_size(self, num_sequences: int) -> int:
        return len(self._lines[num_sequences]) if num_sequences in self._lines else 0

    def largest_of_all(self) -> int:
        """Sequences of the largest queued group; 0 without any."""
        return max(self._lines, default=0)

    # Versions

    def versions(self) -> Mapping[int, int]:
        """Number of queued groups by policy version (for a group that names none: by the version at its arrival)."""
        return {version: len(groups) for version, groups in self._versions.items()}

    def stale(self, oldest_version: int) -> list[GroupHeader]:
        """Groups of a version older than `oldest_version`, in arrival order."""
        old = [groups for version, groups in self._versions.items() if version < oldest_version]
        return sorted((header for groups in old for header in groups.values()), key=_number)

    # Batches

    def plan(
        self, *, batch_size: int, floors: Mapping[int, int], overdue_before: int | None = None
    ) -> Plan | NoBatch:
        """Choose the next batch, see `plan_lines`; nothing is removed.

        With `overdue_before`, groups of an older version take precedence: of the oldest of each size and of each
        environment with a floor, the first that can be part of a batch is part of this one.
        """
        own: dict[int | None, _Line] = {
            each: self._environments[each] for each in floors if each in self._environments
        }
        overdue: list[GroupHeader] = []
        if (
            overdue_before is not None
            and min(self._versions, default=overdue_before) < overdue_before
        ):
            oldest = {next(iter(line)) for line in (*self._lines.values(), *own.values())}
            late = [header for header in oldest if header.version < overdue_before]
            overdue = sorted(late, key=_number)
        return plan_lines(
            self._lines, own=own, batch_size=batch_size, floors=floors, overdue=overdue
        )


class _Line:
    """Queued groups of one size or of one environment, oldest first."""

    __slots__ = ("_arrived", "_returned", "sizes")

    def __init__(self) -> None:
        # Iteration skips entries removed at the front: 1 ms after 200,000 groups. An OrderedDict would not, but takes
        # 52 more bytes per group, and adding a group to the queue then takes 1.7 times as long.
        self._arrived: dict[int, GroupHeader] = {}
        self._returned: list[GroupHeader] = []
        """By number. Short: only groups that return after later ones have arrived."""
        self.sizes: dict[int, int] = {}
        """Groups by number of sequences; no entry for a size without any."""

    def __len__(self) -> int:
        return len(self._arrived) + len(self._returned)

    def __iter__(self) -> Iterator[GroupHeader]:
        if not self._returned:
            return iter(self._arrived.values())
        return heapq.merge(self._arrived.values(), self._returned, key=_number)

    def add(self, header: GroupHeader) -> None:
        if not self._arrived or header.number > next(reversed(self._arrived)):
            self._arrived[header.number] = header
        else:
            insort(self._returned, header, key=_number)
        self.sizes[header.num_sequences] = self.sizes.get(header.num_sequences, 0) + 1

    def remove(self, header: GroupHeader) -> None:
        if header.number in self._arrived:
            del self._arrived[header.number]
        else:
            del self._returned[bisect_left(self._returned, header.number, key=_number)]
        self.sizes[header.num_sequences] -= 1
        if not self.sizes[header.num_sequences]:
            del self.sizes[header.num_sequences]


def rounded(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


_number = attrgetter("number")


class DeadLetter(NamedTuple):
    header: GroupHeader
    reason: str


class DeadLetters:
    """Groups that are kept but not delivered, until they are requeued or their bytes are needed, in the order in which
    they were set aside."""

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
