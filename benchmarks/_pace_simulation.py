"""A trainer, a hub's queue and environments in virtual time, for `pace.py` and the tests of `runtime/capacity.py`."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

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
    queued: int = 0
    running: dict[int, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    num_given: int = 0
    num_taken: int = 0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=4))
    """Sequences in the last batches."""
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


def simulate(
    environments: list[Environment],
    *,
    batch_size: int,
    step_s: Callable[[int], float],
    max_batches_offpolicy: int = 3,
    num_steps: int = 300,
    num_before: int = 50,
    seed: int = 0,
    default_workers: int = 8,
) -> Outcome:
    """Run until `num_steps` batches are taken; the first `num_before` are not counted."""
    rng = random.Random(seed)
    events: list[tuple[float, int, Environment | None, int]] = []
    keys = itertools.count()
    queue: deque[tuple[Environment, int]] = deque()
    now = began = waited = 0.0
    version = num_taken = 0
    busy: deque[float] = deque(maxlen=4)
    asked_at: float | None = None
    staleness: list[int] = []

    def queued_sequences() -> int:
        return sum(each.queued * each.group_size for each in environments)

    def demand(env: Environment) -> Demand | None:
        if env.num_workers is not None or not busy:
            return None
        return env.history.demand(
            step_s=statistics.median(busy),
            ages_s=[now - since for since in env.running.values()],
            missing_sequences=batch_size - queued_sequences(),
            trainer_waits_s=None if asked_at is None else now - asked_at,
        )

    def start() -> None:
        for env in environments:
            load = Load(
                max_workers=env.num_workers or 512,
                running=len(env.running),
                group_size=env.group_size,
                batch_size=batch_size,
                max_batches_offpolicy=max_batches_offpolicy,
                queue_size=queued_sequences() // env.group_size,
                self_queue_size=env.queued,
                weight=env.weight,
                recent_share=sum(env.recent) / batch_size / max(1, len(env.recent)),
                demand=(asked := demand(env)),
            )
            num = num_to_start(load)
            if asked is None and env.num_workers is None:
                num = min(num, max(0, default_workers - len(env.running)))
            for _ in range(num):
                key = next(keys)
                env.running[key] = now
                heapq.heappush(events, (now + env.duration_s(rng), key, env, version))

    def take() -> None:
        nonlocal asked_at, began, waited, num_taken
        if asked_at is None or queued_sequences() < batch_size:
            return
        if num_taken == num_before:
            began, waited = now, 0.0
            staleness.clear()
        elif num_taken > num_before:
            waited += now - asked_at
        size = 0
        for each in environments:
            each.recent.append(0)
        while size < batch_size:
            env, sampled = queue.popleft()
            env.queued -= 1
            env.num_taken += num_taken >= num_before
            env.recent[-1] += env.group_size
            size += env.group_size
            staleness.append(version - sampled)
        asked_at = None
        heapq.heappush(events, (now + step_s(num_taken), next(keys), None, STEP))
        num_taken += 1

    asked_at = now
    start()
    while num_taken < num_steps:
        now, key, env, sampled = heapq.heappop(events)
        if env is None and sampled == STEP:
            version += 1
            busy.append(step_s(num_taken - 1))
            asked_at = now
            for each in environments:
                each.in_flight.append(len(each.running))
        elif env is not None:
            if rng.random() < env.groups_per_item:
                queue.append((env, sampled))
                env.queued += 1
                env.num_given += 1
            env.history.add(now - env.running.pop(key), num_accepted=env.num_given)
        take()
        start()
        if env is None and asked_at is not None:
            heapq.heappush(events, (now + TICK_S, next(keys), None, TICK))
    total = sum(each.num_taken for each in environments)
    return Outcome(
        waits=waited / (now - began),
        staleness=statistics.fmean(staleness),
        max_staleness=max(staleness),
        groups_in_flight=[each.in_flight for each in environments],
        shares=[each.num_taken / total for each in environments],
    )
