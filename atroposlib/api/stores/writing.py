"""What the durable stores have in common: one task that writes.

A call of the store is a job. Jobs that arrive while the writer is busy become one transaction. After an error of a
transaction nothing more is written.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atroposlib.api.stores.base import (
    Appended,
    Change,
    NewGroup,
    SavedRun,
    StoreBroken,
    StoreFull,
    TermLost,
)

logger = logging.getLogger(__name__)

IDLE_S: Final = 1.0
"""How long a writer waits for work, and the interval at which it looks after its storage."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A request to the writer, made on the event loop."""

    future: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    groups: Sequence[NewGroup] = ()
    refusal: StoreFull | None = None
    """Of groups with unknown ids."""
    change: Change | None = None
    alone: Callable[[], Any] | None = None
    """Called by itself, after all earlier jobs and before all later ones."""
    answer: Any = None
    """What `future` gets: a result, or an exception to raise."""


class JobStore(abc.ABC):
    """A `GroupStore` whose calls are jobs of one task.

    `on_failure` is called once, on the event loop, with the error that broke the store.
    """

    _remedy = ""
    """End of the message of a store that is broken."""

    def __init__(
        self,
        name: str,
        *,
        max_commit_bytes: int,
        on_failure: Callable[[BaseException], None] | None,
        clock: Callable[[], float],
    ) -> None:
        """`name`: the store in messages. `max_commit_bytes`: payloads per transaction."""
        self._name = name
        self._max_commit_bytes = max_commit_bytes
        self._on_failure = on_failure
        self._clock = clock
        self._failure: BaseException | None = None
        """What broke the store; after it, nothing is written."""
        self._is_open = False
        self._writer: asyncio.Task[None] | None = None
        self._jobs: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._next_look_s = float("-inf")

    async def open(self) -> SavedRun:
        saved: SavedRun = await self._call(self._load)
        self._is_open = True
        self._writer = asyncio.create_task(self._write(), name=f"store {self._name}")
        return saved

    async def append(
        self, groups: Sequence[NewGroup], *, refusal: StoreFull | None = None
    ) -> list[Appended]:
        outcomes: list[Appended] = await self._submit(Job(groups=groups, refusal=refusal))
        return outcomes

    async def commit(self, change: Change) -> None:
        await self._submit(Job(change=change))

    async def clear(self) -> None:
        await self._submit(Job(alone=self._clear))

    async def close(self) -> None:
        """See `GroupStore`. Does nothing to a store that is already broken.

        Raises `StoreBroken` if it breaks now; then changes that were not durable may be lost.
        """
        was_broken = self._failure is not None
        self._is_open = False
        self._wake.set()
        if self._writer is not None:
            await asyncio.wait([self._writer])  # cancelling the caller does not cancel it
        if self._failure is not None and not was_broken:
            raise self._broken()

    async def _submit(self, job: Job) -> Any:
        if self._failure is not None:
            raise self._broken()
        assert self._is_open, "the store is not open"
        self._jobs.append(job)
        self._wake.set()
        # Cancelling the caller cancels the future, not the job.
        return await job.future

    def _broken(self) -> StoreBroken:
        kind = TermLost if isinstance(self._failure, TermLost) else StoreBroken
        error = kind(f"{self._name}: {self._failure}{self._remedy}")
        error.__cause__ = self._failure
        return error

    # The writer.

    async def _write(self) -> None:
        try:
            while self._jobs or self._is_open:
                jobs = await self._next_jobs()
                await self._attempt(self._do, jobs)
                for job in jobs:
                    job.answer = job.answer if self._failure is None else self._broken()
                    _answer(job)
            await self._attempt(self._call, self._finish)
        finally:
            self._release()

    async def _attempt(self, work: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Await `work`, unless the store is broken; any error breaks it."""
        if self._failure is not None:
            return
        try:
            await work(*args)
        except Exception as e:
            error = None if isinstance(e, TermLost) else e
            logger.error("%s: the store is broken: %s", self._name, e, exc_info=error)
            self._failure = e
            if self._on_failure is not None:
                self._on_failure(e)

    async def _next_jobs(self) -> list[Job]:
        """Wait for a job; return it and later ones, up to the size of a commit or one to do alone. Empty if idle."""
        if not self._jobs:
            self._wake.clear()
            idle = asyncio.get_running_loop().call_later(IDLE_S, self._wake.set)
            await self._wake.wait()
            idle.cancel()
            if not self._jobs:
                return []
        jobs = [self._jobs.popleft()]
        num_bytes = 0
        while self._jobs and jobs[-1].alone is None and self._jobs[0].alone is None:
            num_bytes += sum(len(group.payload) for group in jobs[-1].groups)
            if num_bytes >= self._max_commit_bytes:
                break
            jobs.append(self._jobs.popleft())
        return jobs

    async def _do(self, jobs: Sequence[Job]) -> None:
        if jobs and (alone := jobs[0].alone) is not None:
            await self._call(alone)
        elif jobs:
            await self._call(self._commit, jobs)
        now_s = self._clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + IDLE_S
            await self._call(self._look_after, now_s)

    @abc.abstractmethod
    async def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return what one of the methods below returns, which a store may have as coroutines."""

    @abc.abstractmethod
    def _load(self) -> Any:
        """Return the `SavedRun`."""

    @abc.abstractmethod
    def _commit(self, jobs: Sequence[Job]) -> Any:
        """Do appends and changes in one transaction, and set their answers."""

    @abc.abstractmethod
    def _look_after(self, now_s: float) -> Any:
        """Give space back that no held group needs. Called about every `IDLE_S`."""

    @abc.abstractmethod
    def _clear(self) -> Any:
        """Do the job of `clear`."""

    @abc.abstractmethod
    def _finish(self) -> Any:
        """Make everything durable."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Close what `_load` opened; nothing is written or read afterwards."""


def _answer(job: Job) -> None:
    """Give a job's answer to its caller, unless the caller was cancelled."""
    if job.future.done():
        return
    if isinstance(job.answer, BaseException):
        job.future.set_exception(job.answer)
    else:
        job.future.set_result(job.answer)
