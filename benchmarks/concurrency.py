"""What does adapting the number of requests to an inference server gain?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/concurrency.py` simulates servers and clients in virtual time
(`_simulated_engine.py`, a minute of CPU) with the adaptive limiter, with the configured maximum only, and with the best
fixed number. `--sensitivity` halves and doubles each constant of the limiter.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from atroposlib.inference.servers.concurrency import ConcurrencyController
from benchmarks._simulated_engine import (
    TOKEN_TIME_S,
    Client,
    FixedLimit,
    Limiter,
    Server,
    Simulation,
)
from benchmarks._table import Table

CAP = 576
"""The defaults of `num_max_requests_at_once` and `num_requests_for_eval` together."""
FIXED = (8, 16, 32, 64, 80, 128, 256)
BEFORE_S, MEASURED_S = 60.0, 300.0
"""Virtual seconds before a measurement, and its duration."""
WINDOW_S, RECOVERED, GIVEN_UP_S = 3.0, 0.9, 300.0
"""A server has recovered when a window has this share of the best rate."""

MakeLimiter = Callable[[], Limiter]


def adaptive() -> Limiter:
    return ConcurrencyController(CAP)


def fixed(limit: int) -> MakeLimiter:
    return lambda: FixedLimit(limit)


SERVERS: dict[str, Server] = {
    "queues, as vLLM does": Server(),
    "queues, and clients time out after 10 s": Server(timeout_s=10.0),
    "refuses beyond its slots, Retry-After 1 s": Server(max_waiting=0),
    "queues 16, then refuses, no Retry-After": Server(max_waiting=16, retry_after_s=None),
    "slows down beyond its slots": Server(
        runs_all=True, token_time=lambda n, slots: TOKEN_TIME_S * max(1.0, n / slots) ** 1.5
    ),
    "has room for all": Server(
        runs_all=True, token_time=lambda n, slots: TOKEN_TIME_S * (1 + n / 64)
    ),
}


class Result(NamedTuple):
    """Means over the seeds."""

    goodput: float
    """Completions per second."""
    p50_s: float
    p99_s: float
    again: float
    """Attempts refused or timed out, per completion."""
    failed: float
    """Requests that ended in failure."""
    smallest_part: float
    """Tokens of the client with the fewest, relative to an equal share."""


def measure(
    make: Sequence[MakeLimiter], server: Server, seed: int, *, stagger_s: float = 0.0
) -> Result:
    """Let one client per limiter share a server; each starts `stagger_s` after the previous one."""
    clients = [Client(one(), starts_at=i * stagger_s) for i, one in enumerate(make)]
    simulation = Simulation(clients, replace(server), seed=seed)
    began = BEFORE_S + stagger_s * len(clients)
    simulation.run(began)
    counts = [(one.num_refused + one.num_timed_out, one.num_failed) for one in clients]
    tokens = [one.num_tokens for one in clients]
    simulation.run(began + MEASURED_S)
    found = [latency for one in clients for at, latency in one.latencies if at > began]
    waits = sorted(found + simulation.ages())
    num = max(1, len(found))
    again = sum(one.num_refused + one.num_timed_out for one in clients)
    parts = [one.num_tokens - before for one, before in zip(clients, tokens, strict=True)]
    return Result(
        goodput=len(found) / MEASURED_S,
        p50_s=waits[len(waits) // 2],
        p99_s=waits[int(len(waits) * 0.99)],
        again=(again - sum(count for count, _ in counts)) / num,
        failed=sum(one.num_failed for one in clients) - sum(count for _, count in counts),
        smallest_part=min(parts) * len(parts) / max(1.0, sum(parts)),
    )


def recovery_s(make: MakeLimiter, server: Server, seed: int, *, slots: tuple[int, int]) -> float:
    """Return the seconds until throughput matches the second number of slots."""
    client = Client(make())
    simulation = Simulation([client], replace(server, slots=slots[0]), seed=seed)
    simulation.run(BEFORE_S)
    simulation.server.slots = slots[1]
    return recovering_s(simulation, best=slots[1] / TOKEN_TIME_S)


def recovering_s(simulation: Simulation, *, best: float) -> float:
    [client], began = simulation.clients, simulation.now
    while simulation.now < began + GIVEN_UP_S:
        before = client.num_tokens
        simulation.run(simulation.now + WINDOW_S)
        if client.num_tokens - before >= RECOVERED * best * WINDOW_S:
            break
    return simulation.now - began


def outage_s(make: MakeLimiter, seed: int) -> float:
    """Refuse everything (503) for 10 s; return the seconds until recovery."""
    client = Client(make())
    simulation = Simulation([client], Server(runs_all=True), seed=seed)
    simulation.run(BEFORE_S)
    simulation.server.refuses_all = True
    simulation.run(BEFORE_S + 10)
    simulation.server.refuses_all = False
    return recovering_s(simulation, best=512 / TOKEN_TIME_S)


def first_minutes(make: MakeLimiter, seed: int) -> float:
    """Return completions per second in the first 20 minutes, with answers that take one to two minutes."""
    server = Server(
        runs_all=True,
        token_time=lambda n, slots: TOKEN_TIME_S * (1 + n / 256),
        lengths=lambda rng: rng.randint(3000, 6000),
    )
    client = Client(make())
    Simulation([client], server, seed=seed).run(1200.0)
    return client.num_tokens / 4500 / 1200.0


def mean(of: Callable[[int], float], seeds: int) -> float:
    return statistics.fmean(of(seed) for seed in range(seeds))


def mean_result(of: Callable[[int], Result], seeds: int) -> Result:
    return Result(*map(statistics.fmean, zip(*map(of, range(seeds)), strict=True)))


def best_fixed(server: Server, seeds: int) -> int:
    """Return the number with the most completions (within 1 %), then the fewest refusals, then the smallest."""
    results = {n: mean_result(lambda s, n=n: measure([fixed(n)], server, s), seeds) for n in FIXED}
    most = max(result.goodput for result in results.values())
    good = [n for n, result in results.items() if result.goodput >= 0.99 * most]
    return min(good, key=lambda n: (round(results[n].again, 2), n))


def describe(name: str, server: Server, seeds: int) -> None:
    best = best_fixed(server, seeds)
    makes: list[MakeLimiter] = [adaptive, fixed(CAP), fixed(best)]
    alone = [mean_result(lambda s, m=m: measure([m], server, s), seeds) for m in makes]
    both = [
        mean_result(lambda s, m=m: measure([m, m], server, s, stagger_s=60.0), seeds) for m in makes
    ]
    table = Table(f"Server {name}", "", "adaptive", "none", f"fixed, {best}")
    table.row("completions per second", *(f"{one.goodput:.1f}" for one in alone))
    table.row("latency p50 / p99, s", *(f"{one.p50_s:.1f} / {one.p99_s:.1f}" for one in alone))
    table.row("refused or timed out per completion", *(f"{one.again:.2f}" for one in alone))
    table.row("requests given up", *(f"{one.failed:.0f}" for one in alone))
    if name == "has room for all":
        rates = [mean(lambda s, m=m: first_minutes(m, s), seeds) for m in makes]
        table.row("the first 20 minutes, answers of 1 to 2", *(f"{rate:.2f}" for rate in rates))
    else:
        for slots in ((64, 8), (8, 64)):
            waits = [
                mean(lambda s, m=m, to=slots: recovery_s(m, server, s, slots=to), seeds)
                for m in makes
            ]
            cells = [f"{wait:.0f}" if wait < GIVEN_UP_S else "never" for wait in waits]
            table.row(f"recovery from {slots[0]} -> {slots[1]} slots, s", *cells)
    table.row("two clients: completions per second", *(f"{one.goodput:.1f}" for one in both))
    table.row("two clients: smaller part (1: equal)", *(f"{one.smallest_part:.2f}" for one in both))


def describe_constants(seeds: int) -> None:
    """Print the effect of about half and double of each constant; for fractions, of their distance from 1."""
    changed = {
        "START": (32, 128),
        "GROWTH": (1.5, 4.0),
        "BACKOFF": (0.9, 0.975),
        "MAX_FALL": (0.25, 0.75),
        "WORSE": (0.8, 0.95),
    }
    variants: dict[str, dict[str, float]] = {"as they are": {}}
    variants |= {f"{name} {x:g}": {name: x} for name, both in changed.items() for x in both}
    queues, times_out, refuses, _, slows, _ = SERVERS.values()
    table = Table(
        "Half and double of each constant",
        *("", "refuses, /s", "slows down, /s", "time-outs: /s / timed out", "recovery 8 -> 64, s"),
        *("after 503, s", "smaller part, refuses", "smaller part, queues", "first 20 minutes, /s"),
    )
    for name, constants in variants.items():
        kind = type("Variant", (ConcurrencyController,), constants)

        def make(kind: type[ConcurrencyController] = kind) -> Limiter:
            return kind(CAP)

        def rate(server: Server, make: MakeLimiter = make) -> Result:
            return mean_result(lambda s: measure([make], server, s), seeds)

        def part(server: Server, make: MakeLimiter = make) -> float:
            both = [make, make]
            return mean(lambda s: measure(both, server, s, stagger_s=60.0).smallest_part, seeds)

        late = rate(times_out)
        table.row(
            name,
            f"{rate(refuses).goodput:.1f}",
            f"{rate(slows).goodput:.1f}",
            f"{late.goodput:.1f} / {late.again:.3f}",
            f"{mean(lambda s, m=make: recovery_s(m, refuses, s, slots=(8, 64)), seeds):.0f}",
            f"{mean(lambda s, m=make: outage_s(m, s), seeds):.0f}",
            f"{part(refuses):.2f}",
            f"{part(queues):.2f}",
            f"{mean(lambda s, m=make: first_minutes(m, s), seeds):.2f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="servers whose name contains this")
    parser.add_argument("--sensitivity", action="store_true", help="constants instead of servers")
    args = parser.parse_args()
    if args.sensitivity:
        describe_constants(args.seeds)
        return
    for name, server in SERVERS.items():
        if args.only in name:
            describe(name, server, args.seeds)


if __name__ == "__main__":
    main()
