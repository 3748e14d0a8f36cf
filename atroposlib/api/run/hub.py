"""The runs of one hub: each a coordinator with its own store, opened on first use.

Runs are independent. A run holds one experiment at a time: when a trainer begins another one, the hub sets the earlier
one aside under its own name until it is resumed or deleted. An application owns one `Hub`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.experiments import Entry, entry_to
from atroposlib.api.run.types import Quota, RunPolicy
from atroposlib.api.schemas import RegisterTrainer, RegistrationReply
from atroposlib.api.stores.base import OwnedElsewhere, UnreadableRun
from atroposlib.api.stores.runs import Kept, MemoryRuns, RunStores
from atroposlib.api.stores.space import Space, used_bound
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.wording import counted

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_RUN = "default"
"""The run of the paths without `/runs/NAME`."""
_MAX_GAP_S = 3.0
"""A longer gap between reads means that the process did not run: it reads the clock at least once a second."""


class TooManyRuns(AtroposError):
    """The hub has `max_runs` open runs, none of which was set aside, or the token has begun as many as it may."""


class AwakeClock:
    """Seconds during which this process ran; time while it is stopped or starved does not count.

    A stopped process answers no heartbeat, so no lease may expire meanwhile. The clock must be read at least every
    `_MAX_GAP_S` seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._stopped_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        gap_s = now - self._last
        if gap_s > _MAX_GAP_S:
            self._stopped_s += gap_s
            logger.warning("the hub did not run for %.1f s; no deadline counts them", gap_s)
        self._last = now
        return now - self._stopped_s


class Hub:
    """Opens, keeps, sets aside and closes runs."""

    def __init__(
        self,
        stores: RunStores | None = None,
        *,
        policy: RunPolicy | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.quota_of: Callable[[str], Quota] = lambda token: Quota()
        """The quota of a token, by its name; set by the application."""
        self._rooms: dict[str, Space] = {}
        self._stores = stores or MemoryRuns()
        self.policy = policy or RunPolicy()
        self._clock = clock or AwakeClock()
        self._changing: dict[str, asyncio.Task[object]] = {}
        """Runs that are being opened, set aside or deleted; one change of a run at a time."""
        self._registering = asyncio.Lock()
        """Serialises registrations: of two trainers that begin at once, the second sees the first one's experiment."""
        self.runs: dict[str, Coordinator] = {}
        """Open runs by name; only this class changes it."""
        self.idle: set[str] = set()
        """Runs that were closed because they were idle."""
        self._last_epochs: dict[str, int] = {}
        """Epochs of deleted runs, so that their trainers are not served by a new run of the same name."""
        self.found: list[str] = []
        """One line per run that was found in its store."""
        self.is_open = False

    async def open(self, *, opens_runs: bool = True) -> None:
        """Open the default run and every stored run that is not set aside; without `opens_runs` none yet.

        An unreadable run is logged and not served; for the default run, `UnreadableRun` is raised. An open hub stays
        as it is.
        """
        if self.is_open:
            return
        await self._stores.open()
        try:
            if opens_runs:
                await self._open_stored()
        except BaseException:
            await self.close()
            raise
        self.is_open = True

    async def _open_stored(self) -> None:
        kept = {each.name for each in await self._stores.kept()}
        names = [name for name in await self._stores.names() if name not in kept]
        for name in dict.fromkeys([DEFAULT_RUN, *names]):
            try:
                await self.run(name)
            except UnreadableRun as e:
                if name == DEFAULT_RUN:
                    raise
                logger.error("run %r is not served and left as it is: %s", name, e)

    async def find(self, name: str) -> Coordinator | None:
        """Return a run, opened on first use; None if no trainer has created it. The default run always exists."""
        if name in self.runs and name not in self._changing:
            self.runs[name].used_at = self._clock()
            return self.runs[name]
        await self._until_unchanging(name)
        if name in self.runs or name == DEFAULT_RUN or await self._stores.holds(name):
            return await self.run(name)
        return None

    async def run(self, name: str = DEFAULT_RUN) -> Coordinator:
        """Return a run, created or opened on first use. Raises `TooManyRuns`, `StoreBroken`, `UnreadableRun`."""
        await self._until_unchanging(name)
        run = self.runs.get(name)
        if run is None:
            run = await self._change(name, lambda: self._open(name))
        run.used_at = self._clock()
        return run

    async def register(
        self, name: str, registration: RegisterTrainer, *, token: str | None = None
    ) -> RegistrationReply:
        """Register a trainer with a run, created on first use; what it begins counts for `token`, a name.

        If the trainer begins or resumes another experiment than the run's, that one (empty if it is not kept) replaces
        the current one, which is set aside and named in the reply. Raises `TooManyRuns`, `StoreBroken`, and ConfigError
        for a trainer that would begin in an experiment that was set aside.
        """
        async with self._registering:
            all_kept = await self._stores.kept()
            here = next((each for each in all_kept if each.name == name), None)
            if here is not None and registration.resume_step is None:
                raise ConfigError(
                    f"{name!r} is an earlier experiment of the run {here.of_run!r}, set aside: register with"
                    f" that run, or delete it first (run-api --forget {name})"
                )
            if token is not None and name not in self.runs and not await self._stores.holds(name):
                self._check_quota(token)
            run = await self.run(name)
            set_aside = None
            asked, current = registration.experiment, run.state.experiment
            begins = entry_to(run.state, registration, now=self._clock()) is Entry.BEGIN
            is_another = begins or asked not in (None, current)
            kept = None  # what the trainer resumes, if it was set aside
            if registration.resume_step is not None and is_another:
                of_run = [each for each in all_kept if each.of_run == name]
                kept = next((each for each in of_run if each.experiment == asked), None)
            if kept is not None or (current is not None and is_another):
                set_aside = await self._change(name, lambda: self._replace(name, run, kept))
                run = await self.run(name)
            if begins or run.state.token is None:
                run.state.token = token
            reply = await run.register(registration)
        reply.set_aside = set_aside
        return reply

    def _begun_by(self, token: str) -> list[Coordinator]:
        return [run for run in self.runs.values() if run.state.token == token]

    def _check_quota(self, token: str) -> None:
        """Raise `TooManyRuns` unless the token may begin another run."""
        num_runs, max_runs = len(self._begun_by(token)), self.quota_of(token).max_runs
        if max_runs is not None and num_runs >= max_runs:
            raise TooManyRuns(
                f"token {token!r} has {counted(num_runs, 'open run')}; end one with DELETE /runs/NAME, or change"
                f" max_runs in the token file or --max-token-runs (now {max_runs})"
            )

    def _room_of(self, token: str | None) -> Space | None:
        """Return the room of all runs that a token began; None if it is not bounded."""
        max_bytes = None if token is None else self.quota_of(token).max_bytes
        if token is None or max_bytes is None:
            return None
        begun = self._begun_by(token)
        used = sum(run.store.usage().payload_bytes + run.arriving_bytes for run in begun)
        flag = "max_bytes in the token file or --max-token-bytes"
        room = self._rooms.setdefault(token, Space())
        room.note([used_bound(f"token {token!r}", used_bytes=used, max_bytes=max_bytes, flag=flag)])
        return room

    async def _until_unchanging(self, name: str) -> None:
        while (change := self._changing.get(name)) is not None:
            await asyncio.wait([change])

    async def _change(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Apply one change to a run after those in progress; cancelling the caller does not interrupt it."""
        await self._until_unchanging(name)

        async def whole() -> T:
            try:
                return await work()
            finally:
                del self._changing[name]

        task = asyncio.create_task(whole())
        self._changing[name] = task
        return await asyncio.shield(task)

    async def _open(self, name: str, *, earlier: Coordinator | None = None) -> Coordinator:
        if name in self.runs:
            return self.runs[name]
        if len(self.runs) >= self.policy.max_runs:
            # A run that was set aside was opened to be looked at, and can be opened again.
            for kept in await self._stores.kept():
                if kept.name in self.runs:
                    await self.release(kept.name)
        if len(self.runs) >= self.policy.max_runs:
            raise TooManyRuns(
                f"{self.policy.max_runs} runs are open (--max-runs); end one with DELETE /runs/NAME before starting"
                f" {name!r}"
            )
        run = Coordinator(
            await asyncio.to_thread(self._stores.store, name),
            policy=self.policy,
            clock=self._clock,
            name=name,
            first_epoch=self._last_epochs.get(name, -1) + 1,
            room_of=self._room_of,
        )
        found = await run.open(earlier)
        if run.state.experiment is None and run.state.leases.epoch == 0:
            await self._finish_replacing(run)
        self._last_epochs.pop(name, None)
        if found:
            self.found.append(found)
            logger.info("%s", found)
        self.runs[name] = run
        self.idle.discard(name)
        return run

    async def _replace(self, name: str, earlier: Coordinator, kept: Kept | None) -> str | None:
        """Set the experiment of a run aside and replace it with `kept`, or with an empty one.

        Return the name under which the earlier one is kept; None if it never received a group. The environments, which
        may never register again, are kept at every moment: after a crash in between, `_open` or another attempt of the
        trainer, which got no reply, completes the replacement.
        """
        self.runs.pop(name, None)
        earlier.state.token = None  # set aside, it counts for no token until one resumes it
        await earlier.close()
        if kept is None and earlier.ledger().produced == 0:
            earlier = await self._open(name)  # with what was stored while it was closed
            if earlier.ledger().produced == 0:
                await earlier.begin_again()
                return None
            await self.runs.pop(name).close()
        if kept is not None:
            await (await self.run(kept.name)).take_over(earlier)
        set_aside = None
        if earlier.ledger().produced == 0:
            await self._stores.forget(name)
        elif await self._stores.holds(name):
            set_aside = await self._stores.set_aside(
                name,
                experiment=earlier.state.experiment or "",
                step=earlier.state.current_step,
                resumed=kept,
            )
            for gone in [each for each in list(self.runs) if not await self._stores.holds(each)]:
                await self.runs.pop(gone).close()
            logger.warning(
                "run %s: another experiment %s; the earlier one (%s) is set aside as %r: resume it with its trainer's"
                " --resume, delete it with run-api --forget %s",
                name,
                "begins" if kept is None else "is resumed",
                earlier.summary(),
                set_aside,
                set_aside,
            )
        if kept is not None:
            await self._change(kept.name, lambda: self._bring_back(kept))
        await self._open(name, earlier=earlier)
        return set_aside

    async def _finish_replacing(self, run: Coordinator) -> None:
        """Give a run that follows no other the environments set aside last: a crash may have cut `_replace` off."""
        kept = next((each for each in await self._stores.kept() if each.of_run == run.name), None)
        if kept is not None:
            try:
                await run.take_over(await self.run(kept.name))
                await self.release(kept.name)
            except AtroposError as e:
                logger.error("run %s begins without its earlier environments: %s", run.name, e)

    async def _bring_back(self, kept: Kept) -> None:
        if (run := self.runs.pop(kept.name, None)) is not None:
            await run.close()
        await self._stores.bring_back(kept)

    def has(self, name: str) -> bool:
        """Whether the run is open here, or being opened, replaced or closed."""
        return name in self.runs or name in self._changing

    async def release(self, name: str) -> None:
        """Close an open run as it is, so that it can be opened again, here or by another hub."""

        async def close() -> None:
            run = self.runs.pop(name, None)
            if run is not None:
                await run.close(is_moved=True)

        await self._change(name, close)

    async def forget(self, name: str) -> bool:
        """Delete a run and its stored data; False if there is none."""
        await self._until_unchanging(name)
        if name not in self.runs and not await self._stores.holds(name):
            return False
        await self._change(name, lambda: self._delete(name))
        return True

    async def _delete(self, name: str) -> None:
        run = self.runs.pop(name, None)
        if run is not None:
            self._last_epochs[name] = run.state.leases.epoch
            await run.reset()
            await run.close()
        await self._stores.forget(name)
        self.idle.discard(name)

    async def close_idle(self) -> None:
        """Close the runs without leases that nothing has asked for lately; the default run stays open."""
        for name, run in list(self.runs.items()):
            idle_s = self._clock() - run.used_at
            is_busy = name == DEFAULT_RUN or run.state.leases.leased
            if idle_s > self.policy.idle_run_s and not is_busy:
                self.idle.add(name)
                self._last_epochs[name] = run.state.leases.epoch  # it may be deleted while closed
                await self.release(name)
                logger.info("run %s: closed after %.0f s without a request", name, idle_s)

    async def delete_surplus(self) -> None:
        """Measure the earlier experiments of this hub's runs, and delete those beyond what the policy keeps."""
        days, num = self.policy.keep_set_aside_days, self.policy.keep_set_aside
        num_bytes = {run.name: run.num_bytes for run in await self._stores.stored()}
        async with self._registering:  # none is brought back meanwhile
            left: dict[str, list[int]] = {name: [] for name in (*self.runs, *self.idle)}
            for kept in await self._stores.kept():
                sizes = left.get(kept.of_run)
                if sizes is None:
                    continue  # another hub's
                age_days = (time.time() - kept.set_aside_at) / 86400
                if (num is None or len(sizes) < num) and (days is None or age_days <= days):
                    sizes.append(num_bytes.get(kept.name, 0))
                    continue
                try:
                    await self.forget(kept.name)
                except OwnedElsewhere as e:  # another hub has it open
                    logger.info("%s; it is deleted later", e)
                    continue
                logger.warning(
                    "run %s: its earlier experiment %r (step %d, set aside %.1f days ago) is deleted, as"
                    " --keep-set-aside or --keep-set-aside-days asks",
                    kept.of_run,
                    kept.name,
                    kept.step,
                    age_days,
                )
                if kept.of_run in self.runs:
                    self.runs[kept.of_run].num_set_aside_deleted += 1
            for name, run in self.runs.items():
                run.set_aside_bytes = left.get(name, [])

    async def tick(self) -> None:
        """Expire leases, groups and environments in every run; then raise the first error, if any."""
        self._clock()  # also without runs: a gap between reads would count as a stop of the process
        await self._of_every_run(Coordinator.tick)

    def stop_waiting(self) -> None:
        """Answer every waiting request now, for a quick shutdown."""
        for run in self.runs.values():
            run.stop_waiting()

    async def close(self) -> None:
        """Close every store; the runs stay as they are stored."""
        self.is_open = False
        if self._changing:
            await asyncio.wait(list(self._changing.values()))
        try:
            await self._of_every_run(Coordinator.close)
        finally:
            self.runs.clear()
            await self._stores.close()

    async def _of_every_run(self, call: Callable[[Coordinator], Awaitable[object]]) -> None:
        """Await a call of every open run, also if one fails; then raise the first error, if any."""
        # At once: a store may wait for its database.
        calls = map(call, self.runs.values())
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
