"""Who holds which batch of a run, and for which step: the records, without groups' payloads, store or HTTP.

A batch is *leased* (a trainer holds it), *trained* (acknowledged, kept for a trainer that falls back) or waits for
*replay*. A lease ends by acknowledgement, by being given back, by time, or when the trainer registers anew; only the
holder of the current lease id can acknowledge. Pure: time and ids are arguments. The coordinator calls it and tells
the store.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from atroposlib.api.run.types import GroupHeader
from atroposlib.api.stores.base import BatchState, StoredBatch
from atroposlib.errors import AtroposError

MAX_CLOSED = 1024
"""Freed batches whose lease is remembered, so that a repeated acknowledgement is answered as the first."""
MAX_REQUESTS = 1024
"""Request ids remembered; a repeated request follows the first within seconds."""


class UnknownBatch(AtroposError):
    """This run has handed out no batch of that id."""


class LeaseLost(AtroposError):
    """The lease expired, was given back, or belongs to an earlier incarnation of the trainer."""


class Superseded(AtroposError):
    """Another incarnation of the trainer has taken the run over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """How a trainer wants to hold a batch."""

    ttl_s: float | None = None
    """None: the run's default."""
    request_id: str | None = None
    """Asking again with it returns the batch of the first answer, which may have been lost."""
    epoch: int | None = None
    """Of the trainer that asks; None: whichever is current."""
    number: int = field(default_factory=itertools.count().__next__, compare=False)
    """Later requests have higher ones."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """A batch whose groups are still held."""

    number: int
    headers: Sequence[GroupHeader]
    """In arrival order, which is also the order of delivery."""
    state: BatchState = BatchState.LEASED
    step: int = 0
    epoch: int = 0
    lease_id: str = ""
    ttl_s: float = 0.0
    leased_at: float = 0.0
    expires_at: float = 0.0
    """Of no meaning unless leased."""
    request_id: str | None = None
    is_plain: bool = False
    """Delivered to a client that knows no leases: held by its connection, not by time."""
    num_bytes: int = field(init=False)
    """Of its payloads. Kept, because every acknowledgement adds up those of all trained batches."""

    def __post_init__(self) -> None:
        self.num_bytes = sum(header.num_bytes for header in self.headers)

    @property
    def is_leased(self) -> bool:
        return self.state is BatchState.LEASED

    def stored(self) -> StoredBatch:
        return StoredBatch(
            number=self.number,
            state=self.state,
            step=self.step,
            epoch=self.epoch,
            lease_id=self.lease_id,
            ttl_s=self.ttl_s,
            request_id=self.request_id,
            is_plain=self.is_plain,
        )


class _Closed(NamedTuple):
    lease_id: str
    step: int


@dataclass(slots=True)
class Steps:
    """Steps handed out with batches: one that came back is handed out again first.

    >>> steps = Steps()
    >>> steps.take(), steps.take()
    (1, 2)
    >>> steps.give_back(1)
    >>> steps.current, steps.take(), steps.take()
    (1, 1, 3)
    """

    last: int = 0
    returned: list[int] = field(default_factory=list)

    @property
    def current(self) -> int:
        """Batches handed out and not given back, counted from the run's starting step."""
        return self.last - len(self.returned)

    def take(self) -> int:
        if self.returned:
            return heappop(self.returned)
        self.last += 1
        return self.last

    def give_back(self, step: int) -> None:
        heappush(self.returned, step)


class Leases:
    """The batches of one run. Trained ones are kept in the order of their acknowledgement."""

    def __init__(self, *, first_number: int = 0, epoch: int = 0) -> None:
        self.steps = Steps()
        self.epoch = epoch
        """Counts the trainer's incarnations, also across experiments and resets: an earlier one is never served."""
        self.next_number = first_number
        self.freed_step = 0
        """The highest step whose batch was freed."""
        self._first_number = first_number
        self._batches: dict[int, Batch] = {}
        self._replay: deque[int] = deque()
        self._closed: dict[int, _Closed] = {}
        self._newest: dict[str, int] = {}
        """Number of the latest request under each of the ids used last."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(list(self._batches.values()))

    def __contains__(self, batch: Batch) -> bool:
        return self._batches.get(batch.number) is batch

    def holds(self, batch: Batch, lease_id: str) -> bool:
        """Is `batch` still leased as it was when it had this lease id?"""
        return batch in self and batch.is_leased and batch.lease_id == lease_id

    def get(self, number: int) -> Batch | None:
        return self._batches.get(number)

    def in_state(self, state: BatchState) -> list[Batch]:
        return [batch for batch in self._batches.values() if batch.state is state]

    @property
    def num_replay(self) -> int:
        """Batches that wait to be delivered again."""
        return len(self._replay)

    def restore(self, rows: Iterable[Batch]) -> None:
        """Take over batches from a store; leases run their full time again, since nobody could renew them."""
        for batch in sorted(rows, key=lambda batch: (batch.step, batch.number)):
            self._batches[batch.number] = batch
            if batch.state is BatchState.REPLAY:
                self._replay.append(batch.number)

    # Leases

    def next_replay(self) -> Batch | None:
        """The batch to be delivered again next; it must be leased at once."""
        return self._batches[self._replay.popleft()] if self._replay else None

    def add(self, headers: Sequence[GroupHeader]) -> Batch:
        """A batch of groups that leave the queue; it must be leased at once."""
        batch = Batch(number=self.next_number, headers=headers)
        self.next_number += 1
        self._batches[batch.number] = batch
        return batch

    def lease(
        self,
        batch: Batch,
        request: LeaseRequest | None,
        *,
        lease_id: str,
        default_ttl_s: float,
        now: float,
    ) -> None:
        """Hand `batch` out; `request` None: to a client that knows no leases."""
        asked = None if request is None else request.ttl_s
        batch.state = BatchState.LEASED
        batch.step = self.steps.take()
        batch.epoch = self.epoch
        batch.lease_id = lease_id
        batch.ttl_s = default_ttl_s if asked is None else asked
        batch.leased_at = now
        batch.expires_at = now + batch.ttl_s
        batch.request_id = None if request is None else request.request_id
        batch.is_plain = request is None

    def check_epoch(self, epoch: int | None) -> None:
        """Raises `Superseded` for the epoch of a trainer that is not the current one."""
        if epoch is not None and epoch != self.epoch:
            raise Superseded(
                f"another trainer has taken this run over: it has epoch {self.epoch}, this one {epoch};"
                " stop this one, or register it with the step to resume from"
            )

    def is_outdated(self, request: LeaseRequest | None) -> bool:
        """Note this request; True when it has come once more since: nobody listens to this one any longer."""
        if request is None or request.request_id is None:
            return False
        newest = max(request.number, self._newest.pop(request.request_id, 0))
        self._newest[request.request_id] = newest
        while len(self._newest) > MAX_REQUESTS:
            del self._newest[next(iter(self._newest))]
        return request.number < newest

    def asked_before(self, request: LeaseRequest | None, *, now: float) -> Batch | None:
        """The open batch that was the answer to the same request, renewed."""
        if request is None or request.request_id is None:
            return None
        for batch in self._batches.values():
            if batch.is_leased and batch.request_id == request.request_id:
                batch.expires_at = now + batch.ttl_s
                return batch
        return None

    def held(self, number: int, lease_id: str) -> Batch:
        """The batch, if this is its current lease. Raises `LeaseLost`, `UnknownBatch`."""
        if not self._first_number <= number < self.next_number:
            raise UnknownBatch(f"batch {number} was not handed out in this run")
        batch = self._batches.get(number)
        if batch is None or not batch.is_leased or batch.is_plain or not _same(batch, lease_id):
            raise LeaseLost(
                f"the lease of batch {number} expired, was given back or belongs to an earlier"
                " incarnation of the trainer; its groups are delivered again"
            )
        return batch

    def held_plainly(self, number: int) -> Batch | None:
        """The batch, if it is still on its way to a client that knows no leases."""
        batch = self._batches.get(number)
        return batch if batch is not None and batch.is_leased and batch.is_plain else None

    def expired(self, *, now: float) -> list[Batch]:
        return [
            batch
            for batch in self._batches.values()
            if batch.is_leased and not batch.is_plain and now >= batch.expires_at
        ]

    def take_back(self, batch: Batch) -> None:
        """End a lease without an acknowledgement; its groups make up a batch no longer."""
        del self._batches[batch.number]
        self.steps.give_back(batch.step)

    # Acknowledgements

    def acknowledged_step(self, number: int, lease_id: str) -> int | None:
        """The step that this lease was acknowledged with; None when it was not."""
        batch = self._batches.get(number)
        if batch is not None:
            is_trained = batch.state is BatchState.TRAINED
            return batch.step if is_trained and _same(batch, lease_id) else None
        closed = self._closed.get(number)
        return closed.step if closed is not None and closed.lease_id == lease_id else None

    def acknowledge(self, batch: Batch, step: int | None) -> None:
        batch.state = BatchState.TRAINED
        batch.step = batch.step if step is None else step
        self._batches[batch.number] = self._batches.pop(batch.number)

    def surplus(self, *, max_batches: int, max_bytes: int) -> list[Batch]:
        """The oldest trained batches, beyond what is kept without a checkpoint."""
        trained = self.in_state(BatchState.TRAINED)
        num_bytes = sum(batch.num_bytes for batch in trained)
        surplus: list[Batch] = []
        for batch in trained:
            if len(trained) - len(surplus) <= max_batches and num_bytes <= max_bytes:
                break
            num_bytes -= batch.num_bytes
            surplus.append(batch)
        return surplus

    def free(self, batch: Batch) -> None:
        """Forget a batch that was trained on."""
        del self._batches[batch.number]
        self._closed[batch.number] = _Closed(batch.lease_id, batch.step)
        while len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self.freed_step = max(self.freed_step, batch.step)

    def freed(self, num_batches: int) -> list[tuple[int, str, int]]:
        """Number, lease id and step of the batches freed last."""
        newest = itertools.islice(reversed(self._closed.items()), num_batches)
        return [(number, closed.lease_id, closed.step) for number, closed in newest][::-1]

    def restore_freed(self, rows: Iterable[tuple[int, str, int]]) -> None:
        """Take over what `freed` returned."""
        self._closed = {number: _Closed(lease_id, step) for number, lease_id, step in rows}

    # Resuming

    def undo(self, step: int) -> list[Batch]:
        """Void all leases and take out, by step, every batch that is not trained on at or before `step`."""
        self.epoch += 1
        undone = [
            batch
            for batch in self._batches.values()
            if batch.state is not BatchState.TRAINED or batch.step > step
        ]
        for batch in undone:
            del self._batches[batch.number]
        self._replay.clear()
        self.steps = Steps(step)
        return sorted(undone, key=lambda batch: (batch.step, batch.number))

    def replay(self, batch: Batch) -> None:
        """Deliver `batch` again as it is, after those already waiting for it."""
        batch.state = BatchState.REPLAY
        self._batches[batch.number] = batch
        self._replay.append(batch.number)


def _same(batch: Batch, lease_id: str) -> bool:
    given = lease_id.encode("utf-8", "surrogatepass")
    return secrets.compare_digest(batch.lease_id.encode(), given)
