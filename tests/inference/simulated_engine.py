"""A queueing inference server and its clients in virtual time, for the tests of the concurrency controller.

All running requests advance at a common rate (tokens per second each) that depends on how many run, as in continuous
batching; the rest wait in arrival order. No clocks, no sleeps: events are processed in order of their time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atroposlib.inference.servers.concurrency import ConcurrencyController


@dataclass
class Client:
    """An environment with more work than the server can take."""

    controller: ConcurrencyController
    weight: float = 1.0
    starts_at: float = 0.0
    limits: list[tuple[float, int]] = field(default_factory=list)
    num_refused: int = 0
    num_running: int = 0
    num_tokens: float = 0.0
    """Tokens made so far, by finished and unfinished requests."""


@dataclass
class _Request:
    client: Client
    started_at: float
    num_tokens: int
    work: float
    done_at_clock: float = 0.0


class SimulatedEngine:
    """`slots` run at once, `queue` wait, more are refused; `token_time` is seconds per token by the number that run."""

    def __init__(
        self,
        clients: list[Client],
        *,
        slots: int,
        token_time: Callable[[int], float] = lambda running: 0.01,
        overhead_tokens: float = 5.0,
        lengths: Callable[[random.Random], int] = lambda rng: rng.randint(50, 350),
        noise: float = 0.1,
        queue: int | None = None,
        retry_after_s: float | None = None,
        timeout_s: float | None = None,
        reports_every_s: float | None = None,
        seed: int = 0,
    ) -> None:
        self.clients = clients
        self.slots = slots
        self.token_time = token_time
        self.overhead_tokens = overhead_tokens
        self.lengths = lengths
        self.noise = noise
        self.queue = queue
        self.retry_after_s = retry_after_s
        self.timeout_s = timeout_s
        self.reports_every_s = reports_every_s
        self.rng = random.Random(seed)
        self.now = 0.0
        self.clock = 0.0
        """Tokens that a request which always ran would have made."""
        self.running: list[tuple[float, int, _Request]] = []
        self.waiting: deque[_Request] = deque()
        self._ids = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for client in clients:
            self.at(client.starts_at, lambda: None)
        if reports_every_s is not None:
            self.at(reports_every_s, self._report)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ids), action))

    def run(self, until: float) -> None:
        while True:
            self._send()
            rate = 1.0 / self.token_time(max(1, len(self.running)))
            finish = (
                self.now + (self.running[0][0] - self.clock) / rate
                if self.running
                else float("inf")
            )
            event = self._events[0][0] if self._events else float("inf")
            time = min(finish, event, until)
            progress = (time - self.now) * rate
            for client in self.clients:
                client.num_tokens += client.num_running * progress
            self.clock += progress
            self.now = time
            if time >= until:
                return
            if finish <= event:
                self._finish(heapq.heappop(self.running)[2])
            else:
                heapq.heappop(self._events)[2]()

    def set_slots(self, slots: int) -> None:
        self.slots = slots

    def _send(self) -> None:
        progress = True
        while progress:
            progress = False
            for client in self.clients:
                controller = client.controller
                room = max(1, int(controller.limit * client.weight))
                if self.now < client.starts_at or controller.in_flight >= room:
                    continue
                if self.now < controller.paused_until:
                    self.at(controller.paused_until, lambda: None)
                    continue
                progress = True
                self._arrive(client)
                if not client.limits or client.limits[-1][1] != controller.limit:
                    client.limits.append((self.now, controller.limit))
        self._admit()

    def _arrive(self, client: Client) -> None:
        client.controller.start(self.now)
        num_tokens = self.lengths(self.rng)
        work = (self.overhead_tokens + num_tokens) * self.rng.lognormvariate(0.0, self.noise)
        request = _Request(client, self.now, num_tokens, work)
        self._admit()
        if (
            self.queue is not None
            and len(self.running) >= self.slots
            and len(self.waiting) >= self.queue
        ):
            client.num_refused += 1
            client.controller.refuse(
                self.now, started_at=self.now, retry_after_s=self.retry_after_s
            )
            return
        self.waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            request.client.num_running += 1
            heapq.heappush(self.running, (self.clock + request.work, next(self._ids), request))

    def _finish(self, request: _Request) -> None:
        request.client.controller.finish(
            self.now, started_at=request.started_at, num_tokens=request.num_tokens
        )
        request.client.num_running -= 1

    def _report(self) -> None:
        assert self.reports_every_s is not None
        for client in self.clients:
            client.controller.observe(
                self.now, running=len(self.running), waiting=len(self.waiting)
            )
        self.at(self.now + self.reports_every_s, self._report)
