"""One run as a state machine: trainer, environments, queue, step, ledger.

The only owner of the hub's state. No HTTP and no files: the server calls it from one event loop,
payloads go to the store it was given, clock and run ids are injected. Every method is synchronous
and either changes everything it says or raises before it changed anything. Every group that ever
came in is in exactly one place of the ledger.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atroposlib.api.batching import (
    GroupHeader,
    NoBatch,
    oldest_subset,
    plan_batch,
    sequence_floors,
)
from atroposlib.api.schemas import (
    EnvRegistration,
    EnvStatus,
    HubInfo,
    HubStatus,
    Ledger,
    RegisterEnv,
    Registration,
    WandbInfo,
)
from atroposlib.api.stores.base import Payload, PayloadStore
from atroposlib.errors import AtroposError, GroupError

logger = logging.getLogger(__name__)

MIN_ENV_WEIGHT = 0.01
"""The least share of the work an environment is told to do, as in the original."""


class NotRegistered(AtroposError):
    """No trainer has registered, so there is no batch size to cut batches by."""


class UnknownEnvironment(AtroposError):
    """The environment id was not given out by this hub in this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingGroup:
    """A checked group as the server hands it in."""

    env_id: int | None
    num_sequences: int
    policy_version: int | None
    group_id: str | None
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of one accepted group.

    A repeated `group_id` gets the receipt of the first time.
    """

    buffer_size: int | None
    """Sequences buffered for the environment after this group; None: it went to the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One delivered batch."""

    step: int
    """`current_step` after this delivery."""
    payloads: list[Payload]
    policy_versions: list[int | None]
    """Per group: the oldest policy version that sampled it."""


@dataclass(slots=True, kw_only=True)
class Environment:
    """A registered environment. The id is its index in order of registration."""

    registration: RegisterEnv
    name: str
    is_connected: bool = True
    last_seen: float
    """Injected clock, seconds."""
    buffered: list[GroupHeader] = field(default_factory=list)
    """Odd-sized groups that wait for others to make up one full group."""

    @property
    def share(self) -> float:
        """`min_batch_allocation`, 0 when none is asked for or the environment has left."""
        return (self.registration.min_batch_allocation or 0.0) if self.is_connected else 0.0

    @property
    def demand(self) -> float:
        """Context length times weight: its claim on the work, compared with the others'."""
        return self.registration.max_token_length * max(0.0, self.registration.weight)


class _Queue:
    """Headers of queued groups, first in first, with the counts that `/status-env` polls for."""

    def __init__(self) -> None:
        self._headers: dict[int, GroupHeader] = {}
        self.num_sequences: Counter[int | None] = Counter()
        """Queued sequences by environment; no entry for an environment without any."""
        self._sizes: dict[int | None, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._headers)

    def __iter__(self) -> Iterator[GroupHeader]:
        return iter(self._headers.values())

    def add(self, header: GroupHeader) -> None:
        self._headers[header.number] = header
        self.num_sequences[header.env_id] += header.num_sequences
        self._sizes.setdefault(header.env_id, Counter())[header.num_sequences] += 1

    def remove(self, headers: Iterable[GroupHeader]) -> None:
        for header in headers:
            del self._headers[header.number]
            self.num_sequences[header.env_id] -= header.num_sequences
            sizes = self._sizes[header.env_id]
            sizes[header.num_sequences] -= 1
            if not sizes[header.num_sequences]:
                del sizes[header.num_sequences]
            if not sizes:
                del self._sizes[header.env_id], self.num_sequences[header.env_id]

    def largest(self, env_id: int | None) -> int:
        """Sequences of the environment's largest queued group; 0 without any."""
        return max(self._sizes.get(env_id, ()), default=0)

    def largest_of_all(self) -> int:
        return max((max(sizes) for sizes in self._sizes.values()), default=0)


class Coordinator:
    """One run: what is registered, what is queued, what was delivered."""

    def __init__(
        self,
        store: PayloadStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_uuid: Callable[[], int] = lambda: uuid.uuid4().int,
    ) -> None:
        self._store = store
        self._clock = clock
        self._new_uuid = new_uuid
        self._begin()

    def _begin(self) -> None:
        self._trainer: Registration | None = None
        self._has_started = False
        """True once the trainer has asked for a batch: this is what lets environments in."""
        self._step = 0
        self._policy_version: int | None = None
        self._environments: list[Environment] = []
        self._queue = _Queue()
        self._next_number = 0
        self._is_plan_stale = True
        self._is_stuck = False
        self._latest: Payload | None = None
        self._receipts: dict[str, Receipt] = {}
        self._num_delivered = 0
        self._num_duplicates = 0
        self._num_refused_at_entry = 0
        self._rejected: Counter[str] = Counter()

    def reset(self) -> None:
        """Forget the run: trainer, environments, groups, ledger. What is discarded is logged."""
        ledger = self.ledger()
        logger.warning(
            "reset: discarding %d queued and %d buffered groups at step %d",
            ledger.queued,
            ledger.buffered,
            self._step,
        )
        self._store.clear()
        self._begin()

    # Trainer

    def register(self, registration: Registration) -> int:
        """Register the trainer and return a 128-bit id.

        A second registration joins the live run and changes nothing.
        """
        if self._trainer is not None:
            logger.warning(
                "a second trainer registered; the live run keeps its state (batch_size %d, step %d)"
                " and ignores %s; GET /reset_data begins a new run",
                self._trainer.batch_size,
                self._step,
                registration.model_dump(exclude_defaults=True),
            )
            return self._new_uuid()
        self._trainer = registration
        self._step = registration.starting_step
        self._is_plan_stale = True
        too_large = [h for h in self._queue if h.num_sequences > registration.batch_size]
        if too_large:
            logger.warning(
                "rejecting %d groups, sent before the trainer came, larger than its batch_size %d",
                len(too_large),
                registration.batch_size,
            )
            self._store.take([header.number for header in too_large])
            self._queue.remove(too_large)
            self._rejected["larger_than_batch"] += len(too_large)
        logger.info(
            "trainer registered: batch_size %d, step %d of %d",
            registration.batch_size,
            self._step,
            registration.num_steps,
        )
        return self._new_uuid()

    def wandb_info(self) -> WandbInfo:
        if self._trainer is None:
            return WandbInfo(group=None, project=None)
        return WandbInfo(group=self._trainer.wandb_group, project=self._trainer.wandb_project)

    def info(self) -> HubInfo:
        if self._trainer is None:
            return HubInfo(batch_size=-1, max_token_len=-1)
        return HubInfo(
            batch_size=self._trainer.batch_size, max_token_len=self._trainer.max_token_len
        )

    def set_policy(self, version: int) -> None:
        """Note the policy version that the engines serve from now on.

        It may go back after a rollback.
        """
        self._policy_version = version

    def next_batch(self) -> Batch | None:
        """Deliver the next exact batch and advance the step; None when no batch can be cut yet.

        Raises `NotRegistered` before the trainer has registered.
        """
        if self._trainer is None:
            raise NotRegistered("Trainer not registered. Call /register first.")
        self._has_started = True
        if not self._is_plan_stale:
            return None
        batch_size = self._trainer.batch_size
        shares = {n: env.share for n, env in enumerate(self._environments) if env.share > 0}
        plan = plan_batch(
            self._queue, batch_size=batch_size, floors=sequence_floors(batch_size, shares)
        )
        if isinstance(plan, NoBatch):
            self._is_plan_stale = False
            self._note_stuck(plan)
            return None
        self._is_stuck = False
        if plan.waived:
            logger.warning(
                "no batch of whole groups honours every min_batch_allocation; waived for %s",
                list(plan.waived),
            )
        payloads = self._store.take([header.number for header in plan.groups])
        self._queue.remove(plan.groups)
        self._num_delivered += len(plan.groups)
        self._step += 1
        return Batch(
            step=self._step,
            payloads=payloads,
            policy_versions=[header.policy_version for header in plan.groups],
        )

    def _note_stuck(self, plan: NoBatch) -> None:
        if plan.is_stuck and not self._is_stuck:
            logger.warning("there is no batch although enough is queued: %s", plan.reason)
        self._is_stuck = plan.is_stuck

    # Environments

    def register_env(self, registration: RegisterEnv) -> EnvRegistration | None:
        """Register an environment; None until the trainer has asked for its first batch."""
        if self._trainer is None or not self._has_started:
            return None
        name = registration.desired_name
        same_name = sum(env.registration.desired_name == name for env in self._environments)
        environment = Environment(
            registration=registration, name=f"{name}_{same_name}", last_seen=self._clock()
        )
        self._environments.append(environment)
        self._is_plan_stale = True
        env_id = len(self._environments) - 1
        logger.info("environment %d registered: %s", env_id, environment.name)
        return EnvRegistration(
            env_id=env_id,
            wandb_name=environment.name,
            checkpoint_dir=self._trainer.checkpoint_dir,
            starting_step=self._step,
            checkpoint_interval=self._trainer.save_checkpoint_interval,
            num_steps=self._trainer.num_steps,
        )

    def disconnect_env(self, env_id: int) -> None:
        """Take the environment out of weights and minimums.

        Its queued groups stay. Raises `UnknownEnvironment`.
        """
        environment = self._environment(env_id)
        environment.is_connected = False
        self._is_plan_stale = True
        logger.info("environment %d (%s) disconnected", env_id, environment.name)

    def status_env(self, env_id: int) -> EnvStatus:
        """Tell an environment how much work is ahead of it. Raises `UnknownEnvironment`.

        The original's formulas, without their side effects; other environments' sequences are rounded up to the largest
        queued group.
        """
        environment = self._environment(env_id)
        environment.last_seen = self._clock()
        group_size = max(environment.registration.group_size, self._queue.largest(env_id))
        max_group_size = max(1, self._queue.largest_of_all())
        batch_size = self.info().batch_size
        own = self._queue.num_sequences[env_id]
        others = 0
        for other, queued in self._queue.num_sequences.items():
            if other != env_id:
                rounded = -(-queued // max_group_size) * max_group_size
                others += max(0, rounded - int(batch_size * self._share(other)))
        connected = [env for env in self._environments if env.is_connected]
        demand = sum(env.demand for env in connected)
        return EnvStatus(
            current_step=self._step,
            queue_size=(own + others) // group_size,
            unallocated_fraction=1.0 - min(1.0, sum(env.share for env in connected)),
            self_queue_size=own // group_size,
            max_group_size=max_group_size,
            env_weight=max(MIN_ENV_WEIGHT, environment.demand / demand if demand else 0.0),
            policy_version=self._policy_version,
        )

    def _environment(self, env_id: int) -> Environment:
        if not 0 <= env_id < len(self._environments):
            raise UnknownEnvironment(
                f"environment {env_id} is not registered in this run"
                f" ({len(self._environments)} are); register it again with POST /register-env"
            )
        return self._environments[env_id]

    def _share(self, env_id: int | None) -> float:
        is_known = env_id is not None and 0 <= env_id < len(self._environments)
        return self._environments[env_id].share if is_known and env_id is not None else 0.0

    # Groups

    def accept(self, groups: Sequence[IncomingGroup]) -> list[Receipt]:
        """Take in checked groups, all or none; one receipt per group.

        Raises `GroupError` when a group could never be part of a batch: it has no sequences, or
        more than the batch.
        """
        for index, group in enumerate(groups):
            problem = self._refusal(group)
            if problem is not None:
                self.reject(problem.reason, num_groups=len(groups))
                prefix = f"[{index}]." if len(groups) > 1 else ""
                raise GroupError(f"{prefix}tokens: {problem.message}")
        return [self._accept_one(group) for group in groups]

    def reject(self, reason: str, *, num_groups: int = 1) -> None:
        """Count refused groups; a request whose groups could not be counted is one."""
        self._num_refused_at_entry += num_groups
        self._rejected[reason] += num_groups

    def _refusal(self, group: IncomingGroup) -> _Refusal | None:
        if group.num_sequences == 0:
            return _Refusal("empty", "the group has no sequences; leave it out")
        if self._trainer is not None and group.num_sequences > self._trainer.batch_size:
            return _Refusal(
                "larger_than_batch",
                f"{group.num_sequences} sequences, but a batch holds {self._trainer.batch_size};"
                " lower group_size or raise the trainer's batch_size",
            )
        return None

    def _accept_one(self, group: IncomingGroup) -> Receipt:
        if group.group_id is not None and group.group_id in self._receipts:
            self._num_duplicates += 1
            return self._receipts[group.group_id]
        header = GroupHeader(
            number=self._next_number,
            env_id=group.env_id,
            num_sequences=group.num_sequences,
            policy_version=group.policy_version,
        )
        self._store.put(header.number, group.payload)
        self._next_number += 1
        receipt = Receipt(buffer_size=self._place(header, group.payload))
        if group.group_id is not None:
            self._receipts[group.group_id] = receipt
        return receipt

    def _place(self, header: GroupHeader, payload: Payload) -> int | None:
        """Queue the group, or buffer it until odd sizes add up to a full group.

        Return the sequences left in the buffer; None when the group did not go there.
        """
        env_id = header.env_id
        if env_id is None or not 0 <= env_id < len(self._environments):
            self._enqueue([header], payload)
            return None
        environment = self._environments[env_id]
        environment.last_seen = self._clock()
        expected = environment.registration.group_size
        if header.num_sequences >= expected:
            self._enqueue([header], payload)
            return None
        buffered = environment.buffered
        buffered.append(header)
        chosen = oldest_subset([each.num_sequences for each in buffered], expected)
        if chosen:
            self._enqueue([buffered[index] for index in chosen], payload)
            for index in reversed(chosen):
                del buffered[index]
        return sum(each.num_sequences for each in buffered)

    def _enqueue(self, headers: Iterable[GroupHeader], newest: Payload) -> None:
        for header in headers:
            self._queue.add(header)
        self._latest = newest
        self._is_plan_stale = True

    def latest(self) -> Payload | None:
        """The group queued last, delivered or not; None before the first."""
        return self._latest

    # Accounts

    def status(self) -> HubStatus:
        return HubStatus(
            current_step=self._step,
            queue_size=len(self._queue),
            policy_version=self._policy_version,
        )

    def ledger(self) -> Ledger:
        """Where every group is.

        `produced` is counted apart from the places, so that a leak would show.
        """
        return Ledger(
            produced=self._next_number + self._num_refused_at_entry,
            queued=len(self._queue),
            buffered=sum(len(env.buffered) for env in self._environments),
            delivered=self._num_delivered,
            rejected=dict(self._rejected),
            duplicates=self._num_duplicates,
        )


class _Refusal(NamedTuple):
    reason: str
    message: str
