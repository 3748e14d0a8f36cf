"""How long does planning a batch block the hub's event loop? Environments x sizes x floors x queue length.

Run it as `PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/planner.py`; `--only floors` selects rows by name. CPU
milliseconds, the minimum of three plans of the same queue. "With overdue": all groups have exceeded the hub's patience.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from atroposlib.api.run.batching import NoBatch, Plan
from atroposlib.api.run.queue import GroupQueue
from atroposlib.api.run.types import GroupHeader


class Case(NamedTuple):
    """One row: a queue in which environments alternate."""

    name: str
    num_groups: int
    num_envs: int
    sizes: Sequence[int]
    batch_size: int
    floor: int = 0
    """Sequences that each environment has in every batch."""
    last_size: int | None = None
    """Size of one more group, the newest."""

    @property
    def floors(self) -> dict[int, int]:
        return dict.fromkeys(range(self.num_envs), self.floor) if self.floor else {}

    def queue(self) -> GroupQueue:
        rng = random.Random(0)
        sizes = [rng.choice(self.sizes) for _ in range(self.num_groups)]
        if self.last_size is not None:
            sizes.append(self.last_size)
        queue = GroupQueue()
        for number, size in enumerate(sizes):
            env_id = number % self.num_envs
            queue.add(GroupHeader(number=number, env_id=env_id, num_sequences=size))
        return queue


EVEN = range(2, 17, 2)
CASES = [
    Case("one size", 50_000, 4, [8], 256),
    Case("one size, floors", 50_000, 4, [8], 256, 64),
    Case("1 to 16", 50_000, 4, range(1, 17), 256),
    Case("1 to 16, floors", 50_000, 4, range(1, 17), 256, 64),
    Case("1 to 16, floors, large batch", 50_000, 4, range(1, 17), 4096, 1024),
    Case("unknown environments, one size", 50_000, 50_000, [8], 256),
    Case("unknown environments, 1 to 16", 50_000, 50_000, range(1, 17), 256),
    Case("300 floors, one size", 20_000, 300, [8], 2400, 8),
    Case("300 floors, 4 to 16, the whole batch", 20_000, 300, range(4, 17), 2400, 8),
    Case("300 floors, 4 to 16, half the batch", 20_000, 300, range(4, 17), 4800, 8),
    Case("300 floors, 4 to 16, most of the batch", 20_000, 300, range(4, 17), 4096, 13),
    Case("1000 floors, 4 to 16", 50_000, 1000, range(4, 17), 8192, 6),
    Case("1 to 16, largest batch", 100_000, 4, range(1, 17), 16_384),
    Case("1 to 16, floors, largest batch", 100_000, 4, range(1, 17), 16_384, 4096),
    Case("1 to 1000, largest batch", 50_000, 4, range(1, 1001), 16_384),
    Case("even sizes, odd batch: none", 100_000, 1, EVEN, 16_383),
    Case("even sizes, odd batch, odd group last", 100_000, 1, EVEN, 16_383, last_size=1),
]


def least_ms(plan: Callable[[], Plan | NoBatch]) -> float:
    took = []
    for _ in range(3):
        began = time.process_time()
        plan()
        took.append(time.process_time() - began)
    return 1e3 * min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    only = parser.parse_args().only
    print(f"{'queue':40s} {'groups':>8s} {'batch':>7s} {'plan ms':>8s} {'with overdue ms':>16s}")
    for row in CASES:
        if only not in row.name:
            continue
        queue, size, floors = row.queue(), row.batch_size, row.floors
        plain = least_ms(lambda q=queue, b=size, f=floors: q.plan(batch_size=b, floors=f))
        overdue = least_ms(
            lambda q=queue, b=size, f=floors: q.plan(batch_size=b, floors=f, overdue_before=1)
        )
        print(f"{row.name:40s} {row.num_groups:8,d} {size:7,d} {plain:8.2f} {overdue:16.2f}")


if __name__ == "__main__":
    main()
