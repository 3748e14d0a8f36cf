"""The queued groups of one run, indexed so that no question costs the length of the queue.

Invariant: every queued group is in the line of its size and in that of its environment, oldest first, and counted
with its version. The coordinator calls it, from one thread. The coordinator decides what leaves the queue and where it
goes, `batching` which groups make up a batch.

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
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from atroposlib.api.run.batching import NO_FLOORS, NoBatch, Plan, plan_lines
from atroposlib.api.run.types import GroupHeader


class GroupQueue:
    """Headers of queued groups in arrival order, which is the order of their numbers."""

    def __init__(self) -> None:
        self.total_sequences = 0
        self.total_bytes = 0
        self.total_tokens = 0
        self._headers: dict[int, GroupHeader] = {}
        self._lines: dict[int, _Line] = {}
        self._environments: dict[int | None, _Totals] = {}
        self._versions: dict[int, dict[int, GroupHeader]] = {}
        self._sorted_versions: list[int] = []

    def __len__(self) -> int:
        return len(self._headers)

    def __iter__(self) -> Iterator[GroupHeader]:
        """In arrival order. Costs the length of the queue."""
        return map(self._headers.__getitem__, sorted(self._headers))

    def add(self, header: GroupHeader) -> None:
        """Queue a group. A group that returns, with a number lower than others, gets its old place."""
        number = header.number
        assert number not in self._headers, f"group {number} is queued already"
        self._headers[number] = header
        size = header.num_sequences
        if size not in self._lines:
            self._lines[size] = _Line()
        self._lines[size].add(header)
        if header.env_id not in self._environments:
            self._environments[header.env_id] = _Totals()
        self._environments[header.env_id].add(header)
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
        line = self._lines[header.num_sequences]
        line.remove(number)
        if not line:
            del self._lines[header.num_sequences]
        environment = self._environments[header.env_id]
        environment.remove(header)
        if not environment.groups:
            del self._environments[header.env_id]
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

    def num_sequences(self, env_id: int | None) -> int:
        return self._environments[env_id].num_sequences if env_id in self._environments else 0

    def largest(self, env_id: int | None) -> int:
        """Sequences of the environment's largest queued group; 0 without any."""
        if env_id not in self._environments:
            return 0
        return max(self._environments[env_id].sizes)

    def num_of_size(self, num_sequences: int) -> int:
        """Queued groups of exactly so many sequences."""
        return len(self._lines[num_sequences]) if num_sequences in self._lines else 0

    def largest_of_all(self) -> int:
        """Sequences of the largest queued group; 0 without any."""
        return max(self._lines, default=0)

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
        """Choose the next batch, see `plan_lines`; nothing is removed.

        With `overdue_before`, groups of an older version are not passed over any longer: the oldest of a size, or of an
        environment with a floor, that can be part of a batch at all is part of this one.
        """
        own: dict[int | None, _Line] = {
            env_id: self._environments[env_id].groups
            for env_id in floors
            if env_id in self._environments
        }
        overdue: list[GroupHeader] = []
        if overdue_before is not None and self._sorted_versions[:1] < [overdue_before]:
            oldest = {next(iter(line)) for line in (*self._lines.values(), *own.values())}
            late = [header for header in oldest if _version(header) < overdue_before]
            overdue = sorted(late, key=_number)
        return plan_lines(
            self._lines,
            own=own,
            batch_size=batch_size,
            floors=floors,
            overdue=overdue,
        )


class _Totals:
    """What one environment has queued."""

    __slots__ = ("groups", "num_sequences", "sizes")

    def __init__(self) -> None:
        self.groups = _Line()
        self.num_sequences = 0
        self.sizes: dict[int, int] = {}
        """Groups by number of sequences; no entry for a size without any."""

    def add(self, header: GroupHeader) -> None:
        size = header.num_sequences
        self.groups.add(header)
        self.num_sequences += size
        self.sizes[size] = self.sizes.get(size, 0) + 1

    def remove(self, header: GroupHeader) -> None:
        size = header.num_sequences
        self.groups.remove(header.number)
        self.num_sequences -= size
        self.sizes[size] -= 1
        if not self.sizes[size]:
            del self.sizes[size]


class _Line:
    """Queued groups of one size or of one environment, oldest first."""

    __slots__ = ("_arrived", "_returned")

    def __init__(self) -> None:
        # Reading from the front skips what was removed there: 1 ms after 200,000 groups. An OrderedDict would not, but
        # takes 52 bytes more a group, and adding a group to the queue 1.7 times as long.
        self._arrived: dict[int, GroupHeader] = {}
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


def _version(header: GroupHeader) -> int:
    return header.arrival_step if header.policy_version is None else header.policy_version
