"""How much work others have queued ahead of an environment, kept up to date per change so that asking is cheap."""

from __future__ import annotations

from atroposlib.api.run.environments import Environments
from atroposlib.api.run.queue import GroupQueue


class Backlog:
    """Per environment: queued sequences, rounded up to whole largest groups, less what its minimum claims."""

    def __init__(self) -> None:
        self._total = 0
        self._of: dict[int | None, int] = {}
        self._touched: set[int | None] = set()
        self._basis: tuple[int, int, int] | None = None

    def touch(self, env_id: int | None) -> None:
        """What this environment has queued changed."""
        self._touched.add(env_id)

    def of_others(
        self,
        env_id: int,
        *,
        queue: GroupQueue,
        environments: Environments,
        batch_size: int,
        max_group_size: int,
    ) -> int:
        """Sequences; counts again only what changed, everything when the rounding or a minimum did."""
        basis = (environments.version, batch_size, max_group_size)
        if basis != self._basis:
            self._basis = basis
            self._of.clear()
            self._total = 0
            self._touched = set(queue.env_ids())
        for touched in self._touched:
            rounded = -(-queue.num_sequences(touched) // max_group_size) * max_group_size
            environment = environments.find(touched)
            claimed = 0 if environment is None else int(batch_size * environment.share)
            left = max(0, rounded - claimed)
            self._total += left - self._of.get(touched, 0)
            self._of[touched] = left
        self._touched.clear()
        return self._total - self._of.get(env_id, 0)
