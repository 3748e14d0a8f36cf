"""A controller of the number of requests in flight at one inference server. It does no I/O; times are arguments.

`limit` (1..cap) falls when the server refuses requests (429, 503), times out, or generated more tokens per second with
fewer requests; otherwise it grows. For a server that queues requests it reaches the cap, because waiting there is no
worse than waiting here. `APIServer` owns one controller per server.

This controller limits the requests at a server, `runtime/capacity.py` the items in flight. Neither reads the other's
number, and a limit that the items do not reach does not grow, so the two cannot oscillate.

The figures beside the constants come from `benchmarks/concurrency.py --sensitivity`: completions per second of a server
with 64 slots, which makes at most 31.2.
"""

from __future__ import annotations

import math


class ConcurrencyController:
    """The limit of one server."""

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
