"""Which queued groups form the next batch, or why none can: a pure policy over group headers.

Guarantees: a batch sums to exactly `batch_size` sequences; groups are never split; it is the batch that could have been
cut earliest, made of the oldest groups possible, if that one honours the floors; groups of one size from one
environment leave in arrival order; an additional group never makes a feasible batch infeasible. Where floors bind, each
environment with a floor supplies a part, and the earliest of all other groups complete the batch. The parts exceed the
floors by as little as possible. Only the oldest groups of each are searched, so a floor may be waived that later groups
could have honoured. The work is bounded by the batch and the numbers of different sizes and of floors, not by the
length of the queue. `GroupQueue.plan` calls it; tokens and time play no part.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from itertools import islice
from math import gcd
from operator import attrgetter
from typing import NamedTuple, Protocol

from atroposlib.scored_data import GroupHeader

_LOOK_AHEAD_GROUPS = 12
_LOOK_AHEAD_FLOORS = 2
"""An environment's part is chosen among its oldest groups: at least this many, with this many times its floor.

Of 958 random queues that held a batch (1 to 20 floors, 1 to 16 sizes), 6 waived a floor that the whole queue could
honour; with 4 groups 63, with 16 groups 2. Time grows with the number: 300 environments with floors take about 10 ms.
"""
_NUM_OVERDUE_TRIED = 4
"""Overdue groups tried; each can cost as much as the plan itself."""
_number = attrgetter("number")
_size = attrgetter("num_sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    groups: tuple[GroupHeader, ...]
    """In arrival order."""
    waived: tuple[int, ...] = ()
    """Environments whose floor could not be honoured together with those before it."""


class Blocker(enum.StrEnum):
    """Why the queue yields no batch."""

    TOO_FEW = "too_few"
    """Fewer sequences are queued than a batch holds."""
    MINIMUM = "minimum"
    """An environment has not queued what it must supply."""
    SIZES = "sizes"
    """Enough sequences, but no choice of whole groups sums to the batch size: more of these sizes may never help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatch:
    blocker: Blocker
    reason: str
    have: int
    """Sequences queued in groups that fit into a batch: of `env_id`, or of all when that is None."""
    need: int
    env_id: int | None = None
    """The environment that must queue more; None unless the blocker is MINIMUM."""


def sequence_floors(batch_size: int, minimums: Mapping[int, float]) -> dict[int, int]:
    """Turn shares of the batch, 0 to 1, into the sequences that each environment must supply.

    Shares that exceed the batch in sum are scaled down proportionally, each to at least one sequence.

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


class Line(Sized, Iterable[GroupHeader], Protocol):
    """Queued groups of one size, oldest first. Only the oldest are visited."""


_Floors = Mapping[int | None, int]
_Candidates = Mapping[int | None, Sequence[GroupHeader]]
"""For each environment with a floor, the oldest groups, among which its part is chosen."""


@dataclass(frozen=True, slots=True)
class _Stock:
    """The groups that a batch can be made of: `lines` by size, less those `taken`."""

    lines: Mapping[int, Line]
    num_groups: Mapping[int, int]
    """By size."""
    taken: Set[int] = frozenset()
    """Group numbers."""

    def without(self, groups: Iterable[GroupHeader]) -> _Stock:
        num_groups = dict(self.num_groups)
        numbers = set(self.taken)
        for group in groups:
            num_groups[group.num_sequences] -= 1
            numbers.add(group.number)
        return _Stock(self.lines, num_groups, numbers)

    def can_sum_to(self, target: int) -> bool:
        return bool(sums_of(self.num_groups, target) >> target & 1)

    def in_order(self, target: int) -> Iterator[GroupHeader]:
        """The groups that could be part of a choice that sums to `target`, oldest first."""
        left = (
            (group for group in line if group.number not in self.taken) if self.taken else line
            for line in self.lines.values()
        )
        could_take_part = (
            islice(line, target // size) for size, line in zip(self.lines, left, strict=True)
        )
        return heapq.merge(*could_take_part, key=_number)


def plan_lines(
    lines: Mapping[int, Line],
    *,
    batch_size: int,
    floors: Mapping[int, int],
    own: Mapping[int | None, Iterable[GroupHeader]],
    overdue: Iterable[GroupHeader] = (),
) -> Plan | NoBatch:
    """Choose the next batch from `lines`, queued groups by their size, which is positive.

    `floors` are the sequences, positive, that an environment must supply, in order of importance; `own` are its groups,
    oldest first. If an environment has not queued its floor, there is no batch. If all have, but the oldest groups can
    not honour every floor at once, the last floors are waived until a batch exists: waiting would not help.

    The earliest batch can pass over a group indefinitely: with batches of 8, a group of 5 while 2 and 6, then 1 and 7,
    keep arriving. So the batch includes the first of the `overdue` groups (each the oldest of its size or environment)
    that can be part of one. (Floors can rule a group out; then only the next few are tried.)
    """
    lines = {size: line for size, line in lines.items() if size <= batch_size}
    stock = _Stock(lines, {size: len(line) for size, line in lines.items()})
    needed: _Floors = dict(floors.items())
    candidates = {
        env_id: _oldest(own.get(env_id, ()), floor, batch_size) for env_id, floor in needed.items()
    }
    missing = _what_is_missing(stock, candidates, batch_size, needed)
    if missing is not None:
        return missing
    groups, num_kept = _choose(stock, candidates, batch_size, needed)
    kept = dict(islice(needed.items(), num_kept))
    numbers = {group.number for group in groups}
    spare = batch_size - sum(kept.values())

    def could_be_part(group: GroupHeader) -> bool:
        num_spare = group.num_sequences - kept.get(group.env_id, 0)
        rest = batch_size - group.num_sequences
        return num_spare <= spare and stock.without([group]).can_sum_to(rest)

    for group in islice(filter(could_be_part, overdue), _NUM_OVERDUE_TRIED):
        if group.number in numbers:
            break
        with_it = _choose_with(group, stock, candidates, batch_size, kept)
        if with_it is not None:
            groups = with_it
            break
    return Plan(groups=tuple(sorted(groups, key=_number)), waived=tuple(floors)[num_kept:])


def oldest_subset(sizes: Sequence[int], target: int) -> list[int]:
    """Return the indices, ascending, of the oldest subset of `sizes` that sums to `target`; empty if there is none.

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
    to_take = target
    to_leave = sum(sizes[index] for index in candidates) - target
    if to_take <= 0 or to_leave < 0:
        return []
    # A subset is also determined by what it leaves out, which is usually little and among the last few.
    limit = min(to_take, to_leave)
    mask = (1 << (limit + 1)) - 1
    after = [1]
    for index in reversed(candidates):
        if after[-1] >> to_leave & 1:
            break
        after.append((after[-1] | after[-1] << sizes[index]) & mask)
    if not after[-1] >> limit & 1:
        return []
    num_taken = len(candidates) - len(after) + 1
    chosen = candidates[:num_taken]
    to_take -= sum(sizes[index] for index in chosen)
    for index in candidates[num_taken:]:
        after.pop()
        size = sizes[index]
        if size <= to_take and after[-1] >> min(to_take - size, to_leave) & 1:
            chosen.append(index)
            to_take -= size
        else:
            to_leave -= size
    return chosen


def _oldest(own: Iterable[GroupHeader], floor: int, batch_size: int) -> list[GroupHeader]:
    """Return the oldest groups of an environment, among which its part of the batch is chosen: a bounded look-ahead."""
    oldest: list[GroupHeader] = []
    num_sequences = 0
    for group in own:
        if len(oldest) >= _LOOK_AHEAD_GROUPS and num_sequences >= _LOOK_AHEAD_FLOORS * floor:
            break
        if group.num_sequences <= batch_size:
            oldest.append(group)
            num_sequences += group.num_sequences
    return oldest


def _what_is_missing(
    stock: _Stock, candidates: _Candidates, batch_size: int, floors: _Floors
) -> NoBatch | None:
    have = sum(size * num for size, num in stock.num_groups.items())
    if have < batch_size:
        return NoBatch(
            blocker=Blocker.TOO_FEW,
            reason=f"{have} of {batch_size} sequences are queued",
            have=have,
            need=batch_size,
        )
    for env_id, floor in floors.items():
        supply = sum(map(_size, candidates[env_id]))
        if supply < floor:
            return NoBatch(
                blocker=Blocker.MINIMUM,
                reason=f"environment {env_id} must supply {floor} of {batch_size} sequences"
                f" (min_batch_allocation) and has {supply} queued",
                have=supply,
                need=floor,
                env_id=env_id,
            )
    if stock.can_sum_to(batch_size):
        return None
    could_take_part = {n: min(stock.num_groups[n], batch_size // n) for n in sorted(stock.lines)}
    return NoBatch(
        blocker=Blocker.SIZES,
        reason=f"no choice of whole groups sums to {batch_size} sequences"
        f" (queued, size: groups that could take part: {could_take_part})",
        have=have,
        need=batch_size,
    )


class _Chosen(NamedTuple):
    groups: list[GroupHeader]
    num_kept: int
    """How many of the first floors these groups honour."""


def _choose(stock: _Stock, candidates: _Candidates, target: int, floors: _Floors) -> _Chosen:
    """Return the earliest batch if it honours the floors; else their parts and the earliest groups to complete them."""
    groups = _earliest(stock.in_order(target), target)
    supplied: Counter[int | None] = Counter()
    if floors:
        for group in groups:
            supplied[group.env_id] += group.num_sequences
    if all(supplied[env_id] >= floor for env_id, floor in floors.items()):
        return _Chosen(groups, len(floors))
    groups, num_kept = _honour(floors, stock, candidates, target)
    target -= sum(map(_size, groups))
    others = stock.without(groups).in_order(target)
    return _Chosen(groups + _earliest(others, target), num_kept)


def _choose_with(
    group: GroupHeader, stock: _Stock, candidates: _Candidates, target: int, floors: _Floors
) -> list[GroupHeader] | None:
    """Return `group` and groups that complete it (some do); None if they do not honour the floors."""
    if group.env_id in floors:
        left = [each for each in candidates[group.env_id] if each is not group]
        candidates = {**candidates, group.env_id: left}
        floors = {**floors, group.env_id: floors[group.env_id] - group.num_sequences}
        floors = {env_id: floor for env_id, floor in floors.items() if floor > 0}
    target -= group.num_sequences
    others, num_kept = _choose(stock.without([group]), candidates, target, floors)
    return [group, *others] if num_kept == len(floors) else None


def _honour(floors: _Floors, stock: _Stock, candidates: _Candidates, target: int) -> _Chosen:
    """Choose the smallest parts for as many of the first floors as one batch can honour.

    A batch exists if a sum of parts, made of candidates, and a sum of the other groups add up to the batch size.
    """
    sizes = [Counter(map(_size, candidates[env_id])) for env_id in floors]
    parts: list[int] = []
    # Entry i: what the first i parts can sum to.
    together = [1]
    for num_groups, floor in zip(sizes, floors.values(), strict=True):
        parts.append(sums_of(num_groups, target) >> floor << floor)
        together.append(add(together[-1], parts[-1], step=gcd(*num_groups), limit=target))

    def completable(num_floors: int) -> int:
        """Return the sums of the first parts that the other groups can complete to a batch."""
        num_others = Counter(stock.num_groups)
        for num_groups in sizes[:num_floors]:
            num_others.subtract(num_groups)
        others = sums_of(num_others, target)
        # Mirrored: bit n is set if the others reach the target from n.
        return together[num_floors] & int(f"{others:0{target + 1}b}"[::-1], 2)

    num_kept = len(floors)
    sums = completable(num_kept)
    if not sums:
        # Fewer floors are almost never harder to honour, and zero floors always can be.
        num_kept = bisect_left(range(1, num_kept), True, key=lambda n: not completable(n))
        sums = completable(num_kept)
    groups: list[GroupHeader] = []
    num_sequences = next(positions(sums))
    kept = [candidates[env_id] for env_id in islice(floors, num_kept)]
    for own, part, others in reversed(list(zip(kept, parts, together, strict=False))):
        fitting = (n for n in positions(part) if n <= num_sequences)
        num_own = next(n for n in fitting if others >> num_sequences - n & 1)
        groups += _earliest(own, num_own)
        num_sequences -= num_own
    return _Chosen(groups, num_kept)


def _earliest(queue: Iterable[GroupHeader], target: int) -> list[GroupHeader]:
    """Return the oldest choice that sums to `target` from the shortest prefix of `queue` with one, which must exist.

    What a choice leaves out of such a prefix is usually little: sums are needed up to that, not up to `target`.
    """
    prefix: list[GroupHeader] = []
    excess = -target
    limit = sums = 0
    for group in queue if target else ():
        size = group.num_sequences
        prefix.append(group)
        excess += size
        if excess < 0:
            continue
        if excess == 0:
            return prefix
        if limit < min(excess, target):
            limit = min(2 * excess, target)
            sums = sums_of(Counter(map(_size, prefix)), limit)
        else:
            sums |= sums << size & (2 << limit) - 1
        if sums >> min(excess, target) & 1:
            break
    return [prefix[index] for index in oldest_subset(list(map(_size, prefix)), target)]


# Sets of reachable sums as bits of an integer: bit n is set if n is reachable.


def sums_of(num_groups: Mapping[int, int], limit: int) -> int:
    """Return the sums up to `limit` of all choices among `num_groups`, counts by size.

    >>> evens = sums_of({2: 3}, limit=10)
    >>> bin(evens), bin(add(sums_of({5: 1}, limit=10), evens, step=2, limit=10))
    ('0b1010101', '0b1011110101')
    """
    mask = (1 << (limit + 1)) - 1
    sums = 1
    for size, count in num_groups.items():
        if size <= limit:
            sums = _spread(sums, size, min(count, limit // size)) & mask
    return sums


def add(left: int, right: int, *, step: int, limit: int) -> int:
    """Return all a + b up to `limit`, with a in `left` and b in `right`, whose members are equal modulo `step`.

    Sums of groups are mostly unbroken runs of multiples of their step, and a run is added by doubling.
    """
    run_starts = right & ~(right << step)
    run_ends = right & ~(right >> step)
    total = 0
    for first, last in zip(positions(run_starts), positions(run_ends), strict=True):
        total |= _spread(left, step, (last - first) // step) << first
    return total & ((1 << (limit + 1)) - 1)


def positions(bits: int) -> Iterator[int]:
    """Positions of set bits, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _spread(bits: int, step: int, num_steps: int) -> int:
    """Return the union of `bits` shifted by 0, 1, ... `num_steps` steps."""
    num_more = 1
    while num_steps > 0:
        num_more = num_more if num_more < num_steps else num_steps
        bits |= bits << num_more * step
        num_steps -= num_more
        num_more *= 2
    return bits
