"""Admission: the bounds of the queue, and which groups are accepted beyond them. Read only.

With a trainer, a run over its bound refuses everything only while a batch can be cut: otherwise the group that would
make the next batch possible could never arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from atroposlib.api.run.batching import Blocker, NoBatch, Plan
from atroposlib.api.run.state import RunState
from atroposlib.api.run.types import Overloaded
from atroposlib.api.stores.base import NewGroup

_FAR_BEYOND: Final = 2
"""Multiple of the bound from which on only groups that the next batch needs are accepted."""


class _Excess(NamedTuple):
    reason: str
    factor: float
    """Usage in multiples of the bound."""


def overload(run: RunState) -> str | None:
    """Return why the run accepts no group now; None if it may accept some: `check` decides per group."""
    excess = _excess(run)
    if excess is None:
        return None
    plan = None if run.trainer is None else run.look()
    if run.leases.to_replay or isinstance(plan, Plan):
        return excess.reason
    return excess.reason if plan is None and excess.factor >= _FAR_BEYOND else None


def check(run: RunState, groups: Sequence[NewGroup]) -> None:
    """Raise `Overloaded` if the run is full, or if it waits for other groups and these would fill it."""
    excess = _excess(run)
    if excess is None:
        return
    if overload(run) is not None:
        raise Overloaded(f"{excess.reason}; wait until the trainer has taken batches")
    if any(_is_wanted(group, run) for group in groups):
        return
    if excess.factor >= _FAR_BEYOND:
        raise Overloaded(f"{excess.reason}; the next batch waits for other groups than these")
    fair = run.queue.total_sequences / max(1, run.environments.num_active)
    for group in groups:
        if run.queue.num_sequences(group.header.env_id) > fair:
            raise Overloaded(
                f"{excess.reason}, more than its share by environment {group.header.env_id};"
                " wait until the trainer has taken batches"
            )


def _excess(run: RunState) -> _Excess | None:
    """Return the first bound that is reached. Groups beyond the staleness bound would be too old when delivered."""
    policy, staleness = run.policy, run.max_staleness
    bounds = [policy.max_queued_sequences]
    if staleness is not None and run.trainer is not None:
        bounds.append((staleness + 1) * run.batch_size)
    max_sequences = min((bound for bound in bounds if bound is not None), default=None)
    for unit, used, bound in [
        ("sequences", run.queue.total_sequences, max_sequences),
        ("bytes", run.queue.total_bytes, policy.max_queued_bytes),
        ("groups", len(run.queue), policy.max_queued_groups),
    ]:
        if bound is not None and used >= bound:
            reason = f"{used} {unit} are queued, the bound is {bound}"
            return _Excess(reason, used / max(1, bound))
    return None


def _is_wanted(group: NewGroup, run: RunState) -> bool:
    """Whether the next batch may be impossible without this group, or one like it."""
    plan = None if run.trainer is None else run.look()
    if not isinstance(plan, NoBatch):
        return False
    if plan.blocker is Blocker.MINIMUM:
        return group.header.env_id == plan.env_id
    if plan.blocker is Blocker.SIZES:
        # No batch holds more groups of one size.
        size = group.header.num_sequences
        return run.queue.num_of_size(size) < run.batch_size // size
    return True
