"""The queued groups of one run, indexed so that no question costs the length of the queue.

Invariant: every queued group is in the line of its kind, oldest first, and in the counts of its environment and of its
version. The coordinator calls it, from one thread; what leaves the queue and where it goes is the coordinator's
business, which groups make up a batch is `batching`'s.

>>> queue = GroupQueue()
>>> for number, size in enumerate([3, 4, 4]):
...     queue.add(GroupHeader(number=number, env_id=0, num_sequences=size))
>>> batch = queue.plan(batch_size=8)
>>> [group.number for group in queue.remove(group.number for group in batch.groups)]
[1, 2]
>>> queue.num_sequences(0)
3
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from atroposlib.api.batching import NO_FLOORS, GroupHeader, Kind, NoBatch, Plan, plan_lines


class GroupQueue:
    """Headers of queued groups in arrival order, which is the order of their numbers."""

    def __init__(self) -> None:
        self.total_sequences = 0
        self.total_bytes = 0
        self.total_tokens = 0
        self._headers: dict[int, GroupHeader] = {}
        self._lines: dict[Kind, _Line] = {}
        self._environments: dict[int | None, _Totals] = {}
        self._sizes: Counter[int] = Counter()
        self._versions: dict[int, dict[int, GroupHeader]] = {}
        self._sorted_versions: list[int] = []

    def __len__(self) -> int:
        return len(self._headers)

    def __iter__(self) -> Iterator[GroupHeader]:
        """In arrival order. Costs the length of the queue."""
        return map(self._headers.__getitem__, sorted(self._headers))

    def __contains__(self, number: int) -> bool:
        return number in self._headers

    def add(self, header: GroupHeader) -> None:
        """Queue a group. A group that returns, with a number lower than others, gets its old place."""
        number = header.number
        assert number not in self._headers, f"group {number} is queued already"
        self._headers[number] = header
        kind = _kind(header)
        if kind not in self._lines:
            self._lines[kind] = _Line()
        self._lines[kind].add(header)
        if header.env_id not in self._environments:
            self._environments[header.env_id] = _Totals()
        self._environments[header.env_id].count(header, +1)
        self._sizes[header.num_sequences] += 1
        version = _version(header)
        if version not in self._versions:
            self._versions[version] = {}
            insort(self._sorted_versions, version)
        self._versions[version][number] = header
        self.total_sequences += header.num_sequences
        self.total_bytes += header.num_bytes
        self.total_tokens += header.num_tokens

    def remove(self, numbers: Iterable[int]) -> list[GroupHeader]:
        """Take groups out and return them in the order asked; all, or none and KeyError for one that is absent."""
        headers = {number: self._headers[number] for number in numbers}
        for header in headers.values():
            self._remove(header)
        return list(headers.values())

    def _remove(self, header: GroupHeader) -> None:
        number = header.number
        del self._headers[number]
        line = self._lines[_kind(header)]
        line.remove(number)
        if not line:
            del self._lines[_kind(header)]
        environment = self._environments[header.env_id]
        environment.count(header, -1)
        if not environment.num_groups:
            del self._environments[header.env_id]
        self._sizes[header.num_sequences] -= 1
        if not self._sizes[header.num_sequences]:
            del self._sizes[header.num_sequences]
        version = _version(header)
        del self._versions[version][number]
        if not self._versions[version]:
            del self._versions[version]
            del self._sorted_versions[bisect_left(self._sorted_versions, version)]
        self.total_sequences -= header.num_sequences
        self.total_bytes -= header.num_bytes
        self.total_tokens -= header.num_tokens

    # Counts

    def env_ids(self) -> Iterable[int | None]:
        """Environments with something queued."""
        return list(self._environments)

    def num_groups(self, env_id: int | None) -> int:
        return self._environments[env_id].num_groups if env_id in self._environments else 0

    def num_sequences(self, env_id: int | None) -> int:
        return self._environments[env_id].num_sequences if env_id in self._environments else 0

    def num_bytes(self, env_id: int | None) -> int:
        return self._environments[env_id].num_bytes if env_id in self._environments else 0

    def largest(self, env_id: int | None) -> int:
        """Sequences of the environment's largest queued group; 0 without any."""
        if env_id not in self._environments:
            return 0
        return max(self._environments[env_id].sizes)

    def num_of_size(self, num_sequences: int) -> int:
        """Queued groups of exactly so many sequences."""
        return self._sizes[num_sequences]

    def largest_of_all(self) -> int:
        """Sequences of the largest queued group; 0 without any."""
        return max(self._sizes, default=0)

    # Versions

    def versions(self) -> Mapping[int, int]:
        """Number of queued groups by policy version (for a group that names none: by the version at its arrival)."""
        return {version: len(self._versions[version]) for version in self._sorted_versions}

    def stale(self, oldest_version: int) -> list[GroupHeader]:
        """Groups of a version older than `oldest_version`, in arrival order."""
        num_stale = bisect_left(self._sorted_versions, oldest_version)
        found = [self._versions[version] for version in self._sorted_versions[:num_stale]]
        return sorted((h for group in found for h in group.values()), key=_number)

    # Batches

    def plan(
        self,
        *,
        batch_size: int,
        floors: Mapping[int, int] = NO_FLOORS,
        overdue_before: int | None = None,
    ) -> Plan | NoBatch:
        """Choose the next batch, as `plan_batch` would from the whole queue; nothing is removed.

        With `overdue_before`, groups of an older version are not passed over any longer: the oldest of them that can be
        part of a batch at all is part of this one.
        """
        overdue: list[Kind] = []
        if overdue_before is not None and self._sorted_versions[:1] < [overdue_before]:
            oldest = [next(iter(line)) for line in self._lines.values()]
            late = [header for header in oldest if _version(header) < overdue_before]
            overdue = [_kind(header) for header in sorted(late, key=_number)]
        return plan_lines(self._lines, batch_size=batch_size, floors=floors, overdue=overdue)


class _Totals:
    """What one environment has queued."""

    __slots__ = ("num_bytes", "num_groups", "num_sequences", "sizes")

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_sequences = 0
        self.num_bytes = 0
        self.sizes: Counter[int] = Counter()
        """Groups by number of sequences; no entry for a size without any."""

    def count(self, header: GroupHeader, sign: int) -> None:
        self.num_groups += sign
        self.num_sequences += sign * header.num_sequences
        self.num_bytes += sign * header.num_bytes
        self.sizes[header.num_sequences] += sign
        if not self.sizes[header.num_sequences]:
            del self.sizes[header.num_sequences]


class _Line:
    """The queued groups of one kind, oldest first."""

    __slots__ = ("_arrived", "_returned")

    def __init__(self) -> None:
        # Removal from the front of a plain dict or list would cost the length of the line.
        self._arrived: OrderedDict[int, GroupHeader] = OrderedDict()
        self._returned: list[GroupHeader] = []
        """By number. Short: only what comes back after later groups came is not at the end of the line."""

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

    def remove(self, number: int) -> None:
        if number in self._arrived:
            del self._arrived[number]
        else:
            del self._returned[bisect_left(self._returned, number, key=_number)]


_number = attrgetter("number")


def _kind(header: GroupHeader) -> Kind:
    return Kind(header.env_id, header.num_sequences)


def _version(header: GroupHeader) -> int:
    return header.arrival_step if header.policy_version is None else header.policy_version
