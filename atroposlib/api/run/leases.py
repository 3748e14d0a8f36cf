"""Which batches of a run a trainer holds, for which steps and how long: records without payloads, store or HTTP.

A batch is *leased* (a trainer holds it), *trained* (acknowledged, kept for a trainer that falls back to a checkpoint)
or waits for *replay*. A lease ends by acknowledgement, release or expiry, or when a trainer resumes; only the holder of
the current lease id can acknowledge. Time is an argument. `RunState` owns it.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

from atroposlib.api.run.types import RunPolicy
from atroposlib.api.stores.base import BatchState, StoredBatch
from atroposlib.errors import AtroposError
from atroposlib.scored_data import GroupHeader

MAX_CLOSED = 1024
"""Freed batches whose lease is remembered, so that a repeated acknowledgement gets the same reply."""
MAX_SAVED_LEASES = 16
"""How many of them survive a restart; a trainer repeats only its last acknowledgement."""
MAX_REQUESTS = 1024
"""Request ids remembered; a repeated request follows the first within seconds."""
NUM_STEPS = 8
"""Recent steps that count: a trainer that becomes faster is noticed after two, one that becomes slower after seven."""


class UnknownBatch(AtroposError):
    """This run has delivered no batch with that id."""


class LeaseLost(AtroposError):
    """The lease expired, was given back, or belongs to an earlier incarnation of the trainer."""


class Superseded(AtroposError):
    """Another incarnation of the trainer has taken the run over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    ttl_s: float | None = None
    """None: the run's default."""
    request_id: str | None = None
    """A repeated request with it gets the same batch, in case the first response was lost."""
    epoch: int | None = None
    """Epoch of the trainer; None: the current one."""
    number: int = field(default_factory=itertools.count().__next__, compare=False)
    """Later requests have higher ones."""


@dataclass(slots=True, kw_only=True)
class HeldBatch:
    """A batch whose groups are still held; each lease makes a new one."""

    row: StoredBatch
    """What the store keeps of it."""
    headers: Sequence[GroupHeader]
    """In arrival order, which is also the order of delivery."""
    leased_at: float = 0.0
    expires_at: float = 0.0
    """Both are meaningless unless leased."""
    is_delivered: bool = False
    """Whether a delivery of it was counted; a repeated request does not count it again."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(header.num_bytes for header in self.headers)


class _Closed(NamedTuple):
    lease_id: str
    step: int


class Leases:
    """The batches of one run, by number. Others read them; only the methods change them."""

    def __init__(self, *, first_number: int = 0, epoch: int = 0) -> None:
        self.leased: dict[int, HeldBatch] = {}
        self.trained: dict[int, HeldBatch] = {}
        """In the order of their acknowledgement."""
        self.to_replay: deque[HeldBatch] = deque()
        """Batches to be delivered again, in this order."""
        self.last_step = 0
        """The highest that was assigned to a batch."""
        self._returned_steps: list[int] = []
        """A heap: those of batches that were given back are assigned again first."""
        self.epoch = epoch
        """Counts the trainer's incarnations, also across experiments and resets: an earlier one is never served."""
        self.next_number = first_number
        self.freed_step = 0
        """The highest step whose batch was freed."""
        self._first_number = first_number
        self._closed: dict[int, _Closed] = {}
        self._newest: dict[str, int] = {}
        """Number of the latest request, by recent request id."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `saved` returned; raises KeyError if it is incomplete."""
        self.last_step = saved["last_step"]
        self._returned_steps = list(saved["returned_steps"])
        self.epoch = saved["epoch"]
        self.next_number = saved["next_batch"]
        self.freed_step = saved["freed_step"]
        self._closed = {number: _Closed(*closed) for number, *closed in saved["freed_leases"]}

    def restore_batches(self, batches: Iterable[HeldBatch], *, now: float) -> None:
        """Restore batches; leases get their full time again, since no trainer could renew them."""
        for batch in sorted(batches, key=_step):
            if batch.row.state is BatchState.REPLAY:
                self.to_replay.append(batch)
            elif batch.row.state is BatchState.TRAINED:
                self.trained[batch.row.number] = batch
            else:
                batch.leased_at = now
                batch.expires_at = now + batch.row.ttl_s
                self.leased[batch.row.number] = batch

    def saved(self) -> dict[str, Any]:
        """What a restart needs besides the batches."""
        newest = itertools.islice(reversed(self._closed.items()), MAX_SAVED_LEASES)
        return {
            "last_step": self.last_step,
            "returned_steps": sorted(self._returned_steps),
            "epoch": self.epoch,
            "next_batch": self.next_number,
            "freed_step": self.freed_step,
            "freed_leases": [(number, *closed) for number, closed in newest][::-1],
        }

    @property
    def current_step(self) -> int:
        """Batches delivered and not given back, counted from the run's starting step."""
        return self.last_step - len(self._returned_steps)

    # Leases

    def lease(
        self,
        headers: Sequence[GroupHeader] | None,
        request: LeaseRequest | None,
        *,
        default_ttl_s: float,
        now: float,
    ) -> HeldBatch:
        """Lease `headers` (None: the next batch to replay); `request` None: a plain delivery."""
        if headers is None:
            replayed = self.to_replay.popleft()
            headers, number = replayed.headers, replayed.row.number
        else:
            number = self.next_number
            self.next_number += 1
        asked = request or LeaseRequest()
        ttl_s = default_ttl_s if asked.ttl_s is None else asked.ttl_s
        step = heappop(self._returned_steps) if self._returned_steps else self.last_step + 1
        self.last_step = max(self.last_step, step)
        row = StoredBatch(
            number=number,
            state=BatchState.LEASED,
            step=step,
            epoch=self.epoch,
            lease_id=secrets.token_hex(16),
            ttl_s=ttl_s,
            request_id=asked.request_id,
            is_plain=request is None,
        )
        batch = HeldBatch(row=row, headers=headers, leased_at=now, expires_at=now + ttl_s)
        self.leased[number] = batch
        return batch

    def check_epoch(self, epoch: int | None) -> None:
        """Raise `Superseded` unless `epoch` is the current one, or None."""
        if epoch is not None and epoch != self.epoch:
            raise Superseded(
                f"another trainer has taken this run over: it has epoch {self.epoch}, this one {epoch};"
                " stop this one, or register it with the step to resume from"
            )

    def is_outdated(self, request: LeaseRequest | None) -> bool:
        """Record a request; return whether the trainer has repeated it since and so waits only for the later one."""
        if request is None or request.request_id is None:
            return False
        newest = max(request.number, self._newest.pop(request.request_id, 0))
        self._newest[request.request_id] = newest
        _drop_oldest(self._newest, MAX_REQUESTS)
        return request.number < newest

    def asked_before(self, request: LeaseRequest | None, *, now: float) -> HeldBatch | None:
        """Return the leased batch that answered the same request, renewed; None if there is none."""
        if request is None or request.request_id is None:
            return None
        for batch in self.leased.values():
            if batch.row.request_id == request.request_id:
                batch.expires_at = now + batch.row.ttl_s
                return batch
        return None

    def holds(self, row: StoredBatch) -> bool:
        """Whether this lease has not ended, or this plain delivery is in progress."""
        batch = self.leased.get(row.number)
        return batch is not None and batch.row is row

    def held(self, number: int, lease_id: str) -> HeldBatch:
        """Return the batch if `lease_id` is its current lease. Raises `LeaseLost`, `UnknownBatch`."""
        if not self._first_number <= number < self.next_number:
            raise UnknownBatch(f"batch {number} was not delivered in this run")
        batch = self.leased.get(number)
        if batch is None or batch.row.is_plain or not _same(batch.row.lease_id, lease_id):
            raise LeaseLost(
                f"the lease of batch {number} expired, was given back or belongs to an earlier"
                " incarnation of the trainer; its groups are delivered again"
            )
        return batch

    @property
    def num_held(self) -> int:
        """Leased batches; plain deliveries do not count."""
        return sum(not batch.row.is_plain for batch in self.leased.values())

    def take_back(self, batch: HeldBatch) -> None:
        """End a lease without an acknowledgement; the batch is dissolved."""
        del self.leased[batch.row.number]
        heappush(self._returned_steps, batch.row.step)

    # Acknowledgements

    def acknowledged_step(self, number: int, lease_id: str) -> int | None:
        """Return the step that this lease was acknowledged with; None if it was not."""
        batch = self.trained.get(number)
        known = self._closed.get(number) if batch is None else batch.row
        return known.step if known is not None and _same(known.lease_id, lease_id) else None

    def acknowledge(self, batch: HeldBatch, step: int | None) -> None:
        step = batch.row.step if step is None else step
        batch.row = replace(batch.row, state=BatchState.TRAINED, step=step)
        del self.leased[batch.row.number]
        self.trained[batch.row.number] = batch

    def are_too_many(self, policy: RunPolicy) -> bool:
        """Whether the trained batches exceed the limits for batches without a checkpoint."""
        num_bytes = sum(batch.num_bytes for batch in self.trained.values())
        is_over = num_bytes > policy.keep_trained_bytes
        return is_over or len(self.trained) > policy.keep_trained_batches

    def free(self, batch: HeldBatch) -> None:
        """Remove a trained batch, or a completed plain delivery."""
        number, step = batch.row.number, batch.row.step
        if self.leased.pop(number, None) is None:
            del self.trained[number]
        self._closed[number] = _Closed(batch.row.lease_id, step)
        _drop_oldest(self._closed, MAX_CLOSED)
        self.freed_step = max(self.freed_step, step)

    # Resuming

    @property
    def known_step(self) -> int:
        """The last step that is known to be trained, by count or by the steps that trainers acknowledged."""
        counted = self.current_step - len(self.leased)
        return max([counted, self.freed_step, *(batch.row.step for batch in self.trained.values())])

    def undo(self, step: int) -> list[HeldBatch]:
        """Void all leases; remove and return, by step, every batch not trained at or before `step`."""
        self.epoch += 1
        undone = [batch for batch in self.trained.values() if batch.row.step > step]
        for batch in undone:
            del self.trained[batch.row.number]
        undone += [*self.leased.values(), *self.to_replay]
        self.leased.clear()
        self.to_replay.clear()
        self.last_step, self._returned_steps = step, []
        return sorted(undone, key=_step)

    def replay(self, batch: HeldBatch) -> None:
        """Queue `batch` for replay, unchanged, after those already queued."""
        batch.row = replace(batch.row, state=BatchState.REPLAY)
        self.to_replay.append(batch)


def _step(batch: HeldBatch) -> tuple[int, int]:
    return batch.row.step, batch.row.number


def _same(lease_id: str, given: str) -> bool:
    return secrets.compare_digest(lease_id.encode(), given.encode("utf-8", "surrogatepass"))


def _drop_oldest(remembered: dict[Any, Any], max_entries: int) -> None:
    while len(remembered) > max_entries:
        del remembered[next(iter(remembered))]


class TrainerTimes:
    """How long a run's trainer works on a batch and waits for the next; forgotten at a restart of the hub.

    A leased batch is worked on from its delivery, or from the acknowledgement of the one before if that came later (a
    trainer that prefetches), to its acknowledgement. A batch without a lease is worked on until the next request.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Total, up to the last delivery."""
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._waits_s: deque[float] = deque(maxlen=NUM_STEPS)
        """Before recent deliveries."""
        self._behind: deque[float] = deque(maxlen=NUM_STEPS)
        """Mean number of versions that the groups lay behind in each of the recent batches."""
        self.staleness: float | None = None
        """The mean of `_behind`; None before the first batch."""
        self._asked_at: float | None = None
        self._plain_since: float | None = None
        self._ended_at: float | None = None
        """When the trainer ended its last batch."""

    @property
    def step_s(self) -> float | None:
        """Lower quartile of recent steps, without waiting; None before the first has ended.

        Groups that are enough for a short step are also there after a long one; the median of steps of two kinds is
        neither. From the fifth step on, it is not decided by a single step without work.
        """
        return sorted(self._steps_s)[(len(self._steps_s) - 1) // 4] if self._steps_s else None

    def ask(self, now: float) -> None:
        """Record a request for a batch; a trainer that polls repeats it until it gets one."""
        if self._plain_since is not None:
            self._end(now, since=self._plain_since)
            self._plain_since = None
        if self._asked_at is None:
            self._asked_at = now

    def deliver(
        self,
        now: float,
        groups: Sequence[GroupHeader],
        *,
        version: int,
        is_plain: bool,
        num_held: int,
    ) -> None:
        """Record a delivery at a policy version, while `num_held` other batches are leased."""
        if groups:
            behind = [max(0, version - header.version) for header in groups]
            self._behind.append(statistics.fmean(behind))
            self.staleness = statistics.fmean(self._behind)
        self._waits_s.append(self.waits_s(now, num_held=num_held) or 0.0)
        self.waited_s += self._waits_s[-1]
        self._asked_at = None
        self._plain_since = now if is_plain else None

    def deliver_again(self) -> None:
        """Record that a repeated request was answered with a batch whose delivery is already recorded."""
        self._asked_at = None

    def wait_share(self, now: float, *, num_held: int) -> float | None:
        """Return the share of recent time, 0 to 1, that the trainer waited; None before its first step has ended."""
        if not self._steps_s:
            return None
        waited_s = sum(self._waits_s) + (self.waits_s(now, num_held=num_held) or 0.0)
        total_s = waited_s + sum(self._steps_s)
        return waited_s / total_s if total_s > 0 else 0.0

    def acknowledge(self, now: float, *, leased_at: float) -> None:
        """Record that the trainer has trained on a leased batch."""
        self._end(now, since=max(leased_at, self._ended_at or leased_at))

    def waits_s(self, now: float, *, num_held: int) -> float | None:
        """Return how long the trainer has waited for a batch; None if it has one or has not asked."""
        if self._asked_at is None or num_held:
            return None
        return now - max(self._asked_at, self._ended_at or self._asked_at)

    def _end(self, now: float, *, since: float) -> None:
        self._steps_s.append(now - since)
        self._ended_at = now
