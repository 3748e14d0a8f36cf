"""How many requests one inference server should have at once: a controller that only computes.

`limit` (1..cap) falls when the server refuses requests (429, 503), does not answer in time, or made more tokens per
second with fewer requests; otherwise it grows. A server that queues requests is sent the cap: waiting there is no worse
than waiting here. Times are arguments; `APIServer` owns one controller per server; nothing here sends.

This controller decides how many requests are at a server, `runtime/capacity.py` how many items are in flight; neither
reads the other's number, and a limit that the items do not reach does not grow, so they cannot oscillate.

The figures beside the constants come from `benchmarks/concurrency.py --sensitivity`, in completions per second of a
server of 64 slots that makes 31.2 at best.
"""

from __future__ import annotations

import math


class ConcurrencyController:
    """The limit of one server."""

    START = 64
    """Limit and step at first. 32: 7 % fewer answers in the first 20 minutes of a fast server with long answers; 128:
    20.5 instead of 28.7 where the server slows down, whose best level is never seen."""
    GROWTH = 2.0
    """Factor of the step after a round that reached the limit. 1.5: 33 instead of 24 s to recover from 8 to 64 slots;
    4: 9 % instead of 1 % of the attempts time out at a server that queues."""
    BACKOFF = 0.95
    """Part of what the server took that it is sent next. 0.9: 28.9 instead of 30.3 where it refuses; 0.975: the
    smaller of two clients has 0.64 instead of 0.71 of an equal part there."""
    MAX_FALL = 0.5
    """Part of the limit that is left at least when requests sent together are refused. 0.25: three times as many
    attempts time out."""
    PAUSE_S = 0.5
    """Nothing is sent for so long after a refusal that leaves nothing in flight. 0: 50 refusals a second."""
    WORSE = 0.9
    """Less than this part of the best rate, with more requests, means too many. 0.8: 26.3 instead of 28.7 where the
    server slows down; rounds of 64 answers vary by 5 %, so it cannot be much closer to 1."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.in_flight = 0
        self.share = 1.0
        """The part of the limit that this client may use; the rest belongs to other environments."""
        self.paused_until = 0.0
        """Nothing should be sent before this time."""
        self._limit = float(min(cap, self.START))
        self._step = self._limit
        """What the next good round adds."""
        self._floor = 1.0
        self._lowered_at = -math.inf
        self._best_rate = self._best_level = 0.0
        """Most tokens per second of a round, and the mean number of requests in flight that made them."""
        self._area = self._counted_at = 0.0
        """Integral of the requests in flight over the round, and up to when."""
        self._begin_round(0.0)

    @property
    def limit(self) -> int:
        """Requests that may be in flight, before `share`."""
        return max(1, min(self.cap, round(self._limit)))

    def start(self, now: float) -> None:
        """A request was sent."""
        self._count(now, 1)
        self._is_used |= self.in_flight >= max(1, int(self.limit * self.share))

    def drop(self, now: float) -> None:
        """A request ended without saying anything about load (cancelled, malformed, connection lost)."""
        self._count(now, -1)

    def finish(self, now: float, *, started_at: float, num_tokens: int | None) -> None:
        """A request was answered; `num_tokens` is the length of its longest completion, None if unknown."""
        self._count(now, -1)
        if started_at < self._round_began:
            return
        self._num_answers += 1
        self._tokens += num_tokens or 1
        self._latency += now - started_at
        if self._num_answers >= self._limit * self.share:
            self._end_round(now)

    def refuse(self, now: float, *, started_at: float) -> None:
        """The server refused a request, or did not answer it in time.

        What is left in flight is what the server took. Requests sent before the limit began to fall let it fall by
        half at most: many that time out together would leave nothing.
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
        """Measure until as many requests as the limit were sent and answered."""
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
