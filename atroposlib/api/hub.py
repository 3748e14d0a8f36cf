"""The runs of one hub: each a coordinator with a store of its own, opened when it is first spoken of.

Nothing that happens in one run touches another. The application owns one `Hub`; tests make as many as they like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from atroposlib.api.calls import RunPolicy
from atroposlib.api.coordinator import Coordinator
from atroposlib.api.stores.runs import MemoryRuns, RunStores
from atroposlib.errors import AtroposError

logger = logging.getLogger(__name__)

DEFAULT_RUN = "default"
"""The run of the paths without `/runs/NAME`."""
MAX_RUNS = 100


class TooManyRuns(AtroposError):
    """The hub holds as many runs as it may."""


class Hub:
    """Opens, keeps and closes runs."""

    def __init__(
        self,
        stores: RunStores | None = None,
        *,
        policy: RunPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores or MemoryRuns()
        self._policy = policy or RunPolicy()
        self._clock = clock
        self._opening: dict[str, asyncio.Task[Coordinator]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, Coordinator] = {}
        self.found: list[str] = []
        """One line per run that was found in its store."""
        self.is_open = False

    @property
    def runs(self) -> Mapping[str, Coordinator]:
        """Open runs by name."""
        return self._runs

    def is_under_way(self, name: str) -> bool:
        """Is the run just being opened or ended?"""
        return name in self._opening or name in self._ending

    async def open(self) -> None:
        """Open the default run and every run that something is stored of."""
        for name in dict.fromkeys([DEFAULT_RUN, *self._stores.names()]):
            await self.run(name)
        self.is_open = True

    async def run(self, name: str = DEFAULT_RUN) -> Coordinator:
        """Return a run, opening it at first. Raises `TooManyRuns`, `StoreBroken`."""
        # What is stored of an ending run is still being deleted: a store opened there now would lose its files.
        while (ending := self._ending.get(name)) is not None:
            await asyncio.wait([ending])
        coordinator = self._runs.get(name)
        if coordinator is not None:
            return coordinator
        if name not in self._opening:
            if len(self._runs) + len(self._opening) >= MAX_RUNS:
                raise TooManyRuns(
                    f"{MAX_RUNS} runs are open; end one with DELETE /runs/NAME before starting {name!r}"
                )
            self._opening[name] = asyncio.create_task(self._open(name))
        return await asyncio.shield(self._opening[name])

    async def _open(self, name: str) -> Coordinator:
        try:
            coordinator = Coordinator(
                self._stores.store(name), policy=self._policy, clock=self._clock, name=name
            )
            found = await coordinator.open()
            if found:
                self.found.append(found)
                logger.info("%s", found)
            self._runs[name] = coordinator
            return coordinator
        finally:
            del self._opening[name]

    async def forget(self, name: str) -> bool:
        """End a run and delete what is stored of it; False when there is none."""
        coordinator = self._runs.pop(name, None)
        if coordinator is None:
            return False
        self._ending[name] = asyncio.create_task(self._end(name, coordinator))
        await asyncio.shield(self._ending[name])
        return True

    async def _end(self, name: str, coordinator: Coordinator) -> None:
        try:
            await coordinator.reset()
            await coordinator.close()
            await asyncio.to_thread(self._stores.forget, name)
        finally:
            del self._ending[name]

    async def tick(self) -> None:
        """Let time pass in every run."""
        for coordinator in list(self._runs.values()):
            await coordinator.tick()

    def stop_waiting(self) -> None:
        for coordinator in self._runs.values():
            coordinator.stop_waiting()

    async def close(self) -> None:
        """Close every store; the runs stay as they are stored."""
        self.is_open = False
        under_way = [*self._opening.values(), *self._ending.values()]
        if under_way:
            await asyncio.wait(under_way)
        for coordinator in self._runs.values():
            await coordinator.close()
        self._runs.clear()
