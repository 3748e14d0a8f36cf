"""Runs of real coordinators with memory stores in virtual time, and the invariants that hold after every event.

Heavy-tailed rollouts, mixed group sizes, weights, floors, groups sent twice; trainers that slow down, die and resume
from a checkpoint, environments that vanish and return under another id, and a hub that is killed. Time and failures are
simulated, the decisions are real. A broken invariant raises AssertionError.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atroposlib.api.run.batching import Plan, sequence_floors
from atroposlib.api.run.coordinator import Coordinator, Delivery
from atroposlib.api.run.environments import NUM_BATCHES
from atroposlib.api.run.leases import LeaseRequest
from atroposlib.api.run.types import Overloaded, RunPolicy
from atroposlib.api.schemas import EnvStatus, RegisterEnv, RegisterTrainer
from atroposlib.api.stores.base import NewGroup
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.runtime.capacity import History, Load, num_to_start
from atroposlib.scored_data import GroupHeader
from tests.api.helpers_api import environment, registration

MINUTE_S, HOUR_S = 60.0, 3600.0
ROLLOUT_S = 1200.0
"""Mean of a Pareto distribution of shape 1.8."""
MAX_STALENESS, MAX_BATCHES_OFFPOLICY = 16, 4
CHECKPOINT_STEPS = 5
POLICY = RunPolicy(env_timeout_s=600.0)
BUSY_LOOK_S, IDLE_LOOK_S = 300.0, 60.0
"""An environment asks for its status this often while its items run, and while it has none."""
MAX_LACK, MAX_PART = 4.0, 0.4
"""Groups that an environment with groups queued may lack of its share of `NUM_BATCHES` batches, and the same as a part
of it; the larger counts."""
SLOW = (8 / 24, 10 / 24)
"""From when to when trainers are three times slower; of the simulated time."""
OUTAGE = 14 / 24
"""When a third of the environments vanish; of the simulated time."""
KILLS = (4 / 24, 12 / 24, 20 / 24)
"""When the hub is killed and opens its stores again."""


class Event(NamedTuple):
    time_s: float
    number: int
    action: Callable[[Any], Awaitable[None]]
    subject: Any


@dataclass(slots=True)
class World:
    """What the runs share: virtual time, events and random numbers."""

    events: list[Event]
    numbers: Iterator[int]
    rng: random.Random
    end_s: float
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[Any], Awaitable[None]], subject: Any) -> None:
        heapq.heappush(self.events, Event(time_s, next(self.numbers), action, subject))


class Kind(NamedTuple):
    group_size: int
    weight: float
    num_workers: int = 1
    floor: float | None = None


KINDS = [Kind(8, 1.0)] * 7 + [Kind(4, 2.0)] * 2 + [Kind(16, 1.0)]
FLOORS = [Kind(8, 1.0, 32, 0.02), Kind(4, 1.0, 32, 0.01)]
"""The first environments of a run; the others are of `KINDS` in turn."""


@dataclass(slots=True, eq=False)
class Env:
    """One life of an environment's process."""

    kind: Kind
    uid: str
    env_id: int
    is_alive: bool = True
    running: dict[int, float] = field(default_factory=dict)
    """Items in flight and when they began."""
    history: History = field(default_factory=History)
    num_accepted: int = 0


class Item(NamedTuple):
    env: Env
    number: int
    version: int | None


class Training(NamedTuple):
    life: int
    delivery: Delivery


class SimulatedRun:
    """One run. Methods that take a subject are events."""

    def __init__(self, world: World, *, name: str, num_environments: int) -> None:
        self.world = world
        self.name = name
        self.num_environments = num_environments
        self.batch_size = num_environments * 2 // 16 * 16
        self.step_s = 0.8 * self.batch_size / (num_environments * 8 / ROLLOUT_S)
        """The trainer takes four fifths of the time that the environments need for a batch."""
        self.store = MemoryStore()
        self.coordinator = self._coordinator()
        self.envs: list[Env] = []
        self.num_steps = self.num_env_crashes = self.num_resumes = self.num_sent = 0
        self._life = 0
        self._epoch: int | None = None
        self._is_training = self._is_waiting = False
        self._delivered: dict[int, list[bytes]] = {}
        """Payloads by step since the last checkpoint."""
        self._trained: dict[bytes, int] = {}
        """Step at which each group was trained."""
        self._checkpoint = 0
        self._window: deque[tuple[dict[int, float], Counter[int]]] = deque(maxlen=NUM_BATCHES)
        """Per batch, the sequences that environments are entitled to and those taken from them."""

    def _coordinator(self) -> Coordinator:
        return Coordinator(self.store, policy=POLICY, clock=self.world.clock, name=self.name)

    async def start(self) -> None:
        await self.coordinator.open()
        await self._register()
        await self.ask(self._life)
        for index in range(self.num_environments):
            kind = FLOORS[index] if index < len(FLOORS) else KINDS[index % len(KINDS)]
            self.world.at(self.world.rng.uniform(0, 10 * MINUTE_S), self.join, kind)
        self.world.at(MINUTE_S, self.each_minute, self)

    # The trainer

    async def _register(self, *, resume_step: int | None = None) -> None:
        asked = registration(
            batch_size=self.batch_size,
            num_steps=10**6,
            max_staleness=MAX_STALENESS,
            experiment=self.name,
            resume_step=resume_step,
        )
        self._epoch = (await self.coordinator.register(RegisterTrainer(**asked))).epoch
        await self.coordinator.set_policy(self._checkpoint, epoch=self._epoch)
        crash_s = self.world.rng.expovariate(4 / self.world.end_s)
        self.world.at(self.world.now + crash_s, self.crash_trainer, self._life)

    async def ask(self, life: int) -> None:
        """Take the next batch if there is one; else an arrival asks again."""
        if life != self._life or self._is_training:
            return
        lease = LeaseRequest(epoch=self._epoch)
        if self._is_waiting and not self.coordinator.may_deliver(lease):
            return
        state = self.coordinator.state
        plan, is_replay = state.look(), bool(state.leases.to_replay)
        floors = sequence_floors(self.batch_size, state.environments.sums.minimums)
        delivery = await self.coordinator.deliver(lease)
        if delivery is not None:
            self._check_batch(delivery, plan, floors, is_replay=is_replay)
        self.check_ledger()
        self._is_waiting = delivery is None
        if delivery is None:
            return
        self._is_training = True
        slowness = 3.0 if SLOW[0] <= self.world.now / self.world.end_s < SLOW[1] else 1.0
        step_s = self.step_s * slowness * self.world.rng.lognormvariate(-0.125, 0.5)
        training = Training(life, delivery)
        self.world.at(self.world.now + step_s, self.finish_step, training)
        self.world.at(self.world.now + 300.0, self.heartbeat, training)

    async def heartbeat(self, training: Training) -> None:
        life, delivery = training
        if life == self._life and delivery.row.number in self.coordinator.state.leases.leased:
            await self.coordinator.heartbeat(delivery.row.number, delivery.row.lease_id)
            self.world.at(self.world.now + 300.0, self.heartbeat, training)

    async def finish_step(self, training: Training) -> None:
        life, delivery = training
        if life != self._life:
            return
        step = await self.coordinator.ack(delivery.row.number, delivery.row.lease_id)
        for payload in delivery.payloads:
            assert payload not in self._trained, f"{payload!r} trained twice"
            self._trained[payload] = step
        self.num_steps += 1
        await self.coordinator.set_policy(step, epoch=self._epoch)
        if step % CHECKPOINT_STEPS == 0:
            self._checkpoint = step
            await self.coordinator.checkpoint(step, epoch=self._epoch)
            self._delivered = {at: each for at, each in self._delivered.items() if at > step}
        self._is_training = False
        self.check_ledger()
        await self.ask(life)

    async def crash_trainer(self, life: int) -> None:
        self._life += 1
        self._is_training = self._is_waiting = False
        minutes = self.world.rng.uniform(2, 10)
        self.world.at(self.world.now + minutes * MINUTE_S, self.resume, self._life)

    async def resume(self, life: int) -> None:
        """The trainer returns with its last checkpoint; what it trained on since is trained on again."""
        self.num_resumes += 1
        trained = self._trained.items()
        self._trained = {each: step for each, step in trained if step <= self._checkpoint}
        await self._register(resume_step=self._checkpoint)
        self.check_ledger()
        await self.ask(life)

    # Environments

    async def join(self, kind: Kind) -> None:
        """A new process registers; it has no memory of an earlier one."""
        uid = f"{self.name}-{next(self.world.numbers)}"
        asked = environment(
            desired_name=f"{kind.group_size}",
            weight=kind.weight,
            group_size=kind.group_size,
            min_batch_allocation=kind.floor,
            env_uid=uid,
        )
        found = await self.coordinator.register_env(RegisterEnv(**asked))
        assert found is not None
        env = Env(kind, uid, found.env_id)
        self.envs.append(env)
        crash_s = self.world.rng.expovariate(1 / self.world.end_s)
        self.world.at(self.world.now + crash_s, self.crash_env, env)
        await self.look(env)

    async def crash_env(self, env: Env) -> None:
        """The process vanishes without disconnecting; its items are lost."""
        if not env.is_alive:
            return
        env.is_alive = False
        self.envs.remove(env)
        self.num_env_crashes += 1
        back_s = self.world.rng.uniform(1, 30) * MINUTE_S
        self.world.at(self.world.now + back_s, self.join, env.kind)

    async def lose_environments(self, _: SimulatedRun) -> None:
        for env in self.world.rng.sample(self.envs, len(self.envs) // 3):
            await self.crash_env(env)

    async def look(self, env: Env) -> None:
        """Ask for the status now and from time to time, and start items."""
        if env.is_alive:
            self._start_items(env)
            after_s = BUSY_LOOK_S if env.running else IDLE_LOOK_S
            self.world.at(self.world.now + after_s, self.look, env)

    def _start_items(self, env: Env) -> None:
        status = self.coordinator.status_env(env.env_id, env_uid=env.uid)
        if len(env.running) == env.kind.num_workers:
            return
        for _ in range(num_to_start(self._load(env, status))):
            number = next(self.world.numbers)
            env.running[number] = self.world.now
            rollout_s = ROLLOUT_S * 0.8 / 1.8 * self.world.rng.paretovariate(1.8)
            item = Item(env, number, status.policy_version)
            self.world.at(self.world.now + rollout_s, self.finish_item, item)

    def _load(self, env: Env, status: EnvStatus) -> Load:
        now, demand = self.world.now, None
        if status.trainer_step_s is not None:
            demand = env.history.demand(
                step_s=status.trainer_step_s,
                ages_s=[now - since for since in env.running.values()],
                missing_sequences=self.batch_size - status.queue_size * env.kind.group_size,
                trainer_waits_s=status.trainer_waits_s,
            )
        return Load(
            max_workers=env.kind.num_workers,
            running=len(env.running),
            group_size=env.kind.group_size,
            batch_size=self.batch_size,
            max_batches_offpolicy=MAX_BATCHES_OFFPOLICY,
            queue_size=status.queue_size,
            self_queue_size=status.self_queue_size,
            unallocated_fraction=status.unallocated_fraction,
            min_batch_allocation=env.kind.floor,
            wanted_share=status.wanted_share,
            demand=demand,
        )

    async def finish_item(self, item: Item) -> None:
        """Send the group; one of 20 is half a group, and one of 100 is sent twice."""
        env, number, version = item
        if not env.is_alive:
            return
        size = env.kind.group_size // (2 if number % 20 == 0 else 1)
        payload = number.to_bytes(5, "big")
        header = GroupHeader(
            env_id=env.env_id,
            num_sequences=size,
            num_tokens=size * 2048,
            policy_version=version,
            group_id=str(number),
            digest=number.to_bytes(16, "big"),
            num_bytes=len(payload),
        )
        group = NewGroup(header=header, payload=payload)
        try:
            [receipt] = await self.coordinator.accept([group], experiment=self.name)
        except Overloaded:
            self.world.at(self.world.now + 30.0, self.finish_item, item)
            return
        assert not receipt.is_duplicate
        self.num_sent += 1
        if number % 100 == 0:
            [receipt] = await self.coordinator.accept([group], experiment=self.name)
            assert receipt.is_duplicate
        self.check_ledger()
        env.num_accepted += 1
        env.history.add(self.world.now - env.running.pop(number), num_accepted=env.num_accepted)
        self._start_items(env)
        if self._is_waiting:
            await self.ask(self._life)

    # The hub

    async def kill_hub(self, _: SimulatedRun) -> None:
        """A new process opens the store; environments, leases and every count must be as before."""
        before = self.coordinator.ledger().model_dump(exclude={"duplicates"})
        self.coordinator = self._coordinator()
        await self.coordinator.open()
        after = self.coordinator.ledger().model_dump(exclude={"duplicates"})
        assert before == after, (before, after)
        self.check_ledger()
        if self._is_waiting:  # its request broke; it asks again
            self._is_waiting = False
            await self.ask(self._life)

    # Checks

    def check_ledger(self) -> None:
        """Every group sent is in exactly one place."""
        ledger = self.coordinator.ledger()
        places = ledger.queued + ledger.buffered + ledger.leased + ledger.trained
        ends = ledger.expired + ledger.dead + ledger.discarded + sum(ledger.rejected.values())
        assert ledger.produced == places + ends == self.num_sent, ledger

    def _check_batch(
        self, delivery: Delivery, plan: object, floors: dict[int, int], *, is_replay: bool
    ) -> None:
        """The batch is exact, honours or waives each floor, is not too old, and is the same when repeated."""
        state = self.coordinator.state
        headers = state.leases.held(delivery.row.number, delivery.row.lease_id).headers
        assert sum(header.num_sequences for header in headers) == self.batch_size
        earlier = self._delivered.setdefault(delivery.row.step, delivery.payloads)
        assert earlier == delivery.payloads, (
            f"step {delivery.row.step} was replayed with other groups"
        )
        if is_replay:
            return
        assert max(delivery.staleness) <= MAX_STALENESS
        taken: Counter[int] = Counter()
        for header in headers:
            assert header.env_id is not None
            taken[header.env_id] += header.num_sequences
        if isinstance(plan, Plan) and list(plan.groups) == list(headers):
            for env_id, floor in floors.items():
                assert taken[env_id] >= floor or env_id in plan.waived
        active = [each for each in state.environments if each.is_active]
        by_weight = self.batch_size * state.environments.sums.unallocated
        by_weight /= sum(each.demand for each in active)
        entitled = {
            each.env_id: each.share * self.batch_size + each.demand * by_weight for each in active
        }
        self._window.append((entitled, taken))
        self._check_order(headers, floors)
        self._check_shares()

    def _check_order(self, headers: Sequence[GroupHeader], floors: dict[int, int]) -> None:
        """Of each size the batch took the oldest groups, but for floors and at most one group that was overdue."""
        oldest_left: dict[int, int] = {}
        for header in self.coordinator.state.queue:
            if header.env_id not in floors:
                oldest_left.setdefault(header.num_sequences, header.number)
        overtaking = [
            header
            for header in headers
            if header.env_id not in floors
            and header.number > oldest_left.get(header.num_sequences, header.number)
        ]
        assert len(overtaking) <= 1, f"{overtaking} taken before {oldest_left}"

    def _check_shares(self) -> None:
        """Over the last batches an environment got what its weight and floor entitle it to, or all that it sent.

        It may lack a little, since groups are not split, and older ones of others come first.
        """
        if len(self._window) < NUM_BATCHES:
            return
        queue = self.coordinator.state.queue
        for env in self.envs:
            env_id = env.env_id
            if not all(env_id in entitled for entitled, _ in self._window):
                continue
            got = sum(taken[env_id] for _, taken in self._window)
            share = sum(entitled[env_id] for entitled, _ in self._window)
            lack = (min(share, got + queue.num_sequences(env_id)) - got) / env.kind.group_size
            limit = max(MAX_LACK, MAX_PART * share / env.kind.group_size)
            assert lack <= limit, f"environment {env_id} lacks {lack} groups of {env.kind}"

    async def each_minute(self, _: SimulatedRun) -> None:
        is_changed = await self.coordinator.tick()
        if is_changed and self._is_waiting:
            await self.ask(self._life)
        self.world.at(self.world.now + MINUTE_S, self.each_minute, self)


async def simulate(
    *, num_runs: int, num_environments: int, hours: float, seed: int = 0
) -> list[SimulatedRun]:
    """Simulate runs of `num_environments` together, with the failures of a day in these hours.

    Raises AssertionError at the first broken invariant.
    """
    events: list[Event] = []
    world = World(events, itertools.count(), random.Random(seed), hours * HOUR_S)
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
