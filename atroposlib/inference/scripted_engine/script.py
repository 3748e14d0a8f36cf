"""How a scripted engine behaves: its speed, its capacity, its answers and its faults, all settable while it runs.

`Script` is what `POST /script` takes; unknown fields are refused. `Schedule` decides which request meets which fault,
in the order of arrival and from a seeded generator, so that a run can be repeated. Pure; the server carries it out.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

FAULT_HEADER = "X-Script-Fault"
"""A request may carry a fault of its own, as JSON; it meets that one and no other."""

FaultKind = Literal[
    "status",
    "drop_before",
    "drop_after",
    "drop_in_body",
    "cut_json",
    "wrong_lengths",
    "slow_first_byte",
    "swap_weights",
]


class Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that a generation takes: `first_token_s + num_tokens * per_token_s`, times the spread."""

    first_token_s: float = 0.0
    per_token_s: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm of a lognormal factor with median 1; 0: constant."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that goes wrong with some requests.

    `drop_before` closes the connection before anything is generated, `drop_after` when everything is and no byte was
    sent, `drop_in_body` in the middle of the answer. `cut_json` answers 200 with half a body whose length is declared
    right, `wrong_lengths` with one logprob too few, `swap_weights` changes weights when half of the tokens are there.
    """

    kind: FaultKind
    status: int = 503
    """For `status`."""
    retry_after_s: float | None = None
    """For `status`: the Retry-After header."""
    delay_s: float = 0.0
    """For `slow_first_byte`: seconds between the end of the generation and the first byte."""
    path: str = ""
    """Only requests for this path; empty: all that generate."""
    skip: int = 0
    """Let this many matching requests pass first."""
    times: int | None = None
    """Then meet this many; None: all."""
    chance: float = 1.0
    """Of those, meet each with this probability."""
    for_s: float | None = None
    """Stop this many seconds after the script was set; None: never."""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole behaviour; the default answers at once and never fails."""

    seed: int = 0
    latency: Latency = Latency()
    num_slots: int = 0
    """Completions generated at the same time, the others wait in line; 0: any number."""
    thrash: float = 0.0
    """A completion takes `1 + thrash * num_waiting / num_slots` times as long as alone, so that throughput falls
    beyond the best concurrency."""
    max_waiting: int | None = None
    """With more completions than this in line, requests are answered 429; None: never."""
    retry_after_s: float | None = 1.0
    """The Retry-After header of those 429."""
    answers: tuple[str, ...] = ()
    """Choice i is text i, round and round; none: tokens are drawn from prompt, seed and choice."""
    lengths: tuple[int, int] | None = None
    """Drawn completions have so many tokens with EOS, at least and at most; None: as many as the request allows."""
    alphabet: Literal["text", "bytes"] = "text"
    """Drawn tokens are printable ASCII, or any byte (mostly not UTF-8)."""
    reports_spans: bool = True
    """`/v1/completions` tells which weight version sampled which tokens. vLLM 0.32 does not there."""
    while_paused: Literal["hold", "refuse"] = "hold"
    """Requests that come while generation is paused wait, as in vLLM, or are answered 503."""
    faults: tuple[Fault, ...] = ()


class Schedule:
    """Which of the requests to come meet which fault."""

    def __init__(self, script: Script, *, now_s: float) -> None:
        self._faults = script.faults
        self._set_at_s = now_s
        self._seen = [0] * len(script.faults)
        self._met = [0] * len(script.faults)
        self._rng = random.Random(script.seed)

    def next(self, path: str, *, generates: bool, now_s: float) -> Fault | None:
        """Return the first fault that this request meets.

        >>> schedule = Schedule(Script(faults=(Fault(kind="status", skip=1, times=1),)), now_s=0)
        >>> [bool(schedule.next("/generate", generates=True, now_s=0)) for _ in range(3)]
        [False, True, False]
        """
        for i, fault in enumerate(self._faults):
            if fault.path != path if fault.path else not generates:
                continue
            if fault.for_s is not None and now_s - self._set_at_s >= fault.for_s:
                continue
            self._seen[i] += 1
            if self._seen[i] <= fault.skip:
                continue
            if fault.times is not None and self._met[i] >= fault.times:
                continue
            if fault.chance < 1.0 and self._rng.random() >= fault.chance:
                continue
            self._met[i] += 1
            return fault
        return None
