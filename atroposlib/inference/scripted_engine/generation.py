"""The engine behind the routes: duration, concurrency and weights of generations.

Invariant: every sampled token belongs to exactly one weight version, the one in force when it was sampled. The clock
stops while generation is paused. Routes call `answer`; nothing here depends on HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from atroposlib.http_bodies import ApiError
from atroposlib.inference.answerer import (
    Answers,
    Ask,
    Completion,
    Sampled,
    sample_text,
    with_prompt,
)
from atroposlib.inference.scripted_answers import (
    Respond,
    complete,
    made_up_number,
    made_up_tokens,
    request_of,
)
from atroposlib.inference.scripted_engine.script import Script
from atroposlib.inference.servers.api_server import WeightSpan

PauseMode = Literal["abort", "wait", "keep"]
Tell = Callable[[Answers], Awaitable[None]]
PRINTABLE = range(32 + 3, 127 + 3)
"""Ids of printable ASCII in `ByteTokenizer`."""


class _Plan(NamedTuple):
    """What a completion will be if nothing aborts or stops it."""

    tokens: list[int] | None
    """None: drawn when their weight versions are known."""
    num_tokens: int
    finish_reason: str

    def until(self, num_tokens: int) -> _Plan:
        """Return its beginning, which has no finish reason."""
        return self if self.num_tokens <= num_tokens else _Plan(self.tokens, num_tokens, "")


@dataclass(slots=True, eq=False)
class _Flight:
    """A running generation."""

    began_s: float
    first_token_s: float
    per_token_s: float
    is_aborted: bool = False
    changes: list[tuple[int, str]] = field(default_factory=list)
    """(tokens sampled before, version from then on), oldest first."""
    wake: asyncio.Future[None] | None = None

    def num_sampled(self, now_s: float) -> int:
        """Return the number of tokens sampled by now if the generation had no end."""
        passed_s = now_s - self.began_s - self.first_token_s
        if passed_s < 0:
            return 0
        return int(passed_s / self.per_token_s) if self.per_token_s else 2**31


class Generator:
    """Answers according to the script."""

    def __init__(
        self, *, tokenizer: Any, script: Script, respond: Respond | None, weight_version: str
    ) -> None:
        self.tokenizer = tokenizer
        self.respond = respond
        self.weight_version = weight_version
        self.num_running = 0
        """Completions being generated."""
        self.num_waiting = 0
        """Completions in the queue."""
        self.script = script
        self._rng = random.Random(script.seed)
        self._calls = 0
        self._flights: set[_Flight] = set()
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._paused_since_s: float | None = None
        self._frozen_s = 0.0
        self.is_paused = False
        """Paused or about to be: no new generation starts."""
        self._changed = asyncio.Event()

    # The script and the weights.

    def set_script(self, script: Script) -> None:
        self.script = script
        self._rng = random.Random(script.seed)
        self._admit()

    def set_weight_version(self, version: str) -> None:
        """Switch the weights, also in the middle of generations."""
        now_s = self._now_s()
        for flight in self._flights:
            flight.changes.append((flight.num_sampled(now_s), version))
        self.weight_version = version

    def next_version(self) -> str:
        """Return the version after this one: "8" after "7", "default.1" after "default"."""
        head, dot, last = self.weight_version.rpartition(".")
        if last.isdecimal():
            return f"{head}{dot}{int(last) + 1}"
        return f"{self.weight_version}.1"

    # Pausing.

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating.

        `abort` ends them with their tokens so far, `wait` lets them finish first, `keep` freezes them until `resume`.
        """
        self.is_paused = True
        if mode == "abort":
            for flight in self._flights:
                flight.is_aborted = True
            self._wake_flights()
        if mode == "wait":
            while self._flights and self.is_paused:
                await self._changed.wait()
        if self.is_paused and self._paused_since_s is None:
            self._paused_since_s = asyncio.get_running_loop().time()

    def resume(self) -> None:
        self.is_paused = False
        if self._paused_since_s is not None:
            self._frozen_s += asyncio.get_running_loop().time() - self._paused_since_s
            self._paused_since_s = None
        self._wake_flights()
        self._admit()
        self._notify()

    def _wake_flights(self) -> None:
        for flight in self._flights:
            if flight.wake is not None:
                _set(flight.wake)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _now_s(self) -> float:
        if self._paused_since_s is not None:
            return self._paused_since_s - self._frozen_s
        return asyncio.get_running_loop().time() - self._frozen_s

    # Generating.

    async def answer(
        self, ask: Ask, *, swaps_weights: bool = False, tell: Tell | None = None
    ) -> Answers:
        """Return `ask.n` completions after the time that the script sets.

        `swaps_weights`: the weights change after half of the longest completion. `tell` gets the completions as they
        are after each token but the last; those that go on have an empty finish reason.
        """
        ask = dataclasses.replace(ask, call=self._calls)
        self._calls += 1
        if self.is_paused and self.script.while_paused == "refuse":
            raise ApiError("generation is paused", status=503)
        while self.is_paused:
            await self._changed.wait()
        plans = [self._plan(ask, choice) for choice in range(ask.n)]
        await self._enter(ask.n)
        longest = max(plan.num_tokens for plan in plans)
        flight = self._begin()
        version = self.weight_version
        try:
            if swaps_weights:
                half = longest // 2
                await self._until(flight, num_tokens=half)
                new = self.next_version()
                self.set_weight_version(new)
                flight.changes[-1] = (half, new)
            for num_tokens in range(1, longest if tell else 0):
                await self._until(flight, num_tokens=num_tokens)
                if tell is not None and not flight.is_aborted:
                    so_far = [plan.until(num_tokens) for plan in plans]
                    await tell(self._made(ask, so_far, version, flight))
            await self._until(flight, num_tokens=longest)
            sampled = flight.num_sampled(self._now_s()) if flight.is_aborted else 2**31
        finally:
            self._flights.discard(flight)
            self._leave(ask.n)
        if flight.is_aborted:
            plans = [_Plan(plan.tokens, min(plan.num_tokens, sampled), "abort") for plan in plans]
        return self._made(ask, plans, version, flight)

    def _made(self, ask: Ask, plans: list[_Plan], version: str, flight: _Flight) -> Answers:
        spans_of = functools.partial(_cut_spans, version, flight.changes)
        made = [self._finish(ask, i, plan, spans_of) for i, plan in enumerate(plans)]
        return Answers(ask.prompt_tokens or [], made)

    def _plan(self, ask: Ask, choice: int) -> _Plan:
        script, limit = self.script, ask.max_tokens
        text: str | None = None
        if self.respond is not None:
            text = self.respond(request_of(with_prompt(self.tokenizer, ask), choice))
        elif script.answers:
            text = script.answers[choice % len(script.answers)]
        if text is not None:
            tokens, reason = sample_text(self.tokenizer, text, limit)
            return _Plan(tokens, len(tokens), reason)
        if script.lengths is None or ask.ignore_eos:
            return _Plan(None, limit, "length")
        least, most = script.lengths
        drawn = least + made_up_number(
            ask.prompt_tokens or (), seed=self._seed(ask), choice=choice, below=most - least + 1
        )
        return _Plan(None, min(drawn, limit), "stop" if drawn <= limit else "length")

    def _seed(self, ask: Ask) -> int:
        if ask.greedy:
            return -1
        return self.script.seed if ask.seed is None else ask.seed

    def _begin(self) -> _Flight:
        latency = self.script.latency
        factor = latency.factor(self._rng)
        flight = _Flight(
            began_s=self._now_s(),
            first_token_s=latency.first_token_s * factor,
            per_token_s=latency.per_token_s * factor,
        )
        self._flights.add(flight)
        return flight

    async def _until(self, flight: _Flight, *, num_tokens: int) -> None:
        """Return when a generation has `num_tokens` tokens or is aborted."""
        until_s = flight.began_s + flight.first_token_s + num_tokens * flight.per_token_s
        loop = asyncio.get_running_loop()
        while not flight.is_aborted:
            left_s = until_s - self._now_s()
            is_frozen = self._paused_since_s is not None
            if left_s <= 0 and not is_frozen:
                return
            flight.wake = wake = loop.create_future()
            # While the clock is stopped, only `resume` and aborts wake it.
            timer = None if is_frozen else loop.call_later(left_s, _set, wake)
            try:
                await wake
            finally:
                if timer is not None:
                    timer.cancel()

    def _finish(
        self,
        ask: Ask,
        choice: int,
        plan: _Plan,
        spans_of: Callable[[int], list[WeightSpan]],
    ) -> Completion:
        tokens, num_tokens, reason = plan
        if tokens is None:
            tokens = made_up_tokens(
                ask.prompt_tokens or (),
                seed=self._seed(ask),
                choice=0 if ask.greedy else choice,
                spans=spans_of(num_tokens),
                alphabet=PRINTABLE,
            )
            if reason == "stop":
                tokens[-1] = self.tokenizer.eos_token_id
        sampled = Sampled(tokens[:num_tokens], reason)
        return complete(self.tokenizer, ask, sampled, spans_of=spans_of)

    # The queue.

    async def _enter(self, n: int) -> None:
        if not self._queue and self._has_room(n):
            self.num_running += n
            return
        most = self.script.max_waiting
        if most is not None and self.num_waiting + n > most:
            raise ApiError(
                "too many requests wait", status=429, retry_after_s=self.script.retry_after_s
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((n, turn))
        self.num_waiting += n
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave(n)  # it was admitted in the same tick as the cancel
            else:
                self.num_waiting -= n
                self._queue = deque(entry for entry in self._queue if entry[1] is not turn)
            raise

    def _has_room(self, n: int) -> bool:
        # A request for more choices than slots starts when nothing else runs.
        slots = self.script.num_slots
        return slots == 0 or self.num_running + n <= max(slots, n)

    def _leave(self, n: int) -> None:
        self.num_running -= n
        self._admit()
        self._notify()

    def _admit(self) -> None:
        while self._queue and not self.is_paused and self._has_room(self._queue[0][0]):
            n, turn = self._queue.popleft()
            if turn.cancelled():
                continue  # `_enter` adjusts the count
            self.num_waiting -= n
            self.num_running += n
            turn.set_result(None)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _cut_spans(version: str, changes: list[tuple[int, str]], num_tokens: int) -> list[WeightSpan]:
    """Return the versions of the first `num_tokens` tokens.

    >>> [tuple(span) for span in _cut_spans("7", [(3, "8"), (9, "9")], 5)]
    [('7', 3), ('8', 2)]
    """
    spans: list[WeightSpan] = []
    start = 0
    for at, next_version in [*changes, (num_tokens, "")]:
        end = min(at, num_tokens)
        if end > start:
            spans.append(WeightSpan(version, end - start))
            start = end
        version = next_version
    return spans
