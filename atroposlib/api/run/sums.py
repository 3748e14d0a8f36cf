"""Sets of reachable sums as bits of an integer (bit n is set if n is reachable): the arithmetic of `batching`.

>>> evens = sums_of({2: 3}, limit=10)
>>> bin(evens), bin(add(sums_of({5: 1}, limit=10), evens, step=2, limit=10))
('0b1010101', '0b1011110101')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def sums_of(num_groups: Mapping[int, int], limit: int) -> int:
    """Return the sums up to `limit` of all choices among `num_groups`, counts by size."""
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
