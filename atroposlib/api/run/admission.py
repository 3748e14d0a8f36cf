"""Whether a run that holds much takes more: bounds of the queue, and who may still come in beyond them.

A run over its bound refuses everything only while a batch can be cut: otherwise the group that would make the next
batch possible could never come in. It decides by what it is shown, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from atroposlib.api.run.batching import Blocker, NoBatch, Plan
from atroposlib.api.run.environments import Environments
from atroposlib.api.run.queue import GroupQueue
from atroposlib.api.run.types import IncomingGroup, Overloaded

_FAR_BEYOND: Final = 2
"""Times the bound. From here on only what the next batch waits for is let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the run is doing just now."""

    batch_size: int | None
    """None: no trainer has registered."""
    max_useful_sequences: int | None
    """More than this would be too old before its turn comes; None: nothing gets too old."""
    is_replaying: bool
    """Batches wait to be delivered once more."""
    look: Callable[[], Plan | NoBatch]
    """The next batch; only to be called with a batch size."""

    def plan(self) -> Plan | NoBatch | None:
        return None if self.batch_size is None else self.look()


class _Excess(NamedTuple):
    reason: str
    factor: float
    """How many times the bound is in use."""


class Admission:
    """The bounds of one run. None: no bound."""

    def __init__(
        self,
        queue: GroupQueue,
        environments: Environments,
        *,
        max_sequences: int | None,
        max_bytes: int | None,
        max_groups: int | None,
    ) -> None:
        self._queue = queue
        self._environments = environments
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._max_groups = max_groups

    def overload(self, situation: Situation) -> str | None:
        """Why the run takes no group from anybody now; None when it may take some. Which ones, `check` knows."""
        excess = self._excess(situation)
        if excess is None:
            return None
        plan = situation.plan()
        if situation.is_replaying or isinstance(plan, Plan):
            return excess.reason
        return excess.reason if plan is None and excess.factor >= _FAR_BEYOND else None

    def check(self, groups: Sequence[IncomingGroup], situation: Situation) -> None:
        """Keep a run that waits for certain groups from filling up with others. Raises `Overloaded`."""
        reason = self.overload(situation)
        if reason is not None:
            raise Overloaded(f"{reason}; wait until the trainer has taken batches")
        excess = self._excess(situation)
        if excess is None or any(self._is_wanted(group, situation) for group in groups):
            return
        if excess.factor >= _FAR_BEYOND:
            raise Overloaded(f"{excess.reason}; the next batch waits for other groups than these")
        fair = self._queue.total_sequences / max(1, self._environments.num_active)
        for group in groups:
            if self._queue.num_sequences(group.env_id) > fair:
                raise Overloaded(
                    f"{excess.reason}, more than its share by environment {group.env_id};"
                    " wait until the trainer has taken batches"
                )

    def _excess(self, situation: Situation) -> _Excess | None:
        bounds = (self._max_sequences, situation.max_useful_sequences)
        max_sequences = min((bound for bound in bounds if bound is not None), default=None)
        for unit, used, bound in [
            ("sequences", self._queue.total_sequences, max_sequences),
            ("bytes", self._queue.total_bytes, self._max_bytes),
            ("groups", len(self._queue), self._max_groups),
        ]:
            if bound is not None and used >= bound:
                reason = f"{used} {unit} are queued, the bound is {bound}"
                return _Excess(reason, used / max(1, bound))
        return None

    def _is_wanted(self, group: IncomingGroup, situation: Situation) -> bool:
        """Could the next batch be impossible without this group, or one like it?"""
        plan = situation.plan()
        if not isinstance(plan, NoBatch) or situation.batch_size is None:
            return False
        if plan.blocker is Blocker.MINIMUM:
            return group.env_id == plan.env_id
        if plan.blocker is Blocker.SIZES:
            # No batch takes more groups of one size.
            size = group.num_sequences
            return self._queue.num_of_size(size) < situation.batch_size // size
        return True
