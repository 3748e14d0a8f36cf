"""One run as the server sees it: the calls of trainers and environments, made durable, and their waits.

The only owner of a run's `RunState`. No HTTP and no files; the clock is injected. A method changes memory first (only
`accept` stores first), without an await in between, passes changes to the store in the same order, and returns when its
change is as durable as the store promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from atroposlib.api.run import experiments
from atroposlib.api.run.accounts import Accounts, env_status
from atroposlib.api.run.batching import Plan
from atroposlib.api.run.environments import EnvironmentNotFound
from atroposlib.api.run.leases import HeldBatch, LeaseRequest
from atroposlib.api.run.state import RunState, restore
from atroposlib.api.run.types import (
    ExperimentReplaced,
    NotRegistered,
    Receipt,
    RunMoved,
    RunPolicy,
    RunReset,
)
from atroposlib.api.schemas import (
    EnvRegistration,
    EnvStatus,
    RegisterEnv,
    RegisterTrainer,
    RegistrationReply,
    RejectReply,
    StatusQuery,
)
from atroposlib.api.stores.base import (
    Appended,
    CorruptGroups,
    GroupStore,
    NewGroup,
    StoreBroken,
    StoredBatch,
    StoreFull,
)
from atroposlib.api.stores.space import Space
from atroposlib.errors import GroupError
from atroposlib.utils.wording import main_loss


class Signal:
    """Wakes all waiters at a change, on one event loop.

    There must be no await between reading the state and `wait()`; then no change is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.is_closed = False

    def notify(self) -> None:
        self._event.set()
        if not self.is_closed:
            self._event = asyncio.Event()

    def close(self) -> None:
        """Wake all waiters; from now on `wait` returns at once."""
        self.is_closed = True
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One batch on its way to a trainer, with payloads; `Leases` keeps the batch."""

    row: StoredBatch
    """As it was leased: its step is `current_step` after this delivery."""
    payloads: list[bytes]
    staleness: list[int]
    """Per group: policy versions between its sampling and now."""
    is_repeated: bool = False
    """Whether an earlier answer to the same request was counted already."""


class Coordinator(Accounts):
    """One run: what is registered, what is queued, who holds which batch. Call `open` first."""

    def __init__(
        self,
        store: GroupStore,
        *,
        policy: RunPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "default",
        first_epoch: int = 0,
        room_of: Callable[[str | None], Space | None] = lambda token: None,
    ) -> None:
        """`room_of`: returns the room of all runs that a token, by its name, began; None: not bounded."""
        self.name = name
        self.policy = policy or RunPolicy()
        self.store = store
        self.state = RunState(name, self.policy, epoch=first_epoch)
        """Read-only for others. A reset replaces it."""
        self.arrivals = Signal()
        """Notified when a batch may have become possible."""
        self.progress = Signal()
        """Notified when the step or the policy version changed, or room was freed."""
        self.tokens_in = 0
        self.tokens_out = 0
        """Tokens of groups accepted and delivered since the process started."""
        self.used_at = clock()
        """When the run was last asked for."""
        self.set_aside_bytes: list[int] = []
        """Sizes of the run's earlier experiments."""
        self.num_set_aside_deleted = 0
        self._clock = clock
        self._room_of = room_of
        self.arriving_bytes = 0
        """Payloads on their way to the store."""
        self._is_closed = False
        self._is_moved = False

    async def open(self, earlier: Coordinator | None = None) -> str:
        """Restore the run from the store; return a log line about what was found, empty for a fresh store.

        It takes over from an `earlier` experiment, if there is one. Raises what the store's `open` raises, and
        `UnreadableRun` for an incomplete document.
        """
        saved = await self.store.open()
        try:
            restore(self.state, saved, now=self._clock())
            await (self._save() if earlier is None else self.take_over(earlier))
        except BaseException:
            await self.store.close()
            raise
        if not saved.groups and saved.document is None:
            return saved.found
        return f"run {self.name!r}: {self.summary()}; {saved.found}".rstrip("; ")

    async def close(self, *, is_moved: bool = False) -> None:
        """Wake all waiters, save pending changes, and close the store.

        Later calls raise `RunReset`; `RunMoved` if `is_moved`: the stored run is opened again, here or elsewhere.
        """
        self._is_moved = is_moved
        self.stop_waiting()
        with contextlib.suppress(StoreBroken):  # already reported; it ends the hub
            await self._save()
        self._is_closed = True
        await self.store.close()

    def stop_waiting(self) -> None:
        self.arrivals.close()
        self.progress.close()

    async def reset(self) -> None:
        """Clear the run: trainer, environments, groups, ledger."""
        self._check_open()
        earlier = self.state
        held = self.ledger()
        earlier.log.warning(
            "reset: discarding %d queued, %d buffered and %d leased groups at step %d",
            held.queued,
            held.buffered,
            held.leased,
            earlier.current_step,
        )
        self._renew_state()
        await self.store.clear()
        await self._save_and_wake()

    def _renew_state(self) -> None:
        # A batch of the old run that is still being sent must not be mistaken for one of the next run.
        leases = self.state.leases
        self.state = RunState(
            self.name, self.policy, first_batch=leases.next_number, epoch=leases.epoch + 1
        )

    async def begin_again(self) -> None:
        """Clear a run that holds and expects no group; the environments keep their ids."""
        earlier = self.state.environments
        self._renew_state()
        self.state.environments.adopt(earlier)
        await self._save()

    async def take_over(self, earlier: Coordinator) -> None:
        """Adopt the environments of the run's earlier experiment, and invalidate the epochs of its trainers.

        Environments keep their ids, since original clients never register twice.
        """
        run = self.state
        for environment in run.environments:
            run.flush_buffer(environment)
        run.environments.adopt(earlier.state.environments)
        for environment in run.environments:
            run.note_environment(environment)
        run.leases.epoch = max(run.leases.epoch, earlier.state.leases.epoch + 1)
        await self._save()

    async def _save(self, *, is_durable: bool = True) -> None:
        """Commit the pending changes to the store."""
        self._check_open()
        await self.store.commit(self.state.take_change(is_durable=is_durable))

    def _check_open(self) -> None:
        if self._is_closed and self._is_moved:
            raise RunMoved(f"run {self.name} was closed here, idle or moved; try again")
        if self._is_closed:
            raise RunReset(f"run {self.name} is closed; register again")

    async def _save_and_wake(self) -> None:
        await self._save()
        self.arrivals.notify()
        self.progress.notify()

    # Trainer

    async def register(self, registration: RegisterTrainer) -> RegistrationReply:
        """Register a trainer. If it begins another experiment, the hub has replaced the earlier run before."""
        reply = experiments.register(self.state, registration, now=self._clock())
        await self._save_and_wake()
        return reply

    async def set_policy(self, version: int, *, epoch: int | None = None) -> None:
        """Set the policy version that the engines now serve; it may decrease after a rollback. Raises `Superseded`."""
        if self.state.trainer is None and epoch is not None:
            return  # the run was reset; at its next batch the trainer registers again and publishes again
        self.state.leases.check_epoch(epoch)
        self.state.trainer_seen = self._clock()
        self.state.policy_version = version
        await self._save_and_wake()

    async def checkpoint(self, step: int, *, epoch: int | None = None) -> int:
        """Free the batches trained at or before `step`, not needed again; return how many. Raises `Superseded`."""
        if self.state.trainer is not None:
            self.state.leases.check_epoch(epoch)
        trained = self.state.leases.trained.values()
        done = [batch for batch in trained if batch.row.step <= step]
        self.state.free(done)
        await self._save()
        return len(done)

    # Batches

    def _check_trainer(self, lease: LeaseRequest | None) -> None:
        if self.state.trainer is None:
            raise NotRegistered("Trainer not registered. Call /register first.")
        if lease is not None:
            self.state.leases.check_epoch(lease.epoch)

    async def deliver(self, lease: LeaseRequest | None = None) -> Delivery | None:
        """Deliver the next exact batch; None if none can be cut yet, or if the trainer has repeated the request since.

        Without `lease` the delivery is plain: the caller ends it with `end_plain` or `give_back`.
        Raises `NotRegistered` before a trainer has registered, `Superseded` for the epoch of an earlier trainer.
        """
        self._check_trainer(lease)
        self.state.trainer_seen = self._clock()
        self.state.trainer_times.ask(self._clock())
        if not self.state.has_started:
            self.state.has_started = True
            await self._save()
        while True:
            while await self.tick():
                pass  # saving took time: more may have expired, and the policy version may have changed
            self._check_trainer(lease)
            leases, now = self.state.leases, self._clock()
            if leases.is_outdated(lease):
                return None
            batch = leases.asked_before(lease, now=now)
            is_new = batch is None
            if batch is None:
                batch = self.state.lease_next(lease, now=now)
            if batch is None:
                return None
            payloads = await self._read(batch, is_new=is_new)
            if payloads is None or not self.state.leases.holds(batch.row):
                continue
            version = self.state.current_version
            is_first = self.state.note_delivery(batch, now=self._clock())
            if is_first:
                self.tokens_out += sum(header.num_tokens for header in batch.headers)
            return Delivery(
                row=batch.row,
                payloads=payloads,
                staleness=[max(0, version - header.version) for header in batch.headers],
                is_repeated=not is_first,
            )

    async def _read(self, batch: HeldBatch, *, is_new: bool) -> list[bytes] | None:
        """Read a batch once its lease is stored; None if the lease ended meanwhile, or payloads are damaged."""
        try:
            # Also for a repeated request: the lease may not be on disk yet.
            await self._save()
            if is_new:
                self.progress.notify()
            return await self.store.read([header.number for header in batch.headers])
        except CorruptGroups as e:
            if self.state.leases.holds(batch.row):
                self.state.log.error("%s", e)
                self.state.bury_members(batch, e.numbers, "damaged in the store")
                await self._save()
            return None
        except BaseException as e:
            is_held = self.state.leases.holds(batch.row)
            if isinstance(e, KeyError) and not is_held:
                return None  # its groups ended while it was read
            # Neither a disconnect nor expiry ends a plain delivery that never started.
            if batch.row.is_plain and is_held:
                await self._return(batch, is_failure=False)
            raise

    def may_deliver(self, lease: LeaseRequest | None) -> bool:
        """Whether to call `deliver`: a cheap check while groups arrive one by one."""
        leases = self.state.leases
        return (
            self.state.trainer is None
            or (lease is not None and lease.epoch not in (None, leases.epoch))
            or bool(leases.to_replay)
            or isinstance(self.state.look(), Plan)
            or leases.asked_before(lease, now=self._clock()) is not None
        )

    def _held(self, batch_id: int, lease_id: str) -> HeldBatch:
        """Return a leased batch. Raises `LeaseLost`, `UnknownBatch`."""
        batch = self.state.leases.held(batch_id, lease_id)
        self.state.trainer_seen = self._clock()
        return batch

    async def heartbeat(self, batch_id: int, lease_id: str) -> float:
        """Renew a lease; return the seconds it lasts from now. Raises `LeaseLost`, `UnknownBatch`."""
        await self.tick()
        batch = self._held(batch_id, lease_id)
        batch.expires_at = self._clock() + batch.row.ttl_s
        return batch.row.ttl_s

    async def ack(self, batch_id: int, lease_id: str, step: int | None = None) -> int:
        """Mark a batch as trained at `step` (None: its own); return the step. Idempotent. Raises as `heartbeat`."""
        await self.tick()
        leases = self.state.leases
        if batch_id not in leases.leased:
            known = leases.acknowledged_step(batch_id, lease_id)
            if known is not None:
                await self._save()  # as durable as the first answer
                return known
        batch = self._held(batch_id, lease_id)
        self.state.trainer_times.acknowledge(self._clock(), leased_at=batch.leased_at)
        self.state.acknowledge(batch, step)
        await self._save()
        return batch.row.step

    async def release(self, batch_id: int, lease_id: str) -> None:
        """Give a leased batch back: its groups go to the head of the queue. Raises `LeaseLost`, `UnknownBatch`."""
        await self._return(self._held(batch_id, lease_id), is_failure=True)

    async def reject_groups(
        self, batch_id: int, lease_id: str, positions: Sequence[int], *, reason: str
    ) -> RejectReply:
        """Set groups of a leased batch aside as dead, since the trainer cannot use them; requeue the others.

        `positions` count from 0 within the batch as it was delivered. Raises `LeaseLost`, `UnknownBatch`, and
        `GroupError` for a position outside of the batch.
        """
        batch = self._held(batch_id, lease_id)
        outside = [position for position in positions if position >= len(batch.headers)]
        if outside:
            num_groups = len(batch.headers)
            raise GroupError(f"groups: {outside[0]} is not in a batch of {num_groups} groups")
        numbers = {batch.headers[position].number for position in positions}
        requeued = self.state.bury_members(batch, numbers, f"rejected by the trainer: {reason}")
        await self._save_and_wake()
        return RejectReply(dead=len(numbers), requeued=requeued)

    async def end_plain(self, row: StoredBatch) -> bool:
        """End a plain delivery, whose groups never come again; False if it was no longer held."""
        if not self.state.leases.holds(row):
            return False
        batch = self.state.leases.leased[row.number]
        self.state.unconfirmed[row.number] = len(batch.headers)
        self.state.free([batch])
        await self._save()
        return True

    def note_receipt(self, row: StoredBatch) -> None:
        """Count the groups of an ended plain delivery as trained; stored with the run's next change."""
        self.state.unconfirmed.pop(row.number, None)

    async def give_back(self, row: StoredBatch) -> None:
        """Return the groups of an interrupted plain delivery to the head of the queue."""
        if self.state.leases.holds(row):
            await self._return(self.state.leases.leased[row.number], is_failure=False)

    async def _return(self, batch: HeldBatch, *, is_failure: bool) -> None:
        self.state.take_back(batch, is_failure=is_failure)
        await self._save_and_wake()

    async def tick(self) -> bool:
        """Expire leases, groups and environments; return False, without having awaited, if nothing expired."""
        if not self.state.expire(now=self._clock()):
            return False
        await self._save_and_wake()
        return True

    async def requeue_dead(self, numbers: Iterable[int]) -> int:
        """Requeue dead groups; return how many of `numbers` are queued now: those that no batch may hold stay dead."""
        run = self.state
        back = run.dead.take(numbers)
        oldest = run.oldest_version
        if oldest is not None and (expired := [h for h in back if h.version < oldest]):
            run.bury(expired, f"sampled before policy version {oldest}")
            back = [header for header in back if header.version >= oldest]
        for header in back:
            run.deliveries.pop(header.number, None)
        run.enqueue(back)
        num_queued = sum(run.fits(header.num_sequences) for header in back)
        await self._save_and_wake()
        return num_queued

    # Environments

    async def register_env(self, registration: RegisterEnv) -> EnvRegistration | None:
        """Register an environment; None until the trainer has asked for its first batch."""
        run = self.state
        if run.trainer is None or not run.has_started:
            return None
        environment = run.environments.register(registration, now=self._clock())
        run.note_environment(environment)
        run.log.info("environment %d registered: %r", environment.env_id, environment.name)
        reply = EnvRegistration(
            env_id=environment.env_id,
            wandb_name=environment.name,
            checkpoint_dir=run.trainer.checkpoint_dir,
            starting_step=run.current_step,
            checkpoint_interval=run.trainer.save_checkpoint_interval,
            num_steps=run.trainer.num_steps,
            experiment=run.experiment if registration.env_uid is not None else None,
        )
        await self._save_and_wake()  # a minimum may have become smaller
        return reply

    async def disconnect_env(self, env_id: int, *, env_uid: str | None = None) -> None:
        """Mark an environment as disconnected: it no longer counts in weights and minimums.

        Its groups stay, and buffered ones are queued. Raises `EnvironmentNotFound`.
        """
        run = self.state
        environment = run.environments.get(env_id, env_uid=env_uid)
        run.environments.disconnect(environment)
        run.note_environment(environment)
        run.flush_buffer(environment)
        run.log.info("environment %d (%r) disconnected", environment.env_id, environment.name)
        await self._save_and_wake()

    def status_env(
        self, env_id: int, *, env_uid: str | None = None, experiment: str | None = None
    ) -> EnvStatus:
        """Record that an environment is alive; return how much work is ahead of it.

        Raises `EnvironmentNotFound`, also if `experiment` is not the run's.
        """
        environment = self.state.environments.get(env_id, env_uid=env_uid)
        if experiment is not None and experiment != self.state.experiment:
            raise EnvironmentNotFound("another experiment has started; register again")
        self.state.note_call(environment, now=self._clock())
        return env_status(self.state, environment, now=self._clock())

    def note_items(self, asked: StatusQuery) -> None:
        """Record what an environment says with a status request of its items in flight, and of the earlier ones."""
        environment = self.state.environments.get(asked.env_id)
        since_s, losses = asked.oldest_item_s, asked.losses
        environment.items_in_flight = asked.items_in_flight
        environment.oldest_item_since = None if since_s is None else self._clock() - since_s
        environment.over_age = asked.over_age
        environment.losses = losses
        environment.num_lost = sum(
            n for name, n in (losses or {}).items() if not name.startswith("suspicious_")
        )
        environment.main_loss = None
        if losses is not None and asked.groups_kept is not None:
            environment.main_loss = main_loss(losses, num_kept=asked.groups_kept)

    # Groups

    async def accept(
        self, groups: Sequence[NewGroup], *, experiment: str | None = None
    ) -> list[Receipt]:
        """Store checked groups; return one receipt per group. `experiment`: what they were sampled for, if known.

        Raises `GroupError` for a group that could never be part of a batch (nothing is stored) or reuses the id of
        another (the rest of the call is stored), `ExperimentReplaced`, `Overloaded`, `StoreFull`, `RunReset`.
        """
        if experiment is not None:
            self._check_experiment(experiment, num_groups=len(groups))
        for index in range(len(groups)):
            self._check_size(groups, index)
        self._check_room(groups)
        num_bytes, refusal = sum(len(group.payload) for group in groups), None
        try:
            if (room := self._room_of(self.state.token)) is not None:
                room.take(num_bytes)
        except StoreFull as e:
            num_bytes, refusal = 0, e  # for what is not a duplicate, which needs no room
        self.arriving_bytes += num_bytes
        # A cancelled caller must not leave groups in the store that memory does not know.
        taking = self._take_in(groups, num_bytes=num_bytes, refusal=refusal)
        return await asyncio.shield(asyncio.create_task(taking))

    def _check_experiment(self, experiment: str, *, num_groups: int) -> None:
        current = self.state.experiment
        if current is None:
            # The trainer that registers next may be the one that these groups are for.
            raise RunReset("no trainer has registered; register again and wait for it")
        if experiment != current:
            self.reject("another_run", num_groups=num_groups)
            raise ExperimentReplaced(
                f"sampled for experiment {experiment}, but run {self.name} now holds {current}"
            )

    def _check_size(self, groups: Sequence[NewGroup], index: int) -> None:
        """Refuse all groups if the one at `index` is of a size that no batch can hold."""
        num_sequences = groups[index].header.num_sequences
        if num_sequences == 0:
            reason, problem = "empty", "the group has no sequences; leave it out"
        elif self.state.fits(num_sequences):
            return
        else:
            reason = "larger_than_batch"
            problem = (
                f"{num_sequences} sequences, but a batch holds {self.state.batch_size};"
                " lower group_size or raise the trainer's batch_size"
            )
        self.reject(reason, num_groups=len(groups))
        raise GroupError(f"{_at(index, groups)}tokens: {problem}")

    async def _take_in(
        self, groups: Sequence[NewGroup], *, num_bytes: int, refusal: StoreFull | None
    ) -> list[Receipt]:
        """Store groups, then take them into memory; must not be cancelled in between."""
        run = self.state
        try:
            self._check_open()
            new = [run.numbered(group) for group in groups]
            outcomes = await self.store.append(new, refusal=refusal)
        finally:
            self.arriving_bytes -= num_bytes
        self._check_open()
        if run is not self.state:
            raise RunReset("the run ended while the groups were stored; register again")
        now = self._clock()
        receipts = []
        for group, outcome in zip(new, outcomes, strict=True):
            receipts.append(run.take_in(group, outcome, now=now))
            if outcome is Appended.STORED:
                self.tokens_in += group.header.num_tokens
        if run.pending.moves:
            await self._save(is_durable=False)
        self.arrivals.notify()
        if Appended.CONFLICT in outcomes:
            self.reject("group_id_reused", num_groups=outcomes.count(Appended.CONFLICT))
            first = outcomes.index(Appended.CONFLICT)
            raise GroupError(
                f"{_at(first, groups)}group_id: {groups[first].header.group_id!r} was stored with other content;"
                " make a fresh id for each group"
            )
        return receipts

    def reject(self, reason: str, *, num_groups: int = 1) -> None:
        """Count refused groups; a request whose groups could not be counted counts as one."""
        self.state.rejected[reason] += num_groups

    async def latest(self) -> bytes | None:
        """Return the group queued last, delivered or not; None if there is none, or its payload is gone."""
        latest = self.state.latest
        if not isinstance(latest, int):
            return latest
        try:
            [payload] = await self.store.read([latest])
        except (KeyError, CorruptGroups):
            return None
        return payload


def _at(index: int, groups: Sequence[object]) -> str:
    return f"[{index}]." if len(groups) > 1 else ""
