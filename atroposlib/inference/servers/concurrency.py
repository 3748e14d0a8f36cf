"""How many requests one inference server should have at once: a controller that only computes.

It is told when requests start, finish or are refused (time is an argument) and answers with `limit`, in 1..cap. It aims
at ALLOWANCE requests waiting at a busy server, as many for every client, which is what makes their parts equal. The
queue comes from the server's own figures where it has any, else from latencies; a client that comes late cannot tell
the others' queue from a slow network then, and parts are unequal. `APIServer` owns one per server; nothing here sends.

Latency is `wait + tokens * time_per_token` (as TCP Vegas has it, per token). The line through (tokens, latency)
separates the two, so neither long answers nor a batch that makes every token slower look like a queue; only the wait
does. wait / latency is then the share of requests that wait (Little's law).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

INITIAL_LIMIT = 64
"""Where a server starts; the limit doubles with every round of answers until a queue is seen."""
ALLOWANCE = 8.0
"""Requests that each client keeps waiting at a busy server, so that none of its slots is ever empty."""
QUEUE_SEEN = 0.1
"""Share of waiting requests that ends the doubling."""
MIN_SAMPLES, MAX_SAMPLES = 4, 128
"""Requests in a round of measurement; between the two, half as many as the limit."""
MIN_SPREAD = 0.15
"""Coefficient of variation of the answer lengths below which no line is fitted."""
BATCHING_SLOWDOWN = 3.0
"""Where lengths do not vary: how much slower than at best a token may be before that counts as a queue."""
WORSE = 0.9
"""Less throughput than this share of the best, at a higher limit, means that the server is past its knee."""
PEAK_MEMORY_S, FADE = 300.0, 0.97
"""How long the best throughput counts, and what is left of it after a round that shows it is out of reach."""
SHRUNK, AS_LONG = 0.7, 0.9
"""A wait that is still this long when the limit has shrunk to that share is no queue."""
CEILING_S, KNEE_S = 6.0, 60.0
"""How long the level at which a server refused, or gave less, is exceeded in small steps only."""
REFUSED_FACTOR, TIMEOUT_FACTOR = 0.93, 0.7
PAUSE_AFTER, MAX_PAUSE_S = 3, 60.0
"""Refusals without any answer between them after which nothing is sent for as long as the server says."""
FIRST_PAUSE_S, PROBE_S = 0.1, 2.0
"""The pause after such refusals where the server names none; it doubles from the first to the last."""
FIGURES_VALID_S = 6.0
"""How long the server's own figures take precedence over latencies."""


class ServerLoad(NamedTuple):
    """A server's own figures, over all its clients."""

    running: float
    waiting: float


_RUNNING = frozenset({b"vllm:num_requests_running", b"sglang:num_running_reqs"})
_GAUGE = re.compile(
    rb"^(vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)"
    rb"(?:\{[^\n]*\})?[ \t]+([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)(?=\s|$)",
    re.MULTILINE,
)


def read_load(metrics: bytes) -> ServerLoad | None:
    """Read the load out of vLLM's or SGLang's Prometheus page, summed over engines; None if it is not there."""
    running: list[float] = []
    waiting: list[float] = []
    for name, value in _GAUGE.findall(metrics):
        (running if name in _RUNNING else waiting).append(float(value))
    return ServerLoad(sum(running), sum(waiting)) if running and waiting else None


class ConcurrencyController:
    """The limit of one server."""

    def __init__(self, cap: int, *, initial: int = INITIAL_LIMIT) -> None:
        self.cap = cap
        self.in_flight = 0
        self.share = 1.0
        """The part of the limit that this client may use; the rest belongs to other environments."""
        self.paused_until = 0.0
        """Nothing should be sent before this time: the server refuses everything."""
        self._limit = float(min(cap, initial))
        self._doubles = True
        self._last_share = 0.0
        self._num_refused = 0
        """Refusals since the last answer."""
        self._decreased_at = -math.inf
        self._put_ceiling(math.inf, until=-math.inf, step=1.0)
        self._best_token_time = math.inf
        self._usual_wait = math.inf
        """The shortest wait seen, in tokens: network and prompt."""
        self._peak_rate, self._peak_level, self._peak_at = 0.0, 0.0, -math.inf
        self._shrinking_from: tuple[float, float] | None = None
        """The limit and the sign of a queue where the present decrease began."""
        self._figures_until = -math.inf
        self._round = _Line()
        self._round_began = 0.0
        self._round_limit = self._limit
        self._is_fresh = True
        """No request of this round was sent yet."""
        self._area = self._counted_at = 0.0
        """Integral of the requests in flight over the round, and up to when."""
        self._peak = 0

    @property
    def limit(self) -> int:
        """Requests that may be in flight."""
        return max(1, min(self.cap, round(self._limit)))

    # What happened.

    def start(self, now: float) -> None:
        """A request was sent."""
        if self._is_fresh:
            # What was sent before a decrease has drained: from here on the level is that of the new limit.
            self._is_fresh = False
            self._round_began = self._counted_at = now
            self._area = 0.0
        self._count(now, 1)
        self._peak = max(self._peak, self.in_flight)

    def drop(self, now: float) -> None:
        """A request ended without saying anything about load (cancelled, malformed, connection lost)."""
        self._count(now, -1)

    def _count(self, now: float, change: int) -> None:
        self._area += self.in_flight * (now - self._counted_at)
        self._counted_at = now
        self.in_flight += change

    def finish(self, now: float, *, started_at: float, num_tokens: int | None) -> None:
        """A request was answered; `num_tokens` is the length of its longest completion, None if unknown."""
        self._count(now, -1)
        self._num_refused = 0
        if self._doubles and self._is_used:
            self._set(min(self._limit + 1, 2 * self._round_limit))
        has_figures = now < self._figures_until and not self._doubles
        if has_figures or started_at < self._round_began:
            return
        self._round.add(float(num_tokens or 1), now - started_at)
        if self._round.count >= min(max(self._limit / 2, MIN_SAMPLES), MAX_SAMPLES):
            self._end_round(now)

    def refuse(
        self,
        now: float,
        *,
        started_at: float,
        retry_after_s: float | None = None,
        timed_out: bool = False,
    ) -> None:
        """The server refused a request (429, 503), or did not answer it in time.

        Requests that were on their way when the limit was last lowered do not lower it again.
        """
        self._count(now, -1)
        if started_at < self._decreased_at:
            return
        self._num_refused += 1
        level = max(1.0, min(self._limit, (self.in_flight + 1) / self.share))
        self._doubles = False
        self._put_ceiling(level, until=now + CEILING_S, step=1.0)
        self._set(min(level - 0.5, level * (TIMEOUT_FACTOR if timed_out else REFUSED_FACTOR)))
        self._decreased_at = now
        self._begin_round(now)
        if self._num_refused >= PAUSE_AFTER and not timed_out:
            pause_s = retry_after_s
            if pause_s is None:  # one request at a time finds out
                pause_s = min(
                    FIRST_PAUSE_S * 2.0 ** min(self._num_refused - PAUSE_AFTER, 10), PROBE_S
                )
            self.paused_until = max(self.paused_until, now + min(pause_s, MAX_PAUSE_S))

    def observe(self, now: float, *, running: float, waiting: float) -> None:
        """The server's own figures, over all its clients."""
        self._figures_until = now + FIGURES_VALID_S
        if self.in_flight > self._usable * 1.05:
            return  # what was sent before the last decrease still drains
        share = waiting / (running + waiting) if waiting > 0 else 0.0
        self._adjust(now, share)
        self._begin_round(now)

    # What follows.

    def _begin_round(self, now: float) -> None:
        self._round = _Line()
        self._round_began = now
        self._round_limit = self._limit
        self._is_fresh = True
        self._area, self._counted_at = 0.0, now
        self._peak = self.in_flight

    @property
    def _is_used(self) -> bool:
        return self._peak >= 0.9 * self._usable

    @property
    def _usable(self) -> int:
        return max(1, int(self.limit * self.share))

    def _end_round(self, now: float) -> None:
        line = self._round
        share = self._share_waiting(line)
        if self._is_used and self._is_past_knee(now, line):
            self._doubles = False
            self._put_ceiling(self._peak_level, until=now + KNEE_S, step=1.0)
            self._set(self._peak_level)
        else:
            self._adjust(now, share)
        self._begin_round(now)

    def _share_waiting(self, line: _Line) -> float:
        """Return the share of its latency that a request waits beyond what is usual here."""
        token_time = line.latency_sum / line.tokens_sum
        latency = line.latency_sum / line.count
        self._best_token_time = min(self._best_token_time, token_time)
        if line.spread < MIN_SPREAD:
            sign = token_time
            if self._is_no_queue(sign):
                self._best_token_time = token_time
            share = 1.0 - BATCHING_SLOWDOWN * self._best_token_time / token_time
        else:
            wait, slope, error = line.fit()
            # Reading the prompt takes longer in a large batch, too: the usual wait is counted in tokens.
            slope = max(slope, 0.5 * self._best_token_time)
            sign = min(max(wait, 0.0), latency) / slope
            if self._is_no_queue(sign):
                self._usual_wait = math.inf
            self._usual_wait = min(self._usual_wait, sign + error / slope)
            share = ((sign - self._usual_wait) * slope - error) / latency
        share = max(0.0, share)
        if share < QUEUE_SEEN:
            self._shrinking_from = None
        elif self._shrinking_from is None:
            self._shrinking_from = (self._limit, sign)
        return share

    def _is_no_queue(self, sign: float) -> bool:
        """Whether what looked like a queue is as long as before although far fewer requests are sent."""
        if self._shrinking_from is None:
            return False
        limit, earlier = self._shrinking_from
        if self._limit > SHRUNK * limit:
            return False
        self._shrinking_from = None
        return sign >= AS_LONG * earlier

    def _is_past_knee(self, now: float, line: _Line) -> bool:
        """Whether more requests were tried and gave less: tokens per second = requests in flight / time per token."""
        level = self._area / max(now - self._round_began, 1e-9)
        rate = level * line.tokens_sum / line.latency_sum
        if rate > self._peak_rate / WORSE:
            self._ceiling_until = -math.inf  # it has become faster
        if rate >= self._peak_rate or now - self._peak_at > PEAK_MEMORY_S:
            self._peak_rate, self._peak_level, self._peak_at = rate, level, now
            return False
        if rate >= WORSE * self._peak_rate:
            return False
        if level > 1.2 * self._peak_level:
            return True
        self._peak_rate *= FADE  # no more requests than then, and still less: the server is slower
        return False

    def _adjust(self, now: float, share: float) -> None:
        """Move towards a queue of ALLOWANCE requests, at most halving the limit or adding a half."""
        limit = self._limit
        # A first sign may be a pause for new weights, which is no queue.
        lowest = 0.5 if self._last_share >= QUEUE_SEEN else 0.8
        self._last_share = share
        if share >= QUEUE_SEEN:
            self._doubles = False
            if now >= self._ceiling_until:
                self._put_ceiling(limit * (1.0 - share), until=now + CEILING_S, step=ALLOWANCE / 2)
        wanted = limit * (1.0 - share) + ALLOWANCE
        if self._doubles and now >= self._figures_until:
            wanted = limit  # answers raise it
        elif share < 0.05:
            wanted = max(wanted, 1.5 * limit)
        if wanted > limit and not self._is_used:
            return
        wanted = min(max(wanted, lowest * limit), max(1.5 * limit, limit + 1))
        if now < self._ceiling_until and wanted > limit:
            wanted = min(wanted, max(0.97 * self._ceiling, limit + self._step))
        self._set(wanted)

    def _put_ceiling(self, level: float, *, until: float, step: float) -> None:
        """Exceed `level` by no more than `step` a round for a while."""
        self._ceiling, self._ceiling_until, self._step = level, until, step

    def _set(self, limit: float) -> None:
        self._limit = min(max(limit, 1.0), float(self.cap))


class _Line:
    """Sums of (tokens, latency) pairs, from which the line through them follows."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens_sum = self.latency_sum = 0.0
        self._xx = self._xy = self._yy = 0.0

    def add(self, tokens: float, latency: float) -> None:
        self.count += 1
        self.tokens_sum += tokens
        self.latency_sum += latency
        self._xx += tokens * tokens
        self._xy += tokens * latency
        self._yy += latency * latency

    @property
    def spread(self) -> float:
        """Coefficient of variation of the token counts."""
        mean = self.tokens_sum / self.count
        return math.sqrt(max(0.0, self._xx / self.count - mean * mean)) / mean

    def fit(self) -> tuple[float, float, float]:
        """Return the latency of no tokens at all and of each token, by least squares, and the former's error."""
        n = self.count
        x, y = self.tokens_sum / n, self.latency_sum / n
        xx = self._xx - n * x * x
        xy = self._xy - n * x * y
        yy = self._yy - n * y * y
        slope = max(0.0, xy / xx)
        residual = max(0.0, yy - slope * xy) / max(1, n - 2)
        return y - slope * x, slope, math.sqrt(residual * (1.0 / n + x * x / xx))
