"""Which queued groups form the next batch, or why none can: a pure policy over group headers.

Guarantees: a batch sums to exactly `batch_size` sequences; groups are never split; it is the batch that could have been
cut earliest, made of the oldest groups possible; groups of one size from one environment leave in arrival order; an
additional group never makes a feasible batch infeasible. The work is bounded by the batch and the number of different
(environment, size) pairs, never by the length of the queue. `GroupQueue` calls it; tokens and time never enter it.

>>> sizes = [3, 4, 4]
>>> queue = [GroupHeader(number=n, env_id=0, num_sequences=s) for n, s in enumerate(sizes)]
>>> [group.number for group in plan_batch(queue, batch_size=8).groups]
[1, 2]
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, starmap
from math import gcd
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, Protocol

from atroposlib.api.sums import ZERO, Sums, add, suffix_sums, sums_of

NO_FLOORS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What the policy knows of one queued group."""

    number: int
    """Arrival number, unique and increasing within a run."""
    env_id: int | None
    num_sequences: int
    policy_version: int | None = None
    """Oldest policy version that sampled a token of the group; None: unknown."""
    arrival_step: int = 0
    """Policy version that the engines served when the group came: stands in for an unknown `policy_version`."""
    num_tokens: int = 0
    num_bytes: int = 0
    """Of the stored payload."""


class Kind(NamedTuple):
    """Groups of one kind are interchangeable: a batch takes the oldest of them."""

    env_id: int | None
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An exact batch."""

    groups: tuple[GroupHeader, ...]
    """In arrival order."""
    waived: tuple[int, ...] = ()
    """Environments whose floor no choice of whole groups could honour together with the others."""


class Blocker(enum.StrEnum):
    """What stands between the queue and a batch."""

    TOO_FEW = "too_few"
    """Fewer sequences are queued than a batch holds."""
    MINIMUM = "minimum"
    """An environment has not queued what it must supply."""
    SIZES = "sizes"
    """There are enough sequences, but no choice of whole groups sums to the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatch:
    """No exact batch can be cut now."""

    blocker: Blocker
    reason: str
    have: int
    """Sequences queued in groups that fit into a batch: of `env_id`, or of all when that is None."""
    need: int
    """Sequences that it takes."""
    env_id: int | None = None
    """The environment that is waited for; None unless the blocker is MINIMUM."""

    @property
    def is_stuck(self) -> bool:
        """More groups of the kinds already queued may never help."""
        return self.blocker is Blocker.SIZES


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
    floors: Mapping[int, int] = NO_FLOORS,
) -> Plan | NoBatch:
    """Choose the next batch from `queue`, which is in arrival order.

    `floors` are sequences that an environment must supply, in order of importance. An environment
    that has not queued its floor is waited for. When all have, and whole groups still cannot honour
    every floor at once, the last floors are waived until a batch exists: waiting would not help.
    """
    lines: dict[Kind, list[GroupHeader]] = defaultdict(list)
    for group in queue:
        lines[Kind(group.env_id, group.num_sequences)].append(group)
    return plan_lines(lines, batch_size=batch_size, floors=floors)


class Line(Protocol):
    """The queued groups of one kind, oldest first. Only the oldest are visited."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[GroupHeader]: ...


def plan_lines(
    lines: Mapping[Kind, Line],
    *,
    batch_size: int,
    floors: Mapping[int, int] = NO_FLOORS,
    overdue: Sequence[Kind] = (),
) -> Plan | NoBatch:
    """`plan_batch` for a queue that is kept by kind.

    The earliest batch can pass over a group for ever: with batches of 8, a group of 5 while 2 and 6, then 1 and 7, keep
    arriving. So of the kinds `overdue`, the first whose oldest group can be part of a batch has it in this one.
    """
    lines = {kind: line for kind, line in lines.items() if 0 < kind.num_sequences <= batch_size}
    floors = {env_id: floor for env_id, floor in floors.items() if floor > 0}
    missing = _what_is_missing(lines, batch_size, floors)
    if missing is not None:
        return missing
    groups = _head_of_the_queue(lines, batch_size, floors)
    kept = _floors_to_keep(lines, batch_size, floors) if groups is None else floors
    if kept is None:
        return _stuck(lines, batch_size)
    if groups is None:
        groups = _earliest_batch(lines, batch_size, kept)
    for kind in overdue:
        if kind not in lines:
            continue
        if next(iter(lines[kind])) in groups:
            break
        with_it = _batch_with(kind, lines, batch_size, kept)
        if with_it is not None:
            groups = with_it
            break
    return Plan(groups=tuple(groups), waived=tuple(floors)[len(kept) :])


def oldest_subset(sizes: Sequence[int], target: int) -> list[int]:
    """Indices, ascending, of the oldest subset of `sizes` that sums to `target`.

    Empty when there is none.

    "Oldest": index 0 takes part if any solution contains it, then index 1 given that, and so on.

    >>> oldest_subset([3, 2, 2], 4), oldest_subset([1, 4, 3], 4), oldest_subset([5], 4)
    ([1, 2], [0, 2], [])
    """
    candidates: list[int] = []
    num_seen: Counter[int] = Counter()
    for index, size in enumerate(sizes):
        if size > 0 and num_seen[size] < target // size:
            num_seen[size] += 1
            candidates.append(index)
    reachable = suffix_sums([sizes[index] for index in candidates], target)
    if target <= 0 or not reachable[0] >> target & 1:
        return []
    chosen: list[int] = []
    missing = target
    for index, reachable_after in zip(candidates, reachable[1:], strict=True):
        if sizes[index] <= missing and reachable_after >> (missing - sizes[index]) & 1:
            chosen.append(index)
            missing -= sizes[index]
    return chosen


def _what_is_missing(
    lines: Mapping[Kind, Line], batch_size: int, floors: Mapping[int, int]
) -> NoBatch | None:
    queued: Counter[int | None] = Counter()
    for kind, line in lines.items():
        queued[kind.env_id] += kind.num_sequences * len(line)
    have = queued.total()
    if have < batch_size:
        return NoBatch(
            blocker=Blocker.TOO_FEW,
            reason=f"{have} of {batch_size} sequences are queued",
            have=have,
            need=batch_size,
        )
    for env_id, floor in floors.items():
        if queued[env_id] < floor:
            return NoBatch(
                blocker=Blocker.MINIMUM,
                reason=f"environment {env_id} must supply {floor} of {batch_size} sequences"
                f" (min_batch_allocation) and has {queued[env_id]} queued",
                have=queued[env_id],
                need=floor,
                env_id=env_id,
            )
    return None


def _stuck(lines: Mapping[Kind, Line], batch_size: int) -> NoBatch:
    by_size: Counter[int] = Counter()
    for kind, line in lines.items():
        by_size[kind.num_sequences] += len(line)
    could_take_part = {size: min(n, batch_size // size) for size, n in sorted(by_size.items())}
    return NoBatch(
        blocker=Blocker.SIZES,
        reason=f"no choice of whole groups sums to {batch_size} sequences"
        f" (queued, size: groups that could take part: {could_take_part})",
        have=sum(size * n for size, n in by_size.items()),
        need=batch_size,
    )


def _floors_to_keep(
    lines: Mapping[Kind, Line], batch_size: int, floors: Mapping[int, int]
) -> dict[int, int] | None:
    """As many of the first floors as a batch can honour together; None without any batch."""
    order = list(floors.items())

    def is_too_much(num_kept: int) -> bool:
        demand = _Demand.of(lines, batch_size, dict(order[:num_kept]))
        return not demand.can_be_met(demand.count(lines))

    if not is_too_much(len(order)):
        return dict(order)
    # Fewer floors are never harder to honour.
    num_kept = bisect_left(range(len(order)), True, key=is_too_much) - 1
    return None if num_kept < 0 else dict(order[:num_kept])


def _head_of_the_queue(
    lines: Mapping[Kind, Line], batch_size: int, floors: Mapping[int, int]
) -> list[GroupHeader] | None:
    """The oldest groups, none left out, if they happen to be a batch.

    No batch is complete earlier, and none that is complete then can do without one of them.
    """
    head: list[GroupHeader] = []
    missing = batch_size
    for group in heapq.merge(*lines.values(), key=attrgetter("number")):
        head.append(group)
        missing -= group.num_sequences
        if missing <= 0:
            break
    return head if missing == 0 and not _unmet(head, floors) else None


class _Tail:
    """A line without its oldest group."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __len__(self) -> int:
        return len(self._line) - 1

    def __iter__(self) -> Iterator[GroupHeader]:
        return islice(self._line, 1, None)


def _batch_with(
    kind: Kind, lines: Mapping[Kind, Line], batch_size: int, floors: Mapping[int, int]
) -> list[GroupHeader] | None:
    """The oldest group of `kind` and what completes it earliest; None when nothing does."""
    first = next(iter(lines[kind]))
    missing = batch_size - kind.num_sequences
    owed = {
        env_id: floor - kind.num_sequences if env_id == kind.env_id else floor
        for env_id, floor in floors.items()
    }
    owed = {env_id: floor for env_id, floor in owed.items() if floor > 0}
    rest: dict[Kind, Line] = {**lines, kind: _Tail(lines[kind])}
    rest = {k: line for k, line in rest.items() if k.num_sequences <= missing and len(line)}
    if _what_is_missing(rest, missing, owed) is not None:
        return None
    demand = _Demand.of(rest, missing, owed)
    if not demand.can_be_met(demand.count(rest)):
        return None
    return sorted([first, *_earliest_batch(rest, missing, owed)], key=attrgetter("number"))


def _unmet(groups: Iterable[GroupHeader], floors: Mapping[int, int]) -> dict[int, int]:
    """The floors that `groups` do not honour."""
    if not floors:
        return {}
    supplied: Counter[int | None] = Counter()
    for group in groups:
        supplied[group.env_id] += group.num_sequences
    return {env_id: floor for env_id, floor in floors.items() if supplied[env_id] < floor}


def _earliest_batch(
    lines: Mapping[Kind, Line], batch_size: int, floors: Mapping[int, int]
) -> list[GroupHeader]:
    """The oldest groups within the shortest prefix of the queue that holds a batch; there is one.

    Floors cost time only where they bind: the best batch of all, if it honours them, is the best that honours them.
    """
    asked: dict[int, int] = {}
    while True:
        demand = _Demand.of(lines, batch_size, asked)
        groups = _oldest_choice(_shortest_prefix(lines, demand), demand)
        unmet = _unmet(groups, floors)
        if not unmet:
            return groups
        # At most three rounds: none, those that bind, all.
        asked = dict(floors) if asked else unmet


_LaneKind = tuple[int | None, int]
"""Lane and size. A lane is an environment with a floor, whose sums are kept apart, or None for all that need not be."""


class _Candidate(NamedTuple):
    group: GroupHeader
    kind: _LaneKind | None
    """None: is part of every batch worth considering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What a batch must hold, with as few groups in lanes as possible.

    Only batches that take the oldest of each kind are worth considering. If such a batch takes more groups of one size
    from an environment than the floor needs, those that the floor needs are among them. So only these are in the lane
    of the environment, and the others like any other's. If it has but one size, it needs no lane: these are certain.
    """

    target: int
    """Sequences to choose, besides the groups that are certain."""
    floors: Mapping[int, int]
    """Of the lanes."""
    spare: int
    """Sequences to choose beyond the floors."""
    num_own: Mapping[Kind, int]
    """Number of oldest groups that its floor could need, for each kind of an environment with a floor."""

    @classmethod
    def of(cls, kinds: Iterable[Kind], batch_size: int, floors: Mapping[int, int]) -> _Demand:
        num_own: dict[Kind, int] = {}
        by_lane: dict[int, list[Kind]] = defaultdict(list)
        for kind in kinds:
            if kind.env_id is not None and kind.env_id in floors:
                num_own[kind] = -(-floors[kind.env_id] // kind.num_sequences)
                by_lane[kind.env_id].append(kind)
        certain = [of_lane[0] for of_lane in by_lane.values() if len(of_lane) == 1]
        target = batch_size - sum(kind.num_sequences * num_own[kind] for kind in certain)
        lanes = {env_id: n for env_id, n in floors.items() if len(by_lane[env_id]) != 1}
        spare = target - sum(lanes.values())
        return cls(target=target, floors=lanes, spare=spare, num_own=num_own)

    def candidates(self, lines: Mapping[Kind, Line]) -> Iterator[_Candidate]:
        """The groups that could take part, oldest first."""
        num_left = {kind.num_sequences: self.spare // kind.num_sequences for kind in lines}

        def of_line(kind: Kind, line: Line) -> Iterator[_Candidate]:
            groups = iter(line)
            own = self._own_kind(kind)
            for group in islice(groups, self.num_own.get(kind, 0)):
                yield _Candidate(group, own)
            size = kind.num_sequences
            for group in groups:
                if not num_left[size]:
                    return
                yield _Candidate(group, (None, size))

        merged = heapq.merge(*starmap(of_line, lines.items()), key=lambda c: c.group.number)
        for candidate in merged:
            if candidate.kind is not None and candidate.kind[0] is None:
                size = candidate.kind[1]
                if not num_left[size]:
                    continue
                num_left[size] -= 1
            yield candidate

    def count(self, lines: Mapping[Kind, Line]) -> Counter[_LaneKind | None]:
        """Number of candidates by kind, or more."""
        counts: Counter[_LaneKind | None] = Counter()
        for kind, line in lines.items():
            num_own = min(len(line), self.num_own.get(kind, 0))
            counts[self._own_kind(kind)] += num_own
            counts[None, kind.num_sequences] += len(line) - num_own
        return counts

    def can_be_met(self, num_candidates: Mapping[_LaneKind | None, int]) -> bool:
        """Is there a choice, besides all that is certain, that sums to the target and honours all floors?"""
        if self.spare < 0:
            return False
        lanes: dict[int | None, dict[int, int]] = defaultdict(dict)
        for kind, num_groups in num_candidates.items():
            if kind is not None:
                lane, size = kind
                lanes[lane][size] = num_groups
        total = sums_of(lanes[None], self.spare)
        for env_id, floor in self.floors.items():
            sums = sums_of(lanes[env_id], floor + self.spare)
            total = add(total, Sums(sums.bits >> floor, sums.step), self.spare)
            if not total.bits:
                return False
        return bool(total.bits >> self.spare & 1)

    def _own_kind(self, kind: Kind) -> _LaneKind | None:
        return kind if kind.env_id in self.floors else None


def _shortest_prefix(lines: Mapping[Kind, Line], demand: _Demand) -> list[_Candidate]:
    """The candidates up to the group that completes the earliest batch."""
    candidates = demand.candidates(lines)
    prefix: list[_Candidate] = []
    owed = dict(demand.floors)
    num_uncertain = sum(n for kind, n in demand.num_own.items() if kind.env_id not in demand.floors)
    mask = (1 << (demand.target + 1)) - 1
    sums = 1
    # No prefix is enough before all of this holds; without lanes, it is enough then.
    while num_uncertain or owed or not sums >> demand.target:
        candidate = next(candidates)
        prefix.append(candidate)
        if candidate.kind is None:
            num_uncertain -= 1
            continue
        lane, size = candidate.kind
        sums = (sums | sums << size) & mask
        if lane is not None and lane in owed:
            owed[lane] -= size
            if owed[lane] <= 0:
                del owed[lane]
    if not demand.floors:
        return prefix

    def is_enough(length: int) -> bool:
        return demand.can_be_met(Counter(candidate.kind for candidate in prefix[:length]))

    too_short = len(prefix) - 1
    num_more = 1
    while not is_enough(len(prefix)):
        too_short = len(prefix)
        prefix.extend(islice(candidates, num_more))
        assert len(prefix) > too_short, "there is no batch"
        num_more *= 2
    return prefix[: bisect_left(range(len(prefix)), True, lo=too_short + 1, key=is_enough)]


def _oldest_choice(prefix: Sequence[_Candidate], demand: _Demand) -> list[GroupHeader]:
    """Of `prefix`, which holds a batch, take every group that a batch with those already taken can contain."""
    rest = _Rest([c.kind for c in prefix if c.kind is not None], demand)
    refused: set[_LaneKind] = set()
    chosen: list[GroupHeader] = []
    for group, kind in prefix:
        # What is refused once stays refused: a batch with the later group could have had the older one instead.
        if kind is None or (kind not in refused and rest.take_if_possible(kind)):
            chosen.append(group)
        else:
            refused.add(kind)
            rest.leave(kind)
    return chosen


class _Rest:
    """What the groups not yet visited can add to those taken.

    Each lane knows the sums that its unvisited groups reach, counted from what the lane still owes. They are the leaves
    of a tree whose inner nodes hold the sums of their lanes together, so that a change of one lane costs the logarithm
    of the number of lanes. `_spare` is what may be taken beyond all that is owed.
    """

    def __init__(self, kinds: Sequence[_LaneKind], demand: _Demand) -> None:
        floors = demand.floors
        self._owed: dict[int | None, int] = {None: 0, **dict(floors.items())}
        lanes: dict[int | None, list[int]] = {lane: [] for lane in self._owed}
        for lane, size in kinds:
            lanes[lane].append(size)
        self._spare = demand.spare
        self._sums = {
            lane: suffix_sums(sizes, self._owed[lane] + self._spare)
            for lane, sizes in lanes.items()
        }
        self._visited = dict.fromkeys(lanes, 0)
        self._steps = {lane: gcd(*sizes) for lane, sizes in lanes.items()}
        # A heap-shaped tree: node n has the children 2n and 2n + 1; node 1 is the root.
        self._leaf = {lane: len(lanes) + n for n, lane in enumerate(lanes)}
        self._nodes = [ZERO] * len(lanes)
        self._nodes += [Sums(self._sums[x][0] >> self._owed[x], self._steps[x]) for x in lanes]
        for node in range(len(lanes) - 1, 0, -1):
            self._nodes[node] = add(self._nodes[2 * node], self._nodes[2 * node + 1], self._spare)

    def leave(self, kind: _LaneKind) -> None:
        """Visit the next group of the lane without taking it."""
        # The leaf may go on counting it: no batch with the groups taken contains it.
        self._visited[kind[0]] += 1

    def take_if_possible(self, kind: _LaneKind) -> bool:
        """Visit and take the next group of the lane if a batch remains possible; else change nothing."""
        lane, size = kind
        owed = max(0, self._owed[lane] - size)
        spare = self._spare - max(0, size - self._owed[lane])
        if spare < 0:
            return False
        visited = self._visited[lane] + 1
        node = self._leaf[lane]
        sums = Sums(self._sums[lane][visited] >> owed, self._steps[lane])
        changed = {node: sums}
        mask = (1 << (spare + 1)) - 1
        # Lanes together reach so many sums that a change of one seldom gets far.
        while node > 1 and (sums.bits ^ self._nodes[node].bits) & mask:
            sums = add(sums, self._nodes[node ^ 1], spare)
            node //= 2
            changed[node] = sums
        root = changed.get(1, self._nodes[1])
        if not root.bits >> spare & 1:
            return False
        for node, sums in changed.items():
            self._nodes[node] = sums
        self._owed[lane], self._spare, self._visited[lane] = owed, spare, visited
        return True
