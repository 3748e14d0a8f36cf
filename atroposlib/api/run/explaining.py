"""Why there is no batch, in words and figures: the answer of `GET /explain`. Changes nothing."""

from __future__ import annotations

from atroposlib.api.run.batching import NoBatch, Plan, sequence_floors
from atroposlib.api.run.environments import Environment, Environments
from atroposlib.api.run.leases import Leases
from atroposlib.api.run.queue import GroupQueue
from atroposlib.api.schemas import EnvironmentView, Explanation
from atroposlib.api.stores.base import BatchState


def explain(
    plan: Plan | NoBatch | None,
    *,
    queue: GroupQueue,
    environments: Environments,
    leases: Leases,
    batch_size: int,
    current_step: int,
    policy_version: int,
    max_staleness: int | None,
    dead: dict[str, int],
    conflicts: list[str],
    now: float,
) -> Explanation:
    """Describe a run whose next batch is `plan`; None: no trainer has registered, so there is no `batch_size`."""
    num_leased = len(leases.in_state(BatchState.LEASED))
    blocker, reason = None, "a batch is ready"
    env_id = have = need = None
    if plan is None:
        blocker, reason = "no_trainer", "no trainer has registered, so the batch size is unknown"
    elif isinstance(plan, NoBatch) and not leases.num_replay:
        blocker, reason = str(plan.blocker), plan.reason
        env_id, have, need = plan.env_id, plan.have, plan.need
        buffered = sum(each.num_buffered_sequences for each in environments)
        if buffered:
            reason += f"; {buffered} sequences of odd-sized groups are buffered"
        if num_leased:
            reason += f"; {num_leased} batches are leased to the trainer"
    floors = sequence_floors(batch_size, environments.shares()) if plan else {}
    return Explanation(
        batch="ready" if blocker is None else "none",
        blocker=blocker,
        reason=reason,
        env_id=env_id,
        have=have,
        need=need,
        batch_size=batch_size if plan else None,
        current_step=current_step,
        queued_groups=len(queue),
        queued_sequences=queue.total_sequences,
        leased_batches=num_leased,
        replay_batches=leases.num_replay,
        oldest_version=min(queue.versions(), default=None),
        policy_version=policy_version,
        max_staleness=max_staleness,
        dead=dead,
        conflicts=conflicts,
        environments=[
            EnvironmentView(
                env_id=each.env_id,
                name=each.name,
                state=_state(each),
                last_seen_s=now - each.last_seen,
                queued_sequences=queue.num_sequences(each.env_id),
                buffered_sequences=each.num_buffered_sequences,
                floor=floors.get(each.env_id, 0),
            )
            for each in environments
        ],
    )


def _state(environment: Environment) -> str:
    if not environment.is_connected:
        return "disconnected"
    return "silent" if environment.is_silent else "active"
