"""A trainer, a hub's queue and environments in virtual time, and random settings of them."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from atroposlib.api.run.environments import Shares
from atroposlib.api.run.leases import TrainerTimes
from atroposlib.runtime.capacity import Demand, History, Load, num_to_start

TICK_S = 0.1
"""While the trainer waits, environments look again this often."""
STEP, TICK = -1, -2

Sample = Callable[[random.Random], float]


@dataclass(slots=True, kw_only=True)
class Environment:
    """One environment: how long its items take, and what they yield."""

    duration_s: Sample
    groups_per_item: float = 1.0
    """Probability that an item gives a group."""
    group_size: int = 4
    weight: float = 1.0
    """Share of a batch."""
    num_workers: int | None = None
    """Fixed number of items in flight; None: demand."""
    slowness: Callable[[int], float] = lambda step: 1.0
    """Factor of the time that an item started in a step takes."""
    max_workers: Callable[[int], int] = lambda step: 512
    """Items that may be in flight in a step; a server with the default settings takes 512 requests at once."""
    queued: int = 0
    running: dict[int, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    num_given: int = 0
    num_taken: int = 0
    in_flight: list[int] = field(default_factory=list)
    """After each step."""


class Outcome(NamedTuple):
    waits: float
    """Share of the time in which the trainer waited."""
    staleness: float
    max_staleness: int
    groups_in_flight: list[list[int]]
    """Per environment, at each step."""
    shares: list[float]
    """Of the groups taken, per environment."""
    thrown_away: float
    """Share of the groups that became too old in the queue."""
    waits_s: list[float]
    """Before each step, also those not counted."""


def simulate(
    environments: list[Environment],
    *,
    batch_size: int,
    step_s: Callable[[int], float],
    max_batches_offpolicy: int = 3,
    max_staleness: int | None = None,
    num_steps: int = 300,
    num_before: int = 50,
    seed: int = 0,
    default_workers: int = 8,
) -> Outcome:
    """Run until `num_steps` batches are taken; the first `num_before` are not counted.

    Groups older than `max_staleness` steps are thrown away, as the hub does.
    """
    rng = random.Random(seed)
    events: list[tuple[float, int, int | None, int]] = []
    keys = itertools.count()
    queue: deque[tuple[int, int]] = deque()
    everyone = range(len(environments))
    shares, times = Shares(), TrainerTimes()
    now = began = waited_before = 0.0
    version = num_taken = num_expired = 0
    staleness: list[int] = []
    waits_s: list[float] = []

    def queued_sequences() -> int:
        return sum(each.queued * each.group_size for each in environments)

    def is_too_old(sampled: int) -> bool:
        return max_staleness is not None and version - sampled > max_staleness

    def expire() -> None:
        nonlocal num_expired
        for _ in range(len(queue)):
            index, sampled = queue.popleft()
            if is_too_old(sampled):
                environments[index].queued -= 1
                num_expired += 1
            else:
                queue.append((index, sampled))

    def demand(env: Environment) -> Demand | None:
        if env.num_workers is not None or times.step_s is None:
            return None
        return env.history.demand(
            step_s=times.step_s,
            ages_s=[now - since for since in env.running.values()],
            missing_sequences=batch_size - queued_sequences(),
            trainer_waits_s=times.waits_s(now, num_held=0),
        )

    def start(wanting: Iterable[int]) -> None:
        for index in wanting:
            env = environments[index]
            load = Load(
                max_workers=env.num_workers or env.max_workers(version),
                running=len(env.running),
                group_size=env.group_size,
                batch_size=batch_size,
                max_batches_offpolicy=max_batches_offpolicy,
                queue_size=queued_sequences() // env.group_size,
                self_queue_size=env.queued,
                wanted_share=shares.wanted(index, own=env.weight),
                demand=(asked := demand(env)),
            )
            num = num_to_start(load)
            if asked is None and env.num_workers is None:
                num = min(num, max(0, default_workers - len(env.running)))
            for _ in range(num):
                key = next(keys)
                env.running[key] = now
                ends_at = now + env.duration_s(rng) * env.slowness(version)
                heapq.heappush(events, (ends_at, key, index, version))

    def take() -> bool:
        nonlocal began, waited_before, num_expired, num_taken
        waited_s = times.waits_s(now, num_held=0)
        if waited_s is None or queued_sequences() < batch_size:
            return False
        waits_s.append(waited_s)
        times.deliver(now, [], version=version, is_plain=True, num_held=0)
        if num_taken == num_before:
            began, waited_before, num_expired = now, times.waited_s, 0
            staleness.clear()
        taken: Counter[int | None] = Counter()
        while taken.total() < batch_size:
            index, sampled = queue.popleft()
            env = environments[index]
            env.queued -= 1
            env.num_taken += num_taken >= num_before
            taken[index] += env.group_size
            staleness.append(version - sampled)
        shares.deliver(
            num_taken,
            np.array([env.weight for env in environments]),
            taken=taken,
            left={index: env.queued * env.group_size for index, env in enumerate(environments)},
            batch_size=batch_size,
        )
        heapq.heappush(events, (now + step_s(num_taken), next(keys), None, STEP))
        num_taken += 1
        return True

    times.ask(now)
    start(everyone)
    while num_taken < num_steps:
        now, key, index, sampled = heapq.heappop(events)
        if index is None and sampled == STEP:
            version += 1
            times.ask(now)
            expire()
            for each in environments:
                each.in_flight.append(len(each.running))
        elif index is not None:
            env = environments[index]
            if rng.random() < env.groups_per_item:
                env.num_given += 1
                if is_too_old(sampled):
                    num_expired += 1
                else:
                    queue.append((index, sampled))
                    env.queued += 1
            env.history.add(now - env.running.pop(key), num_accepted=env.num_given)
        start([index] if not take() and index is not None else everyone)
        if index is None and times.waits_s(now, num_held=0) is not None:
            heapq.heappush(events, (now + TICK_S, next(keys), None, TICK))
    total = sum(each.num_taken for each in environments)
    return Outcome(
        waits=(times.waited_s - waited_before) / (now - began),
        staleness=statistics.fmean(staleness),
        max_staleness=max(staleness),
        groups_in_flight=[each.in_flight for each in environments],
        shares=[each.num_taken / total for each in environments],
        thrown_away=num_expired / (num_expired + total),
        waits_s=waits_s,
    )


NUM_BEFORE = 40
"""Steps before anything counts."""


class Findings(NamedTuple):
    """What one setting showed."""

    waits: float
    """Share of the time in which the trainer waits."""
    staleness: float
    """Mean, in steps."""
    amplitude: float
    """Between the 5 % lowest and highest numbers of groups expected from the items in flight, in batches."""
    drift: float
    """Groups per batch by which the share of an environment differs from its weight; the worst environment."""


def try_setting(seed: int, *, num_steps: int = 120) -> Findings:
    """Simulate one setting that a trainer can be fed in: items take 0.01 to 2.5 steps on average.

    1 to 4 environments of other weights, speeds and yields, two to 128 groups per batch.
    """
    rng = random.Random(seed)
    batch_size, group_size = rng.choice([32, 64, 128, 256]), rng.choice([2, 4, 8, 16])
    step_s = 10 ** rng.uniform(-1, 1.5)
    weights = [rng.uniform(0.2, 1.0) for _ in range(rng.choice([1, 2, 2, 3, 4]))]
    environments = [
        Environment(
            duration_s=_log_normal(step_s * 10 ** rng.uniform(-2, 0.4), rng.choice([0.0, 0.5, 1])),
            groups_per_item=rng.choice([1.0, 0.6, 0.3]),
            group_size=group_size,
            weight=weight / sum(weights),
        )
        for weight in weights
    ]
    found = simulate(
        environments,
        batch_size=batch_size,
        step_s=lambda _: step_s,
        max_batches_offpolicy=8,
        num_steps=num_steps,
        num_before=NUM_BEFORE,
        seed=seed,
    )
    groups_per_batch = batch_size / group_size
    expected = sorted(
        sum(env.in_flight[step] * env.groups_per_item / groups_per_batch for env in environments)
        for step in range(NUM_BEFORE, len(environments[0].in_flight))
    )
    shares = zip(found.shares, environments, strict=True)
    return Findings(
        waits=found.waits,
        staleness=found.staleness,
        amplitude=expected[int(0.95 * len(expected))] - expected[int(0.05 * len(expected))],
        drift=max(abs(share - env.weight) for share, env in shares) * groups_per_batch,
    )


class Case(NamedTuple):
    """Environments, one for each kind of item, and a trainer that can be fed by them."""

    items_s: list[Sample]
    """Duration of an item, per environment."""
    step_s: Callable[[int], float]
    group_size: int = 4
    useful: float = 1.0
    """Share of the items that give a group."""
    batch_size: int = 64

    def simulate(self, num_workers: int | None, *, seed: int = 0, num_steps: int = 150) -> Outcome:
        """Run with the demand, or with a fixed number of items in flight per environment."""
        environments = [
            Environment(
                duration_s=item_s,
                groups_per_item=self.useful,
                group_size=self.group_size,
                weight=1 / len(self.items_s),
                num_workers=num_workers,
            )
            for item_s in self.items_s
        ]
        return simulate(
            environments,
            batch_size=self.batch_size,
            step_s=self.step_s,
            max_staleness=4,
            num_steps=num_steps,
            num_before=num_steps // 3,
            seed=seed,
        )

    def best_fixed(self, numbers: Iterable[int], *, may_wait: float = 0.05, **run: int) -> Outcome:
        """Of the fixed numbers, return the least stale that waits no longer, else the one that waits least."""
        return min(
            (self.simulate(number, **run) for number in numbers),
            key=lambda found: (round(max(0.0, found.waits - may_wait), 2), found.staleness),
        )


def slowest(item_s: Sample, num: int) -> Sample:
    """Return the duration of the slowest of several answers."""
    return lambda rng: max(item_s(rng) for _ in range(num))


def exponential(mean_s: float) -> Sample:
    return lambda rng: rng.expovariate(1 / mean_s)


def pareto(shape: float, scale_s: float = 1.0) -> Sample:
    return lambda rng: scale_s * rng.paretovariate(shape)


def two_kinds(short_s: float, long_s: float, share_of_long: float) -> Sample:
    return lambda rng: long_s if rng.random() < share_of_long else short_s


CASES: dict[str, Case] = {
    "exponential answers": Case([slowest(exponential(2), 4)], lambda _: 3.0),
    "a tenth takes 60 s": Case([two_kinds(1, 60, 0.1)], lambda _: 5.0),
    "Pareto 1.1": Case([slowest(pareto(1.1), 8)], lambda _: 10.0, group_size=8),
    "Pareto 1.5": Case([slowest(pareto(1.5), 4)], lambda _: 5.0),
    "steps of 1 s and 9 s": Case([slowest(exponential(2), 4)], lambda step: (1.0, 9.0)[step % 2]),
    "a tenth useful": Case([exponential(2)], lambda _: 5.0, useful=0.1),
    "3 % useful": Case([exponential(2)], lambda _: 5.0, useful=0.03),
    "environments of 1 s and 20 s": Case([lambda _: 1.0, lambda _: 20.0], lambda _: 10.0),
    "2 s, steps of 1 s": Case([lambda rng: 2 + 0.1 * rng.random()], lambda _: 1.0),
}


def random_case(seed: int) -> Case:
    """Return a case with heavy tails and changing steps: a median item takes 0.03 to 1 median steps.

    One or two environments, 8 groups per batch, 30 to 100 % useful items.
    """
    rng = random.Random(seed)
    typical_s = 10 ** rng.uniform(-1, 1.5)

    def items() -> Sample:
        median_s = typical_s * 10 ** rng.uniform(-1.5, 0)
        shape, sigma = rng.uniform(1.05, 2.5), rng.uniform(0, 2)
        tail = two_kinds(median_s, median_s * rng.uniform(5, 100), rng.uniform(0.02, 0.2))
        kinds = [exponential(median_s / math.log(2)), pareto(shape, median_s * 2 ** (-1 / shape))]
        return rng.choice([*kinds, lambda r: median_s * math.exp(sigma * r.gauss(0.0, 1.0)), tail])

    ratio, first, sigma = rng.uniform(1, 10), rng.randrange(2), rng.uniform(0, 0.7)
    steps_s = [typical_s * math.exp(sigma * rng.gauss(0.0, 1.0)) for _ in range(200)]
    step_s = rng.choice(
        [
            lambda _: typical_s,
            lambda step: typical_s * (ratio if step % 2 == first else 1.0),
            lambda step: typical_s * (ratio if steps_s[step] > typical_s else 1.0),
            lambda step: steps_s[step],
            lambda step: typical_s * (ratio if (step // 40) % 2 == first else 1.0),
        ]
    )
    group_size = rng.choice([4, 8])
    return Case(
        [items() for _ in range(rng.choice([1, 1, 2]))],
        step_s,
        group_size=group_size,
        useful=rng.choice([1.0, 1.0, 0.6, 0.3]),
        batch_size=8 * group_size,
    )


def _log_normal(mean_s: float, sigma: float) -> Sample:
    median_s = mean_s * math.exp(-(sigma**2) / 2)
    return lambda rng: median_s * math.exp(sigma * rng.gauss(0.0, 1.0))
