"""How many items may be in flight: pure arithmetic on the hub's status.

Two bounds hold at once. Workers: no more than the environment may run. Staleness: groups queued at the hub, held here
and in flight add up to at most `max_batches_offpolicy` batches, so that a sequence is at most that many steps old when
it is trained on. The result says how many items to start; running items are never cancelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The inputs of the decision. Groups are counted in this environment's group size."""

    max_workers: int
    running: int
    """Items in flight."""
    held: int = 0
    """Groups finished but not yet counted in `queue_size`."""
    group_size: int
    batch_size: int
    """Sequences per batch; -1 while the hub does not know it."""
    max_batches_offpolicy: int
    """0 or less: no staleness bound."""
    queue_size: int = 0
    """Groups waiting at the hub, of every environment."""
    self_queue_size: int = 0
    """Groups waiting at the hub, of this environment."""
    unallocated_fraction: float = 1.0
    """Share of a batch that no environment has reserved."""
    min_batch_allocation: float | None = None
    """Share of a batch this environment has reserved."""


def num_to_start(load: Load) -> int:
    """Return how many items to start now (0 or more).

    >>> num_to_start(Load(max_workers=8, running=2, group_size=4, batch_size=16,
    ...                   max_batches_offpolicy=2, queue_size=3))
    3
    """
    return max(0, min(load.max_workers, _staleness_bound(load)) - load.running)


def _staleness_bound(load: Load) -> int:
    """Return how many items may be in flight, given the groups already queued or held."""
    if load.max_batches_offpolicy <= 0 or load.batch_size <= 0:
        return load.max_workers
    ahead = load.max_batches_offpolicy * load.batch_size
    reserved = load.min_batch_allocation or 0.0
    share = min(1.0, load.unallocated_fraction + reserved)
    room = int(ahead * share) // load.group_size - load.queue_size - load.held
    floor = math.ceil(ahead * reserved / load.group_size) - load.self_queue_size - load.held
    return max(room, floor)
