"""Which queued groups form the next batch, or why none can: a pure policy over group headers.

Guarantees: a batch sums to exactly `batch_size` sequences; groups are never split; it is the batch
that could have been cut earliest, made of the oldest groups possible; groups of one size from one
environment leave in arrival order; an additional group never makes a feasible batch infeasible.
Reachable sums are bits of one integer (bit n set: n sequences can be reached), so the work is
bounded by the batch size, never exponential in the queue. The coordinator calls it; tokens and time
never enter it.

>>> sizes = [3, 4, 4]
>>> queue = [GroupHeader(number=n, env_id=0, num_sequences=s) for n, s in enumerate(sizes)]
>>> [group.number for group in plan_batch(queue, batch_size=8).groups]
[1, 2]
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_NO_FLOORS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What the policy knows of one queued group."""

    number: int
    """Arrival number, unique and increasing within a run."""
    env_id: int | None
    num_sequences: int
    policy_version: int | None = None
    """Oldest policy version that sampled a token of the group; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An exact batch."""

    groups: tuple[GroupHeader, ...]
    """In arrival order."""
    waived: tuple[int, ...] = ()
    """Environments whose floor no choice of whole groups could honour together with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatch:
    """No exact batch can be cut now."""

    reason: str
    is_stuck: bool = False
    """There are enough sequences, but no choice of whole groups sums to the batch size."""


def sequence_floors(batch_size: int, minimums: Mapping[int, float]) -> dict[int, int]:
    """Turn shares of the batch, 0 to 1, into the sequences that each environment must supply.

    Shares that ask for more than the batch are scaled down proportionally, each to at least one
    sequence.

    >>> sequence_floors(8, {0: 0.25, 1: 0.5}), sequence_floors(8, {0: 0.75, 1: 0.75})
    ({0: 2, 1: 4}, {0: 4, 1: 4})
    """
    # The tolerance keeps 100 * 0.29 at 29.
    floors = {env_id: int(batch_size * share + 1e-9) for env_id, share in minimums.items()}
    floors = {env_id: floor for env_id, floor in floors.items() if floor > 0}
    total = sum(floors.values())
    if total <= batch_size:
        return floors
    return {env_id: max(1, floor * batch_size // total) for env_id, floor in floors.items()}


def plan_batch(
    queue: Iterable[GroupHeader],
    *,
    batch_size: int,
    floors: Mapping[int, int] = _NO_FLOORS,
) -> Plan | NoBatch:
    """Choose the next batch from `queue`, which is in arrival order.

    `floors` are sequences that an environment must supply, in order of importance. An environment
    that has not queued its floor is waited for. When all have, and whole groups still cannot honour
    every floor at once, the last floors are waived until a batch exists: waiting would not help.
    """
    queued: Counter[int | None] = Counter()
    candidates = _Candidates(batch_size, floors)
    for group in queue:
        if 0 < group.num_sequences <= batch_size:
            queued[group.env_id] += group.num_sequences
            candidates.add(group)
    if queued.total() < batch_size:
        return NoBatch(reason=f"{queued.total()} of {batch_size} sequences are queued")
    for env_id, floor in floors.items():
        if queued[env_id] < floor:
            have = queued[env_id]
            return NoBatch(
                reason=f"environment {env_id} must supply {floor} of {batch_size} sequences"
                f" (min_batch_allocation) and has {have} queued"
            )
    order = list(floors)
    for num_kept in range(len(order), -1, -1):
        kept = {env_id: floors[env_id] for env_id in order[:num_kept]}
        groups = _earliest_batch(candidates.groups, batch_size, kept)
        if groups is not None:
            return Plan(groups=tuple(groups), waived=tuple(order[num_kept:]))
    sizes = dict(sorted(Counter(group.num_sequences for group in candidates.groups).items()))
    return NoBatch(
        reason=f"no choice of whole groups sums to {batch_size} sequences"
        f" (queued, size: groups that could take part: {sizes})",
        is_stuck=True,
    )


def oldest_subset(sizes: Sequence[int], target: int) -> list[int]:
    """Indices, ascending, of the oldest subset of `sizes` that sums to `target`.

    Empty when there is none.

    "Oldest": index 0 takes part if any solution contains it, then index 1 given that, and so on.

    >>> oldest_subset([3, 2, 2], 4), oldest_subset([1, 4, 3], 4), oldest_subset([5], 4)
    ([1, 2], [0, 2], [])
    """
    reachable = _suffix_sums(sizes, target)
    if target <= 0 or not reachable[0] >> target & 1:
        return []
    chosen: list[int] = []
    missing = target
    for index, size in enumerate(sizes):
        if 0 < size <= missing and reachable[index + 1] >> (missing - size) & 1:
            chosen.append(index)
            missing -= size
    return chosen


class _Candidates:
    """The groups that could take part: of one lane and size, never more than fit into one batch."""

    def __init__(self, batch_size: int, floors: Mapping[int, int]) -> None:
        self.groups: list[GroupHeader] = []
        self._batch_size = batch_size
        self._floors = floors
        self._num_seen: Counter[tuple[int | None, int]] = Counter()

    def add(self, group: GroupHeader) -> None:
        """Keep `group` unless enough older ones are interchangeable with it."""
        kind = (_lane(group, self._floors), group.num_sequences)
        if self._num_seen[kind] < self._batch_size // group.num_sequences:
            self._num_seen[kind] += 1
            self.groups.append(group)


def _lane(group: GroupHeader, floors: Mapping[int, int]) -> int | None:
    """Environments with a floor are summed apart; all others together, as lane None."""
    return group.env_id if group.env_id in floors else None


def _earliest_batch(
    groups: Sequence[GroupHeader], batch_size: int, floors: Mapping[int, int]
) -> list[GroupHeader] | None:
    """The oldest groups within the shortest prefix of `groups` that holds an exact batch."""

    def is_enough(num_groups: int) -> bool:
        return _LaneSums(groups[:num_groups], batch_size, floors).can_fill()

    if not is_enough(len(groups)):
        return None
    shortest = bisect_left(range(len(groups)), True, key=is_enough)
    lanes = _LaneSums(groups[:shortest], batch_size, floors)
    return [group for group in groups[:shortest] if lanes.take_if_possible(group)]


class _LaneSums:
    """A walk over `groups`, oldest first, that knows which sums the rest of each lane can reach."""

    def __init__(
        self, groups: Sequence[GroupHeader], batch_size: int, floors: Mapping[int, int]
    ) -> None:
        self._floors = floors
        self._missing = batch_size
        self._owed: dict[int | None, int] = {None: 0}
        self._owed |= dict(floors.items())
        sizes: dict[int | None, list[int]] = {lane: [] for lane in self._owed}
        for group in groups:
            sizes[_lane(group, floors)].append(group.num_sequences)
        self._sums = {lane: _suffix_sums(of_lane, batch_size) for lane, of_lane in sizes.items()}
        self._visited = dict.fromkeys(self._owed, 0)

    def can_fill(self) -> bool:
        """Can the groups not yet visited make up what is missing, every floor honoured?"""
        return self._can_fill(self._missing, self._owed)

    def take_if_possible(self, group: GroupHeader) -> bool:
        """Visit the next group; True when it becomes part of the batch."""
        lane, size = _lane(group, self._floors), group.num_sequences
        self._visited[lane] += 1
        if size > self._missing:
            return False
        owed = {**self._owed, lane: self._owed[lane] - size}
        if not self._can_fill(self._missing - size, owed):
            return False
        self._missing -= size
        self._owed = owed
        return True

    def _can_fill(self, missing: int, owed: Mapping[int | None, int]) -> bool:
        totals = 1
        for lane, least in owed.items():
            sums = self._sums[lane][self._visited[lane]]
            least = max(0, least)
            totals = _add_sums(totals, sums >> least << least, missing)
        return bool(totals >> missing & 1)


def _suffix_sums(sizes: Sequence[int], limit: int) -> list[int]:
    """Entry i of `len(sizes) + 1`: bit set of sums, up to `limit`, of subsets of `sizes[i:]`."""
    mask = (1 << (max(0, limit) + 1)) - 1
    sums = [1] * (len(sizes) + 1)
    for index in range(len(sizes) - 1, -1, -1):
        rest, size = sums[index + 1], sizes[index]
        sums[index] = (rest | rest << size) & mask if 0 < size <= limit else rest
    return sums


def _add_sums(left: int, right: int, limit: int) -> int:
    """Bit set of a + b, up to `limit`, for every a in `left` and b in `right`."""
    if left.bit_count() > right.bit_count():
        left, right = right, left
    total = 0
    while left:
        lowest = left & -left
        total |= right << (lowest.bit_length() - 1)
        left ^= lowest
    return total & ((1 << (limit + 1)) - 1)
