"""Real `ServerManager`s over simulated engines in virtual time, for `fleet.py` and the tests of the choice.

The clock of the event loop, and `time.monotonic` with it, jumps to the next timer: nothing waits, and results depend on
the seed alone.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.api_server import APIServer
from benchmarks._simulated_engine import NETWORK_S, TOKEN_TIME_S, Server

T = TypeVar("T")

LENGTHS = (20, 60)


def with_slots(slowness: float = 1.0, *, slots: int = 16) -> Server:
    """Return an engine whose requests run at full speed or wait for a slot."""
    return Server(
        slots=slots,
        token_time=lambda n, slots: slowness * TOKEN_TIME_S,
        lengths=lambda rng: rng.randint(*LENGTHS),
    )


def batching(slowness: float = 1.0) -> Server:
    """Return an engine that runs all requests, twice as slow with 17 as with one."""
    return replace(
        with_slots(slowness),
        runs_all=True,
        token_time=lambda n, slots: slowness * TOKEN_TIME_S * (1 + n / 16),
    )


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "no task has anything left to wait for"
        self.now += timeout
        return super().select(0)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in an event loop whose clock starts at 0 and jumps."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with (
        mock.patch.object(time, "monotonic", loop.time),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(main)


class Engine:
    """Generates one token per step for each running request; `server` may be replaced while it runs."""

    def __init__(self, server: Server, *, seed: str) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._running: list[tuple[float, asyncio.Future[None]]] = []
        self._steps: asyncio.Task[None] | None = None

    async def generate(self) -> int:
        """Return the number of generated tokens."""
        await asyncio.sleep(NETWORK_S)
        if self.server.refuses_all:
            raise EngineUnavailable("answered 500", status=500)
        if (
            self.server.max_waiting is not None
            and len(self._running) >= self.server.slots
            and len(self._waiting) >= self.server.max_waiting
        ):
            raise EngineUnavailable("answered 429", status=429, retry_after_s=1.0)
        num_tokens = self.server.lengths(self.rng)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((self.server.overhead_tokens + num_tokens, done))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        await done
        return num_tokens

    async def _run(self) -> None:
        clock = 0.0
        while self._waiting or self._running:
            server = self.server
            while self._waiting and (server.runs_all or len(self._running) < server.slots):
                work, done = self._waiting.popleft()
                self._running.append((clock + work, done))
            step_s = server.token_time(len(self._running), server.slots)
            await asyncio.sleep(step_s * self.rng.lognormvariate(0.0, 0.1))
            clock += 1
            for ends_at, done in self._running:
                if ends_at <= clock and not done.done():
                    done.set_result(None)
            self._running = [one for one in self._running if not one[1].done()]


class SimulatedServer(APIServer):
    """A client of an engine."""

    def __init__(self, engine: Engine, config: APIServerConfig) -> None:
        super().__init__(config)
        self.engine = engine

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[Any, ...]:
        num_tokens = await self.engine.generate()
        return [0], [[0] * num_tokens], [[0.0] * num_tokens], ["length"]

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        raise NotImplementedError


class MostFreeSlots(ServerManager):
    """Chooses by free slots alone, whatever the speed."""

    async def _choose(self, split: str = "train", *, after: Any = ()) -> APIServer:
        def rank(server: APIServer) -> tuple[bool, bool, int]:
            num_free = server.sem.capacity - sum(server.num_assigned.values())
            return server not in after, not server.is_avoided, num_free

        return max(self.servers, key=rank)


class Answer(NamedTuple):
    ended_at: float
    seconds: float
    num_tokens: int


class Sample(NamedTuple):
    """Of the answers in a time span."""

    tokens_per_s: float
    p50_s: float
    p99_s: float


class Fleet:
    """Engines, and managers (one per environment) that keep requests open."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        manager_class: type[ServerManager] = ServerManager,
        num_managers: int = 1,
        seed: int = 0,
    ) -> None:
        random.seed(seed)  # of the pauses between attempts
        self.engines = [Engine(server, seed=f"{seed} {i}") for i, server in enumerate(servers)]
        self.answers: list[Answer] = []
        self._managers = [self._manager(manager_class) for _ in range(num_managers)]

    def _manager(self, manager_class: type[ServerManager]) -> ServerManager:
        engines = iter(self.engines)
        configs = [
            APIServerConfig(base_url=f"http://engine{i}.invalid", health_check=False)
            for i in range(len(self.engines))
        ]
        return manager_class(
            configs,
            server_class=lambda config, **_: SimulatedServer(next(engines), config),  # type: ignore[arg-type]
        )

    async def ask(self, manager: ServerManager) -> None:
        """Send one request and wait for its answer."""
        began = time.monotonic()
        try:
            answer = await manager.tokens_and_logprobs_completion(input_ids=[0])
        except EngineUnavailable:
            return
        now = time.monotonic()
        self.answers.append(Answer(now, now - began, len(answer.output_tokens[0])))

    async def keep_asking(self, num_requests: int, *, until: float) -> None:
        """Keep that many requests open."""

        async def work(manager: ServerManager) -> None:
            while True:
                await self.ask(manager)

        workers = [
            asyncio.create_task(work(self._managers[i % len(self._managers)]))
            for i in range(num_requests)
        ]
        await asyncio.sleep(until - time.monotonic())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def sample(self, began: float, end: float) -> Sample:
        found = [answer for answer in self.answers if began < answer.ended_at <= end]
        waits = sorted(answer.seconds for answer in found) or [0.0]
        tokens = sum(answer.num_tokens for answer in found)
        return Sample(tokens / (end - began), waits[len(waits) // 2], waits[len(waits) * 99 // 100])


Change = Callable[[Fleet], Coroutine[Any, Any, None]]
"""Waits, then changes the engines of a fleet."""


def simulate(
    servers: Sequence[Server],
    num_requests: int,
    *,
    spans: Sequence[tuple[float, float]],
    change: Change | None = None,
    **options: Any,
) -> list[Sample]:
    """Keep requests open at a fleet and return a sample per time span; `options` are those of `Fleet`."""

    async def main() -> list[Sample]:
        fleet = Fleet(servers, **options)
        async with asyncio.TaskGroup() as group:
            group.create_task(fleet.keep_asking(num_requests, until=spans[-1][1]))
            if change is not None:
                group.create_task(change(fleet))
        return [fleet.sample(*span) for span in spans]

    return run_virtually(main())
