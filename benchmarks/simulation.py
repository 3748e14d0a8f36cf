"""A day of a large hub in virtual time: is every group accounted for, who is served, and where does one hub end?

`PYTHONPATH=. python benchmarks/simulation.py --picture benchmarks/simulation.svg` drives real `Coordinator`s with
memory stores through 24 hours of 10,000 environments in 10 runs: heavy-tailed rollouts, mixed group sizes, weights,
floors, retries, trainers that slow down, die and resume from a checkpoint, environments that vanish and return under
another id, and a hub that is killed. Time and failures are simulated; the decisions and their CPU time are real. A
broken invariant raises AssertionError. `_simulated_run.py` has the events and the checks.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import logging
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks._simulated_run import (
    HOUR_S,
    MINUTE_S,
    SLOW,
    Event,
    Meter,
    SimulatedRun,
    World,
)
from benchmarks._table import Table

OUTAGE = 14 / 24
"""When a third of the environments vanish; of the simulated time."""
KILLS = (4 / 24, 12 / 24, 20 / 24)
"""When the hub is killed and opens its stores again."""
BUCKET_MINUTES = 20
GREY = "#808080"
TOKENS_PER_GROUP, BYTES_PER_GROUP = 8 * 2048, 133_000
CPU_S_PER_MTOK = {"memory": 0.031, "disk": 0.09, "PostgreSQL (hub and database)": 0.185}
"""Packed groups in and out, middle of the ranges that benchmarks/README.md gives for hub.py."""
STATUS_S = 0.00023
"""CPU time of `GET /status-env`, same source."""
LONG_POLL_S = 50.0
"""A waiting environment asks again after this long at the latest."""


async def simulate(
    *, num_runs: int, num_environments: int, hours: float, seed: int = 0
) -> list[SimulatedRun]:
    """Simulate runs of `num_environments` together, with the failures of a day in these hours.

    Raises AssertionError at the first broken invariant.
    """
    events: list[Event] = []
    world = World(events, itertools.count(), random.Random(seed), Meter(), hours * HOUR_S)
    runs = [
        SimulatedRun(world, name=f"run-{index}", num_environments=num_environments // num_runs)
        for index in range(num_runs)
    ]
    for run in runs:
        await run.start()
        world.at(OUTAGE * world.end_s, run.lose_environments, run)
        for share in KILLS:
            world.at(share * world.end_s, run.kill_hub, run)
    while events[0].time_s < world.end_s:
        event = heapq.heappop(events)
        world.now = event.time_s
        await event.action(event.subject)
    for run in runs:
        run.check_ledger()
    return runs


def curves(runs: list[SimulatedRun]) -> dict[str, list[float]]:
    """Join the samples of all runs: one value per `BUCKET_MINUTES`."""
    found: dict[str, list[float]] = {}
    num_minutes = min(len(run.samples) for run in runs)
    for start in range(0, num_minutes - BUCKET_MINUTES + 1, BUCKET_MINUTES):
        last = start + BUCKET_MINUTES - 1
        samples = [each for run in runs for each in run.samples[start : last + 1]]
        ages: list[float] = sorted(age for each in samples for age in each.staleness)
        ages = ages or [math.nan]
        grown = [
            (run.samples[last], run.samples[max(0, start - 1)] if start else None) for run in runs
        ]
        produced = sum(new.produced - (old.produced if old else 0) for new, old in grown)
        expired = sum(new.expired - (old.expired if old else 0) for new, old in grown)
        lost = sum(new.lost - (old.lost if old else 0) for new, old in grown)
        steps = sum(new.steps - (old.steps if old else 0) for new, old in grown)
        repeated = sum(new.repeated - (old.repeated if old else 0) for new, old in grown)
        point = {
            "hour": (start + BUCKET_MINUTES / 2) / 60,
            "staleness": statistics.fmean(ages),
            "staleness, 95 %": ages[int(0.95 * (len(ages) - 1))],
            "expired": 100 * expired / max(1, produced),
            "lost": 100 * lost / max(1, produced + lost),
            "repeated": 100 * repeated / max(1, steps),
            "trainers": 100 * statistics.fmean(each.is_training for each in samples),
            "environments": 100 * statistics.fmean(each.busy for each in samples),
        }
        for name, value in point.items():
            found.setdefault(name, []).append(value)
    return found


def draw(found: dict[str, list[float]], path: Path, *, hours: float) -> None:
    """Draw staleness, waste and utilisation over the day."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels: list[tuple[str, list[tuple[str, str, str]]]] = [
        (
            "policy versions",
            [
                ("staleness", "staleness, mean", "#3b82c4"),
                ("staleness, 95 %", "staleness, 95 %", "#d9822b"),
            ],
        ),
        (
            "% wasted",
            [
                ("expired", "groups too old", "#3b82c4"),
                ("lost", "rollouts lost with their environment", "#d9822b"),
                ("repeated", "steps repeated after a resume", "#3fa35b"),
            ],
        ),
        (
            "% busy",
            [("trainers", "trainers", "#3b82c4"), ("environments", "environments", "#d9822b")],
        ),
    ]
    style: dict[str, Any] = {"svg.hashsalt": "atropos", "svg.fonttype": "none", "text.color": GREY}
    style |= {f"{part}.color": GREY for part in ("xtick", "ytick")}
    style |= {"axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY}
    with rc_context(style):
        figure = Figure(figsize=(8, 7), layout="constrained")
        all_axes = figure.subplots(3, 1, sharex=True)
        for axes, (label, lines) in zip(all_axes, panels, strict=True):
            for name, shown, color in lines:
                axes.plot(found["hour"], found[name], color=color, label=shown)
            for share in KILLS:
                axes.axvline(share * hours, color=GREY, linewidth=0.8, linestyle=":")
            axes.axvline(OUTAGE * hours, color=GREY, linewidth=0.8, linestyle="--")
            axes.axvspan(SLOW[0] * hours, SLOW[1] * hours, color=GREY, alpha=0.15, linewidth=0)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.legend(
                frameon=False, loc="lower left", bbox_to_anchor=(0, 0.97), ncols=3, fontsize="small"
            )
        all_axes[-1].set_xlabel(
            "virtual hours\ndotted: the hub is killed; dashed: a third of the environments vanish;"
            " grey: trainers are three times slower",
            fontsize="small",
        )
        figure.savefig(path, transparent=True, metadata={"Date": None})


def print_outcome(runs: list[SimulatedRun]) -> None:
    table = Table("Groups of all runs", "what", "number")
    ledgers = [run.coordinator.ledger() for run in runs]
    for name in ("produced", "trained", "expired", "dead", "duplicates"):
        table.row(name, sum(getattr(ledger, name) for ledger in ledgers))
    table.row("rollouts lost with their environment", sum(run.num_lost for run in runs))
    table.row("steps", sum(run.num_steps for run in runs))
    table.row("of them repeated after a resume", sum(run.num_repeated for run in runs))
    table.row("crashes of environments", sum(run.num_env_crashes for run in runs))
    table.row("resumes of trainers", sum(run.num_resumes for run in runs))
    table.row("batches that waived a floor", sum(run.num_waived for run in runs))
    table.row("checks of a ledger", sum(run.num_checks for run in runs))
    table.row("checks of the shares", sum(len(run.lacks) for run in runs))
    lacks = sorted(itertools.chain.from_iterable(run.lacks for run in runs)) or [0.0]
    table.row(
        "groups that one lacks of its share of 12 batches, 99 %", lacks[len(lacks) * 99 // 100]
    )
    table.row("the same, at most", lacks[-1])
    table = Table("CPU time of the coordinator", "call", "calls", "CPU s", "ms per call", "longest")
    for name, times in sorted(runs[0].world.meter.of.items()):
        table.row(
            name, times.calls, times.cpu_s, 1000 * times.cpu_s / times.calls, 1000 * times.max_s
        )


def print_limits(runs: list[SimulatedRun]) -> None:
    """Print where one hub ends: hub.py's CPU time per request plus what the coordinators took here."""
    meter = runs[0].world.meter
    num_groups = sum(run.coordinator.ledger().produced for run in runs)
    decisions_s = sum(times.cpu_s for name, times in meter.of.items() if name != "status_env")
    table = Table(
        "One core: groups of 8 x 2048 tokens; one run holds at most 10,000 environments",
        *("store", "CPU ms per group", "groups/s", "MB/s"),
        *("environments, a group per minute", "a group per 10 minutes"),
    )
    for store, cpu_s in CPU_S_PER_MTOK.items():
        group_s = cpu_s * TOKENS_PER_GROUP / 1e6 + decisions_s / num_groups
        rate = 1 / group_s
        environments = [
            int(1 / (group_s / every_s + STATUS_S * (1 / every_s + 1 / LONG_POLL_S))) // 100 * 100
            for every_s in (MINUTE_S, 10 * MINUTE_S)
        ]
        table.row(store, 1000 * group_s, rate, rate * BYTES_PER_GROUP / 1e6, *environments)


def main(argv: list[str] | None = None) -> None:
    """Simulate, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--environments", type=int, default=10_000, help="of all runs together")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    logging.getLogger("atroposlib").setLevel(logging.CRITICAL)
    began = time.process_time()
    runs = asyncio.run(
        simulate(
            num_runs=options.runs,
            num_environments=options.environments,
            hours=options.hours,
            seed=options.seed,
        )
    )
    print_outcome(runs)
    print_limits(runs)
    print(f"\n{time.process_time() - began:.0f} CPU seconds; every check passed")
    if options.picture is not None:
        draw(curves(runs), options.picture, hours=options.hours)


if __name__ == "__main__":
    main()
