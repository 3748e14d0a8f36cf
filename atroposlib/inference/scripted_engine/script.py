"""Speed, capacity, answers and faults of a scripted engine, all settable while it runs.

`Script` is the body of `POST /script`; unknown fields are refused. `Schedule` assigns faults to requests in order of
arrival, with a seeded generator, so that a run is repeatable. Pure; the server injects the faults.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

FaultKind = Literal[
    "status",
    "drop_before",
    "drop_after",
    "drop_in_body",
    "cut_json",
    "wrong_lengths",
    "swap_weights",
]


class Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that a generation takes: `first_token_s + num_tokens * per_token_s`, times a random factor."""

    first_token_s: float = 0.0
    per_token_s: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm of that factor, which is lognormal with median 1; 0: constant."""

    def factor(self, rng: random.Random) -> float:
        """Draw the factor of one generation."""
        return rng.lognormvariate(0.0, self.sigma) if self.sigma else 1.0


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault of some requests.

    `drop_before` closes the connection before generation, `drop_after` after generation but before the first byte,
    `drop_in_body` in the middle of the answer. `cut_json` answers 200 with half the JSON and a matching Content-Length,
    `wrong_lengths` with one logprob too few; `swap_weights` changes the weights after half of the tokens.
    """

    kind: FaultKind
    status: int = 503
    """For `status`."""
    retry_after_s: float | None = None
    """For `status`: the Retry-After header."""
    path: str = ""
    """Only requests for this path; empty: all that generate."""
    skip: int = 0
    """Number of matching requests to spare first."""
    times: int | None = None
    """Maximum number of requests to affect; None: no limit."""
    chance: float = 1.0
    """Probability that a matching request is affected."""
    for_s: float | None = None
    """Stop this many seconds after the script was set; None: never."""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole behaviour; the default answers at once and never fails."""

    seed: int = 0
    latency: Latency = Latency()
    num_slots: int = 0
    """Completions generated at the same time, the others are queued; 0: no limit."""
    max_waiting: int | None = None
    """If more completions than this would be queued, requests are answered 429; None: never."""
    retry_after_s: float | None = 1.0
    """The Retry-After header of those 429."""
    answers: tuple[str, ...] = ()
    """Choice i is text i, modulo their number; empty: tokens are drawn from prompt, seed and choice."""
    lengths: tuple[int, int] | None = None
    """Minimum and maximum tokens of drawn completions, with EOS; None: as many as the request allows."""
    reports_spans: bool = True
    """Whether `/v1/completions` reports the weight version of each token. vLLM 0.32 does not."""
    while_paused: Literal["hold", "refuse"] = "hold"
    """Whether requests that arrive while generation is paused wait, as in vLLM, or are answered 503."""
    faults: tuple[Fault, ...] = ()


class Schedule:
    """Decides which requests get which fault."""

    def __init__(self, script: Script, *, now_s: float) -> None:
        self._faults = script.faults
        self._set_at_s = now_s
        self._seen = [0] * len(script.faults)
        self._met = [0] * len(script.faults)
        self._rng = random.Random(script.seed)

    def next(self, path: str, *, generates: bool, now_s: float) -> Fault | None:
        """Return the first fault that applies to this request.

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
