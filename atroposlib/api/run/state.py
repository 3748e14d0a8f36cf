"""One run in memory: what is registered, where each group is, and the rules by which groups change places.

Every group ever received is in exactly one place of the ledger.

    received -> (buffered ->) queued -> leased -> trained -> freed
                                 ^--------'           with side exits expired, dead, discarded, rejected

No store, no clock, no await: a method changes memory and records the change for the store; the coordinator commits it
(`take_change`) before any other await.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from atroposlib.api.run.batching import Blocker, NoBatch, Plan, oldest_subset, sequence_floors
from atroposlib.api.run.environments import Environment, Environments, Shares
from atroposlib.api.run.leases import HeldBatch, LeaseRequest, Leases, TrainerTimes
from atroposlib.api.run.queue import DeadLetters, GroupQueue
from atroposlib.api.run.types import Receipt, RunPolicy
from atroposlib.api.schemas import Registration
from atroposlib.api.stores.base import (
    Appended,
    Change,
    Fate,
    Move,
    NewGroup,
    Place,
    SavedRun,
    UnreadableRun,
)
from atroposlib.scored_data import GroupHeader

_MAX_BUFFERED_SIZES = 8
"""Buffer limit for odd-sized groups, in multiples of the environment's group size."""
PATIENCE_VERSIONS = 8
"""A group older than this many policy versions is not passed over for others that fit better."""
TRAINER_FACT = "trainer"
ENVIRONMENT_FACT = "environment "
"""Names of facts in the store; an environment's ends with its id."""


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """Starts each line with the name of the run."""

    def process(
        self, msg: str, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        return f"run {self.extra['run'] if self.extra else ''}: {msg}", kwargs


class RunState:
    """The state of one run. Code outside the package `run` only reads it."""

    def __init__(
        self, name: str, policy: RunPolicy, *, first_batch: int = 0, epoch: int = 0
    ) -> None:
        self.name = name
        self.policy = policy
        self.log = RunLog(logging.getLogger(__name__), {"run": name})
        self.trainer: Registration | None = None
        self.experiment: str | None = None
        """Id of the training that the run holds; None before a trainer has registered."""
        self.token: str | None = None
        """Name of the token whose trainer began the experiment."""
        self.trainer_seen: float | None = None
        """Time of the trainer's last call, injected clock; None: none since this process opened the run."""
        self.trainer_times = TrainerTimes()
        self.shares = Shares()
        self.conflicts: list[str] = []
        """What a trainer that joined the live run asked for and does not get."""
        self.unknown_steps = 0
        """Steps that trainers resumed from and this run has no record of; see `experiments`."""
        self.has_started = False
        """Whether the trainer has asked for a batch; environments may register from then on."""
        self.policy_version: int | None = None
        self.leases = Leases(first_number=first_batch, epoch=epoch)
        self.environments = Environments()
        self.queue = GroupQueue()
        self.buffers: dict[int, list[GroupHeader]] = {}
        """By environment, if it has any: odd-sized groups that wait for others to make up one full group."""
        self.dead = DeadLetters()
        self.deliveries: dict[int, int] = {}
        """Per held group: times it was leased without an acknowledgement. Absent: none."""
        self.latest: int | bytes | None = None
        """Payload of the group queued last, or its number after a restart."""
        self.next_number = 0
        self.num_accepted = 0
        self.num_duplicates = 0
        self.ended: Counter[Fate] = Counter()
        self.unconfirmed: dict[int, int] = {}
        """Groups in plain batches that were sent, but maybe not received, by batch; -1: those of earlier processes."""
        self.rejected: Counter[str] = Counter()
        self._plan: Plan | NoBatch | None = None
        self._planned_for: tuple[int, ...] = ()
        self._is_stuck = False
        self.pending = Change()
        """For the store."""

    @property
    def batch_size(self) -> int:
        """Sequences; -1 before a trainer has registered."""
        return -1 if self.trainer is None else self.trainer.batch_size

    @property
    def current_step(self) -> int:
        return self.leases.current_step

    @property
    def current_version(self) -> int:
        """The policy version of groups sampled now; the step if no trainer publishes versions."""
        return self.current_step if self.policy_version is None else self.policy_version

    def note_delivery(self, batch: HeldBatch, *, now: float) -> bool:
        """Note that a batch is about to be sent to the trainer; return False, and count nothing, if it was before."""
        if batch.is_delivered:
            self.trainer_times.deliver_again()
            return False
        batch.is_delivered = True
        is_plain = batch.row.is_plain
        self.trainer_times.deliver(
            now,
            batch.headers,
            version=self.current_version,
            is_plain=is_plain,
            num_held=self.leases.num_held - (not is_plain),
        )
        taken: Counter[int | None] = Counter()
        for header in batch.headers:
            taken[header.env_id] += header.num_sequences
        self.shares.deliver(
            batch.row.number,
            self.environments.own_shares(),
            taken=taken,
            left=self.queue.supplies,
            batch_size=self.batch_size,
        )
        return True

    @property
    def max_staleness(self) -> int | None:
        asked = None if self.trainer is None else self.trainer.max_staleness
        return self.policy.max_staleness if asked is None else asked

    @property
    def oldest_version(self) -> int | None:
        """Groups that were sampled before this policy version expire; None: none do."""
        return None if self.max_staleness is None else self.current_version - self.max_staleness

    # Pending changes for the store

    def note_trainer(self) -> None:
        assert self.trainer is not None
        self.pending.facts[TRAINER_FACT] = msgspec.json.encode(self.trainer.model_dump())

    def note_environment(self, environment: Environment) -> None:
        # Zero-padded: facts are loaded in the order of their names, so environments by id.
        name = f"{ENVIRONMENT_FACT}{environment.env_id:08}"
        self.pending.facts[name] = msgspec.json.encode(environment.saved())

    def note_batch(self, batch: HeldBatch, place: Place) -> None:
        """Record that the groups of a batch moved to `place`."""
        self._move(batch.headers, place, batch=batch.row.number)
        self.pending.batches[batch.row.number] = batch.row

    def note_end(self, batch: HeldBatch, *, is_trained: bool = False) -> None:
        self.pending.batches[batch.row.number] = None
        if not is_trained:
            self.shares.forget(batch.row.number)

    def take_change(self, *, is_durable: bool) -> Change:
        change, self.pending = self.pending, Change()
        change.document = self.document()
        change.is_durable = is_durable
        return change

    def document(self) -> bytes:
        """Encode what may change with every batch; the trainer and environments are facts, written when they change."""
        document = {
            "experiment": self.experiment,
            "token": self.token,
            "has_started": self.has_started,
            "policy_version": self.policy_version,
            "unknown_steps": self.unknown_steps,
            "unconfirmed": sum(self.unconfirmed.values()),
            "rejected": dict(self.rejected),
            "duplicates": self.num_duplicates,
        }
        return msgspec.json.encode(document | self.leases.saved())

    # Places

    def _move(
        self,
        headers: Iterable[GroupHeader],
        place: Place,
        *,
        batch: int | None = None,
        reason: str | None = None,
    ) -> None:
        for header in headers:
            deliveries = self.deliveries.get(header.number, 0)
            self.pending.moves[header.number] = Move(
                place=place, batch=batch, deliveries=deliveries, reason=reason
            )

    def fits(self, num_sequences: int) -> bool:
        """Whether a group of `num_sequences` can be part of a batch; before a trainer registers, any can."""
        return self.trainer is None or num_sequences <= self.trainer.batch_size

    def enqueue(self, headers: Sequence[GroupHeader]) -> None:
        """Queue groups; those that no longer fit into a batch are set aside as dead."""
        for header in headers:
            self.queue.add(header)
        self._move(headers, Place.QUEUED)
        self.bury_oversized()

    def bury_oversized(self) -> None:
        """Set aside queued groups that are larger than the trainer's batch."""
        if not self.fits(self.queue.largest_of_all()):
            too_large = [h for h in self.queue if not self.fits(h.num_sequences)]
            self.queue.remove(too_large)
            reason = f"larger than the trainer's batch of {self.batch_size} sequences"
            self.bury(too_large, reason)

    def bury(self, headers: Sequence[GroupHeader], reason: str) -> None:
        for header in headers:
            self.dead.add(header, reason)
        self._move(headers, Place.DEAD, reason=reason)
        self.log.error("%d groups set aside as dead: %s", len(headers), reason)

    def end(self, headers: Iterable[GroupHeader], fate: Fate) -> None:
        for header in headers:
            self.deliveries.pop(header.number, None)
            self.ended[fate] += 1
            self.pending.ends[header.number] = fate

    # Batches

    def look(self) -> Plan | NoBatch:
        """Return the plan for the next batch of the queue, recomputed only if its inputs changed."""
        version = self.current_version
        basis = (self.queue.version, self.environments.version, self.batch_size, version)
        if self._plan is None or basis != self._planned_for:
            self._planned_for = basis
            self._plan = self.queue.plan(
                batch_size=self.batch_size,
                floors=sequence_floors(self.batch_size, self.environments.sums.minimums),
                overdue_before=version - PATIENCE_VERSIONS,
            )
        return self._plan

    def lease_next(self, request: LeaseRequest | None, *, now: float) -> HeldBatch | None:
        """Lease the next batch, from those to replay or else from the queue; None if there is none."""
        headers = None
        if not self.leases.to_replay:
            plan = self.look()
            was_stuck = self._is_stuck
            self._is_stuck = isinstance(plan, NoBatch) and plan.blocker is Blocker.SIZES
            if isinstance(plan, NoBatch):
                if self._is_stuck and not was_stuck:
                    self.log.warning("there is no batch although enough is queued: %s", plan.reason)
                return None
            if plan.waived:
                self.log.warning(
                    "no batch of whole groups honours every min_batch_allocation; waived for %s",
                    list(plan.waived),
                )
            headers = plan.groups
            self.queue.remove(headers)
        ttl_s = self.policy.lease_ttl_s
        batch = self.leases.lease(headers, request, default_ttl_s=ttl_s, now=now)
        self.note_batch(batch, Place.LEASED)
        return batch

    def take_back(self, batch: HeldBatch, *, is_failure: bool) -> None:
        """End a lease without an acknowledgement; a failure counts against the groups."""
        self.leases.take_back(batch)
        self.note_end(batch)
        self.enqueue(self.count_failure(batch.headers) if is_failure else batch.headers)

    def bury_members(self, batch: HeldBatch, numbers: Iterable[int], reason: str) -> int:
        """End a lease; set its groups `numbers` aside as dead, requeue the others and return how many those are."""
        bad = set(numbers)
        good = [header for header in batch.headers if header.number not in bad]
        self.leases.take_back(batch)
        self.note_end(batch)
        self.bury([header for header in batch.headers if header.number in bad], reason)
        self.enqueue(good)
        return len(good)

    def count_failure(self, headers: Sequence[GroupHeader]) -> list[GroupHeader]:
        """Count a lease without acknowledgement; return the groups still to be delivered."""
        alive: list[GroupHeader] = []
        poison: list[GroupHeader] = []
        for header in headers:
            failures = self.deliveries.get(header.number, 0) + 1
            self.deliveries[header.number] = failures
            (poison if failures >= self.policy.max_deliveries else alive).append(header)
        if poison:
            times = self.policy.max_deliveries
            self.bury(poison, f"leased {times} times without an acknowledgement")
        return alive

    def acknowledge(self, batch: HeldBatch, step: int | None) -> None:
        """Mark a batch as trained; free the oldest ones beyond the limits for batches without a checkpoint."""
        self.leases.acknowledge(batch, step)
        for header in batch.headers:
            self.deliveries.pop(header.number, None)
        self.note_batch(batch, Place.TRAINED)
        while self.leases.are_too_many(self.policy):
            self.free([next(iter(self.leases.trained.values()))])

    def free(self, batches: Iterable[HeldBatch]) -> None:
        """Remove trained batches and end their groups."""
        for batch in batches:
            self.leases.free(batch)
            self.note_end(batch, is_trained=True)
            self.end(batch.headers, Fate.TRAINED)

    # Incoming groups

    def numbered(self, group: NewGroup) -> NewGroup:
        """Return an arriving group with its number, for the store."""
        header = replace(group.header, number=self.next_number, arrival_step=self.current_version)
        self.next_number += 1
        place = Place.BUFFERED if self._is_odd(header) else Place.QUEUED
        return replace(group, header=header, place=place)

    def _is_odd(self, header: GroupHeader) -> bool:
        """Whether the group is smaller than its active environment's `group_size`, and so is buffered."""
        environment = self.environments.find(header.env_id)
        if environment is None or not environment.is_active:
            return False
        # A `group_size` beyond the batch size is useless, and its sums would cost memory.
        return header.num_sequences < environment.registration.group_size <= self.batch_size

    def take_in(self, group: NewGroup, outcome: Appended, *, now: float) -> Receipt:
        """Apply what the store did with a group to memory."""
        env_id = group.header.env_id
        environment = self.environments.find(env_id)
        if environment is not None:
            self.note_call(environment, now=now)
        if outcome is not Appended.STORED:
            is_duplicate = outcome is Appended.DUPLICATE
            self.num_duplicates += is_duplicate
            return Receipt(env_id=env_id, is_duplicate=is_duplicate)
        self.num_accepted += 1
        if group.place is Place.QUEUED or environment is None:
            self.latest = group.payload
            self.queue.add(group.header)
            if not self.fits(group.header.num_sequences):
                self.bury_oversized()  # a trainer has registered while the group was stored
            return Receipt(env_id=env_id)
        version = self.queue.version
        self.buffer(group.header)
        if self.queue.version != version:
            self.latest = group.payload
        return Receipt(env_id=env_id, buffer_size=self.num_buffered_sequences(environment.env_id))

    def buffer(self, header: GroupHeader) -> None:
        """Buffer an odd-sized group; queue it with others once they add up to `group_size`."""
        environment = self.environments.find(header.env_id)
        if environment is None:
            self.enqueue([header])
            return
        buffered = self.buffers.setdefault(environment.env_id, [])
        buffered.append(header)
        if not self._is_odd(header):
            self.flush_buffer(environment)
            return
        group_size = environment.registration.group_size
        chosen = oldest_subset([each.num_sequences for each in buffered], group_size)
        if chosen:
            self.enqueue([buffered[index] for index in chosen])
            for index in reversed(chosen):
                del buffered[index]
            self._set_buffer(environment.env_id, buffered)
        elif self.num_buffered_sequences(environment.env_id) > _MAX_BUFFERED_SIZES * group_size:
            self.log.warning(
                "environment %d (%r) sends groups that do not add up to its group_size of %d; they are queued all the"
                " same",
                environment.env_id,
                environment.name,
                group_size,
            )
            self.flush_buffer(environment)

    def flush_buffer(self, environment: Environment) -> None:
        """Queue all buffered groups of an environment."""
        self.enqueue(self.buffers.pop(environment.env_id, []))

    def _set_buffer(self, env_id: int, headers: list[GroupHeader]) -> None:
        if headers:
            self.buffers[env_id] = headers
        else:
            del self.buffers[env_id]

    def num_buffered_sequences(self, env_id: int) -> int:
        return sum(header.num_sequences for header in self.buffers.get(env_id, ()))

    def note_call(self, environment: Environment, *, now: float) -> None:
        environment.last_seen = now
        if environment.is_silent:
            self.environments.end_silence(environment)
            self.log.info("environment %d (%r) reconnected", environment.env_id, environment.name)

    # Time

    def expire(self, *, now: float) -> bool:
        """Expire overdue leases, environments and groups; return whether there were any."""
        leased = self.leases.leased.values()
        lost = [each for each in leased if not each.row.is_plain and now >= each.expires_at]
        for batch in lost:
            self.log.warning(
                "the lease of batch %d (step %d) expired after %.0f s; its %d groups go back",
                batch.row.number,
                batch.row.step,
                now - batch.leased_at,
                len(batch.headers),
            )
            self.take_back(batch, is_failure=True)
        silent = self.environments.silence(now=now, timeout_s=self.policy.env_timeout_s)
        for environment in silent:
            self.log.warning(
                "environment %d (%r) has been silent for %.0f s; its minimum is suspended",
                environment.env_id,
                environment.name,
                now - environment.last_seen,
            )
            self.flush_buffer(environment)
        stale = self._take_stale()
        self.end(stale, Fate.EXPIRED)
        forgotten = self.dead.take_beyond(self.policy.keep_dead_bytes)
        self.end(forgotten, Fate.DEAD)
        return bool(lost or silent or stale or forgotten)

    def _take_stale(self) -> list[GroupHeader]:
        """Remove and return the groups that were sampled too many policy versions ago."""
        oldest = self.oldest_version
        if oldest is None:
            return []
        stale = self.queue.stale(oldest)
        self.queue.remove(stale)
        for env_id, buffered in list(self.buffers.items()):
            stale += [h for h in buffered if h.version < oldest]
            self._set_buffer(env_id, [h for h in buffered if h.version >= oldest])
        if stale:
            self.log.warning(
                "%d groups expired, sampled before policy version %d (by environment: %s)",
                len(stale),
                oldest,
                dict(Counter(header.env_id for header in stale)),
            )
        return stale


# What `RunState.take_change` wrote, read again


def restore(run: RunState, saved: SavedRun, *, now: float) -> None:
    """Restore the state; changes made on the way stay pending for the store. Raises `UnreadableRun`."""
    try:
        if saved.document is not None:
            facts = {name: msgspec.json.decode(fact) for name, fact in saved.facts.items()}
            _restore_document(run, msgspec.json.decode(saved.document), facts, now=now)
        _restore_groups(run, saved, now=now)
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as e:
        raise UnreadableRun(f"the stored state of run {run.name!r} cannot be read: {e!r}") from e


def _restore_document(
    run: RunState, document: Mapping[str, Any], facts: Mapping[str, Any], *, now: float
) -> None:
    environments = [fact for name, fact in facts.items() if name.startswith(ENVIRONMENT_FACT)]
    run.experiment = document.get("experiment")
    run.token = document.get("token")
    run.environments.restore(environments, now=now)
    if TRAINER_FACT in facts:
        run.trainer = Registration.model_validate(facts[TRAINER_FACT])
        # None: written by an older version, without experiment ids.
        run.experiment = run.experiment or secrets.token_hex(16)
    run.has_started = document["has_started"]
    run.policy_version = document["policy_version"]
    run.unknown_steps = document.get("unknown_steps", 0)  # older versions write neither
    run.unconfirmed = {-1: document.get("unconfirmed", 0)}
    run.leases.restore(document)
    run.rejected = Counter(document["rejected"])
    run.num_duplicates = document["duplicates"]


def _restore_groups(run: RunState, saved: SavedRun, *, now: float) -> None:
    run.next_number = saved.next_number
    run.num_accepted = len(saved.groups) + saved.ended.total()
    run.ended = Counter(saved.ended)
    members: dict[int, list[GroupHeader]] = {row.number: [] for row in saved.batches}
    buffered: list[GroupHeader] = []
    for group in saved.groups:
        header, move = group.header, group.move
        if move.deliveries:
            run.deliveries[header.number] = move.deliveries
        if move.batch is not None:
            members[move.batch].append(header)
        elif move.place is Place.DEAD:
            run.dead.add(header, move.reason or "")
        elif move.place is Place.BUFFERED:
            buffered.append(header)
        else:
            run.queue.add(header)
            run.latest = header.number
    batches = [HeldBatch(row=row, headers=members[row.number]) for row in saved.batches]
    run.leases.restore_batches(batches, now=now)
    for batch in list(run.leases.leased.values()):
        # A plain delivery's connection died with the process, before the body was confirmed.
        if batch.row.is_plain:
            run.take_back(batch, is_failure=False)
    for header in buffered:
        run.buffer(header)
