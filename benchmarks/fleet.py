"""What does choosing servers by load and speed gain over choosing by free slots alone?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/fleet.py` simulates servers behind the real door in virtual time
(`_simulated_servers.py`, a minute of CPU), with both choices in turn. `--sensitivity` changes the number of
recent answers that count, `--groups` how near sessions are placed to those of their group.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from atroposlib.inference.servers import admission
from benchmarks._simulated_servers import (
    Behaviour,
    Choice,
    Sample,
    batching,
    groups_per_minute,
    most_free_slots,
    simulate,
    with_slots,
)
from benchmarks._table import Table

KINDS: dict[str, Callable[[float], Behaviour]] = {"16 slots": with_slots, "batching": batching}
CHOICES: dict[str, Choice] = {"by slots": most_free_slots, "by load and speed": admission.best}
BEFORE_S, MEASURED_S = 20.0, 60.0
NEARNESSES = (0.125, 0.25, 1.0)
CHANGE_S = 60.0
"""Virtual seconds before and during a change."""


def long_tailed(server: Behaviour) -> Behaviour:
    """Return the server with answers of 60 tokens in the median, and a standard deviation of the logarithm of 1."""
    return replace(server, lengths=lambda rng: round(5 + rng.lognormvariate(math.log(60), 1.0)))


def means(samples: Sequence[Sample]) -> Sample:
    return Sample(*map(statistics.fmean, zip(*samples, strict=True)))


def steady(
    servers: Sequence[Behaviour], num: int, seeds: int, choice: Choice = admission.best
) -> Sample:
    spans = [(BEFORE_S, BEFORE_S + MEASURED_S)]
    return means(
        [simulate(servers, num, spans=spans, choice=choice, seed=s)[0] for s in range(seeds)]
    )


def waits(sample: Sample) -> str:
    return f"{sample.p50_s:.2f} / {sample.p99_s:.2f}"


COLUMNS = ("by slots: of the sum", "of the sum", "by slots: p50 / p99, s", "p50 / p99, s")


def describe_pairs(seeds: int) -> None:
    """Print the throughput of two servers as a share of what each alone answers with as many requests."""
    table = Table("Two servers", "", "times slower", "requests in flight", "first alone", *COLUMNS)
    for name, make in KINDS.items():
        for slowness in (1, 2, 4):
            for num in (8, 16, 24, 32, 64, 128):
                first, second = (steady([make(s)], num, seeds).tokens_per_s for s in (1, slowness))
                pair = [make(1), make(slowness)]
                both = [steady(pair, num, seeds, choice) for choice in CHOICES.values()]
                of_sum = [f"{one.tokens_per_s / (first + second):.2f}" for one in both]
                alone = f"{first / (first + second):.2f}"
                table.row(name, slowness, num, alone, *of_sum, *map(waits, both))


CHANGES = {
    "16 slots, 8 times slower for 60 s": (with_slots(), with_slots(8), 60.0),
    "16 slots, answers 500 at once for 10 s": (
        with_slots(),
        replace(with_slots(), refuses_with=500),
        10.0,
    ),
    "batching, answers 500 at once for 20 s": (
        batching(),
        replace(batching(), refuses_with=500),
        20.0,
    ),
}


def describe_changes(seeds: int) -> None:
    head = ["the first of two", "requests in flight", "choice", "before", "during", "20 s after"]
    table = Table("A server that changes: tokens per second", *head, "later")
    for name, (usual, changed, during_s) in CHANGES.items():
        end = CHANGE_S + during_s
        spans = [(20.0, CHANGE_S), (CHANGE_S, end), (end, end + 20), (end + 20, end + 60)]
        changes = {CHANGE_S: changed, end: usual}
        for num in (2, 16, 64):
            for label, choice in CHOICES.items():
                runs = [
                    simulate(
                        [usual, usual], num, spans=spans, choice=choice, changes=changes, seed=seed
                    )
                    for seed in range(seeds)
                ]
                rates = [
                    f"{means(samples).tokens_per_s:,.0f}" for samples in zip(*runs, strict=True)
                ]
                table.row(name, num, label, *rates)


def describe_groups(seeds: int) -> None:
    """Print what it gains to put the sessions of a group together, as a share of choosing for each alone."""
    table = Table(
        "Groups a minute: sessions near their group",
        "servers",
        "groups in flight",
        "of",
        "tokens in common",
        "each alone",
        *(f"{share:g} of the slots more" for share in NEARNESSES),
    )
    fleets = {
        "2": [batching(), batching()],
        "4": [batching()] * 4,
        "2, one 4 times slower": [batching(), batching(4)],
    }
    cases = [(name, n, 8) for name in fleets for n in (1, 4, 16)]
    for name, num_groups, group_size in [*cases, ("4", 1, 64), ("4", 4, 64)]:
        for num_tokens in (500, 5_000, 53_000):
            rates = []
            for admission.NEARNESS in (0.0, *NEARNESSES):
                runs = [
                    groups_per_minute(
                        fleets[name],
                        num_groups,
                        num_tokens=num_tokens,
                        group_size=group_size,
                        seed=seed,
                    )
                    for seed in range(seeds)
                ]
                rates.append(statistics.fmean(runs))
            shares = [f"{rate / max(rates[0], 0.1):.2f}" for rate in rates[1:]]
            table.row(name, num_groups, group_size, num_tokens, f"{rates[0]:.1f}", *shares)


def describe_constant(seeds: int) -> None:
    table = Table(
        "Recent answers that count: tokens per second",
        "",
        "1 and 4 times, 8 in flight",
        "the same, 16",
        "equal, 32",
        "8 times slower, 2 in flight: during",
        "20 s after",
    )
    changes = {CHANGE_S: with_slots(8), 2 * CHANGE_S: with_slots()}
    for num_answers in (4, 8, 16, 32, 64, 128):
        admission.NUM_ANSWERS = num_answers
        servers = {slowness: long_tailed(with_slots(slowness)) for slowness in (1, 4)}
        cases = [
            steady([servers[1], servers[slowness]], num, seeds)
            for slowness, num in ((4, 8), (4, 16), (1, 32))
        ]
        equal = [with_slots(), with_slots()]
        spans = [(60.0, 120.0), (120.0, 140.0)]
        runs = [
            simulate(equal, 2, spans=spans, changes=changes, seed=seed) for seed in range(seeds)
        ]
        cases += [means(samples) for samples in zip(*runs, strict=True)]
        table.row(num_answers, *(f"{one.tokens_per_s:,.0f}" for one in cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sensitivity", action="store_true", help="numbers of recent answers")
    parser.add_argument("--groups", action="store_true", help="sessions near their group")
    args = parser.parse_args()
    if args.sensitivity:
        describe_constant(args.seeds)
    elif args.groups:
        describe_groups(args.seeds)
    else:
        describe_pairs(args.seeds)
        describe_changes(args.seeds)


if __name__ == "__main__":
    main()
