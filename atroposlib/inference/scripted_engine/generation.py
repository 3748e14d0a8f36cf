"""The engine behind the routes: duration, concurrency and weights of generations.

Invariant: every sampled token belongs to exactly one weight version, the one in force when it was sampled. The clock
stops while generation is paused. Routes call `generate`; nothing here depends on HTTP.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from atroposlib.http_bodies import ApiError
from atroposlib.inference.scripted_answers import (
    HarnessRequest,
    Respond,
    answer_tokens,
    made_up_logprobs,
    made_up_number,
    made_up_tokens,
)
from atroposlib.inference.scripted_engine.script import Script

PauseMode = Literal["abort", "wait", "keep"]
PRINTABLE = range(32 + 3, 127 + 3)
"""Ids of printable ASCII in `ByteTokenizer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and its sampling parameters."""

    prompt_tokens: list[int]
    n: int = 1
    max_tokens: int = 16
    seed: int | None = None
    """None: the script's."""
    greedy: bool = False
    """Temperature 0: the seed does not matter."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(slots=True, kw_only=True)
class Generated:
    """One completion."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop, length or abort."""
    stop_reason: int | str | None
    """The stop string or id that ended it, as in vLLM."""
    spans: list[tuple[str, int]]
    text: str
    """Without special tokens and without what stopped it."""


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
    """Answers `GenerationRequest`s according to the script."""

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

    async def generate(
        self, ask: GenerationRequest, *, swaps_weights: bool = False
    ) -> list[Generated]:
        """Return `ask.n` completions after the time that the script sets.

        `swaps_weights`: the weights change after half of the longest completion.
        """
        call, self._calls = self._calls, self._calls + 1
        if self.is_paused and self.script.while_paused == "refuse":
            raise ApiError("generation is paused", status=503)
        while self.is_paused:
            await self._changed.wait()
        plans = [self._plan(ask, choice, call) for choice in range(ask.n)]
        await self._enter(ask.n)
        longest = max(len(tokens) if tokens is not None else num for tokens, num, _ in plans)
        flight = self._begin()
        version = self.weight_version
        try:
            if swaps_weights:
                half = longest // 2
                await self._until(flight, num_tokens=half)
                new = self.next_version()
                self.set_weight_version(new)
                flight.changes[-1] = (half, new)
            await self._until(flight, num_tokens=longest)
            sampled = flight.num_sampled(self._now_s()) if flight.is_aborted else 2**31
        finally:
            self._flights.discard(flight)
            self._leave(ask.n)
        return [
            self._finish(ask, choice, plan, version, flight, sampled)
            for choice, plan in enumerate(plans)
        ]

    def _plan(
        self, ask: GenerationRequest, choice: int, call: int
    ) -> tuple[list[int] | None, int, str]:
        """Return (scripted tokens or None, number of tokens, finish reason)."""
        script, limit = self.script, ask.max_tokens
        text: str | None = None
        if self.respond is not None:
            prompt = self.tokenizer.decode(ask.prompt_tokens)
            text = self.respond(HarnessRequest(prompt=prompt, choice=choice, call=call, kwargs={}))
        elif script.answers:
            text = script.answers[choice % len(script.answers)]
        if text is not None:
            tokens, reason = answer_tokens(self.tokenizer, text, limit=limit)
            return tokens, len(tokens), reason
        if script.lengths is None or ask.ignore_eos:
            return None, limit, "length"
        least, most = script.lengths
        drawn = least + made_up_number(
            ask.prompt_tokens, seed=self._seed(ask), choice=choice, below=most - least + 1
        )
        return None, min(drawn, limit), "stop" if drawn <= limit else "length"

    def _seed(self, ask: GenerationRequest) -> int:
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
        ask: GenerationRequest,
        choice: int,
        plan: tuple[list[int] | None, int, str],
        version: str,
        flight: _Flight,
        sampled: int,
    ) -> Generated:
        scripted, num_tokens, reason = plan
        if sampled < num_tokens:
            num_tokens, reason = sampled, "abort"
        elif flight.is_aborted:
            reason = "abort"
        spans = _cut_spans(version, flight.changes, num_tokens)
        if scripted is None:
            tokens = made_up_tokens(
                ask.prompt_tokens,
                seed=self._seed(ask),
                choice=0 if ask.greedy else choice,
                spans=spans,
                alphabet=PRINTABLE,
            )
            if reason == "stop":
                tokens[-1] = self.tokenizer.eos_token_id
        else:
            tokens = scripted[:num_tokens]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        stop_reason: int | str | None = None
        if ask.stop or ask.stop_token_ids:
            tokens, text, stop_reason = self._stop(ask, tokens, text)
            if stop_reason is not None:
                reason = "stop"
                spans = _cut_spans(version, flight.changes, len(tokens))
        logprobs = made_up_logprobs(ask.prompt_tokens, tokens, spans=spans)
        return Generated(
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            spans=spans,
            text=text,
        )

    def _stop(
        self, ask: GenerationRequest, tokens: list[int], text: str
    ) -> tuple[list[int], str, int | str | None]:
        """Cut at the first stop id or string: the tokens include it, the text excludes it."""
        for end in range(1, len(tokens) + 1):
            if tokens[end - 1] in ask.stop_token_ids:
                kept = tokens[:end]
                shown = self.tokenizer.decode(kept[:-1], skip_special_tokens=True)
                return kept, shown, tokens[end - 1]
            if not ask.stop:
                continue
            so_far = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
            for stop in ask.stop:
                if (at := so_far.find(stop)) >= 0:
                    return tokens[:end], so_far[:at], stop
        return tokens, text, None

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


def _cut_spans(
    version: str, changes: list[tuple[int, str]], num_tokens: int
) -> list[tuple[str, int]]:
    """Return the versions of `num_tokens` tokens.

    >>> _cut_spans("7", [(3, "8"), (9, "9")], 5)
    [('7', 3), ('8', 2)]
    """
    spans: list[tuple[str, int]] = []
    start = 0
    for at, next_version in [*changes, (num_tokens, "")]:
        end = min(at, num_tokens)
        if end > start:
            spans.append((version, end - start))
            start = end
        version = next_version
    return spans
