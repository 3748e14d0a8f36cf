"""What does adapting the number of requests to an inference server gain?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/concurrency.py` simulates servers behind the real door in virtual time
(`_simulated_servers.py`, some minutes of CPU): with adaptation, with the configured maximum only, and with a fixed
number, the server's slots. `--sensitivity` halves and doubles each constant of the adaptation.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from atroposlib.inference.servers.admission import ConcurrencyController
from benchmarks._simulated_servers import TOKEN_TIME_S, Behaviour, Client, Simulation
from benchmarks._table import Table

BEFORE_S, MEASURED_S = 60.0, 300.0
"""Virtual seconds before a measurement, and its duration."""
WINDOW_S, RECOVERED, GIVEN_UP_S = 3.0, 0.9, 300.0
"""A server has recovered when a window has this share of the best rate."""

Limits = Mapping[str, Any]
"""Fields of `APIServerConfig`."""
ADAPTIVE: Limits = {}
LIMITS: dict[str, Limits] = {
    "adaptive": ADAPTIVE,
    "none": {"adaptive_concurrency": False},
    "fixed, 64": {"adaptive_concurrency": False, "num_max_requests_at_once": 64},
}

SERVERS: dict[str, Behaviour] = {
    "queues, as vLLM does": Behaviour(),
    "queues, and clients time out after 10 s": Behaviour(timeout_s=10.0),
    "refuses beyond its slots, Retry-After 1 s": Behaviour(max_waiting=0),
    "queues 16, then refuses, no Retry-After": Behaviour(max_waiting=16, retry_after_s=None),
    "slows down beyond its slots": Behaviour(
        runs_all=True, token_time=lambda n, slots: TOKEN_TIME_S * max(1.0, n / slots) ** 1.5
    ),
    "has room for all": Behaviour(
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


def measure(server: Behaviour, limits: Limits, seed: int, *, num_clients: int = 1) -> Result:
    """Let clients share a server; each starts 60 s after the previous one."""
    clients = [Client(dict(limits), starts_at=60.0 * i) for i in range(num_clients)]
    began = BEFORE_S + 60.0 * (num_clients - 1)
    with Simulation([server], clients, seed=seed) as simulation:
        simulation.run(began)
        before = [
            (one.num_tokens, one.num_refused + one.num_timed_out, one.num_failed) for one in clients
        ]
        simulation.run(began + MEASURED_S)
        ages = simulation.ages()
    found = [answer.seconds for one in clients for answer in one.answers if answer.ended_at > began]
    waits = sorted(found + ages)
    changes = [
        (
            one.num_tokens - tokens,
            one.num_refused + one.num_timed_out - again,
            one.num_failed - failed,
        )
        for one, (tokens, again, failed) in zip(clients, before, strict=True)
    ]
    parts, again, failed = zip(*changes, strict=True)
    return Result(
        goodput=len(found) / MEASURED_S,
        p50_s=waits[len(waits) // 2],
        p99_s=waits[int(len(waits) * 0.99)],
        again=sum(again) / max(1, len(found)),
        failed=sum(failed),
        smallest_part=min(parts) * len(parts) / max(1.0, sum(parts)),
    )


def recovery_s(server: Behaviour, limits: Limits, seed: int, *, slots: tuple[int, int]) -> float:
    """Return the seconds until throughput matches the second number of slots."""
    client = Client(dict(limits))
    with Simulation([replace(server, slots=slots[0])], [client], seed=seed) as simulation:
        simulation.run(BEFORE_S)
        simulation.engines[0].change(slots=slots[1])
        return recovering_s(simulation, best=slots[1] / TOKEN_TIME_S)


def recovering_s(simulation: Simulation, *, best: float) -> float:
    [client], began = simulation.clients, simulation.now
    while simulation.now < began + GIVEN_UP_S:
        before = client.num_tokens
        simulation.run(simulation.now + WINDOW_S)
        if client.num_tokens - before >= RECOVERED * best * WINDOW_S:
            break
    return simulation.now - began


def outage_s(seed: int) -> float:
    """Refuse everything (503) for 10 s; return the seconds until recovery."""
    with Simulation([Behaviour(runs_all=True)], [Client()], seed=seed) as simulation:
        simulation.run(BEFORE_S)
        simulation.engines[0].change(refuses_with=503)
        simulation.run(BEFORE_S + 10)
        simulation.engines[0].change(refuses_with=None)
        return recovering_s(simulation, best=512 / TOKEN_TIME_S)


def first_minutes(limits: Limits, seed: int) -> float:
    """Return completions per second in the first 20 minutes, with answers that take one to two minutes."""
    server = Behaviour(
        runs_all=True,
        token_time=lambda n, slots: TOKEN_TIME_S * (1 + n / 256),
        lengths=lambda rng: rng.randint(3000, 6000),
    )
    client = Client(dict(limits))
    with Simulation([server], [client], seed=seed) as simulation:
        simulation.run(1200.0)
    return client.num_tokens / 4500 / 1200.0


def mean(of: Callable[[int], float], seeds: int) -> float:
    return statistics.fmean(of(seed) for seed in range(seeds))


def mean_result(of: Callable[[int], Result], seeds: int) -> Result:
    return Result(*map(statistics.fmean, zip(*map(of, range(seeds)), strict=True)))


def describe(name: str, server: Behaviour, seeds: int) -> None:
    def rows(num_clients: int) -> list[Result]:
        return [
            mean_result(lambda s, to=to: measure(server, to, s, num_clients=num_clients), seeds)
            for to in LIMITS.values()
        ]

    alone, both = rows(1), rows(2)
    table = Table(f"Server {name}", "", *LIMITS)
    table.row("completions per second", *(f"{one.goodput:.1f}" for one in alone))
    table.row("latency p50 / p99, s", *(f"{one.p50_s:.1f} / {one.p99_s:.1f}" for one in alone))
    table.row("refused or timed out per completion", *(f"{one.again:.2f}" for one in alone))
    table.row("requests given up", *(f"{one.failed:.0f}" for one in alone))
    if name == "has room for all":
        rates = [mean(lambda s, to=to: first_minutes(to, s), seeds) for to in LIMITS.values()]
        table.row("the first 20 minutes, answers of 1 to 2", *(f"{rate:.2f}" for rate in rates))
    else:
        for slots in ((64, 8), (8, 64)):
            waits = [
                mean(lambda s, to=to, slots=slots: recovery_s(server, to, s, slots=slots), seeds)
                for to in LIMITS.values()
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

    def rate(server: Behaviour) -> Result:
        return mean_result(lambda s: measure(server, ADAPTIVE, s), seeds)

    def part(server: Behaviour) -> float:
        return mean(lambda s: measure(server, ADAPTIVE, s, num_clients=2).smallest_part, seeds)

    for name, constants in variants.items():
        with mock.patch.multiple(ConcurrencyController, **constants):
            late = rate(times_out)
            table.row(
                name,
                f"{rate(refuses).goodput:.1f}",
                f"{rate(slows).goodput:.1f}",
                f"{late.goodput:.1f} / {late.again:.3f}",
                f"{mean(lambda s: recovery_s(refuses, ADAPTIVE, s, slots=(8, 64)), seeds):.0f}",
                f"{mean(outage_s, seeds):.0f}",
                f"{part(refuses):.2f}",
                f"{part(queues):.2f}",
                f"{mean(lambda s: first_minutes(ADAPTIVE, s), seeds):.2f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
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
