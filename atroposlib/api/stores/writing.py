"""What the durable stores have in common: jobs for one writer, and the places of payloads in segments.

A call of the store is a job. Jobs that arrive while the writer is busy become one transaction. A segment holds payloads
until all of its groups have ended, or until the few that are left are moved.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from atroposlib.api.stores.base import Appended, Change, NewGroup, StoreBroken

IDLE_S: Final = 1.0
"""How long a writer waits for work, and the interval at which it looks after the segments."""
_SPARSE_SHARE: Final = 0.2
_SPARSE_S: Final = 600.0


@dataclass(slots=True, kw_only=True)
class Job:
    """A request to the writer, made on the event loop."""

    future: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    groups: Sequence[NewGroup] = ()
    change: Change | None = None
    alone: Callable[[], Any] | None = None
    """Called by itself, after all earlier jobs and before all later ones."""
    answer: Any = None
    """What `future` gets: a result, or an exception to raise."""


def answer(jobs: Iterable[Job]) -> None:
    """Give every job's answer to its caller, unless the caller was cancelled."""
    for job in jobs:
        if job.future.done():
            continue
        if isinstance(job.answer, BaseException):
            job.future.set_exception(job.answer)
        else:
            job.future.set_result(job.answer)


class JobStore(abc.ABC):
    """The calls of a `GroupStore` that change something, as jobs."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        """What broke the store; after it, nothing is written."""
        self._is_open = False

    async def append(self, groups: Sequence[NewGroup]) -> list[Appended]:
        outcomes: list[Appended] = await self._submit(Job(groups=groups))
        return outcomes

    async def commit(self, change: Change) -> None:
        await self._submit(Job(change=change))

    async def clear(self) -> None:
        await self._submit(Job(alone=self._clear))

    async def _submit(self, job: Job) -> Any:
        if self._failure is not None:
            raise self._broken()
        assert self._is_open, "the store is not open"
        self._put(job)
        # Cancelling the caller cancels the future, not the job.
        return await job.future

    @abc.abstractmethod
    def _put(self, job: Job) -> None:
        """Pass a job to the writer."""

    @abc.abstractmethod
    def _clear(self) -> Any:
        """Do the job of `clear`."""

    @abc.abstractmethod
    def _broken(self) -> StoreBroken:
        """Return the error of calls after `_failure`."""


class Located(Protocol):
    """Where a payload is stored."""

    @property
    def segment(self) -> int: ...
    @property
    def length(self) -> int: ...


L = TypeVar("L", bound=Located)


@dataclass(slots=True)
class _Segment:
    """What the writer knows of one segment."""

    num_groups: int = 0
    """Held groups."""
    live_bytes: int = 0
    sparse_since_s: float | None = None


class Segments(Generic[L]):
    """The places of all held groups. Only the writer changes them; any thread may read them."""

    def __init__(self) -> None:
        self.places: dict[int, L] = {}
        """By group number. A group that is moved has a place at every moment."""
        self._all: dict[int, _Segment] = {}

    def add(self, segments: Iterable[int]) -> None:
        """Count segments, which may hold no group."""
        for number in segments:
            self._all.setdefault(number, _Segment())

    def note(self, number: int, place: L) -> None:
        """Record where a group is, and that it left where it was before."""
        before = self.places.get(number)
        self.places[number] = place
        segment = self._all.setdefault(place.segment, _Segment())
        segment.num_groups += 1
        segment.live_bytes += place.length
        if before is not None:
            self._leave(before)

    def end(self, number: int) -> None:
        """Forget a group."""
        self._leave(self.places.pop(number))

    def _leave(self, place: L) -> None:
        segment = self._all[place.segment]
        segment.num_groups -= 1
        segment.live_bytes -= place.length

    def payload_bytes(self) -> int:
        return sum(segment.live_bytes for segment in list(self._all.values()))

    def empty(self, *, current: int | None) -> list[int]:
        """The segments without a held group, except `current`, to which groups are still added."""
        return [n for n, each in self._all.items() if not each.num_groups and n != current]

    def sparse(
        self, now_s: float, *, sizes: Mapping[int, int], current: int | None
    ) -> Iterator[int]:
        """Yield segments of which little has been held for `_SPARSE_S`; each again only after the same time."""
        for number, segment in list(self._all.items()):
            if number == current or segment.live_bytes >= _SPARSE_SHARE * sizes.get(number, 0):
                segment.sparse_since_s = None
            elif segment.sparse_since_s is None:
                segment.sparse_since_s = now_s
            elif segment.num_groups and now_s - segment.sparse_since_s >= _SPARSE_S:
                segment.sparse_since_s = now_s
                yield number

    def forget(self, segments: Iterable[int]) -> None:
        for number in segments:
            self._all.pop(number, None)
