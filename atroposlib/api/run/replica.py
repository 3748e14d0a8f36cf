"""One hub process among several on one database: which runs it serves, and who serves the others.

A replica renews its membership every `RENEW_S` and reads who owns what. It adopts runs without an owner, gives one away
to a replica that has at least two fewer, and closes those it has lost. The stores keep an earlier owner from writing;
this module decides who should own what, and stops serving when it cannot know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING
from uuid import UUID

from atroposlib.api.run.coordinator import Signal
from atroposlib.api.run.hub import DEFAULT_RUN, Hub
from atroposlib.api.run.types import NoOwner
from atroposlib.api.stores.base import OwnedElsewhere, StoreBroken, UnreadableRun

if TYPE_CHECKING:  # asyncpg is an extra
    from atroposlib.api.stores.postgres.owners import Member, OwnedRun, Owners, Ownership

logger = logging.getLogger(__name__)

RENEW_S = 0.5
"""A takeover takes up to this time to see the lapse, and up to it again until all know the new owner."""
TRUST_S = 3.5
"""A replica that could not renew for this time serves nothing: soon others take its runs (`owners.LAPSE_S`)."""
SETTLE_S = 3.0
"""After an outage of the database a replica takes no run from others that may not have renewed yet."""
YIELD_S = 2.0
"""A run without an owner is left to a replica with the fewest runs for this time, then any replica adopts it."""
LOOK_S = 0.05
"""Requests that find a run moved within this time share one reading of who owns what."""
DRAIN_S = 2.0
"""Time for requests in flight to finish before a run is given away."""


class Replica:
    """This process as a member. Open it before the application serves requests."""

    ownership: Ownership
    """As last read; set by `open`."""

    def __init__(
        self, hub: Hub, owners: Owners, *, address: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.hub = hub
        self.owners = owners
        self.id = owners.id
        self.address = address
        self.changed = Signal()
        """Notified when `ownership` was read."""
        self.num_takeovers = 0
        """Runs adopted from members that lapsed."""
        self._clock = clock
        self._renewed_at = float("-inf")
        self._steady_since = float("inf")
        """Since when no renewal was late."""
        self._free_since: dict[str, float] = {}
        """When a run was first seen without an owner."""
        self._wanted: set[str] = set()
        """Runs that were set aside, or closed because they were idle, and have been asked for."""
        self._broken: set[str] = set()
        """Open runs whose store failed."""
        self._unreadable: set[str] = set()
        self._leaving: set[str] = set()
        """Runs that are being given away; they take no new requests."""
        self._in_flight: Counter[str] = Counter()
        self._finished = Signal()
        self._due = asyncio.Event()
        """Set when the sweep should look: after every renewal, and when a run is broken or wanted."""
        self._tasks: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None

    # Life

    async def open(self) -> None:
        """Join, and adopt runs without an owner. Raises `StoreBroken` and `ConfigError` without the database.

        An open replica stays as it is.
        """
        if self._tasks:
            return
        await self.hub.open(opens_runs=False)
        await self.owners.join(self.address)
        await self.renew()
        # Opening many runs may take longer than a membership lasts.
        self._tasks = [asyncio.create_task(_repeat(self.renew, lambda: asyncio.sleep(RENEW_S)))]
        if DEFAULT_RUN not in self.ownership.runs:
            await self._adopt(DEFAULT_RUN)
        await self.sweep()
        self._tasks.append(asyncio.create_task(_repeat(self.sweep, self._until_due)))

    async def close(self) -> None:
        """Close every run and give all of them up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.changed.close()
        await self.hub.close()

    async def _until_due(self) -> None:
        await self._due.wait()
        self._due.clear()

    async def renew(self) -> None:
        asked_at = self._clock()
        ownership = await self.owners.renew()
        if asked_at - self._renewed_at > TRUST_S:
            self._steady_since = asked_at
        self._renewed_at = asked_at
        self._note(ownership)
        self._due.set()

    def _note(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self.changed.notify()

    async def look(self) -> None:
        """Read who owns what; calls at the same time share one reading. Nothing changes without the database."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        try:
            await asyncio.sleep(LOOK_S)
            self._note(await self.owners.look())
        except StoreBroken:
            pass  # `renew` reports it
        finally:
            self._looking = None

    @property
    def is_trusted(self) -> bool:
        """Whether it renewed lately, so that no other replica can have taken its runs."""
        return self._clock() - self._renewed_at < TRUST_S

    @property
    def _is_settled(self) -> bool:
        """Whether every living member has had the time to renew since the database was last unreachable."""
        return self._clock() - self._steady_since > SETTLE_S

    # Who serves a run

    def serves(self, name: str) -> bool:
        # A request must not make the hub claim a run that is not this replica's.
        is_own = name in self.owners.terms and self.hub.has(name)
        is_here = is_own or name in self._unreadable
        is_going = name in self._leaving or name in self._broken
        return is_here and not is_going and self.is_trusted

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """Count a request that this replica serves, so that it finishes before the run is given away."""
        self._in_flight[name] += 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]
                self._finished.notify()

    async def find(
        self,
        name: str,
        *,
        begins: bool,
        is_forwarded: bool,
        until: float,
        refused_by: Member | None = None,
    ) -> Member | None:
        """Return the member that serves a run, waiting for one; None for this replica, also if there is no such run.

        `begins`: the request may create the run, which then belongs to the member with the fewest runs. `refused_by`
        is not tried again for `RENEW_S`. Raises `NoOwner` at the time `until` of the clock.
        """
        refused = None if refused_by is None else refused_by.id
        retry_at = self._clock() + RENEW_S
        if refused is not None:
            await self.look()
        while not self.serves(name):
            if self._clock() >= retry_at:
                refused = None
            if self.is_trusted:
                if name not in self.ownership.runs:
                    await self.look()  # another replica may just have created it
                if self._is_unknown(name):
                    chosen = self._least_loaded() if begins and not is_forwarded else None
                    if chosen is None or chosen.id in (self.id, refused):
                        return None
                    return chosen
                self._want(name)
            owner = self.ownership.owner_of(name)
            if owner is not None and owner.id not in (self.id, refused):
                return owner
            remaining_s = until - self._clock()
            if remaining_s <= 0 or self.changed.is_closed:
                raise NoOwner(f"no replica serves run {name!r} at this time; try again")
            await self.changed.wait(min(remaining_s, RENEW_S))
        return None

    def _is_unknown(self, name: str) -> bool:
        return name not in self.ownership.runs and name != DEFAULT_RUN

    def _want(self, name: str) -> None:
        """Ask the sweep for a run that it would not adopt by itself."""
        run = self.ownership.runs.get(name)
        is_kept = run is not None and run.is_kept and self._is_free(run)
        if (is_kept or name in self.hub.idle) and name not in self._wanted:
            self._wanted.add(name)
            self._due.set()

    def _least_loaded(self) -> Member | None:
        """Return the living member with the fewest runs, this one if it is among them."""
        living = [member for member in self.ownership.members.values() if member.is_alive]
        count = self.ownership.num_runs
        return min(living, key=lambda each: (count(each.id), each.id != self.id), default=None)

    def is_gone(self, member: UUID) -> bool:
        """Whether a member has left or lapsed."""
        found = self.ownership.members.get(member)
        return self._is_settled and (found is None or not found.is_alive)

    def owned_runs(self) -> list[tuple[Member, list[str]]]:
        """Return every member with the names of its runs, by address."""
        runs = self.ownership.runs.values()
        return [
            (member, [run.name for run in runs if run.owner == member.id])
            for member in sorted(self.ownership.members.values(), key=lambda each: each.address)
        ]

    # What it should own

    def note_broken(self, name: str, _: BaseException) -> None:
        """Close a run, whose store failed, and claim it again if no other replica has."""
        self._broken.add(name)
        self._due.set()

    async def sweep(self) -> None:
        """Close what was lost, adopt what has no owner, give one run away if another replica has too few."""
        self._broken |= {name for name in self.hub.runs if self._has_lost(name)}
        for name in list(self._broken):
            logger.warning("run %s: closed here, to be resumed from the database", name)
            await self.hub.release(name)
            self.owners.terms.pop(name, None)
            self._broken.discard(name)
        if not self.is_trusted:
            return
        runs = self.ownership.runs
        self._unreadable &= {name for name, run in runs.items() if run.owner == self.id}
        if DEFAULT_RUN in runs:
            self._free_since.pop("", None)
        elif self._clock() - self._free_since.setdefault("", self._clock()) > YIELD_S:
            # It was deleted, not just replaced by another experiment.
            await self._adopt(DEFAULT_RUN)
        for run in runs.values():
            if self._should_adopt(run):
                await self._adopt(run.name)
        await self._give_one_away()

    def _has_lost(self, name: str) -> bool:
        """Whether another replica has claimed a run that is open here."""
        term = self.owners.terms.get(name)
        if term is None:
            return True
        runs = self.ownership.runs.values()
        return any(run.id == term.run_id and run.term > term.number for run in runs)

    def _is_free(self, run: OwnedRun) -> bool:
        return run.owner is None or self.ownership.owner_of(run.name) is None

    def _should_adopt(self, run: OwnedRun) -> bool:
        is_full = len(self.hub.runs) >= self.hub.policy.max_runs
        if self.hub.has(run.name) or run.name in self._unreadable or is_full:
            return False
        if run.name in self.hub.idle and run.name not in self._wanted:
            return False
        if run.owner == self.id:
            return True
        if not self._is_free(run) or (run.owner is not None and not self._is_settled):
            self._free_since.pop(run.name, None)
            return False
        if run.is_kept and run.name not in self._wanted:
            return False
        since = self._free_since.setdefault(run.name, self._clock())
        chosen = self._least_loaded()
        return (chosen is not None and chosen.id == self.id) or self._clock() - since > YIELD_S

    async def _adopt(self, name: str) -> None:
        earlier = self.ownership.runs.get(name)
        self._free_since.pop(name, None)
        self._wanted.discard(name)
        try:
            await self.hub.run(name)
        except UnreadableRun as e:
            self._unreadable.add(name)
            logger.error("run %r is not served and left as it is: %s", name, e)
        except (StoreBroken, OwnedElsewhere) as e:
            logger.info("run %s: not adopted: %s", name, e)
        else:
            is_takeover = earlier is not None and earlier.owner not in (None, self.id)
            self.num_takeovers += is_takeover
            logger.info("run %s: %s", name, "taken over" if is_takeover else "adopted")
        await self.look()

    async def _give_one_away(self) -> None:
        fewest = self._least_loaded()
        own = sorted(set(self.hub.runs) - self._broken)
        if fewest is not None and len(own) - self.ownership.num_runs(fewest.id) >= 2:
            await self.give_away(own[-1])

    async def give_away(self, name: str) -> None:
        """Finish the requests of a run, close it, and give it up."""
        run = self.hub.runs[name]
        self._leaving.add(name)
        try:
            run.stop_waiting()
            deadline = self._clock() + DRAIN_S
            while self._in_flight[name] and (remaining_s := deadline - self._clock()) > 0:
                await self._finished.wait(remaining_s)
            await self.hub.release(name)
            await self.owners.release(name)
            logger.info("run %s: given away", name)
        finally:
            self._leaving.discard(name)
        await self.look()


async def _repeat(
    work: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]
) -> None:
    """Call `work` after every pause, also after errors, until cancelled."""
    while True:
        await pause()
        try:
            await work()
        except StoreBroken as e:
            logger.warning("%s failed: %s", work.__qualname__, e)
        except Exception:
            # Awaited only at shutdown: if this task ended, the replica would lapse for ever.
            logger.exception("%s failed", work.__qualname__)
