"""The original's batching functions, at the original's import path, over dicts with a `tokens` key.

They call `batching` with other shapes. The hub does not use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.api.run.batching import NoBatch, oldest_subset, sequence_floors
from atroposlib.api.run.queue import GroupQueue
from atroposlib.scored_data import GroupHeader

Group = dict[str, Any]


def find_groups_summing_to_target(buffer: Sequence[Group], target_size: int) -> list[int]:
    """Return the indices, ascending, of groups that sum to exactly `target_size` sequences; empty if none do."""
    return oldest_subset([len(group["tokens"]) for group in buffer], target_size)


def grab_exact_from_heterogeneous_queue(
    queue: list[Group], batch_size: int
) -> tuple[list[Group] | None, list[Group]]:
    """Return `(batch, remaining queue)`, or `(None, queue)` when no exact batch exists."""
    return _grab(queue, batch_size, {})


def grab_batch_with_minimum_allocations(
    queue: list[Group], batch_size: int, env_configs: Sequence[Mapping[str, Any]]
) -> tuple[list[Group] | None, list[Group]]:
    """As above, with every connected environment's `min_batch_allocation` (0 to 1) as a floor."""
    minimums = {
        env["registered_id"]: env["min_batch_allocation"]
        for env in env_configs
        if env.get("connected") and env.get("min_batch_allocation") is not None
    }
    return _grab(queue, batch_size, sequence_floors(batch_size, minimums))


def _grab(
    queue: list[Group], batch_size: int, floors: Mapping[int, int]
) -> tuple[list[Group] | None, list[Group]]:
    queued = GroupQueue()
    for number, group in enumerate(queue):
        if size := len(group["tokens"]):
            queued.add(GroupHeader(number=number, env_id=group.get("env_id"), num_sequences=size))
    plan = queued.plan(batch_size=batch_size, floors=floors)
    if isinstance(plan, NoBatch):
        return None, queue
    taken = {header.number for header in plan.groups}
    batch = [queue[header.number] for header in plan.groups]
    return batch, [group for n, group in enumerate(queue) if n not in taken]
