"""One run as a state machine: trainer, environments, queue, batches, step, ledger.

The only owner of a run's state. No HTTP and no files; clock and ids are injected. Memory is changed first, in one
piece between two awaits, and each change goes to the store in that order; a method returns when its change is as
durable as the store promises. Every group that ever came in is in exactly one place of the ledger.

    received -> (buffered ->) queued -> leased -> trained -> freed
                                 ^--------'           with side exits expired, dead, discarded, rejected
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from atroposlib.api.run.admission import Admission, Situation
from atroposlib.api.run.backlog import Backlog
from atroposlib.api.run.batching import NoBatch, Plan, oldest_subset, sequence_floors
from atroposlib.api.run.dead_letters import DeadLetters
from atroposlib.api.run.environments import Environment, Environments, UnknownEnvironment
from atroposlib.api.run.experiments import TRAINER_TIMEOUT_S, Entry, choose
from atroposlib.api.run.explaining import explain
from atroposlib.api.run.leases import (
    Batch,
    LeaseRequest,
    Leases,
    Steps,
)
from atroposlib.api.run.queue import GroupQueue
from atroposlib.api.run.signals import Signal
from atroposlib.api.run.types import (
    AnotherExperiment,
    Delivery,
    GroupHeader,
    IncomingGroup,
    NotRegistered,
    Receipt,
    RunPolicy,
    RunReset,
)
from atroposlib.api.schemas import (
    MAX_ENV_NAME_CHARS,
    DeadGroup,
    EnvRegistration,
    EnvStatus,
    Explanation,
    HubInfo,
    HubStatus,
    Ledger,
    RegisterEnv,
    RegisterTrainer,
    Registration,
    RegistrationReply,
    RejectReply,
    Resume,
    WandbInfo,
)
from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    Change,
    CorruptGroups,
    Durability,
    End,
    Fate,
    GroupStore,
    Move,
    NewGroup,
    Place,
    SavedRun,
    StoreBroken,
    StoreUsage,
    UnreadableRun,
)
from atroposlib.errors import GroupError

logger = logging.getLogger(__name__)

_MAX_BUFFERED_SIZES = 8
"""Times its group size that an environment may have waiting for what makes up one group."""
_TRAINER = "trainer"
_ENVIRONMENT = "environment "
"""Names of facts in the store; that of an environment ends with its id."""
MAX_SAVED_LEASES = 16
"""Freed batches whose acknowledgement is known after a restart; a trainer repeats only its last."""
PATIENCE_VERSIONS = 8
"""A group older than this many policy versions is not passed over for others that fit better."""


class Coordinator:
    """One run: what is registered, what is queued, who holds which batch. Call `open` first."""

    def __init__(
        self,
        store: GroupStore,
        *,
        policy: RunPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_uuid: Callable[[], int] = lambda: uuid.uuid4().int,
        new_lease_id: Callable[[], str] = lambda: secrets.token_hex(16),
        name: str = "default",
        first_epoch: int = 0,
    ) -> None:
        self.name = name
        self.policy = policy or RunPolicy()
        self.arrivals = Signal()
        """Something came that may make a batch possible."""
        self.progress = Signal()
        """The step or the policy version changed, or room was made."""
        self.tokens_in = 0
        self.tokens_out = 0
        self._store = store
        self._clock = clock
        self._new_uuid = new_uuid
        self._new_lease_id = new_lease_id
        self._generation = 0
        self._is_closed = False
        self._begin(epoch=first_epoch)

    def _begin(self, *, first_batch: int = 0, epoch: int = 0) -> None:
        self._generation += 1
        self._trainer: Registration | None = None
        self._experiment: str | None = None
        """None before a trainer has registered."""
        self._trainer_seen: float | None = None
        """When a trainer made its last call, injected clock; None: not since this process opened the run."""
        self._conflicts: list[str] = []
        self._has_started = False
        """True once the trainer has asked for a batch: this is what lets environments in."""
        self._leases = Leases(first_number=first_batch, epoch=epoch)
        self._policy_version: int | None = None
        self._environments = Environments()
        self._queue = GroupQueue()
        self._dead = DeadLetters()
        self._deliveries: dict[int, int] = {}
        """Per held group: times it was leased without an acknowledgement. Absent: none."""
        self._unsaved_facts: dict[str, bytes] = {}
        """What the next save writes besides the document."""
        self._next_number = 0
        self._num_accepted = 0
        self._ended: Counter[Fate] = Counter()
        self._rejected: Counter[str] = Counter()
        self._num_duplicates = 0
        self._latest: int | bytes | None = None
        """Payload of the group queued last, or its number after a restart."""
        self._plan: Plan | NoBatch | None = None
        """None: the queue changed since the last look."""
        self._is_stuck = False
        self._backlog = Backlog()
        self._admission = self._new_admission()

    def _new_admission(self) -> Admission:
        return Admission(
            self._queue,
            self._environments,
            max_sequences=self.policy.max_queued_sequences,
            max_bytes=self.policy.max_queued_bytes,
            max_groups=self.policy.max_queued_groups,
        )

    async def open(self) -> str:
        """Take over what the store holds; return one line that says what was found, empty for nothing.

        Raises what the store's `open` raises, and `UnreadableRun` for a document that lacks something.
        """
        saved = await self._store.open()
        if saved.document is not None:
            try:
                facts = {name: msgspec.json.decode(fact) for name, fact in saved.facts.items()}
                self._restore_document(msgspec.json.decode(saved.document), facts)
            except (KeyError, TypeError, ValueError, msgspec.DecodeError) as e:
                await self._store.close()
                raise UnreadableRun(
                    f"the stored state of run {self.name!r} cannot be read: {e!r}"
                ) from e
        change = self._restore_groups(saved)
        await self._store.commit(change)
        if not saved.groups and saved.document is None:
            return saved.found
        return f"run {self.name!r}: {self.summary()}; {saved.found}".rstrip("; ")

    def summary(self) -> str:
        """What the run holds, for a log line."""
        ledger = self.ledger()
        return (
            f"step {self.current_step}, {ledger.queued} groups queued, {ledger.buffered} buffered,"
            f" {ledger.leased} leased, {ledger.trained} trained, {ledger.dead} dead,"
            f" {len(self._environments)} environments"
        )

    @property
    def experiment(self) -> str | None:
        """Id of the training that this run holds; None before a trainer has registered."""
        return self._experiment

    @property
    def epoch(self) -> int:
        """Counts the trainer's incarnations."""
        return self._leases.epoch

    async def close(self) -> None:
        """Answer everybody who waits, write down what was only counted, and close the store.

        Calls that still come raise `RunReset`.
        """
        self.stop_waiting()
        try:
            await self._save()
        except StoreBroken:
            pass  # what broke it has been reported, and ends the hub
        self._is_closed = True
        self._generation += 1
        await self._store.close()

    def stop_waiting(self) -> None:
        self.arrivals.close()
        self.progress.close()

    async def reset(self) -> None:
        """Forget the run: trainer, environments, groups, ledger. What is discarded is logged."""
        ledger = self.ledger()
        logger.warning(
            "run %s reset: discarding %d queued, %d buffered and %d leased groups at step %d",
            self.name,
            ledger.queued,
            ledger.buffered,
            ledger.leased,
            self.current_step,
        )
        # A batch of the old run that is still being sent must not be taken for one of the next run.
        self._begin(first_batch=self._leases.next_number, epoch=self._leases.epoch + 1)
        await self._store.clear()
        await self._save()
        self.arrivals.notify()
        self.progress.notify()

    # What survives a restart

    def _document(self) -> bytes:
        """What may change with every batch; the trainer and the environments are facts, written when they change."""
        document = {
            "experiment": self._experiment,
            "has_started": self._has_started,
            "last_step": self._leases.steps.last,
            "returned_steps": sorted(self._leases.steps.returned),
            "epoch": self._leases.epoch,
            "policy_version": self._policy_version,
            "next_batch": self._leases.next_number,
            "freed_step": self._leases.freed_step,
            "freed_leases": self._leases.freed(MAX_SAVED_LEASES),
            "rejected": dict(self._rejected),
            "duplicates": self._num_duplicates,
        }
        return msgspec.json.encode(document)

    def _restore_document(self, document: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        environments = [fact for name, fact in facts.items() if name.startswith(_ENVIRONMENT)]
        if "environments" in document:
            # Stored by a version that had no facts, and took names of any length.
            facts = {_TRAINER: document["trainer"]}
            environments = document["environments"]
            for env_id, each in enumerate(environments):
                registration = each["registration"]
                registration["desired_name"] = registration["desired_name"][:MAX_ENV_NAME_CHARS]
                self._note(_environment_fact(env_id), each)
            self._note(_TRAINER, facts[_TRAINER])
        if facts.get(_TRAINER) is not None:
            self._trainer = Registration.model_validate(facts[_TRAINER])
        self._experiment = document.get("experiment")
        if self._trainer is not None and self._experiment is None:
            self._experiment = secrets.token_hex(16)  # of a version that gave experiments no name
        self._has_started = document["has_started"]
        self._leases.steps = Steps(document["last_step"], list(document["returned_steps"]))
        self._leases.epoch = document["epoch"]
        self._policy_version = document["policy_version"]
        self._environments.restore(environments, now=self._clock())
        self._leases.next_number = document["next_batch"]
        self._leases.freed_step = document["freed_step"]
        self._leases.restore_freed(document["freed_leases"])
        self._rejected = Counter(document["rejected"])
        self._num_duplicates = document["duplicates"]

    def _restore_groups(self, saved: SavedRun) -> Change:
        """Put every stored group where it was; return what has to change at once."""
        self._next_number = saved.next_number
        self._num_accepted = len(saved.groups) + saved.ended.total()
        self._ended = Counter(saved.ended)
        members: dict[int, list[GroupHeader]] = {}
        buffered: list[GroupHeader] = []
        moves: list[Move] = []
        for group in saved.groups:
            number = group.header.number
            if group.deliveries:
                self._deliveries[number] = group.deliveries
            if group.place in (Place.LEASED, Place.TRAINED, Place.REPLAY):
                assert group.batch is not None, f"group {number} is in no batch"
                members.setdefault(group.batch, []).append(group.header)
            elif group.place is Place.DEAD:
                self._dead.add(group.header, group.reason or "")
            elif group.place is Place.BUFFERED:
                buffered.append(group.header)
            else:
                self._queue.add(group.header)
                self._latest = number
        now = self._clock()
        self._leases.restore(
            Batch(
                number=row.number,
                headers=members.pop(row.number, []),
                state=row.state,
                step=row.step,
                epoch=row.epoch,
                lease_id=row.lease_id,
                ttl_s=row.ttl_s,
                leased_at=now,
                expires_at=now + row.ttl_s,
                request_id=row.request_id,
                is_plain=row.is_plain,
            )
            for row in saved.batches
        )
        # A plain delivery's connection died with the process, before the body was confirmed.
        cut_off = [batch for batch in self._leases if batch.is_leased and batch.is_plain]
        for batch in cut_off:
            moves += self._take_back(batch, counts=False)
        assert not members, f"groups of unknown batches {list(members)}"
        for header in buffered:
            moves += self._buffer_or_queue(header)
        closed = [batch.number for batch in cut_off]
        return Change(
            moves=moves,
            closed_batches=closed,
            document=self._document(),
            facts=self._take_unsaved_facts(),
        )

    def _note(self, name: str, fact: object) -> None:
        """Let the next save write a fact."""
        self._unsaved_facts[name] = msgspec.json.encode(fact)

    def _note_environment(self, environment: Environment) -> None:
        self._note(_environment_fact(environment.env_id), environment.saved())

    def _take_unsaved_facts(self) -> dict[str, bytes]:
        facts, self._unsaved_facts = self._unsaved_facts, {}
        return facts

    async def _save(self, change: Change | None = None) -> None:
        """Make a change durable together with the run's document and what was noted."""
        if self._is_closed:
            raise RunReset(f"run {self.name} is closed; register again")
        change = change or Change()
        await self._store.commit(
            Change(
                moves=change.moves,
                ends=change.ends,
                batches=change.batches,
                closed_batches=change.closed_batches,
                document=self._document(),
                facts=self._take_unsaved_facts(),
            )
        )

    # Trainer

    def entry(self, registration: RegisterTrainer) -> Entry:
        """How the trainer of `registration` would enter this run."""
        seen = self._trainer_seen
        return choose(
            registration,
            current=self._experiment,
            is_trainer_alive=seen is not None and self._clock() - seen < TRAINER_TIMEOUT_S,
        )

    async def register(self, registration: RegisterTrainer) -> RegistrationReply:
        """Register the trainer of this run's experiment: the first one, one that joins, or one that resumes.

        A trainer that begins another experiment is the hub's business: it sets this run aside before.
        """
        entry = self.entry(registration)
        is_native = registration.experiment is not None or registration.resume_step is not None
        is_first = self._trainer is None
        if entry is Entry.JOIN:
            self._trainer_seen = self._clock()
            reply = self._join(registration)
            return reply.model_copy(update=self._identity()) if is_native else reply
        change, counts = Change(), dict[str, int]()
        if is_first:
            self._leases.steps = Steps(registration.starting_step)
        if entry is Entry.RESUME:
            step = registration.resume_step
            same_size = is_first or registration.batch_size == self.info().batch_size
            change, counts = self._resume(
                registration.starting_step if step is None else step,
                registration.resume,
                same_size=same_size,
            )
        fields = registration.model_dump(include=set(Registration.model_fields))
        self._trainer = Registration.model_validate(fields)
        self._trainer_seen = self._clock()
        self._experiment = registration.experiment or self._experiment or secrets.token_hex(16)
        self._conflicts = []
        self._note(_TRAINER, self._trainer.model_dump())
        moves = [*change.moves, *self._bury_oversized()]
        self._queue_changed()
        logger.info(
            "run %s: trainer registered: batch_size %d, step %d of %d",
            self.name,
            registration.batch_size,
            self.current_step,
            registration.num_steps,
        )
        await self._save(
            Change(
                moves=moves,
                ends=change.ends,
                batches=change.batches,
                closed_batches=change.closed_batches,
            )
        )
        self.arrivals.notify()
        self.progress.notify()
        reply = RegistrationReply(uuid=self._new_uuid())
        if not is_native:
            return reply
        told = self._identity() | counts
        return reply.model_copy(update=told | ({"step": self.current_step} if counts else {}))

    def _identity(self) -> dict[str, Any]:
        """The fields of a reply that say which experiment and which incarnation of its trainer was registered."""
        return {"epoch": self._leases.epoch, "experiment": self._experiment}

    def _join(self, registration: RegisterTrainer) -> RegistrationReply:
        """Let another trainer take part in the live run, which stays as it is; note what it asked for in vain."""
        assert self._trainer is not None
        asked = registration.model_dump(include=set(Registration.model_fields))
        live = self._trainer.model_dump()
        conflicts = [
            f"{name}: {live[name]!r} stays, {value!r} was asked for"
            for name, value in asked.items()
            if value != live[name] and name != "starting_step"
        ]
        self._conflicts = conflicts or self._conflicts
        logger.warning(
            "run %s: a second trainer registered and joins the live run at step %d%s",
            self.name,
            self.current_step,
            f"; not changed for it: {'; '.join(conflicts)}" if conflicts else "",
        )
        return RegistrationReply(uuid=self._new_uuid())

    async def take_over(self, earlier: Coordinator) -> None:
        """Go on with the environments of the experiment that this one follows in the run; fence its trainers off.

        Environments keep their ids, since those of the original never register twice.
        """
        moves = [move for each in self._environments for move in self._flush_buffer(each)]
        self._environments = earlier._environments.successor()
        for environment in self._environments:
            self._note_environment(environment)
        self._leases.epoch = max(self._leases.epoch, earlier._leases.epoch + 1)
        self._admission = self._new_admission()
        self._queue_changed()
        await self._save(Change(moves=moves))

    def _bury_oversized(self) -> list[Move]:
        """Set queued groups aside that fit into no batch of the trainer that registered."""
        limit = self.info().batch_size
        if self._queue.largest_of_all() <= limit:
            return []
        too_large = [header for header in self._queue if header.num_sequences > limit]
        self._queue.remove([header.number for header in too_large])
        return self._bury_too_large(too_large)

    def _fits(self, num_sequences: int) -> bool:
        """Whether a group of so many sequences can be part of a batch; before a trainer registers, any can."""
        return self._trainer is None or num_sequences <= self._trainer.batch_size

    def _bury_too_large(self, headers: Sequence[GroupHeader]) -> list[Move]:
        if not headers:
            return []
        reason = f"larger than the trainer's batch of {self.info().batch_size} sequences"
        logger.warning("run %s: %d groups set aside as dead: %s", self.name, len(headers), reason)
        return self._bury(headers, reason)

    def _resume(self, step: int, mode: Resume, *, same_size: bool) -> tuple[Change, dict[str, int]]:
        """Void all leases; bring back what was trained after `step`, and what was not trained yet.

        Return the change and the counts that the trainer is told.
        """
        was_leased = {batch.number for batch in self._leases if batch.is_leased}
        undone = self._leases.undo(step)
        # The policy version stands until the trainer publishes another one: a step is another unit.
        if mode is Resume.REPLAY and not same_size:
            mode = Resume.REQUEUE
        moves: list[Move] = []
        ends: list[End] = []
        num_dead = 0
        for batch in undone:
            if mode is Resume.DISCARD:
                ends += self._end(batch.headers, Fate.DISCARDED)
                continue
            alive = list(batch.headers)
            if batch.number in was_leased:
                alive, dead = self._count_failure(batch.headers)
                moves += dead
                num_dead += len(dead)
            if mode is Resume.REQUEUE or len(alive) < len(batch.headers):
                # A batch that lost a member is not the batch that was trained on.
                moves += self._requeue(alive)
                continue
            self._leases.replay(batch)
            moves += self._moves(alive, Place.REPLAY, batch)
        replayed = [batch for batch in undone if batch in self._leases]
        closed = [batch.number for batch in undone if batch not in self._leases]
        num_groups = sum(len(batch.headers) for batch in undone)
        num_replayed = sum(len(batch.headers) for batch in replayed)
        counts = {
            "replayed": num_replayed,
            "requeued": 0 if mode is Resume.DISCARD else num_groups - num_replayed - num_dead,
            "discarded": num_groups if mode is Resume.DISCARD else 0,
            "forgotten_steps": max(0, self._leases.freed_step - step),
        }
        logger.log(
            logging.WARNING if any(counts.values()) else logging.INFO,
            "run %s: a trainer resumes at step %d (epoch %d): %s",
            self.name,
            step,
            self._leases.epoch,
            ", ".join(f"{name} {count}" for name, count in counts.items()),
        )
        change = Change(
            moves=moves,
            ends=ends,
            batches=[batch.stored() for batch in replayed],
            closed_batches=closed,
        )
        return change, counts

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

    async def set_policy(self, version: int, *, epoch: int | None = None) -> None:
        """Note the policy version that the engines serve from now on; it may go back after a rollback.

        Raises `Superseded` for the epoch of a trainer that is no longer the run's.
        """
        if self._trainer is None and epoch is not None:
            return  # its run was reset; when it asks for a batch, it registers again and publishes once more
        self._leases.check_epoch(epoch)
        self._trainer_seen = self._clock()
        self._policy_version = version
        await self._save()
        self.progress.notify()

    @property
    def current_step(self) -> int:
        """Batches handed out and not given back, counted from the trainer's starting step."""
        return self._leases.steps.current

    @property
    def current_version(self) -> int:
        """The policy version that groups sampled now would have: the step, where no trainer publishes versions."""
        return self.current_step if self._policy_version is None else self._policy_version

    @property
    def max_staleness(self) -> int | None:
        asked = None if self._trainer is None else self._trainer.max_staleness
        return self.policy.max_staleness if asked is None else asked

    # Batches

    async def deliver(self, lease: LeaseRequest | None = None) -> Delivery | None:
        """Hand out the next exact batch; None when none can be cut yet.

        Without `lease` the delivery is plain: follow it up with `confirm` or `give_back`.
        Raises `NotRegistered` before the trainer has registered, `Superseded` for one that is no longer the run's.
        """
        if self._trainer is None:
            raise NotRegistered("Trainer not registered. Call /register first.")
        if lease is not None:
            self._leases.check_epoch(lease.epoch)
        self._trainer_seen = self._clock()
        if not self._has_started:
            self._has_started = True
            await self._save()
        while True:
            while await self.tick():
                pass  # while that was stored, time passed and the policy may have moved on
            if self._trainer is None:
                raise NotRegistered("The run was reset. Call /register again.")
            if lease is not None:
                self._leases.check_epoch(lease.epoch)
            if self._leases.is_outdated(lease):
                return None
            batch = self._leases.asked_before(lease, now=self._clock())
            leased_now = batch is None
            batch = batch or self._lease_next(lease)
            if batch is None:
                return None
            lease_id = batch.lease_id
            try:
                if leased_now:
                    moves = self._moves(batch.headers, Place.LEASED, batch)
                    await self._save(Change(moves=moves, batches=[batch.stored()]))
                    self.progress.notify()
                else:
                    await self._save()  # behind the lease, which may be on its way to the disk
                payloads = await self._store.read([header.number for header in batch.headers])
            except CorruptGroups as e:
                if self._leases.holds(batch, lease_id):
                    await self._bury_damaged(batch, e)
                continue
            except BaseException as e:
                if isinstance(e, KeyError) and not self._leases.holds(batch, lease_id):
                    continue  # its groups ended while it was read
                # Neither a connection nor time ends a plain delivery that never began.
                if batch.is_plain and self._leases.holds(batch, lease_id):
                    await self._return(batch, counts=False)
                raise
            if not self._leases.holds(batch, lease_id):
                continue  # taken back or reset while it was read
            now_version = self.current_version
            num_tokens = sum(header.num_tokens for header in batch.headers)
            self.tokens_out += num_tokens
            return Delivery(
                batch_id=batch.number,
                lease_id=batch.lease_id,
                epoch=batch.epoch,
                step=batch.step,
                expires_in_s=batch.ttl_s,
                payloads=payloads,
                staleness=[max(0, now_version - _version(header)) for header in batch.headers],
                num_tokens=num_tokens,
            )

    def may_deliver(self, lease: LeaseRequest | None) -> bool:
        """Is it worth calling `deliver`? Cheap, for those who wait while groups trickle in."""
        return (
            self._trainer is None
            or (lease is not None and lease.epoch not in (None, self._leases.epoch))
            or self._leases.num_replay > 0
            or isinstance(self._look(), Plan)
            or self._leases.asked_before(lease, now=self._clock()) is not None
        )

    def _lease_next(self, lease: LeaseRequest | None) -> Batch | None:
        """Take the next batch out of replay or queue and lease it; memory only."""
        batch = self._leases.next_replay() or self._cut()
        if batch is not None:
            self._leases.lease(
                batch,
                lease,
                lease_id=self._new_lease_id(),
                default_ttl_s=self.policy.lease_ttl_s,
                now=self._clock(),
            )
        return batch

    def _cut(self) -> Batch | None:
        """Take the groups of the next batch out of the queue."""
        plan = self._look()
        if isinstance(plan, NoBatch):
            self._note_stuck(plan)
            return None
        self._is_stuck = False
        if plan.waived:
            logger.warning(
                "run %s: no batch of whole groups honours every min_batch_allocation; waived for %s",
                self.name,
                list(plan.waived),
            )
        self._queue.remove([header.number for header in plan.groups])
        self._queue_changed(*plan.groups)
        return self._leases.add(plan.groups)

    def _moves(
        self, headers: Iterable[GroupHeader], place: Place, batch: Batch | None = None
    ) -> list[Move]:
        """What the store is told when groups change their place."""
        return [
            Move(
                number=header.number,
                place=place,
                batch=None if batch is None else batch.number,
                deliveries=self._deliveries.get(header.number, 0),
            )
            for header in headers
        ]

    async def _bury_damaged(self, batch: Batch, error: CorruptGroups) -> None:
        """Set damaged groups aside; the others go back to the queue."""
        logger.error("run %s: %s; set aside as dead", self.name, error)
        damaged = set(error.numbers)
        bad = [header for header in batch.headers if header.number in damaged]
        good = [header for header in batch.headers if header.number not in damaged]
        self._leases.take_back(batch)
        moves = [*self._bury(bad, "damaged in the store"), *self._requeue(good)]
        await self._save(Change(moves=moves, closed_batches=[batch.number]))

    async def heartbeat(self, batch_id: int, lease_id: str) -> float:
        """Renew a lease; return the seconds it lasts from now. Raises `LeaseLost`, `UnknownBatch`."""
        await self.tick()
        batch = self._leases.held(batch_id, lease_id)
        self._trainer_seen = self._clock()
        batch.expires_at = self._trainer_seen + batch.ttl_s
        return batch.ttl_s

    async def ack(self, batch_id: int, lease_id: str, step: int | None = None) -> int:
        """The batch was trained on, as `step`; return the step. Saying it again changes nothing.

        Raises `LeaseLost`, `UnknownBatch`.
        """
        await self.tick()
        known = self._leases.acknowledged_step(batch_id, lease_id)
        if known is not None:
            await self._store.commit(Change())  # as durable as the first answer
            return known
        batch = self._leases.held(batch_id, lease_id)
        self._trainer_seen = self._clock()
        self._leases.acknowledge(batch, step)
        for header in batch.headers:
            self._deliveries.pop(header.number, None)
        surplus = self._leases.surplus(
            max_batches=self.policy.keep_trained_batches, max_bytes=self.policy.keep_trained_bytes
        )
        ends = [end for old in surplus for end in self._free(old)]
        is_kept = batch in self._leases
        await self._save(
            Change(
                moves=self._moves(batch.headers, Place.TRAINED, batch) if is_kept else (),
                ends=ends,
                batches=[batch.stored()] if is_kept else (),
                closed_batches=[old.number for old in surplus],
            )
        )
        return batch.step

    def _free(self, batch: Batch) -> list[End]:
        """Forget a batch that was trained on."""
        self._leases.free(batch)
        return self._end(batch.headers, Fate.TRAINED)

    async def checkpoint(self, step: int, *, epoch: int | None = None) -> int:
        """Free the batches acknowledged at or before `step`, which need not come again; return how many.

        Raises `Superseded` for the epoch of a trainer that is no longer the run's.
        """
        if self._trainer is not None:
            self._leases.check_epoch(epoch)
        trained = self._leases.in_state(BatchState.TRAINED)
        done = [batch for batch in trained if batch.step <= step]
        ends = [end for batch in done for end in self._free(batch)]
        await self._save(Change(ends=ends, closed_batches=[batch.number for batch in done]))
        return len(done)

    async def release(self, batch_id: int, lease_id: str) -> None:
        """Give a leased batch back: its groups go to the head of the queue. Raises `LeaseLost`, `UnknownBatch`."""
        await self._return(self._leases.held(batch_id, lease_id), counts=True)

    async def reject_groups(
        self, batch_id: int, lease_id: str, positions: Sequence[int], *, reason: str
    ) -> RejectReply:
        """Set groups of a leased batch aside as dead: the trainer cannot use them. The others go back at once.

        `positions` count from 0 within the batch as it was delivered. Raises `LeaseLost`, `UnknownBatch`, and
        `GroupError` for a position outside of the batch.
        """
        batch = self._leases.held(batch_id, lease_id)
        self._trainer_seen = self._clock()
        outside = [position for position in positions if position >= len(batch.headers)]
        if outside:
            raise GroupError(
                f"groups: {outside[0]} is not in a batch of {len(batch.headers)} groups"
            )
        chosen = set(positions)
        unusable = [header for at, header in enumerate(batch.headers) if at in chosen]
        others = [header for at, header in enumerate(batch.headers) if at not in chosen]
        logger.error(
            "run %s: the trainer rejected %d groups of batch %d, set aside as dead: %s",
            self.name,
            len(unusable),
            batch_id,
            reason,
        )
        self._leases.take_back(batch)
        moves = self._bury(unusable, f"rejected by the trainer: {reason}")
        moves += self._requeue(others)
        await self._save(Change(moves=moves, closed_batches=[batch_id]))
        self.arrivals.notify()
        return RejectReply(dead=len(unusable), requeued=len(others))

    async def confirm(self, batch_id: int) -> bool:
        """A plain delivery was written to its end: its groups are trained. False: it was no longer held."""
        batch = self._leases.held_plainly(batch_id)
        if batch is None:
            return False
        ends = self._free(batch)
        await self._save(Change(ends=ends, closed_batches=[batch_id]))
        return True

    async def give_back(self, batch_id: int) -> None:
        """A plain delivery was cut off: its groups go back to the head of the queue."""
        batch = self._leases.held_plainly(batch_id)
        if batch is not None:
            await self._return(batch, counts=False)

    async def _return(self, batch: Batch, *, counts: bool) -> None:
        moves = self._take_back(batch, counts=counts)
        await self._save(Change(moves=moves, closed_batches=[batch.number]))
        self.arrivals.notify()

    def _take_back(self, batch: Batch, *, counts: bool) -> list[Move]:
        """End a lease without an acknowledgement; `counts`: it tells against the groups."""
        self._leases.take_back(batch)
        alive, moves = self._count_failure(batch.headers) if counts else (batch.headers, [])
        return [*moves, *self._requeue(alive)]

    def _count_failure(
        self, headers: Sequence[GroupHeader]
    ) -> tuple[list[GroupHeader], list[Move]]:
        """Count a lease without acknowledgement; return the groups still to be delivered, and the moves of the rest."""
        alive: list[GroupHeader] = []
        poison: list[GroupHeader] = []
        for header in headers:
            failures = self._deliveries.get(header.number, 0) + 1
            self._deliveries[header.number] = failures
            (poison if failures >= self.policy.max_deliveries else alive).append(header)
        if not poison:
            return alive, []
        reason = f"leased {self.policy.max_deliveries} times without an acknowledgement"
        logger.error("run %s: %d groups set aside as dead: %s", self.name, len(poison), reason)
        return alive, self._bury(poison, reason)

    def _requeue(self, headers: Iterable[GroupHeader]) -> list[Move]:
        """Queue groups; those that no longer fit into a batch are set aside as dead."""
        headers = list(headers)
        fitting = [header for header in headers if self._fits(header.num_sequences)]
        for header in fitting:
            self._queue.add(header)
        self._queue_changed(*fitting)
        too_large = [header for header in headers if not self._fits(header.num_sequences)]
        return [*self._moves(fitting, Place.QUEUED), *self._bury_too_large(too_large)]

    def _end(self, headers: Iterable[GroupHeader], fate: Fate) -> list[End]:
        ends = []
        for header in headers:
            self._deliveries.pop(header.number, None)
            self._ended[fate] += 1
            ends.append(End(number=header.number, fate=fate))
        return ends

    def _look(self) -> Plan | NoBatch:
        """The next batch of the queue, computed once per change of the queue."""
        if self._plan is None:
            batch_size = self.info().batch_size
            floors = sequence_floors(batch_size, self._environments.shares())
            self._plan = self._queue.plan(
                batch_size=batch_size,
                floors=floors,
                overdue_before=self.current_version - PATIENCE_VERSIONS,
            )
        return self._plan

    def _queue_changed(self, *headers: GroupHeader) -> None:
        self._plan = None
        for header in headers:
            self._backlog.touch(header.env_id)

    def _note_stuck(self, plan: NoBatch) -> None:
        if plan.is_stuck and not self._is_stuck:
            logger.warning(
                "run %s: there is no batch although enough is queued: %s", self.name, plan.reason
            )
        self._is_stuck = plan.is_stuck

    # Time

    async def tick(self) -> bool:
        """Let leases, groups and environments expire. Call it now and then; every batch call does.

        Returns False when nothing did; then it has not waited for anything either.
        """
        now = self._clock()
        moves: list[Move] = []
        closed: list[int] = []
        for batch in self._leases.expired(now=now):
            logger.warning(
                "run %s: the lease of batch %d (step %d) expired after %.0f s; its %d groups go back",
                self.name,
                batch.number,
                batch.step,
                now - batch.leased_at,
                len(batch.headers),
            )
            moves += self._take_back(batch, counts=True)
            closed.append(batch.number)
        gone = self._environments.silence(now=now, timeout_s=self.policy.env_timeout_s)
        for environment in gone:
            logger.warning(
                "run %s: environment %d (%r) has been silent for %.0f s; its minimum is suspended",
                self.name,
                environment.env_id,
                environment.name,
                now - environment.last_seen,
            )
            moves += self._flush_buffer(environment)
            self._queue_changed()
        ends = self._expire_stale()
        ends += self._end(self._dead.take_beyond(self.policy.keep_dead_bytes), Fate.DEAD)
        if moves or closed or ends:
            await self._save(Change(moves=moves, ends=ends, closed_batches=closed))
        if not (moves or closed or ends or gone):
            return False
        self.arrivals.notify()
        self.progress.notify()
        return True

    def _expire_stale(self) -> list[End]:
        bound = self.max_staleness
        if bound is None:
            return []
        oldest = self.current_version - bound
        stale = self._queue.stale(oldest)
        self._queue.remove([header.number for header in stale])
        for environment in self._environments:
            kept = [header for header in environment.buffered if _version(header) >= oldest]
            if len(kept) < len(environment.buffered):
                stale += [h for h in environment.buffered if _version(h) < oldest]
                environment.buffered = kept
        if not stale:
            return []
        self._queue_changed(*stale)
        by_env = Counter(header.env_id for header in stale)
        logger.warning(
            "run %s: %d groups expired, sampled before policy version %d (by environment: %s)",
            self.name,
            len(stale),
            oldest,
            dict(by_env),
        )
        return self._end(stale, Fate.EXPIRED)

    def _bury(self, headers: Iterable[GroupHeader], reason: str) -> list[Move]:
        moves = []
        for header in headers:
            self._dead.add(header, reason)
            moves.append(
                Move(
                    number=header.number,
                    place=Place.DEAD,
                    deliveries=self._deliveries.get(header.number, 0),
                    reason=reason,
                )
            )
        return moves

    def dead(self) -> Iterator[DeadGroup]:
        """Groups that are set aside now, oldest first; the run may change while they are described."""
        return (
            DeadGroup(
                number=header.number,
                env_id=header.env_id,
                reason=reason,
                deliveries=self._deliveries.get(header.number, 0),
                num_sequences=header.num_sequences,
                num_tokens=header.num_tokens,
            )
            for header, reason in list(self._dead)
        )

    async def requeue_dead(self, numbers: Iterable[int]) -> int:
        """Give dead groups another chance; return how many of `numbers` are queued now."""
        back = self._dead.take(numbers)
        for header in back:
            self._deliveries.pop(header.number, None)
        moves = self._requeue(back)
        await self._save(Change(moves=moves))
        self.arrivals.notify()
        return sum(move.place is Place.QUEUED for move in moves)

    # Environments

    async def register_env(self, registration: RegisterEnv) -> EnvRegistration | None:
        """Register an environment; None until the trainer has asked for its first batch."""
        if self._trainer is None or not self._has_started:
            return None
        environment = self._environments.register(registration, now=self._clock())
        self._note_environment(environment)
        self._queue_changed()
        logger.info(
            "run %s: environment %d registered: %r",
            self.name,
            environment.env_id,
            environment.name,
        )
        reply = EnvRegistration(
            env_id=environment.env_id,
            wandb_name=environment.name,
            checkpoint_dir=self._trainer.checkpoint_dir,
            starting_step=self.current_step,
            checkpoint_interval=self._trainer.save_checkpoint_interval,
            num_steps=self._trainer.num_steps,
            experiment=self._experiment if registration.env_uid is not None else None,
        )
        await self._save()
        return reply

    async def disconnect_env(self, env_id: int, *, env_uid: str | None = None) -> None:
        """Take the environment out of weights and minimums.

        Its groups stay; odd-sized ones no longer wait for others. Raises `UnknownEnvironment`.
        """
        environment = self._environments.get(env_id, env_uid=env_uid)
        self._environments.disconnect(environment)
        self._note_environment(environment)
        moves = self._flush_buffer(environment)
        self._queue_changed()
        logger.info("run %s: environment %d (%r) disconnected", self.name, env_id, environment.name)
        await self._save(Change(moves=moves))
        self.arrivals.notify()

    def status_env(
        self, env_id: int, *, env_uid: str | None = None, experiment: str | None = None
    ) -> EnvStatus:
        """Tell an environment how much work is ahead of it.

        Raises `UnknownEnvironment`, also for one that registered for another experiment than the run's.

        The original's formulas, without their side effects; other environments' sequences are rounded up to the largest
        queued group. Costs the same however much is queued.
        """
        environment = self._environments.get(env_id, env_uid=env_uid)
        if experiment is not None and experiment != self._experiment:
            raise UnknownEnvironment("another experiment has begun; register again")
        self._hear_of(environment)
        group_size = max(environment.registration.group_size, self._queue.largest(env_id))
        max_group_size = max(1, self._queue.largest_of_all())
        own = self._queue.num_sequences(env_id)
        others = self._backlog.of_others(
            env_id,
            queue=self._queue,
            environments=self._environments,
            batch_size=self.info().batch_size,
            max_group_size=max_group_size,
        )
        return EnvStatus(
            current_step=self.current_step,
            queue_size=(own + others) // group_size,
            unallocated_fraction=self._environments.unallocated_fraction(),
            self_queue_size=own // group_size,
            max_group_size=max_group_size,
            env_weight=self._environments.weight(environment),
            policy_version=self._policy_version,
        )

    def knows(self, env_id: int | None) -> bool:
        return self._environments.find(env_id) is not None

    def _hear_of(self, environment: Environment) -> None:
        if self._environments.hear_of(environment, now=self._clock()):
            logger.info(
                "run %s: environment %d (%r) is back",
                self.name,
                environment.env_id,
                environment.name,
            )
            self._queue_changed()

    # Groups

    def overload(self) -> str | None:
        """Why the run takes no group from anybody now, None when it may take some; see `Admission`."""
        return self._admission.overload(self._situation())

    def _situation(self) -> Situation:
        batch_size = None if self._trainer is None else self._trainer.batch_size
        useful = None
        if self.max_staleness is not None and batch_size is not None:
            # What is queued beyond this is too old before its turn comes.
            useful = (self.max_staleness + 1) * batch_size
        return Situation(
            batch_size=batch_size,
            max_useful_sequences=useful,
            is_replaying=self._leases.num_replay > 0,
            look=self._look,
        )

    async def accept(
        self, groups: Sequence[IncomingGroup], *, experiment: str | None = None
    ) -> list[Receipt]:
        """Store checked groups; one receipt per group. `experiment`: what they were sampled for, where that is known.

        Raises `GroupError` for a group that could never be part of a batch (nothing is stored) or comes under the id
        of another (the rest of the call is stored), `AnotherExperiment`, `Overloaded`, `StoreFull`, `RunReset`.
        """
        if experiment is not None:
            self._check_experiment(experiment, num_groups=len(groups))
        for index, group in enumerate(groups):
            problem = self._refusal(group)
            if problem is not None:
                self.reject(problem.reason, num_groups=len(groups))
                raise GroupError(f"{_at(index, groups)}tokens: {problem.message}")
        self._admission.check(groups, self._situation())
        # A caller who goes away must not leave groups in the store that memory knows nothing of.
        return await asyncio.shield(asyncio.create_task(self._take_in(groups)))

    def _check_experiment(self, experiment: str, *, num_groups: int) -> None:
        if self._experiment is None:
            # The trainer that registers next may be the one that these groups are for.
            raise RunReset("no trainer has registered; register again and wait for it")
        if experiment != self._experiment:
            self.reject("another_run", num_groups=num_groups)
            raise AnotherExperiment(
                f"sampled for experiment {experiment}, but run {self.name} now holds {self._experiment}"
            )

    async def _take_in(self, groups: Sequence[IncomingGroup]) -> list[Receipt]:
        """Store groups, then take them into memory; not to be cancelled in between."""
        new = [self._numbered(group) for group in groups]
        generation = self._generation
        outcomes = await self._store.append(new)
        if generation != self._generation:
            raise RunReset("the run ended while the groups were stored; register again")
        receipts: list[Receipt] = []
        moves: list[Move] = []
        conflicts: list[int] = []
        for index, (stored, outcome) in enumerate(zip(new, outcomes, strict=True)):
            receipt, moved = self._settle(stored, outcome)
            moves += moved
            receipts.append(receipt)
            if outcome is Appended.CONFLICT:
                conflicts.append(index)
        if moves:
            await self._store.commit(Change(moves=moves, is_durable=False))
        self.arrivals.notify()
        if conflicts:
            self.reject("group_id_reused", num_groups=len(conflicts))
            first = conflicts[0]
            raise GroupError(
                f"{_at(first, groups)}group_id: {groups[first].group_id!r} was stored with other content;"
                " make a fresh id for each group"
            )
        return receipts

    def reject(self, reason: str, *, num_groups: int = 1) -> None:
        """Count refused groups; a request whose groups could not be counted is one."""
        self._rejected[reason] += num_groups

    def _refusal(self, group: IncomingGroup) -> _Refusal | None:
        if group.num_sequences == 0:
            return _Refusal("empty", "the group has no sequences; leave it out")
        if not self._fits(group.num_sequences):
            return _Refusal(
                "larger_than_batch",
                f"{group.num_sequences} sequences, but a batch holds {self.info().batch_size};"
                " lower group_size or raise the trainer's batch_size",
            )
        return None

    def _numbered(self, group: IncomingGroup) -> NewGroup:
        header = GroupHeader(
            number=self._next_number,
            env_id=group.env_id,
            num_sequences=group.num_sequences,
            policy_version=group.policy_version,
            arrival_step=self.current_version,
            num_tokens=group.num_tokens,
            num_bytes=len(group.payload),
        )
        self._next_number += 1
        return NewGroup(
            header=header,
            group_id=group.group_id or uuid.uuid4().hex,
            digest=group.digest,
            payload=group.payload,
            place=Place.BUFFERED if self._is_odd(header) else Place.QUEUED,
        )

    def _is_odd(self, header: GroupHeader) -> bool:
        """Does the group wait for others of its environment?"""
        environment = self._environments.find(header.env_id)
        if environment is None or not environment.is_active:
            return False
        # Sizes beyond the batch are no use to anyone, and their sums would cost memory.
        return header.num_sequences < environment.registration.group_size <= self.info().batch_size

    def _settle(self, group: NewGroup, outcome: Appended) -> tuple[Receipt, list[Move]]:
        """Take a group into memory as the store has taken it."""
        env_id = group.header.env_id
        environment = self._environments.find(env_id)
        if environment is not None:
            self._hear_of(environment)
        if outcome is Appended.DUPLICATE:
            self._num_duplicates += 1
            return Receipt(env_id=env_id, is_duplicate=True), []
        if outcome is Appended.CONFLICT:
            return Receipt(env_id=env_id), []
        self._num_accepted += 1
        self.tokens_in += group.header.num_tokens
        if group.place is Place.QUEUED or environment is None:
            self._latest = group.payload
            self._queue.add(group.header)
            self._queue_changed(group.header)
            return Receipt(env_id=env_id), []
        moves = self._buffer_or_queue(group.header)
        if moves:
            self._latest = group.payload
        return Receipt(env_id=env_id, buffer_size=environment.num_buffered_sequences), moves

    def _buffer_or_queue(self, header: GroupHeader) -> list[Move]:
        """Buffer an odd-sized group; queue it with others when together they are a full one."""
        environment = self._environments.find(header.env_id)
        if environment is None:
            return self._requeue([header])
        buffered = environment.buffered
        buffered.append(header)
        if not self._is_odd(header):
            return self._flush_buffer(environment)
        group_size = environment.registration.group_size
        chosen = oldest_subset([each.num_sequences for each in buffered], group_size)
        if not chosen and environment.num_buffered_sequences > _MAX_BUFFERED_SIZES * group_size:
            logger.warning(
                "run %s: environment %d (%r) sends groups that do not add up to its group_size of %d; they are"
                " queued as they are",
                self.name,
                environment.env_id,
                environment.name,
                group_size,
            )
            return self._flush_buffer(environment)
        complete = [buffered[index] for index in chosen]
        for index in reversed(chosen):
            del buffered[index]
        return self._requeue(complete)

    def _flush_buffer(self, environment: Environment) -> list[Move]:
        """Queue what waits for others that will not come."""
        left, environment.buffered = environment.buffered, []
        return self._requeue(left)

    async def latest(self) -> bytes | None:
        """The group queued last, delivered or not; None before the first."""
        if isinstance(self._latest, int):
            number = self._latest
            try:
                [payload] = await self._store.read([number])
            except (KeyError, CorruptGroups):
                self._latest = None
            else:
                self._latest = payload
        assert not isinstance(self._latest, int)
        return self._latest

    # Accounts

    def status(self) -> HubStatus:
        return HubStatus(
            current_step=self.current_step,
            queue_size=len(self._queue) + self._num_held(BatchState.REPLAY),
            policy_version=self._policy_version,
        )

    def _num_held(self, state: BatchState) -> int:
        """Groups in batches of one state."""
        return sum(len(batch.headers) for batch in self._leases.in_state(state))

    def ledger(self) -> Ledger:
        """Where every group is. `produced` is counted apart from the places, so that a leak would show."""
        return Ledger(
            produced=self._num_accepted + self._rejected.total(),
            queued=len(self._queue) + self._num_held(BatchState.REPLAY),
            buffered=sum(len(env.buffered) for env in self._environments),
            leased=self._num_held(BatchState.LEASED),
            trained=self._ended[Fate.TRAINED] + self._num_held(BatchState.TRAINED),
            expired=self._ended[Fate.EXPIRED],
            dead=self._ended[Fate.DEAD] + len(self._dead),
            discarded=self._ended[Fate.DISCARDED],
            dead_reasons=self._dead.reasons() or None,
            rejected=dict(self._rejected),
            duplicates=self._num_duplicates,
        )

    def explain(self) -> Explanation:
        """Say why there is no batch, or that there is one; changes nothing."""
        return explain(
            None if self._trainer is None else self._look(),
            queue=self._queue,
            environments=self._environments,
            leases=self._leases,
            batch_size=self.info().batch_size,
            current_step=self.current_step,
            policy_version=self.current_version,
            max_staleness=self.max_staleness,
            dead=self._dead.reasons(),
            conflicts=self._conflicts,
            now=self._clock(),
        )

    # What metrics read

    @property
    def durability(self) -> Durability:
        return self._store.durability

    @property
    def queued_sequences(self) -> int:
        return self._queue.total_sequences

    @property
    def queued_tokens(self) -> int:
        return self._queue.total_tokens

    @property
    def queued_bytes(self) -> int:
        return self._queue.total_bytes

    @property
    def num_connected(self) -> int:
        return self._environments.num_active

    def queued_versions(self) -> Mapping[int, int]:
        """Queued groups by the policy version that sampled them."""
        return self._queue.versions()

    def lease_ages_s(self) -> list[float]:
        now = self._clock()
        return [now - batch.leased_at for batch in self._leases.in_state(BatchState.LEASED)]

    def store_usage(self) -> StoreUsage:
        return self._store.usage()


def _environment_fact(env_id: int) -> str:
    """Under this name; in the order of names, as stores return facts, environments come by id."""
    return f"{_ENVIRONMENT}{env_id:08}"


class _Refusal(NamedTuple):
    reason: str
    message: str


def _version(header: GroupHeader) -> int:
    """Policy version that sampled the group; one that came without is taken to be of its arrival."""
    return header.arrival_step if header.policy_version is None else header.policy_version


def _at(index: int, groups: Sequence[object]) -> str:
    return f"[{index}]." if len(groups) > 1 else ""
