"""A trainer, a hub's queue and environments in virtual time, and random settings of them."""

from __future__ import annotations

import heapq
import itertools
import math
import random
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
    shares: list[float]
    """Of the groups taken, per environment."""
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
    version = num_taken = 0
    waits_s: list[float] = []

    def queued_sequences() -> int:
        return sum(each.queued * each.group_size for each in environments)

    def is_too_old(sampled: int) -> bool:
        return max_staleness is not None and version - sampled > max_staleness

    def expire() -> None:
        for _ in range(len(queue)):
            index, sampled = queue.popleft()
            if is_too_old(sampled):
                environments[index].queued -= 1
            else:
                queue.append((index, sampled))

    def demand(env: Environment) -> Demand | None:
        if times.step_s is None:
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
                max_workers=env.max_workers(version),
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
            if asked is None:
                num = min(num, max(0, default_workers - len(env.running)))
            for _ in range(num):
                key = next(keys)
                env.running[key] = now
                ends_at = now + env.duration_s(rng) * env.slowness(version)
                heapq.heappush(events, (ends_at, key, index, version))

    def take() -> bool:
        nonlocal began, waited_before, num_taken
        waited_s = times.waits_s(now, num_held=0)
        if waited_s is None or queued_sequences() < batch_size:
            return False
        waits_s.append(waited_s)
        times.deliver(now, [], version=version, is_plain=True, num_held=0)
        if num_taken == num_before:
            began, waited_before = now, times.waited_s
        taken: Counter[int | None] = Counter()
        while taken.total() < batch_size:
            index, _ = queue.popleft()
            env = environments[index]
            env.queued -= 1
            env.num_taken += num_taken >= num_before
            taken[index] += env.group_size
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
                if not is_too_old(sampled):
                    queue.append((index, sampled))
                    env.queued += 1
            env.history.add(now - env.running.pop(key), num_accepted=env.num_given)
        start([index] if not take() and index is not None else everyone)
        if index is None and times.waits_s(now, num_held=0) is not None:
            heapq.heappush(events, (now + TICK_S, next(keys), None, TICK))
    total = sum(each.num_taken for each in environments)
    return Outcome(
        waits=(times.waited_s - waited_before) / (now - began),
        shares=[each.num_taken / total for each in environments],
        waits_s=waits_s,
    )


NUM_BEFORE = 40
"""Steps before anything counts."""


class Findings(NamedTuple):
    """What one setting showed."""

    waits: float
    """Share of the time in which the trainer waits."""
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
        amplitude=expected[int(0.95 * len(expected))] - expected[int(0.05 * len(expected))],
        drift=max(abs(share - env.weight) for share, env in shares) * groups_per_batch,
    )


class Case(NamedTuple):
    """Items of one kind, and a trainer that can be fed by them."""

    items_s: Sample
    """Duration of an item."""
    step_s: Callable[[int], float]
    group_size: int = 4

    def simulate(self, *, num_steps: int) -> Outcome:
        return simulate(
            [Environment(duration_s=self.items_s, group_size=self.group_size)],
            batch_size=64,
            step_s=self.step_s,
            max_staleness=4,
            num_steps=num_steps,
            num_before=num_steps // 3,
        )


def slowest(item_s: Sample, num: int) -> Sample:
    """Return the duration of the slowest of several answers."""
    return lambda rng: max(item_s(rng) for _ in range(num))


CASES: dict[str, Case] = {
    "a tenth takes 60 s": Case(lambda rng: 60 if rng.random() < 0.1 else 1, lambda _: 5.0),
    "Pareto 1.1": Case(
        slowest(lambda rng: rng.paretovariate(1.1), 8), lambda _: 10.0, group_size=8
    ),
    "steps of 1 s and 9 s": Case(
        slowest(lambda rng: rng.expovariate(1 / 2), 4), lambda step: (1.0, 9.0)[step % 2]
    ),
}


def _log_normal(mean_s: float, sigma: float) -> Sample:
    median_s = mean_s * math.exp(-(sigma**2) / 2)
    return lambda rng: median_s * math.exp(sigma * rng.gauss(0.0, 1.0))
