"""Questions about a run, answered without changing it: where every group is, why there is no batch, whether more groups
are accepted.

With a trainer, a run over its bound refuses everything only while a batch can be cut: otherwise the group that would
make the next batch possible could never arrive.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from atroposlib.api.run.batching import Blocker, NoBatch, Plan, sequence_floors
from atroposlib.api.run.environments import Environment
from atroposlib.api.run.leases import HeldBatch
from atroposlib.api.run.queue import rounded
from atroposlib.api.run.state import RunState
from atroposlib.api.run.types import Overloaded
from atroposlib.api.schemas import (
    DEFAULT_PAGE,
    DeadGroup,
    EnvironmentView,
    EnvStatus,
    Explanation,
    HubInfo,
    HubStatus,
    Ledger,
    WandbInfo,
)
from atroposlib.api.stores.base import Fate, GroupStore, NewGroup
from atroposlib.api.stores.space import Space

_FAR_BEYOND: Final = 2
"""Multiple of the bound from which on only groups that the next batch needs are accepted."""


class _Excess(NamedTuple):
    reason: str
    factor: float
    """Usage in multiples of the bound."""


class Accounts:
    """What a run reports about itself."""

    state: RunState
    store: GroupStore
    _clock: Callable[[], float]
    _room_of: Callable[[str | None], Space | None]

    def status(self) -> HubStatus:
        run = self.state
        return HubStatus(
            current_step=run.current_step,
            queue_size=len(run.queue) + _num_groups(run.leases.to_replay),
            policy_version=run.policy_version,
        )

    def ledger(self) -> Ledger:
        """Count the groups by place. `produced` is counted independently, so that a leak shows."""
        run = self.state
        unconfirmed = sum(run.unconfirmed.values())
        trained = run.ended[Fate.TRAINED] + _num_groups(run.leases.trained.values())
        return Ledger(
            produced=run.num_accepted + run.rejected.total(),
            queued=len(run.queue) + _num_groups(run.leases.to_replay),
            buffered=sum(map(len, run.buffers.values())),
            leased=_num_groups(run.leases.leased.values()),
            trained=trained - unconfirmed,
            delivered_unconfirmed=unconfirmed,
            expired=run.ended[Fate.EXPIRED],
            dead=run.ended[Fate.DEAD] + len(run.dead),
            discarded=run.ended[Fate.DISCARDED],
            dead_reasons=run.dead.reasons() or None,
            rejected=dict(run.rejected),
            duplicates=run.num_duplicates,
        )

    def summary(self) -> str:
        """Summarise what the run holds, for a log line."""
        held = self.ledger()
        return (
            f"step {self.state.current_step}, {held.queued} groups queued, {held.buffered} buffered,"
            f" {held.leased} leased, {held.trained} trained, {held.dead} dead,"
            f" {len(self.state.environments)} environments"
        )

    def dead(self) -> Iterator[DeadGroup]:
        """Describe the groups now set aside as dead, oldest first; the run may change during the iteration."""
        run = self.state
        return (
            DeadGroup(
                number=header.number,
                env_id=header.env_id,
                reason=reason,
                deliveries=run.deliveries.get(header.number, 0),
                num_sequences=header.num_sequences,
                num_tokens=header.num_tokens,
            )
            for header, reason in list(run.dead)
        )

    def explain(self, *, offset: int = 0, limit: int = DEFAULT_PAGE) -> Explanation:
        """Explain why there is no batch, or that there is one, with a page of the environments, the worst first."""
        run, now = self.state, self._clock()
        plan = None if run.trainer is None else run.look()
        waits_s = run.trainer_times.waits_s(now, num_held=run.leases.num_held)
        num_leased = len(run.leases.leased)
        blocker, reason = None, "a batch is ready"
        env_id = have = need = None
        if plan is None:
            blocker = "no_trainer"
            reason = "no trainer has registered, so the batch size is unknown"
        elif isinstance(plan, NoBatch) and not run.leases.to_replay:
            blocker, reason = str(plan.blocker), plan.reason
            env_id, have, need = plan.env_id, plan.have, plan.need
            buffered = sum(map(run.num_buffered_sequences, run.buffers))
            if buffered:
                reason += f"; {buffered} sequences of odd-sized groups are buffered"
            if num_leased:
                are = "batch is" if num_leased == 1 else "batches are"
                reason += f"; {num_leased} {are} leased to the trainer"
            if waits_s is not None:
                reason += f"; the trainer has waited for {waits_s:.0f} s"
            reason += _cause(run, env_id, now=now)
            if run.conflicts:
                reason += f"; not granted to a second trainer: {', '.join(run.conflicts)}"
        floors = sequence_floors(run.batch_size, run.environments.sums.minimums) if plan else {}
        return Explanation(
            batch="ready" if blocker is None else "none",
            blocker=blocker,
            reason=reason,
            refusal=self.refusal() or self.overload(),
            env_id=env_id,
            have=have,
            need=need,
            batch_size=run.batch_size if plan else None,
            current_step=run.current_step,
            queued_groups=len(run.queue),
            queued_sequences=run.queue.total_sequences,
            leased_batches=num_leased,
            replay_batches=len(run.leases.to_replay),
            trainer_waits_s=waits_s,
            oldest_version=min(run.queue.versions(), default=None),
            policy_version=run.current_version,
            max_staleness=run.max_staleness,
            dead=run.dead.reasons(),
            conflicts=run.conflicts,
            num_environments=len(run.environments),
            num_active=run.environments.num_active,
            unknown_steps=run.unknown_steps,
            environments=[
                EnvironmentView(
                    env_id=each.env_id,
                    name=each.name,
                    state=_state(each),
                    last_seen_s=now - each.last_seen,
                    queued_sequences=run.queue.num_sequences(each.env_id),
                    buffered_sequences=run.num_buffered_sequences(each.env_id),
                    floor=floors.get(each.env_id, 0),
                    items_in_flight=each.items_in_flight,
                    oldest_item_s=None
                    if (since := each.oldest_item_since) is None
                    else now - since,
                    over_age=each.over_age,
                    losses=each.losses,
                )
                for each in _worst(run, offset + limit, blocking=env_id)[offset:]
            ],
        )

    def refusal(self) -> str | None:
        """Return why groups are refused for want of space; None: they are not."""
        room = self._room_of(self.state.token)
        return (room and room.refusal()) or self.store.usage().refusal

    def overload(self) -> str | None:
        """Return why the run accepts no group now; None if it may accept some: `_check_room` decides per group."""
        excess = _excess(self.state)
        if excess is None:
            return None
        plan = None if self.state.trainer is None else self.state.look()
        if self.state.leases.to_replay or isinstance(plan, Plan):
            return excess.reason
        return excess.reason if plan is None and excess.factor >= _FAR_BEYOND else None

    def _check_room(self, groups: Sequence[NewGroup]) -> None:
        """Raise `Overloaded` if the run is full, or if it waits for other groups and these would fill it."""
        run = self.state
        excess = _excess(run)
        if excess is None:
            return
        if self.overload() is not None:
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

    def lease_ages_s(self) -> list[float]:
        now = self._clock()
        return [now - batch.leased_at for batch in self.state.leases.leased.values()]

    def info(self) -> HubInfo:
        """-1 before a trainer has registered."""
        trainer = self.state.trainer
        max_token_len = -1 if trainer is None else trainer.max_token_len
        return HubInfo(batch_size=self.state.batch_size, max_token_len=max_token_len)

    def wandb_info(self) -> WandbInfo:
        trainer = self.state.trainer
        return WandbInfo(
            group=trainer and trainer.wandb_group, project=trainer and trainer.wandb_project
        )


def env_status(run: RunState, environment: Environment, *, now: float) -> EnvStatus:
    """Return how much work is ahead of an environment, by the original's formulas, without their side effects.

    Other environments' sequences are rounded up to the largest queued group. The cost is independent of queue length.
    """
    env_id = environment.env_id
    group_size = max(environment.registration.group_size, run.queue.largest(env_id))
    max_group_size = max(1, run.queue.largest_of_all())
    own = run.queue.num_sequences(env_id)
    others = _queued_by_others(run, env_id, max_group_size=max_group_size)
    wanted = run.shares.wanted(env_id, own=float(run.environments.sums.own[env_id]))
    times, num_held = run.trainer_times, run.leases.num_held
    return EnvStatus(
        current_step=run.current_step,
        queue_size=(own + others) // group_size,
        unallocated_fraction=run.environments.sums.unallocated,
        self_queue_size=own // group_size,
        max_group_size=max_group_size,
        env_weight=float(run.environments.sums.weights[env_id]),
        policy_version=run.policy_version,
        trainer_step_s=times.step_s,
        trainer_waits_s=times.waits_s(now, num_held=num_held),
        # Even if it is ahead of its share: no batch is cut without the minimum.
        wanted_share=max(wanted, min(1.0, environment.share)),
        trainer_wait_share=times.wait_share(now, num_held=num_held),
        staleness=times.staleness,
    )


def _queued_by_others(run: RunState, env_id: int, *, max_group_size: int) -> int:
    """Return the sequences, those of each environment rounded up, less what its minimum claims."""
    queue = run.queue
    total = queue.num_rounded(max_group_size) - rounded(queue.num_sequences(env_id), max_group_size)
    for each, share in run.environments.sums.minimums.items():
        if each != env_id:
            supply = rounded(queue.num_sequences(each), max_group_size)
            total -= min(supply, int(run.batch_size * share))
    return total


def _num_groups(batches: Iterable[HeldBatch]) -> int:
    return sum(len(batch.headers) for batch in batches)


def _worst(run: RunState, num: int, *, blocking: int | None) -> list[Environment]:
    """Return the first `num` environments: the one that blocks, silent ones, those that lose most, the rest."""

    def rank(each: Environment) -> tuple[bool, int, int]:
        place = 2 if not each.is_connected else not each.is_silent
        return each.env_id != blocking, place, -each.num_lost

    return heapq.nsmallest(num, run.environments, key=rank)  # equal ones by id


def _cause(run: RunState, env_id: int | None, *, now: float) -> str:
    """Name the active environment, of all or `env_id`, that made most work for nothing, else that of the oldest item in
    flight; empty if there is none."""
    asked = run.environments if env_id is None else [run.environments.get(env_id)]
    active = [each for each in asked if each.is_active]
    if wasteful := [each for each in active if each.main_loss is not None]:
        worst = max(wasteful, key=lambda each: each.num_lost)
        return f"; {worst.name} {worst.main_loss}"
    began = [
        (each.oldest_item_since, each) for each in active if each.oldest_item_since is not None
    ]
    if not began:
        return ""
    since, oldest = min(began, key=lambda pair: pair[0])
    waiting = [f"{number} for {what}" for what, number in (oldest.over_age or {}).items()]
    over_age = f"; over age and waiting: {', '.join(waiting)}" if waiting else ""
    return (
        f"; {oldest.name} has reported {oldest.items_in_flight} items in flight,"
        f" the oldest started {now - since:.0f} s ago{over_age}"
    )


def _state(environment: Environment) -> str:
    if not environment.is_connected:
        return "disconnected"
    return "silent" if environment.is_silent else "active"


def _excess(run: RunState) -> _Excess | None:
    """Return the first bound that is reached. Groups beyond the staleness bound would be too old when delivered."""
    policy, staleness = run.policy, run.max_staleness
    sequences = [(policy.max_queued_sequences, "--max-queued-sequences")]
    if staleness is not None and run.trainer is not None:
        sequences.append(((staleness + 1) * run.batch_size, "max_staleness"))
    max_sequences = min(sequences, key=lambda each: math.inf if each[0] is None else each[0])
    for unit, used, (bound, flag) in [
        ("sequences", run.queue.total_sequences, max_sequences),
        ("bytes", run.queue.total_bytes, (policy.max_queued_bytes, "--max-queued-bytes")),
        ("groups", len(run.queue), (policy.max_queued_groups, "--max-queued-groups")),
    ]:
        if bound is not None and used >= bound:
            reason = f"{used} {unit} are queued, the bound is {bound} ({flag})"
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
