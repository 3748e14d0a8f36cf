"""Sets of reachable sums as bits of one integer: the arithmetic under `batching`.

Bit n is set when n can be reached. Knows nothing of groups, environments or floors.

>>> evens = sums_of({2: 3}, limit=10)
>>> bin(evens), bin(add(sums_of({5: 1}, limit=10), evens, step=2, limit=10))
('0b1010101', '0b1011110101')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def sums_of(num_groups: Mapping[int, int], limit: int) -> int:
    """Sums up to `limit` of any choice among so many groups of each size."""
    mask = (1 << (limit + 1)) - 1
    sums = 1
    for size, count in num_groups.items():
        if size <= limit:
            sums = _spread(sums, size, min(count, limit // size)) & mask
    return sums


def add(left: int, right: int, *, step: int, limit: int) -> int:
    """a + b, up to `limit`, for every a in `left` and b in `right`, whose members are equal modulo `step`.

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
    """The union of `bits` moved by 0, 1, ... `num_steps` steps."""
    num_more = 1
    while num_steps > 0:
        num_more = num_more if num_more < num_steps else num_steps
        bits |= bits << num_more * step
        num_steps -= num_more
        num_more *= 2
    return bits
