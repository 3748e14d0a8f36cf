"""An inference server and its clients in virtual time, for `concurrency.py` and the tests of the limiter.

All running requests advance at one rate that depends on their number, as in continuous batching; the others wait in
order of arrival. Clients keep `num_workers` requests open, queue them for the limiter, and retry with `APIServer`'s
rules and constants. No clocks or sleeps: events are processed in order of time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atroposlib.inference.servers.retries import MAX_ATTEMPTS, MAX_BACKOFF_S, MIN_PAUSE_S
from atroposlib.patience import Backoff

TOKEN_TIME_S = 0.01
NETWORK_S = 0.02
"""Delay until a client learns of a refusal; meanwhile it may send other requests."""


class Limiter(Protocol):
    """The interface that `ConcurrencyController` and `FixedLimit` share."""

    in_flight: int
    share: float
    paused_until: float

    @property
    def limit(self) -> int: ...
    def start(self, now: float) -> None: ...
    def finish(self, now: float, *, started_at: float, num_tokens: int | None) -> None: ...
    def refuse(self, now: float, *, started_at: float) -> None: ...


@dataclass
class FixedLimit:
    """A constant limit."""

    limit: int
    in_flight: int = 0
    share: float = 1.0
    paused_until: float = 0.0

    def start(self, now: float) -> None:
        self.in_flight += 1

    def finish(self, now: float, *, started_at: float, num_tokens: int | None) -> None:
        self.in_flight -= 1

    def refuse(self, now: float, *, started_at: float) -> None:
        self.in_flight -= 1


@dataclass(eq=False, slots=True)
class Request:
    client: Client
    created_at: float
    num_tokens: int
    work: float
    """Total work in tokens, including prompt and network overhead."""
    num_sent: int = 0
    num_timeouts: int = 0
    sent_at: float = 0.0
    done_at: float | None = None
    """In the server's token clock; None while it does not run."""


@dataclass(eq=False)
class Client:
    """An environment; `num_workers` may be changed while it runs."""

    limiter: Limiter
    num_workers: int = 512
    starts_at: float = 0.0
    line: deque[Request] = field(default_factory=deque)
    open: dict[int, float] = field(default_factory=dict)
    """Start time of each unfinished request: at the server, queued, or between attempts."""
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(time, latency in seconds) of every completion, including waits and retries."""
    num_refused: int = 0
    num_timed_out: int = 0
    num_failed: int = 0
    """Requests given up after MAX_ATTEMPTS timeouts."""
    num_tokens: float = 0.0
    """Generated so far by finished and unfinished requests."""
    num_running: int = 0
    wakes_at: float = 0.0


@dataclass(kw_only=True)
class Server:
    """How a server behaves; every field may be changed while it runs."""

    slots: int = 64
    runs_all: bool = False
    """Whether requests beyond `slots` run as well, slowed down by `token_time`, instead of waiting."""
    token_time: Callable[[int, int], float] = lambda running, slots: TOKEN_TIME_S
    """Seconds per token, given the numbers of running requests and of slots."""
    overhead_tokens: float = 5.0
    lengths: Callable[[random.Random], int] = lambda rng: rng.randint(50, 350)
    max_waiting: int | None = None
    """Maximum number of queued requests; more are refused (429)."""
    retry_after_s: float | None = 1.0
    timeout_s: float | None = None
    """The clients' timeout."""
    refuses_all: bool = False
    """Whether every request is refused (503), as during a weight update or restart."""


class Simulation:
    def __init__(self, clients: list[Client], server: Server, *, seed: int = 0) -> None:
        self.clients = clients
        self.server = server
        self.rng = random.Random(seed)
        self.now = 0.0
        self.clock = 0.0
        """Tokens that a request running from the start would have generated."""
        self.waiting: deque[Request] = deque()
        self.num_running = 0
        self._running: list[tuple[float, int, Request]] = []
        self._ids = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for client in clients:
            self.at(client.starts_at, lambda: None)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ids), action))

    def ages(self) -> list[float]:
        """Return the age of each open request."""
        return [self.now - created_at for one in self.clients for created_at in one.open.values()]

    def run(self, until: float) -> None:
        while True:
            for client in self.clients:
                self._send(client)
            while self._running and self._running[0][0] != self._running[0][2].done_at:
                heapq.heappop(self._running)  # it timed out
            rate = 1.0 / self.server.token_time(max(1, self.num_running), self.server.slots)
            finish = float("inf")
            if self._running:
                finish = self.now + (self._running[0][0] - self.clock) / rate
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
                self._finish(heapq.heappop(self._running)[2])
            else:
                heapq.heappop(self._events)[2]()

    def _send(self, client: Client) -> None:
        if self.now < client.starts_at:
            return
        while len(client.open) < client.num_workers:
            tokens = self.server.lengths(self.rng)
            work = (self.server.overhead_tokens + tokens) * self.rng.lognormvariate(0.0, 0.1)
            request = Request(client, self.now, tokens, work)
            client.line.append(request)
            client.open[id(request)] = self.now
        limiter = client.limiter
        while client.line and limiter.in_flight < max(1, int(limiter.limit * limiter.share)):
            if self.now < limiter.paused_until:
                if client.wakes_at != limiter.paused_until:
                    client.wakes_at = limiter.paused_until
                    self.at(client.wakes_at, lambda: None)
                return
            self._arrive(client.line.popleft())

    def _arrive(self, request: Request) -> None:
        request.sent_at = self.now
        request.num_sent += 1
        request.client.limiter.start(self.now)
        server = self.server
        is_full = (
            server.max_waiting is not None
            and self._is_busy
            and len(self.waiting) >= server.max_waiting
        )
        if is_full or server.refuses_all:
            self.at(self.now + NETWORK_S, lambda: self._refuse(request))
            return
        self.waiting.append(request)
        if server.timeout_s is not None:
            attempt = request.num_sent
            self.at(self.now + server.timeout_s, lambda: self._time_out(request, attempt))
        self._admit()

    @property
    def _is_busy(self) -> bool:
        return self.num_running >= self.server.slots and not self.server.runs_all

    def _admit(self) -> None:
        while self.waiting and not self._is_busy:
            request = self.waiting.popleft()
            request.done_at = self.clock + request.work
            request.client.num_running += 1
            self.num_running += 1
            heapq.heappush(self._running, (request.done_at, next(self._ids), request))

    def _stop(self, request: Request) -> None:
        request.done_at = None
        request.client.num_running -= 1
        self.num_running -= 1
        self._admit()

    def _finish(self, request: Request) -> None:
        client = request.client
        client.limiter.finish(self.now, started_at=request.sent_at, num_tokens=request.num_tokens)
        client.latencies.append((self.now, self.now - request.created_at))
        del client.open[id(request)]
        request.num_sent = 0  # invalidates its timeout
        self._stop(request)

    def _refuse(self, request: Request) -> None:
        client, after_s = request.client, self.server.retry_after_s
        client.num_refused += 1
        client.limiter.refuse(self.now, started_at=request.sent_at)
        if after_s is None:
            self._retry(request, self._back_off_s(request))
        else:
            self._retry(request, after_s + self.rng.uniform(0.0, MIN_PAUSE_S))

    def _time_out(self, request: Request, attempt: int) -> None:
        if request.num_sent != attempt:
            return
        client = request.client
        client.num_timed_out += 1
        client.limiter.refuse(self.now, started_at=request.sent_at)
        if request.done_at is not None:
            self._stop(request)
        else:
            self.waiting.remove(request)
        request.num_timeouts += 1
        if request.num_timeouts < MAX_ATTEMPTS:
            self._retry(request, self._back_off_s(request))
        else:
            client.num_failed += 1
            del client.open[id(request)]

    def _back_off_s(self, request: Request) -> float:
        return Backoff(1.0, MAX_BACKOFF_S, rng=self.rng, num_failed=request.num_sent - 1).next()

    def _retry(self, request: Request, pause_s: float) -> None:
        self.at(self.now + pause_s, lambda: request.client.line.appendleft(request))
