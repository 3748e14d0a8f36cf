"""Sets of reachable sums as bits of one integer: the arithmetic under `batching`.

Bit n is set when n can be reached. The sums of groups are mostly unbroken runs of multiples of their step, the greatest
common divisor of their sizes, so sets are added run by run: a few shifts of an integer, whatever the number of groups.
Knows nothing of groups, environments or floors.

>>> evens = sums_of({2: 3}, limit=10)
>>> bin(evens.bits), bin(add(evens, sums_of({5: 1}, limit=10), limit=10).bits)
('0b1010101', '0b1011110101')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import NamedTuple


class Sums(NamedTuple):
    """A set of numbers that are equal modulo `step`."""

    bits: int
    """Bit n set: n is in the set."""
    step: int
    """0 when the set has at most one number."""


ZERO = Sums(1, 0)


def sums_of(num_groups: Mapping[int, int], limit: int) -> Sums:
    """Sums up to `limit` of any choice among so many groups of each size."""
    mask = (1 << (limit + 1)) - 1
    sums = 1
    for size, count in num_groups.items():
        sums = _spread(sums, size, min(count, limit // size) + 1) & mask
    return Sums(sums, gcd(*num_groups))


def suffix_sums(sizes: Sequence[int], limit: int) -> list[int]:
    """Entry i of `len(sizes) + 1`: bit set of sums, up to `limit`, of subsets of `sizes[i:]`."""
    mask = (1 << (max(0, limit) + 1)) - 1
    sums = [1] * (len(sizes) + 1)
    for index in range(len(sizes) - 1, -1, -1):
        rest, size = sums[index + 1], sizes[index]
        sums[index] = (rest | rest << size) & mask if 0 < size <= limit else rest
    return sums


def add(left: Sums, right: Sums, limit: int) -> Sums:
    """a + b, up to `limit`, for every a in `left` and b in `right`.

    Sums of groups are mostly unbroken runs of multiples of their step, and a run is added by doubling.
    """
    left_starts, right_starts = _run_starts(left), _run_starts(right)
    if left_starts.bit_count() < right_starts.bit_count():
        left, right, right_starts = right, left, left_starts
    step = right.step or 1
    run_ends = right.bits & ~(right.bits >> step)
    total = 0
    for first, last in zip(_positions(right_starts), _positions(run_ends), strict=True):
        total |= _spread(left.bits, step, (last - first) // step + 1) << first
    return Sums(total & ((1 << (limit + 1)) - 1), gcd(left.step, right.step))


def _run_starts(sums: Sums) -> int:
    return sums.bits & ~(sums.bits << (sums.step or 1))


def _spread(bits: int, step: int, num_copies: int) -> int:
    """The union of `bits` moved by 0, 1, ... `num_copies` - 1 steps."""
    num_done = 1
    while num_done < num_copies:
        num_more = min(num_done, num_copies - num_done)
        bits |= bits << num_more * step
        num_done += num_more
    return bits


def _positions(bits: int) -> Iterator[int]:
    """Positions of set bits, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
