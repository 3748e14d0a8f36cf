"""The one door to inference servers: when a request may be sent, to which server, and what its outcome changes.

    async with slot(servers, "train") as taken:  # waits for a healthy server, a slot at it, and a turn to start
        answer = await send(taken.server)  # leaving reports the answer or the exception

`ask` repeats that until there is an answer and is the ONE owner of retries: connection errors, timeouts and 5xx are
retried up to `max_attempts`; 429 and 503 mean "later" and use no attempt; everything else is raised. Only sampling and
scoring go through here, because they can be repeated: a second answer comes from the same distribution. Calls that
change a server must not.

A `Door` per server holds its slots, how many of them may be used (`ConcurrencyController`), its health, its recent
failures and its speed. `best` alone chooses among several. Decisions take the time as an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast
from weakref import WeakKeyDictionary

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.patience import MAX_RETRY_AFTER_S, Backoff, wait_for_first
from atroposlib.utils.wording import without_users

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ATTEMPTS = 3
MAX_BACKOFF_S = 10.0
MIN_PAUSE_S = 0.01
LATER = frozenset({429, 503})
HEALTH_TIMEOUT_S = 4.0
HEALTH_REMINDER_S = 5.0
"""Pause between two probes of a server that is down and has no waiting requests."""
AVOID_S, MAX_AVOID_S = 1.0, 30.0
"""How long other servers are preferred after a failure; doubled by each consecutive failure."""
NUM_ANSWERS = 32
"""After this many more answers per server, an answer weighs 1/e. `benchmarks/README.md` has the figures of 8 to 128."""
NEARNESS = 0.125
"""How much more of a server's slots may be used for a session to join its group. `benchmarks/README.md`: 0 to 1."""
STARTS_PER_ROUND = 6
"""Connecting and sending takes 0.2 to 0.8 ms per request: about 4 ms a round."""


# Errors.


class EngineDown(EngineUnavailable):
    """No server became healthy within a request's maximum wait, so the request is not retried."""


class StreamBroken(EngineUnavailable):
    """An answer broke off whose beginning was told already: another one would not continue it."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    import aiohttp  # 0.2 CPU seconds, which commands that call no engine do not need

    if isinstance(error, EngineDown):
        return False
    return isinstance(
        error, EngineUnavailable | aiohttp.ClientConnectionError | ConnectionError | TimeoutError
    )


def says_later(error: BaseException) -> bool:
    """Whether a healthy server asks to retry later: too many requests, or its weights are being changed."""
    return (
        isinstance(error, EngineUnavailable)
        and error.status in LATER
        and "insufficient_quota" not in str(error)
    )


def timed_out(error: BaseException) -> bool:
    """Whether an attempt timed out."""
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)


# Turns to start.


class StartTurns:
    """The queue of one event loop: at most `per_round` callers of `take` return in each of its rounds, in order.

    When two thousand tasks become ready at once, asyncio runs all of them in one round, and nothing else for half a
    second. A single request does not wait.
    """

    def __init__(self, *, per_round: int = STARTS_PER_ROUND) -> None:
        self._per_round = per_round
        self._left = per_round
        """How many more may start in this round; `_next_round` is scheduled unless that is all of them."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return in this round if fewer than `per_round` callers have, else in a later one."""
        loop = asyncio.get_running_loop()
        if self._left == self._per_round:
            loop.call_soon(self._next_round)
        if self._left > 0:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _next_round(self) -> None:
        self._left = self._per_round
        while self._left > 0 and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._per_round:
            asyncio.get_running_loop().call_soon(self._next_round)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, StartTurns] = WeakKeyDictionary()


async def start_turn() -> None:
    """Wait until one more request or session may start in the running loop."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = StartTurns()
    await turns.take()


# Slots.


class AsyncSemWithAdaptiveWeight:
    """A semaphore of `value` slots of which the share `weight` may be used.

    Several environments share an inference server in proportion to their weight: with 100 slots and weight 0.25,
    25 are usable. At least one always is, so that a small weight slows an environment down but never stops it.

    First come, first served, except that a retried request goes first; a cancelled waiter never keeps a slot. Built on
    futures, not `asyncio.Semaphore`, because the capacity changes while requests wait.
    """

    def __init__(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"a limiter needs at least one slot, got {value}")
        self.max_val = self.capacity = self._limit = value
        """`capacity` slots may be used."""
        self.weight = 1.0
        self.in_use = 0
        """Slots that are taken."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def _value(self) -> int:
        """Free slots, under the name that `asyncio.Semaphore` uses; environments read it."""
        return self.max_val - self.in_use

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiters)

    def update_limit(self, limit: int) -> None:
        """Use at most `limit` slots, before weighting; `max_val` stays the cap."""
        if limit != self._limit:
            self._limit = limit
            self._resize()

    def min_val(self) -> float:
        """Slots that stay reserved for other environments."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        """Set the usable share, clamped to 0..1; waiters that now fit are admitted at once."""
        self.weight = min(max(weight, 0.0), 1.0)
        self._resize()

    def _resize(self) -> None:
        self.capacity = max(1, int(min(self.max_val, self._limit) * self.weight + 1e-9))
        self._wake()

    def locked(self) -> bool:
        """Whether a new request would have to wait."""
        return self.in_use >= self.capacity or bool(self._waiters)

    async def acquire(self, *, first: bool = False) -> bool:
        """Wait for a free slot and take it; `first` goes ahead of all waiters."""
        if self.in_use < self.capacity and (first or not self._waiters):
            self.in_use += 1
            return True
        waiter = asyncio.get_running_loop().create_future()
        if first:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release()  # the slot was handed over in the same tick as the cancel
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        return True

    def release(self) -> None:
        """Release a slot."""
        assert self.in_use > 0, "released more often than acquired"
        self.in_use -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self.in_use < self.capacity:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.in_use += 1
                waiter.set_result(None)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release()


class ConcurrencyController:
    """The number of requests that may be in flight at one server.

    `limit` (1..cap) falls when the server refuses requests (429, 503), times out, or generated more tokens per second
    with fewer requests; otherwise it grows. For a server that queues requests it reaches the cap, because waiting there
    is no worse than waiting here. `runtime/capacity.py` limits the items in flight. Neither reads the other's number,
    and a limit that the items do not reach does not grow, so the two cannot oscillate.

    The figures beside the constants come from `benchmarks/concurrency.py --sensitivity` of commit 34eb935, whose
    simulator was another: completions per second of a
    server with 64 slots, which makes at most 31.2.
    """

    START = 64
    """Initial limit and step. 32: 7 % fewer answers in the first 20 minutes of a fast server with long answers; 128:
    20.5 instead of 28.7 at a server that slows down, whose best level is never reached."""
    GROWTH = 2.0
    """Factor of the step after a round that reached the limit. 1.5: 33 instead of 24 s to recover from 8 to 64 slots;
    4: 9 % instead of 1 % of the attempts time out at a server that queues."""
    BACKOFF = 0.95
    """After a refusal, the new limit as a fraction of the accepted requests. 0.9: 28.9 instead of 30.3 at a server that
    refuses; 0.975: the smaller of two clients gets 0.64 instead of 0.71 of an equal share there."""
    MAX_FALL = 0.5
    """Minimum fraction of the limit that remains when requests sent together are refused. 0.25: three times as many
    timeouts."""
    PAUSE_S = 0.5
    """Pause after a refusal that leaves nothing in flight. 0: 50 refusals a second."""
    WORSE = 0.9
    """A rate below this fraction of the best, with more requests, means too many requests. 0.8: 26.3 instead of 28.7 at
    a server that slows down; rounds of 64 answers vary by 5 %, so it cannot be much closer to 1."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.in_flight = 0
        self.share = 1.0
        """Fraction of the limit that this client may use; the rest belongs to other environments."""
        self.paused_until = 0.0
        """Time before which nothing should be sent."""
        self._limit = float(min(cap, self.START))
        self._step = self._limit
        """Increase of the limit after the next good round."""
        self._floor = 1.0
        self._lowered_at = -math.inf
        self._best_rate = self._best_level = 0.0
        """Best tokens per second of a round, and its mean number of requests in flight."""
        self._area = self._counted_at = 0.0
        """Integral of the requests in flight over the round, and its end time."""
        self._begin_round(0.0)

    @property
    def limit(self) -> int:
        """Requests that may be in flight, before `share`."""
        return max(1, min(self.cap, round(self._limit)))

    def start(self, now: float) -> None:
        """Record a sent request."""
        if not self.in_flight and not self._num_answers:
            self._begin_round(now)
        self._count(now, 1)
        self._is_used |= self.in_flight >= max(1, int(self.limit * self.share))

    def drop(self, now: float) -> None:
        """Record a request whose end says nothing about load (cancelled, malformed, connection lost)."""
        self._count(now, -1)

    def finish(self, now: float, *, started_at: float, num_tokens: int | None) -> None:
        """Record an answer; `num_tokens` is the length of its longest completion, None if unknown."""
        self._count(now, -1)
        if started_at < self._round_began:
            return
        self._num_answers += 1
        self._tokens += num_tokens or 1
        self._latency += now - started_at
        if self._num_answers >= self._limit * self.share:
            self._end_round(now)

    def refuse(self, now: float, *, started_at: float) -> None:
        """Record a refusal or a timeout; the requests still in flight are what the server accepts.

        Requests sent before the limit began to fall lower it to no less than `MAX_FALL` of it: many may fail together.
        """
        self._count(now, -1)
        if started_at >= self._lowered_at:
            self._floor = self._limit * self.MAX_FALL
            self._lowered_at = now
        wanted = self.BACKOFF * self.in_flight / self.share
        self._limit = max(1.0, self._floor, min(self._limit, wanted))
        self._step = 1.0
        if not self.in_flight:
            self.paused_until = now + self.PAUSE_S

    def _count(self, now: float, change: int) -> None:
        self._area += self.in_flight * (now - self._counted_at)
        self._counted_at = now
        self.in_flight += change

    def _begin_round(self, now: float) -> None:
        """Start a round; it ends when as many requests as the limit were sent and answered in it."""
        self._round_began = self._counted_at = now
        self._area = 0.0
        self._num_answers = self._tokens = 0
        self._latency = 0.0
        self._is_used = False
        """Whether the limit was reached."""

    def _end_round(self, now: float) -> None:
        level = self._area / max(now - self._round_began, 1e-9)
        rate = (
            level * self._tokens / max(self._latency, 1e-9)
        )  # requests in flight / time per token
        if rate < self.WORSE * self._best_rate and level > self._best_level:
            self._limit = max(1.0, self._best_level / self.share)
            self._step = 1.0
        else:
            if rate >= self._best_rate or level <= self._best_level:
                self._best_rate, self._best_level = rate, level
            if self._is_used:
                self._limit = min(self._limit + self._step, float(self.cap))
                self._step = min(self._step * self.GROWTH, float(self.cap))
        self._begin_round(now)


# Speed.


@dataclass(slots=True)
class RecentAnswers:
    """Weighted sums of one server's answers: how long it takes per token.

    The weight of an answer falls with every later answer of any server of the fleet. Time plays no part: answers may
    take a tenth of a second or ten minutes, and a pause changes nothing. While only other servers answer, a server's
    estimate returns to the fleet's mean, so that it is tried again. Failures do not count: a server that fails at once
    is not fast.
    """

    num: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    """Of the longest completion of each answer, which determines its duration."""


def seconds_per_token(fleet: Sequence[RecentAnswers]) -> list[float]:
    """Return each server's mean time per token, with the fleet's mean answer as one more; 1 without any answer.

    >>> seconds_per_token([RecentAnswers(num=2, seconds=4, tokens=40), RecentAnswers()])
    [0.1, 0.1]
    """
    num = sum(recent.num for recent in fleet)
    seconds = sum(recent.seconds for recent in fleet) / num if num else 1.0
    tokens = sum(recent.tokens for recent in fleet) / num if num else 1.0
    return [(recent.seconds + seconds) / (recent.tokens + tokens) for recent in fleet]


# One server.


class Door:
    """What is known about one server, and its slots: the base of `APIServer`."""

    max_attempts = MAX_ATTEMPTS
    max_backoff_s = MAX_BACKOFF_S
    health_poll_s = 1.0
    """Pause between two probes of a server that is down; a healthy server is not probed."""
    reminder_s = 30.0
    """Between two log lines about a server that is down."""

    def __init__(self, config: APIServerConfig) -> None:
        self.config = config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.num_assigned = {"train": 0, "eval": 0}
        """Requests and sessions at this server, per budget."""
        self.concurrency: ConcurrencyController | None = None
        """Adapts the number of requests in flight; None: only the two configured limits apply."""
        if config.adaptive_concurrency:
            self.concurrency = ConcurrencyController(
                config.num_max_requests_at_once + config.num_requests_for_eval
            )
            self.apply_limit()
        self.fleet: Sequence[Door] = (self,)
        """All servers of the manager; set by `ServerManager`."""
        self.recent = RecentAnswers()
        self._num_blamed = 0
        """Failures since the last answer; concurrent ones count once."""
        self._blamed_at = self._avoided_until = 0.0
        self.check_task: asyncio.Task[None] | None = None
        self.checks_health = config.health_check and config.base_url is not None
        """Whether the server is probed before its first request and after a failed connection."""
        self.initialized = False
        """Whether the health check has ever been started."""
        self.num_waiting = 0
        """Requests waiting for the server to become healthy, or for their next attempt."""
        self._health_asked_at = -HEALTH_REMINDER_S
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._probed = asyncio.Event()
        """Set by the first result since the server was marked unhealthy."""
        self._is_known = False
        self.health_reason = ""
        """Why the server is not ready; empty if it is, or has no probe result yet."""
        self._fault_logged_at = 0.0

    @functools.cached_property
    def _label(self) -> str:
        return without_users(getattr(self.config, "base_url", None) or type(self).__name__)

    # Slots.

    async def update_weight(self, weight: float) -> None:
        """Set this environment's share (0..1) of the server."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)
        if self.concurrency is not None:
            self.concurrency.share = max(self.sem.weight, 1.0 / self.sem.max_val)

    def load(self, split: str = "train") -> float:
        """Return the used share of a budget's slots after one more request; above 1, that request waits for a slot.

        For training, requests and slots of evaluation count as well.
        """
        num_eval = self.num_assigned["eval"]
        if split != "train":
            return (num_eval + 1) / self.eval_sem.capacity
        slots = self.sem.capacity + self.eval_sem.in_use
        return (self.num_assigned["train"] + num_eval + 1) / slots

    @contextmanager
    def assigned(self, split: str) -> Iterator[None]:
        """Count one more request or session during the block."""
        self.num_assigned[split] += 1
        try:
            yield
        finally:
            self.num_assigned[split] -= 1

    def apply_limit(self) -> None:
        """Apply the adaptive limit to both budgets; training gets what evaluation does not use."""
        if self.concurrency is not None:
            limit = self.concurrency.limit
            self.eval_sem.update_limit(limit)
            self.sem.update_limit(max(1, limit - self.eval_sem.in_use))

    # Outcomes.

    def answered(self, num_tokens: int | None, *, began: float, now: float) -> None:
        """Record an answer to a request that started at `began`; `num_tokens` is that of its longest completion."""
        self._num_blamed = 0
        if self.concurrency is not None:
            self.concurrency.finish(now, started_at=began, num_tokens=num_tokens)
            self.apply_limit()
        if not num_tokens:
            return
        kept = 1 - 1 / (NUM_ANSWERS * len(self.fleet))
        for recent in (server.recent for server in self.fleet):
            recent.num *= kept
            recent.seconds *= kept
            recent.tokens *= kept
        self.recent.num += 1
        self.recent.seconds += now - began
        self.recent.tokens += num_tokens

    def failed(self, error: BaseException, *, began: float, now: float) -> None:
        """Record how a request ended that started at `began` and got no answer."""
        if self.concurrency is not None:
            if says_later(error) or timed_out(error):
                self.concurrency.refuse(now, started_at=began)
            else:
                self.concurrency.drop(now)
            self.apply_limit()
        if not is_transient(error):
            return
        status = getattr(error, "status", None)
        if status != 429:  # which lowers the limit
            self.blame(began=began, now=now)
        if self.checks_health and (status is None or status >= 500):
            self._watch()  # the error may mean that the server is down

    def blame(self, *, began: float, now: float) -> None:
        """Record that a request, sent at `began`, failed here, or was refused here and accepted elsewhere."""
        if self._num_blamed and began < self._blamed_at:
            return  # sent before the failure was known
        self._blamed_at = now
        self._avoided_until = now + min(AVOID_S * 2.0 ** min(self._num_blamed, 10), MAX_AVOID_S)
        self._num_blamed += 1

    def is_avoided(self, now: float) -> bool:
        """Whether other servers are preferred after a recent failure; later this one gets one request at a time."""
        if not self._num_blamed:
            return False
        since_s = now - self._avoided_until
        return since_s < 0 or (since_s < MAX_AVOID_S and any(self.num_assigned.values()))

    def pause_s(self, error: BaseException, num_sent: int) -> float:
        """Return the pause before the next attempt: the server's Retry-After, else exponential backoff."""
        if isinstance(error, EngineUnavailable) and error.retry_after_s is not None:
            return min(error.retry_after_s, MAX_RETRY_AFTER_S) + random.uniform(0.0, MIN_PAUSE_S)
        pause_s = Backoff(1.0, self.max_backoff_s, num_failed=num_sent - 1).next()
        return max(MIN_PAUSE_S, pause_s) if says_later(error) else pause_s

    # Health.

    async def _find_fault(self) -> str | None:
        """Return None if the server is healthy, else the reason it is not; must not make a paid request."""
        return None

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Probe until the server is healthy, then set `server_healthy`; stop early if no request waits for it."""
        while (fault := await self._find_fault()) is not None:
            self._probed.set()
            self._is_known = True
            now = time.monotonic()
            if fault != self.health_reason or now - self._fault_logged_at >= self.reminder_s:
                logger.warning("Inference server %s is not ready: %s", self._label, fault)
                self.health_reason, self._fault_logged_at = fault, now
            await asyncio.sleep(self.health_poll_s)
            if not self.num_waiting:
                return
        if self.health_reason:
            logger.info("Inference server %s is ready", self._label)
            self.health_reason = ""
        self.server_healthy = True

    @property
    def server_healthy(self) -> bool:
        """Whether requests may be sent."""
        return self._healthy.is_set()

    @server_healthy.setter
    def server_healthy(self, value: bool) -> None:
        if value:
            self._healthy.set()
            self._probed.set()
            self._is_known = True
        elif self._healthy.is_set():
            self._forget_events()

    def _forget_events(self) -> None:
        """Begin an outage with fresh events, which are not bound to an earlier event loop."""
        self._healthy, self._probed = asyncio.Event(), asyncio.Event()

    def _watch(self) -> None:
        """Mark the server unhealthy, which holds requests back, and probe it until it is healthy."""
        self.initialized = True
        self.server_healthy = False
        self._health_asked_at = time.monotonic()
        if self.check_task is None or self.check_task.done():
            self.check_task = asyncio.create_task(self.check_server_status_task())

    @property
    def is_known(self) -> bool:
        """Whether a first probe has a result, or the server is never probed."""
        return self._is_known or not self.checks_health

    @property
    def is_ready(self) -> bool:
        """Whether a request that is bound to this server may be sent; one that is never probed always is."""
        return not self.checks_health or (self._is_known and self._healthy.is_set())

    async def first_answer(self) -> None:
        """Probe a server that was never used and wait for the first result, good or bad."""
        if not self.is_known:
            if not self.initialized:
                self._watch()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self._probed.wait()
            self._is_known = True  # no answer counts as a result: not healthy

    async def healthy_again(self) -> None:
        """Wait without limit until requests may be sent."""
        if not self.server_healthy:
            self._watch()
        with self.waiting():
            await self._healthy.wait()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one more waiting request during the block."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        """Stop watching the server. Subclasses close their sessions as well."""
        task, self.check_task = self.check_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not self.server_healthy:
            self._forget_events()


# One of several servers.

D = TypeVar("D", bound=Door)


async def choose(
    servers: Sequence[D],
    split: str = "train",
    *,
    after: Collection[D] = (),
    near: Collection[D] = (),
) -> D:
    """Return the best healthy server; if none is healthy, wait for one.

    If none of them is and each failed a health check, another server of the fleet with the same model stands in: a
    session's prompts are token ids, so it loses only the engine's cache. Raises EngineDown when no server becomes
    healthy within the longest `health_wait_s`.
    """
    if len(servers) == 1 and servers[0].is_ready:
        return servers[0]
    if unknown := [server for server in servers if not server.is_known]:
        await asyncio.gather(*(server.first_answer() for server in unknown))
    if not any(server.server_healthy for server in servers):
        servers = await _until_healthy(servers)
    # No await from here on: another request must not choose before this one is counted.
    return best(servers, split, after=after, near=near, now=time.monotonic())


def best(
    servers: Sequence[D], split: str, *, after: Collection[D], now: float, near: Collection[D] = ()
) -> D:
    """Return the healthy server with the least load times seconds per token.

    Servers without a free slot come after the others, then those with recent failures, those in `after` last. A server
    in `near` has the prompt's beginning in its cache: it wins although its load is up to `NEARNESS` higher.
    """
    speeds = seconds_per_token([server.recent for server in servers])

    def rank(i: int) -> tuple[bool, bool, bool, float, float]:
        server, load = servers[i], servers[i].load(split)
        is_usual = not server.is_avoided(now)
        cost = load * speeds[i] - (NEARNESS * min(speeds) if server in near else 0)
        return server not in after, is_usual, load <= 1, -cost, -load

    for server in servers:
        if not server.server_healthy and now - server._health_asked_at >= HEALTH_REMINDER_S:
            server._watch()  # no request waits for it, so nothing else probes it
    healthy = [i for i, server in enumerate(servers) if server.server_healthy]
    return servers[max(healthy, key=rank)]


async def _until_healthy(servers: Sequence[D]) -> Sequence[D]:
    """Return the servers, or those that stand in for them, when one of them is healthy."""
    first = servers[0]
    # All servers of a fleet are of the manager's class.
    others = [cast(D, other) for other in first.fleet if other not in servers]
    others = [other for other in others if other.config.model_name == first.config.model_name]
    longest_s = max(server.config.health_wait_s for server in servers)
    ends = time.monotonic() + longest_s
    while (left_s := ends - time.monotonic()) > 0:
        unchecked = [server for server in servers if not server._probed.is_set()]
        if not unchecked and any(other.server_healthy for other in others):
            return others
        waits: list[Coroutine[Any, Any, object]] = [server.healthy_again() for server in servers]
        waits += [server._probed.wait() for server in unchecked]
        # There is no event for the recovery of `others`: they are looked at again between waits.
        await wait_for_first(waits, timeout_s=min(left_s, HEALTH_REMINDER_S))
        if any(server.server_healthy for server in servers):
            return servers
    reasons = [f"{server._label}: {server.health_reason or 'no answer yet'}" for server in servers]
    if len(servers) > 1:
        raise EngineDown(f"no inference server is ready. {'; '.join(reasons)}")
    raise EngineDown(
        f"inference server {servers[0]._label} is not ready after {longest_s:g} s:"
        f" {servers[0].health_reason or 'no answer'}. Start it, correct base_url, or raise health_wait_s"
    )


# The door.


@dataclass(slots=True)
class Slot(Generic[D]):
    """A server that takes a request now."""

    server: D
    began: float
    """`time.monotonic()`"""
    seconds: float = 0.0
    """How long the request took; set on leaving."""
    num_tokens: int | None = None
    """Of the longest completion; the caller sets it if it is known and the server sampled it now."""
    num_sent: int = 1
    """Attempts of the request at all servers."""


@asynccontextmanager
async def slot(
    servers: Sequence[D], split: str, *, after: Collection[D] = (), is_retry: bool = False
) -> AsyncIterator[Slot[D]]:
    """Yield a slot at the best server, those in `after` last; a retried request goes before those that wait."""
    while True:
        server = await choose(servers, split, after=after)
        limiter = server.sem if split == "train" else server.eval_sem
        with server.assigned(split):
            await limiter.acquire(first=is_retry)
            server.apply_limit()
            try:
                if server.is_ready:
                    controller, now = server.concurrency, time.monotonic()
                    if controller is not None and now < controller.paused_until:
                        await asyncio.sleep(controller.paused_until - now)
                    await start_turn()
                    taken = Slot(server, time.monotonic())
                    if controller is not None:
                        controller.start(taken.began)
                    try:
                        yield taken
                    except BaseException as e:
                        server.failed(e, began=taken.began, now=time.monotonic())
                        raise
                    now = time.monotonic()
                    taken.seconds = now - taken.began
                    server.answered(taken.num_tokens, began=taken.began, now=now)
                    return
            finally:
                limiter.release()
        is_retry = True  # the server went down while this request was queued


async def ask(
    servers: Sequence[D], split: str, send: Callable[[Slot[D]], Awaitable[T]]
) -> tuple[Slot[D], T]:
    """Send a request to one of the servers until it is answered; return the slot that was used, and the answer.

    `send` makes one attempt.

    The largest `max_attempts` and `health_wait_s` of the servers apply. A request that one server refuses is sent to
    another one; if that refuses it as well, the request is at fault.
    """
    num_sent = num_failed = 0
    waits_since: float | None = None
    failed: list[D] = []
    """Servers where the request failed; cleared when it has failed on every healthy one."""
    refused: list[D] = []
    began = time.monotonic()
    while True:
        num_sent += 1
        try:
            async with slot(servers, split, after=failed, is_retry=num_sent > 1) as taken:
                answer = await send(taken)
        except Exception as e:
            is_refusal = isinstance(e, EngineRejected | EngineProtocolError)
            if isinstance(e, StreamBroken) or not (is_refusal or is_transient(e)):
                raise
            server, now = taken.server, time.monotonic()
            failed.append(server)
            if is_refusal:
                refused.append(server)
                if len(refused) > 1 or not any(
                    o.server_healthy for o in servers if o is not server
                ):
                    raise
            if says_later(e):
                waits_since = now if waits_since is None else waits_since
                is_last = now - waits_since >= max(each.config.health_wait_s for each in servers)
            else:
                num_failed += 1
                is_last = num_failed >= max(each.max_attempts for each in servers)
            if is_last and is_refusal:
                raise
            if is_last:
                raise EngineUnavailable(
                    f"{e} (gave up after {num_sent} attempts)",
                    status=getattr(e, "status", None),
                    retry_after_s=getattr(e, "retry_after_s", None),
                ) from e
            if all(other in failed for other in servers if other.server_healthy):
                failed = []
                with server.waiting():
                    await asyncio.sleep(server.pause_s(e, num_sent))
        else:
            for other in refused:
                other.blame(began=began, now=time.monotonic())
            taken.num_sent = num_sent
            return taken, answer
