"""Inference servers in virtual time behind the real door (`admission.py`).

The clock of the event loop, and `time.monotonic` with it, jumps to the next timer: nothing waits, and results depend on
the seed alone. All running requests of a server advance at one rate that depends on their number, as in continuous
batching; the others wait in order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers import admission
from atroposlib.inference.servers.admission import Door, Slot, ask

T = TypeVar("T")

TOKEN_TIME_S = 0.01
NETWORK_S = 0.02
"""Delay until a client learns of a refusal; meanwhile it may send other requests."""


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "no task has anything left to wait for"
        self.now += timeout
        return super().select(0)


@contextlib.contextmanager
def virtual_time() -> Iterator[asyncio.Runner]:
    """Yield a runner of an event loop whose clock starts at 0 and jumps."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with (
        mock.patch.object(time, "monotonic", loop.time),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        yield runner


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time."""
    with virtual_time() as runner:
        return runner.run(main)


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Of a server."""

    slots: int = 64
    runs_all: bool = False
    """Whether requests beyond `slots` run as well, slowed down by `token_time`, instead of waiting."""
    token_time: Callable[[int, int], float] = lambda running, slots: TOKEN_TIME_S
    """Seconds per token, given the numbers of running requests and of slots."""
    overhead_tokens: float = 5.0
    """What the prompt costs."""
    delay_s: float = 0.0
    """Until a request arrives."""
    lengths: Callable[[random.Random], int] = lambda rng: rng.randint(50, 350)
    max_waiting: int | None = None
    """Maximum number of queued requests; more are refused (429)."""
    retry_after_s: float | None = 1.0
    """With every refusal except 500."""
    timeout_s: float | None = None
    """The clients' timeout."""
    refuses_with: int | None = None
    """Status of the answer to every request: 503 as during a weight update, 500 of a broken server."""


class Size(NamedTuple):
    num_tokens: int
    work: float
    """In tokens, with prompt and network."""


@dataclass(eq=False, slots=True)
class _Request:
    client: Client
    work: float
    done: asyncio.Future[None]
    ends_at: float | None = None
    """In the server's token clock; None while it does not run."""


class Engine:
    """A server; `change` changes its behaviour while it runs."""

    def __init__(self, behaviour: Behaviour, *, seed: str, loop: asyncio.AbstractEventLoop) -> None:
        self.behaviour = behaviour
        self._rng = random.Random(seed)
        self._loop = loop
        self._clock = 0.0
        """Tokens that a request running from the start would have generated."""
        self._moved_at = 0.0
        self._token_s = TOKEN_TIME_S
        self._waiting: deque[_Request] = deque()
        self._running: list[tuple[float, int, _Request]] = []
        self._num_running = 0
        self._running_of: Counter[Client] = Counter()
        self._ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def change(self, **changes: Any) -> None:
        """Change fields of the behaviour."""
        self.behaviour = replace(self.behaviour, **changes)
        self._advance()

    def draw(self) -> Size:
        """Return the size of a request, which stays the same when it is retried."""
        num_tokens = self.behaviour.lengths(self._rng)
        overhead = self.behaviour.overhead_tokens
        return Size(num_tokens, (overhead + num_tokens) * self._rng.lognormvariate(0.0, 0.1))

    async def generate(self, client: Client, work: float) -> None:
        """Return when the server has generated an answer."""
        if self.behaviour.delay_s:
            await asyncio.sleep(self.behaviour.delay_s)
        known = self.behaviour
        is_full = self._num_running >= known.slots and not known.runs_all
        if known.max_waiting is not None and is_full and len(self._waiting) >= known.max_waiting:
            await self._refuse(client, 429)
        if known.refuses_with is not None:
            await self._refuse(client, known.refuses_with)
        request = _Request(client, work, self._loop.create_future())
        self._waiting.append(request)
        self._advance()
        try:
            async with asyncio.timeout(known.timeout_s):
                await request.done
        except (TimeoutError, asyncio.CancelledError) as e:
            client.num_timed_out += isinstance(e, TimeoutError)
            if request.ends_at is not None:
                self._stop(request)
            elif request in self._waiting:
                self._waiting.remove(request)
            self._advance()
            raise

    async def _refuse(self, client: Client, status: int) -> None:
        client.num_refused += 1
        after_s = None if status == 500 else self.behaviour.retry_after_s
        await asyncio.sleep(NETWORK_S)
        raise EngineUnavailable(f"answered {status}", status=status, retry_after_s=after_s)

    def _stop(self, request: _Request) -> None:
        request.ends_at = None
        self._running_of[request.client] -= 1
        self._num_running -= 1

    def _advance(self) -> None:
        """Bring the running requests to the present, end and start some, and come back when the next one ends."""
        now = self._loop.time()
        progress = (now - self._moved_at) / self._token_s
        self._clock += progress
        self._moved_at = now
        for client, num_running in self._running_of.items():
            client.num_tokens += num_running * progress
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            ends_at, _, request = heapq.heappop(self._running)
            if request.ends_at == ends_at:  # else it timed out
                self._stop(request)
                request.done.set_result(None)
        known = self.behaviour
        while self._waiting and (known.runs_all or self._num_running < known.slots):
            request = self._waiting.popleft()
            request.ends_at = self._clock + request.work
            self._running_of[request.client] += 1
            self._num_running += 1
            heapq.heappush(self._running, (request.ends_at, next(self._ids), request))
        self._token_s = known.token_time(max(1, self._num_running), known.slots)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left_s = (self._running[0][0] - self._clock) * self._token_s
            self._timer = self._loop.call_at(now + left_s, self._advance)


class Answer(NamedTuple):
    ended_at: float
    seconds: float
    """With waiting and retries."""
    num_tokens: int


@dataclass(eq=False)
class Client:
    """An environment, and what happened to its requests."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `APIServerConfig`."""
    num_workers: int = 512
    """Requests that it keeps open; may be changed while it runs."""
    starts_at: float = 0.0
    doors: list[Door] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    num_refused: int = 0
    num_timed_out: int = 0
    num_failed: int = 0
    """Requests given up."""
    num_tokens: float = 0.0
    """Generated so far by finished and unfinished requests."""

    async def work(self, engine_of: dict[Door, Engine], number: int) -> None:
        """Keep one request open while there are more workers than `number`."""

        async def send(taken: Slot[Door]) -> None:
            await engine_of[taken.server].generate(self, size.work)
            taken.num_tokens = size.num_tokens

        while number < self.num_workers:
            size = engine_of[self.doors[0]].draw()
            began = time.monotonic()
            try:
                await ask(self.doors, "train", send)
            except (EngineUnavailable, TimeoutError):
                self.num_failed += 1
            else:
                now = time.monotonic()
                self.answers.append(Answer(now, now - began, size.num_tokens))


class Simulation:
    """Servers that clients share, during a `with` block."""

    def __init__(
        self, behaviours: Sequence[Behaviour], clients: Sequence[Client], *, seed: int = 0
    ) -> None:
        self._behaviours = behaviours
        self.clients = clients
        self._seed = seed
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Simulation:
        random.seed(self._seed)  # of the pauses between attempts
        self._stack = contextlib.ExitStack()
        self._runner = self._stack.enter_context(virtual_time())
        self._loop = loop = self._runner.get_loop()
        self.engines = [
            Engine(behaviour, seed=f"{self._seed} {i}", loop=loop)
            for i, behaviour in enumerate(self._behaviours)
        ]
        self._engine_of: dict[Door, Engine] = {}
        for client in self.clients:
            config = APIServerConfig(base_url="http://h", health_check=False, **client.config)
            client.doors = [Door(config) for _ in self.engines]
            for door, engine in zip(client.doors, self.engines, strict=True):
                door.fleet = client.doors
                self._engine_of[door] = engine
            loop.call_at(client.starts_at, self.set_workers, client, client.num_workers, 0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def now(self) -> float:
        return self._loop.time()

    def set_workers(self, client: Client, num: int, running: int | None = None) -> None:
        """Change how many requests a client keeps open."""
        first = client.num_workers if running is None else running
        client.num_workers = num
        for number in range(first, num):
            self._tasks.add(self._loop.create_task(client.work(self._engine_of, number)))

    def run(self, until: float) -> None:
        """Let the time pass."""
        self.wait(asyncio.sleep(until - self.now))
        for engine in self.engines:
            engine.change()  # counts what unfinished requests generated

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end."""
        return self._runner.run(call)


class Sample(NamedTuple):
    """Of the answers in a time span."""

    tokens_per_s: float
    p50_s: float
    p99_s: float


def sample(answers: Sequence[Answer], began: float, end: float) -> Sample:
    """Return a sample of the answers that came after `began` and until `end`."""
    found = [answer for answer in answers if began < answer.ended_at <= end]
    waits = sorted(answer.seconds for answer in found) or [0.0]
    tokens = sum(answer.num_tokens for answer in found)
    return Sample(tokens / (end - began), waits[len(waits) // 2], waits[len(waits) * 99 // 100])


# Fleets: servers of unequal speed.


def with_slots(slowness: float = 1.0) -> Behaviour:
    """Return a server of 16 slots, whose requests run at full speed or wait for one."""
    return Behaviour(
        slots=16,
        token_time=lambda n, slots: slowness * TOKEN_TIME_S,
        lengths=lambda rng: rng.randint(20, 60),
        delay_s=NETWORK_S,
    )


def batching(slowness: float = 1.0) -> Behaviour:
    """Return a server that runs all requests, twice as slow with 17 as with one."""
    return replace(
        with_slots(slowness),
        runs_all=True,
        token_time=lambda n, slots: slowness * TOKEN_TIME_S * (1 + n / 16),
    )


def most_free_slots(
    servers: Sequence[Door],
    split: str,
    *,
    after: Collection[Door],
    now: float,
    near: Collection[Door] = (),
) -> Door:
    """Choose by free slots alone, whatever the speed; in place of `admission.best`."""

    def rank(server: Door) -> tuple[bool, bool, int]:
        num_free = server.sem.capacity - sum(server.num_assigned.values())
        return server not in after, not server.is_avoided(now), num_free

    return max(servers, key=rank)


def simulate(
    behaviours: Sequence[Behaviour],
    num_requests: int,
    *,
    spans: Sequence[tuple[float, float]],
    changes: Mapping[float, Behaviour] | None = None,
    choice: Callable[..., Any] = admission.best,
    num_clients: int = 1,
    seed: int = 0,
) -> list[Sample]:
    """Keep requests open at several servers and return a sample per time span; `changes` are those of the first."""
    parts = [num_requests // num_clients] * num_clients
    clients = [Client(num_workers=num) for num in parts]
    with (
        mock.patch.object(admission, "best", choice),
        Simulation(behaviours, clients, seed=seed) as simulation,
    ):
        for at, behaviour in (changes or {}).items():
            simulation.run(at)
            simulation.engines[0].change(**vars(behaviour))
        simulation.run(spans[-1][1])
    answers = [answer for client in clients for answer in client.answers]
    return [sample(answers, *span) for span in spans]
