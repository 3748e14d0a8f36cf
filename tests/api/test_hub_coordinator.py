"""The run as a state machine: nothing leaks, whatever the order of events, restarts included."""

from __future__ import annotations

import asyncio
import copy
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atroposlib.api.run.coordinator import Coordinator, Delivery
from atroposlib.api.run.environments import EnvironmentNotFound, TooManyEnvironments
from atroposlib.api.run.leases import LeaseLost, LeaseRequest, Superseded, UnknownBatch
from atroposlib.api.run.types import Overloaded, Receipt, RunPolicy, RunReset
from atroposlib.api.schemas import (
    EnvRegistration,
    Ledger,
    RegisterEnv,
    RegisterTrainer,
    RegistrationReply,
    StatusQuery,
)
from atroposlib.api.stores.base import (
    Appended,
    Change,
    CorruptGroups,
    NewGroup,
    StoreFull,
    UnreadableRun,
)
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.errors import GroupError
from atroposlib.scored_data import GroupHeader
from tests.api.helpers_api import environment, registration
from tests.builders.clocks import Clock

T = TypeVar("T")


def incoming(
    num_sequences: int,
    *,
    env_id: int | None = None,
    group_id: str | None = None,
    tag: int = 0,
    version: int | None = None,
) -> NewGroup:
    header = GroupHeader(
        env_id=env_id,
        num_sequences=num_sequences,
        num_tokens=10 * num_sequences,
        policy_version=version,
        group_id=group_id or uuid.uuid4().hex,
        digest=b"" if group_id is None else str(tag).encode().rjust(16),
        num_bytes=len(str(tag)),
    )
    return NewGroup(header=header, payload=str(tag).encode())


async def started(
    batch_size: int = 4,
    policy: RunPolicy | None = None,
    store: MemoryStore | None = None,
    **changes: Any,
) -> Coordinator:
    coordinator = Coordinator(store or MemoryStore(), policy=policy, **changes)
    await coordinator.open()
    await coordinator.register(RegisterTrainer(**registration(batch_size=batch_size)))
    assert await coordinator.deliver() is None
    return coordinator


async def resumed(coordinator: Coordinator, step: int, **changes: Any) -> RegistrationReply:
    trainer = coordinator.state.trainer
    assert trainer is not None
    fields = registration(batch_size=trainer.batch_size) | {"resume_step": step} | changes
    return await coordinator.register(RegisterTrainer(**fields))


async def joined(coordinator: Coordinator, **changes: Any) -> EnvRegistration:
    reply = await coordinator.register_env(RegisterEnv(**environment(**changes)))
    assert reply is not None
    return reply


async def trained(coordinator: Coordinator) -> Delivery:
    """Take a batch and acknowledge it."""
    batch = await leased(coordinator)
    await coordinator.ack(batch.row.number, batch.row.lease_id)
    return batch


async def leased(coordinator: Coordinator, **changes: Any) -> Delivery:
    delivery = await coordinator.deliver(LeaseRequest(**changes))
    assert delivery is not None
    return delivery


def tags(delivery: Delivery | None) -> list[int]:
    return [] if delivery is None else [int(payload) for payload in delivery.payloads]


def check_balance(ledger: Ledger) -> None:
    fields = ledger.model_dump(exclude={"produced", "duplicates", "rejected", "dead_reasons"})
    assert ledger.produced == sum(fields.values()) + sum(ledger.rejected.values()), ledger


async def restarted(coordinator: Coordinator, store: MemoryStore, **changes: Any) -> Coordinator:
    again = Coordinator(store, policy=coordinator.policy, **changes)
    await again.open()
    return again


async def test_group_that_fits_badly_is_not_passed_over_for_ever() -> None:
    coordinator = await started(batch_size=8)
    await coordinator.accept([incoming(5, tag=5)])
    for _ in range(12):
        await coordinator.accept([incoming(size, tag=size) for size in (2, 6, 1, 7)])
        for _ in range(2):
            batch = await trained(coordinator)
            if 5 in tags(batch):
                assert 8 <= batch.row.step <= 12
                return
    raise AssertionError("the group of 5 was never delivered")


async def test_refused_group_leaves_no_trace_and_may_come_again_corrected() -> None:
    coordinator = await started()
    with pytest.raises(GroupError, match=r"^tokens: 5 sequences, but a batch holds 4"):
        await coordinator.accept([incoming(5, group_id="a")])
    assert await coordinator.accept([incoming(4, group_id="a")]) == [Receipt()]
    assert await coordinator.deliver() is not None


async def test_queue_that_cannot_make_a_batch_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = await started(batch_size=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await coordinator.accept([incoming(3)])
            assert await coordinator.deliver() is None
    assert caplog.text.count("there is no batch although enough is queued") == 1


async def test_repeated_acknowledgement_is_known_after_a_restart() -> None:
    store = MemoryStore()
    coordinator = await started(2, policy=RunPolicy(keep_trained_batches=0), store=store)
    await coordinator.accept([incoming(2)])
    batch = await trained(coordinator)
    coordinator = await restarted(coordinator, store)
    assert await coordinator.ack(batch.row.number, batch.row.lease_id) == 1


@pytest.mark.parametrize("version", [2, 50])
async def test_policy_version_stands_after_a_resume_until_another_is_published(
    version: int,
) -> None:
    coordinator = await started(batch_size=2, policy=RunPolicy(max_staleness=1))
    await coordinator.set_policy(version)
    await coordinator.accept([incoming(2, version=version, tag=tag) for tag in range(10)])
    await resumed(coordinator, 20)
    await coordinator.tick()
    ledger = coordinator.ledger()
    assert (coordinator.state.current_version, ledger.queued, ledger.expired) == (version, 10, 0)
    await coordinator.set_policy(version + 2)
    await coordinator.tick()
    assert coordinator.ledger().expired == 10


async def test_full_registry_gives_away_the_place_that_was_silent_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atroposlib.api.run.environments.MAX_ENVIRONMENTS", 2)
    coordinator = await started()
    for name in ("a", "b"):
        await joined(coordinator, desired_name=name)
    with pytest.raises(TooManyEnvironments):
        await joined(coordinator, desired_name="c")
    await coordinator.disconnect_env(0)
    reply = await joined(coordinator, desired_name="c")
    assert (reply.env_id, reply.wandb_name) == (0, "c_0")


async def test_expired_lease_returns_its_groups_first_and_a_late_ack_is_refused() -> None:
    clock = Clock(1000.0)
    coordinator = await started(batch_size=2, clock=clock)
    await coordinator.accept([incoming(2, tag=tag) for tag in (1, 2)])
    late = await leased(coordinator, ttl_s=10.0)
    clock.now_s += 9
    assert await coordinator.heartbeat(late.row.number, late.row.lease_id) == 10.0
    clock.now_s += 9
    assert tags(await leased(coordinator)) == [2]
    clock.now_s += 2
    second = await leased(coordinator)
    assert tags(second) == tags(late) == [1]
    with pytest.raises(LeaseLost, match="expired"):
        await coordinator.ack(late.row.number, late.row.lease_id)
    assert coordinator.ledger().trained == 0
    assert await coordinator.ack(second.row.number, second.row.lease_id) == second.row.step


async def test_step_of_a_batch_that_came_back_is_given_out_again() -> None:
    coordinator = await started(batch_size=2)
    await coordinator.accept([incoming(2, tag=tag) for tag in (1, 2, 3)])
    first, second = await leased(coordinator), await leased(coordinator)
    await coordinator.release(first.row.number, first.row.lease_id)
    assert coordinator.status().current_step == 1
    again = await leased(coordinator)
    assert (first.row.step, second.row.step, again.row.step) == (1, 2, 1)
    assert coordinator.status().current_step == 2
    await leased(coordinator)
    for held in ("3 batches are", "2 batches are", "1 batch is"):
        assert f"; {held} leased to the trainer" in coordinator.explain().reason
        batch = next(iter(coordinator.state.leases.leased.values())).row
        await coordinator.ack(batch.number, batch.lease_id)


async def test_same_request_id_returns_the_same_open_batch() -> None:
    coordinator = await started(batch_size=2)
    await coordinator.accept([incoming(2, tag=tag) for tag in (1, 2)])
    first = await leased(coordinator, request_id="r")
    again = await leased(coordinator, request_id="r")
    assert (again.row.number, again.row.lease_id, tags(again)) == (
        first.row.number,
        first.row.lease_id,
        [1],
    )
    await coordinator.ack(first.row.number, first.row.lease_id)
    assert tags(await leased(coordinator, request_id="r")) == [2]


async def test_batch_whose_answer_was_lost_counts_once() -> None:
    """Once in the shares, the staleness, the tokens and the trainer's times, however often it is delivered."""
    clock = Clock(1000.0)
    coordinator = await started(batch_size=4, clock=clock)
    await coordinator.set_policy(0)
    for name in ("first", "second"):
        await joined(coordinator, desired_name=name)
    await coordinator.accept([incoming(4, env_id=0, version=0)])
    first = await leased(coordinator, request_id="r")
    counted = coordinator.status_env(0)
    assert (counted.staleness, counted.wanted_share, coordinator.tokens_out) == (0.0, 1.0, 40)
    # A second record of the batch would differ: its groups are older now, and the other environment has queued some.
    await coordinator.set_policy(4)
    await coordinator.accept([incoming(4, env_id=1)])
    clock.now_s += 30
    again = await leased(coordinator, request_id="r")
    assert (first.is_repeated, again.is_repeated, again.staleness) == (False, True, [4])
    now = coordinator.status_env(0)
    assert (now.staleness, now.wanted_share, coordinator.tokens_out) == (0.0, 1.0, 40)
    # The repeated request is answered: after the batch, the trainer works until it asks again.
    await coordinator.ack(again.row.number, again.row.lease_id)
    assert coordinator.explain().trainer_waits_s is None


@pytest.mark.parametrize(
    "come_back",
    [
        lambda run, batch: run.release(batch.row.number, batch.row.lease_id),
        lambda run, batch: run.reject_groups(batch.row.number, batch.row.lease_id, [1], reason="x"),
        lambda run, batch: resumed(run, batch.row.step - 1),
        lambda run, batch: resumed(run, batch.row.step - 1, resume="requeue"),
    ],
    ids=["released", "rejected", "replayed", "requeued"],
)
async def test_batch_that_was_leased_twice_counts_once_in_the_shares(
    come_back: Callable[[Coordinator, Delivery], Awaitable[object]],
) -> None:
    runs = [await started(batch_size=16), await started(batch_size=16)]
    for run in runs:
        for name in ("first", "second"):
            await joined(run, desired_name=name)
        # The second batch has 5 groups of the first environment and leaves one of the second.
        for num_first in (4, 5):
            groups = [incoming(2, env_id=0, tag=tag) for tag in range(num_first)]
            await run.accept([*groups, *(incoming(2, env_id=1) for _ in range(4))])
            batch = await leased(run)
            if num_first == 4:
                await run.ack(batch.row.number, batch.row.lease_id)
    await come_back(run, batch)
    await run.requeue_dead([dead.number for dead in run.dead()])
    assert tags(await leased(run)) == tags(batch)
    once, twice = ([run.status_env(env_id).wanted_share for env_id in (0, 1)] for run in runs)
    assert once == twice != [0.5, 0.5]


async def test_group_that_no_trainer_survives_is_set_aside_and_can_come_back() -> None:
    coordinator = await started(batch_size=2, policy=RunPolicy(max_deliveries=3))
    await coordinator.accept([incoming(2, tag=7)])
    for _ in range(3):
        batch = await leased(coordinator)
        await coordinator.release(batch.row.number, batch.row.lease_id)
    assert await coordinator.deliver() is None
    [dead] = coordinator.dead()
    assert dead.reason == "leased 3 times without an acknowledgement"
    check_balance(coordinator.ledger())
    assert await coordinator.requeue_dead([dead.number, 99]) == 1
    assert tags(await leased(coordinator)) == [7]


async def test_a_dead_group_that_is_too_old_to_train_on_is_not_requeued_to_expire() -> None:
    policy = RunPolicy(max_staleness=1, max_deliveries=1)
    coordinator = await started(batch_size=2, policy=policy)
    for version in (0, 4):
        await coordinator.accept([incoming(2, version=version)])
        batch = await leased(coordinator)
        await coordinator.release(batch.row.number, batch.row.lease_id)
    await coordinator.set_policy(5)
    assert await coordinator.requeue_dead([0, 1]) == 1
    await coordinator.tick()
    ledger = coordinator.ledger()
    assert (ledger.queued, ledger.dead, ledger.expired) == (1, 1, 0)
    assert coordinator.explain().dead == {"sampled before policy version 4": 1}


async def test_damaged_group_is_set_aside_and_the_others_are_delivered() -> None:
    class Damaged(MemoryStore):
        async def read(self, numbers: Any) -> list[bytes]:
            if 0 in numbers:
                raise CorruptGroups([0])
            return await super().read(numbers)

    coordinator = await started(4, store=Damaged())
    await coordinator.accept([incoming(2, tag=tag) for tag in range(3)])
    assert tags(await leased(coordinator)) == [1, 2]
    assert [dead.reason for dead in coordinator.dead()] == ["damaged in the store"]
    check_balance(coordinator.ledger())


@pytest.mark.parametrize("mode", ["replay", "requeue", "discard"])
async def test_resumed_trainer_gets_what_came_after_its_checkpoint(mode: str) -> None:
    coordinator = await started(batch_size=2)
    await coordinator.accept([incoming(2, tag=tag) for tag in range(5)])
    for _ in range(3):
        await trained(coordinator)
    held = await leased(coordinator)
    reply = await resumed(coordinator, 1, resume=mode)
    assert (reply.epoch, reply.step) == (1, 1)
    counts = (reply.replayed, reply.requeued, reply.discarded)
    assert counts == {"replay": (3, 0, 0), "requeue": (0, 3, 0), "discard": (0, 0, 3)}[mode]
    check_balance(coordinator.ledger())
    with pytest.raises(LeaseLost):
        await coordinator.ack(held.row.number, held.row.lease_id)
    seen = []
    while (delivery := await coordinator.deliver(LeaseRequest())) is not None:
        seen.append((delivery.row.step, *tags(delivery)))
    expected = [4] if mode == "discard" else [1, 2, 3, 4]
    assert seen == list(enumerate(expected, start=2))


class SlowAppends(MemoryStore):
    """Appended groups are acknowledged when the event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def append(
        self, groups: Sequence[NewGroup], *, refusal: StoreFull | None = None
    ) -> list[Appended]:
        outcomes = await super().append(groups, refusal=refusal)
        await self.may_answer.wait()
        return outcomes


class SlowFirstRead(MemoryStore):
    """The first look at payloads takes until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.num_reads = 0

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        self.num_reads += 1
        if self.num_reads == 1:
            await self.go_on.wait()
        return await super().read(numbers)


@pytest.mark.parametrize("is_freed", [False, True])
async def test_request_that_was_repeated_takes_no_batch_of_its_own(is_freed: bool) -> None:
    store = SlowFirstRead()
    coordinator = await started(batch_size=2, store=store)
    await coordinator.accept([incoming(2, tag=tag) for tag in range(2)])
    given_up = asyncio.create_task(coordinator.deliver(LeaseRequest(request_id="r")))
    await asyncio.sleep(0.01)
    batch = await leased(coordinator, request_id="r")
    await coordinator.ack(batch.row.number, batch.row.lease_id)
    if is_freed:
        await coordinator.checkpoint(batch.row.step)
    store.go_on.set()
    assert await given_up is None
    following = await leased(coordinator, request_id="s")
    assert (tags(following), following.row.step) == ([1], 2)


async def test_request_that_waits_is_over_when_it_is_repeated() -> None:
    coordinator = await started(batch_size=2)
    waiting = LeaseRequest(request_id="r")
    assert await coordinator.deliver(waiting) is None
    assert await coordinator.deliver(LeaseRequest(request_id="r")) is None
    await coordinator.accept([incoming(2, tag=0)])
    assert await coordinator.deliver(waiting) is None
    assert tags(await leased(coordinator, request_id="s")) == [0]


async def test_superseded_trainer_takes_and_lets_go_of_nothing() -> None:
    coordinator = await started(batch_size=2)
    await coordinator.accept([incoming(2, tag=tag) for tag in range(3)])
    old = await leased(coordinator, epoch=0)
    await coordinator.ack(old.row.number, old.row.lease_id)
    assert (await resumed(coordinator, 1)).epoch == 1
    assert coordinator.may_deliver(LeaseRequest(epoch=0))  # a waiting request is refused at once
    with pytest.raises(Superseded, match="it has epoch 1, this one 0"):
        await coordinator.deliver(LeaseRequest(epoch=0))
    for call in (coordinator.checkpoint(1, epoch=0), coordinator.set_policy(50, epoch=0)):
        with pytest.raises(Superseded):
            await call
    assert coordinator.status().policy_version is None
    assert coordinator.ledger().leased == 0
    assert await coordinator.checkpoint(1, epoch=1) == 1
    assert tags(await leased(coordinator, epoch=1)) == [1]
    assert tags(await leased(coordinator)) == [2]


async def test_resume_says_how_many_steps_are_no_longer_held() -> None:
    coordinator = await started(batch_size=2, policy=RunPolicy(keep_trained_batches=2))
    await coordinator.accept([incoming(2, tag=tag) for tag in range(5)])
    for _ in range(5):
        await trained(coordinator)
    reply = await resumed(coordinator, 1)
    assert (reply.forgotten_steps, reply.replayed) == (2, 2)


async def test_a_checkpoint_newer_than_the_restored_run_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    coordinator = await started(batch_size=2, store=store)
    await coordinator.accept([incoming(2, tag=tag) for tag in range(9)])
    for _ in range(2):
        await trained(coordinator)
    await leased(coordinator)  # trained, and acknowledged, after the backup
    backup = MemoryStore()
    held = {name: value for name, value in vars(store).items() if name != "_space"}
    vars(backup).update(copy.deepcopy(held))
    for _ in range(3):
        await trained(coordinator)
    assert (await resumed(coordinator, 5)).unknown_steps == 0  # without a restore
    restored = await restarted(coordinator, backup)
    assert (await resumed(restored, 2)).unknown_steps == 0
    assert (await resumed(restored, 5)).unknown_steps == 3
    assert "a trainer resumes at step 5 (epoch 2): " in caplog.text
    assert "unknown_steps 3" in caplog.text
    assert tags(await trained(restored)) == [2]  # again: the run cannot know better
    assert (await resumed(restored, 6)).unknown_steps == 0
    again = await restarted(restored, backup)
    assert again.explain().unknown_steps == 3


async def test_replayed_batches_keep_their_groups_and_order_over_a_restart() -> None:
    """The minimum that made them holds no more: the policy would now choose others."""
    store = MemoryStore()
    coordinator = await started(4, store=store)
    for name, share in (("a", None), ("b", 0.5)):
        await joined(coordinator, desired_name=name, min_batch_allocation=share)
    for env_id in (0, 1):
        await coordinator.accept([incoming(2, env_id=env_id, tag=2 * n + env_id) for n in range(5)])
    batches = [tags(await trained(coordinator)) for _ in range(3)]
    assert batches == [[0, 1], [2, 3], [4, 5]]
    await coordinator.disconnect_env(1)
    await resumed(coordinator, 0)
    again = [tags(await leased(coordinator))]
    coordinator = await restarted(coordinator, store)
    again += [tags(await leased(coordinator)) for _ in range(2)]
    assert again == batches
    assert tags(await leased(coordinator)) == [6, 8]


async def test_stale_groups_expire_and_are_counted() -> None:
    coordinator = await started(batch_size=2, policy=RunPolicy(max_staleness=1))
    await coordinator.accept([incoming(2, tag=1, version=0), incoming(2, tag=2)])
    await coordinator.set_policy(2)
    await coordinator.tick()
    await coordinator.accept([incoming(2, tag=3)])
    assert tags(await leased(coordinator)) == [3]
    ledger = coordinator.ledger()
    assert (ledger.expired, ledger.leased) == (2, 1)
    check_balance(ledger)


async def test_trainer_may_ask_for_its_own_staleness_bound() -> None:
    coordinator = Coordinator(MemoryStore(), policy=RunPolicy(max_staleness=0))
    await coordinator.open()
    await coordinator.register(RegisterTrainer(**registration(batch_size=2, max_staleness=5)))
    await coordinator.accept([incoming(2, tag=1, version=0)])
    await coordinator.set_policy(5)
    assert tags(await leased(coordinator)) == [1]


async def test_silent_environment_suspends_its_minimum_until_it_is_heard_of() -> None:
    clock = Clock(1000.0)
    coordinator = await started(batch_size=4, clock=clock, policy=RunPolicy(env_timeout_s=60))
    for name in ("a", "b"):
        share = 0.5 if name == "b" else None
        await joined(coordinator, desired_name=name, min_batch_allocation=share)
    await coordinator.accept([incoming(2, env_id=0, tag=tag) for tag in (1, 2)])
    assert await coordinator.deliver() is None
    why = coordinator.explain()
    assert (why.blocker, why.env_id, why.have, why.need) == ("minimum", 1, 0, 2)
    clock.now_s += 61
    coordinator.status_env(0)
    assert tags(await coordinator.deliver()) == [1, 2]
    assert [view.state for view in coordinator.explain().environments] == ["silent", "active"]
    assert coordinator.status_env(0).env_weight == 1.0
    assert coordinator.status_env(1).env_weight == 0.5


async def test_odd_groups_of_an_environment_that_left_are_queued() -> None:
    coordinator = await started(batch_size=6)
    await joined(coordinator, group_size=4)
    receipts = await coordinator.accept([incoming(3, env_id=0, tag=n) for n in (1, 2)])
    assert receipts == [Receipt(env_id=0, buffer_size=3), Receipt(env_id=0, buffer_size=6)]
    assert await coordinator.deliver() is None
    await coordinator.disconnect_env(0)
    assert tags(await coordinator.deliver()) == [1, 2]


async def test_restarted_environment_takes_over_the_name_of_the_one_that_left() -> None:
    coordinator = await started()
    first = await joined(coordinator, env_uid="u")
    await coordinator.disconnect_env(0)
    again = await joined(coordinator, env_uid="v")
    assert again == first


async def test_queue_over_its_bound_refuses_only_while_a_batch_can_be_cut() -> None:
    coordinator = await started(batch_size=4, policy=RunPolicy(max_queued_sequences=6))
    await coordinator.accept([incoming(3, tag=1), incoming(3, tag=2)])
    assert coordinator.overload() is None  # 3 + 3 is no batch of 4: what is missing must get in
    await coordinator.accept([incoming(1, tag=3)])
    assert (
        coordinator.overload() == "7 sequences are queued, the bound is 6 (--max-queued-sequences)"
    )
    with pytest.raises(Overloaded):
        await coordinator.accept([incoming(1, tag=4)])
    assert tags(await coordinator.deliver()) == [1, 3]
    await coordinator.accept([incoming(1, tag=4)])


async def test_environment_beyond_its_share_does_not_take_the_room_of_others() -> None:
    coordinator = await started(batch_size=4, policy=RunPolicy(max_queued_sequences=4))
    for share in (None, 0.5):
        await joined(coordinator, min_batch_allocation=share)
    await coordinator.accept([incoming(2, env_id=0), incoming(2, env_id=0)])
    with pytest.raises(Overloaded, match="environment 0"):
        await coordinator.accept([incoming(2, env_id=0)])
    await coordinator.accept([incoming(2, env_id=1)])
    assert await coordinator.deliver() is not None


async def test_restart_brings_back_trainer_environments_step_and_leases() -> None:
    store, clock = MemoryStore(), Clock(1000.0)
    coordinator = await started(2, store=store, clock=clock)
    await joined(coordinator, group_size=2)
    await coordinator.set_policy(3)
    await coordinator.accept([incoming(2, env_id=0, tag=tag) for tag in (1, 2, 3)])
    await coordinator.accept([incoming(1, env_id=0, tag=4)])
    coordinator.reject("invalid")
    trained, open_lease = await leased(coordinator), await leased(coordinator)
    await coordinator.ack(trained.row.number, trained.row.lease_id)
    before = (coordinator.ledger(), coordinator.status(), coordinator.info())

    coordinator = Coordinator(store, clock=clock)
    found = await coordinator.open()

    assert "1 groups queued, 1 buffered, 1 leased, 1 trained" in found
    assert (coordinator.ledger(), coordinator.status(), coordinator.info()) == before
    assert coordinator.status_env(0).policy_version == 3
    assert await coordinator.ack(open_lease.row.number, open_lease.row.lease_id) == 2
    assert await coordinator.ack(trained.row.number, trained.row.lease_id) == 1
    await coordinator.accept([incoming(1, env_id=0, tag=5)])
    assert [tags(await leased(coordinator)) for _ in range(2)] == [[3], [4, 5]]


async def test_a_change_writes_only_the_environment_that_it_is_about() -> None:
    class Recording(MemoryStore):
        last = Change()

        async def commit(self, change: Change) -> None:
            self.last = change
            await super().commit(change)

    store = Recording()
    coordinator = await started(store=store)
    document_bytes = len(store.last.document or b"")
    for n in range(100):
        name = f"{n:03}".ljust(128, "x")
        await joined(coordinator, desired_name=name)
        assert len(store.last.facts) == 1
        assert len(store.last.facts[f"environment {n:08}"]) < 600
        assert len(store.last.document or b"") == document_bytes
    await coordinator.disconnect_env(7)
    assert list(store.last.facts) == ["environment 00000007"]
    await coordinator.set_policy(1)
    assert store.last.facts == {}
    again = await restarted(coordinator, store)
    assert (await joined(again, desired_name="007".ljust(128, "x"))).env_id == 7


async def test_environments_that_the_next_experiment_takes_over_survive_a_restart() -> None:
    earlier = await started()
    await joined(earlier, desired_name="living")
    store = MemoryStore()
    following = await started(store=store)
    for name in ("replaced", "gone"):
        await joined(following, desired_name=name)
    await following.take_over(earlier)
    for run in (following, await restarted(following, store)):
        states = [(each.name, each.state) for each in run.explain().environments]
        assert states == [("living_0", "active"), ("gone_0", "disconnected")]


async def test_a_name_longer_than_128_characters_is_refused() -> None:
    RegisterEnv(**environment(desired_name="x" * 128))
    with pytest.raises(ValueError, match="at most 128 characters"):
        RegisterEnv(**environment(desired_name="x" * 129))


async def test_a_group_in_a_batch_that_is_not_stored_makes_the_run_unreadable() -> None:
    store = MemoryStore()
    coordinator = await started(2, store=store)
    await coordinator.accept([incoming(2)])
    batch = await leased(coordinator)
    del store._batches[batch.row.number]
    with pytest.raises(UnreadableRun, match="'default' cannot be read"):
        await restarted(coordinator, store)


async def test_refusals_are_counted_over_a_clean_stop() -> None:
    store = MemoryStore()
    coordinator = Coordinator(store)
    await coordinator.open()
    coordinator.reject("invalid")
    await coordinator.close()
    assert (await restarted(coordinator, store)).ledger().rejected == {"invalid": 1}


async def test_plain_delivery_that_was_under_way_at_a_crash_comes_again() -> None:
    store = MemoryStore()
    coordinator = await started(2, store=store)
    await coordinator.accept([incoming(2, tag=tag) for tag in (1, 2)])
    assert tags(await coordinator.deliver()) == [1]
    coordinator = await restarted(coordinator, store)
    assert coordinator.status().current_step == 0
    first = await coordinator.deliver()
    assert tags(first) == [1]
    assert first is not None
    assert await coordinator.end_plain(first.row)
    assert tags(await coordinator.deliver()) == [2]


async def test_plain_delivery_counts_as_trained_once_it_was_received() -> None:
    store = MemoryStore()
    coordinator = await started(2, store=store)
    await coordinator.accept([incoming(2, tag=tag) for tag in range(3)])

    async def sent() -> Delivery:
        delivery = await coordinator.deliver()
        assert delivery is not None
        assert await coordinator.end_plain(delivery.row)
        return delivery

    def counts() -> tuple[int, int]:
        check_balance(ledger := coordinator.ledger())
        return ledger.delivered_unconfirmed, ledger.trained

    first = await sent()
    assert counts() == (1, 0)
    coordinator.note_receipt(first.row)
    coordinator.note_receipt(first.row)
    assert counts() == (0, 1)
    await sent()
    coordinator = await restarted(coordinator, store)  # before the answer has left
    assert counts() == (1, 1)
    coordinator.note_receipt((await sent()).row)
    assert counts() == (1, 2)
    old = await sent_batch_of_the_run_before_a_reset(coordinator)
    coordinator.note_receipt(old.row)
    assert counts() == (1, 0)


async def sent_batch_of_the_run_before_a_reset(coordinator: Coordinator) -> Delivery:
    """Reset the run while a plain batch is not confirmed, and send another, which is not confirmed either."""
    batches = []
    for _ in range(2):
        await coordinator.accept([incoming(2)])
        delivery = await coordinator.deliver()
        assert delivery is not None
        assert await coordinator.end_plain(delivery.row)
        batches.append(delivery)
        if len(batches) == 1:
            await coordinator.reset()
            await coordinator.register(RegisterTrainer(**registration(batch_size=2)))
    return batches[0]


async def test_rejected_groups_are_dead_with_their_reason_and_the_others_come_again() -> None:
    coordinator = await started(batch_size=6)
    await coordinator.accept([incoming(2, tag=tag) for tag in (1, 2, 3, 4)])
    first = await leased(coordinator)
    with pytest.raises(GroupError, match="groups: 3 is not in a batch of 3 groups"):
        await coordinator.reject_groups(first.row.number, first.row.lease_id, [3], reason="x")
    with pytest.raises(LeaseLost):
        await coordinator.reject_groups(first.row.number, "other", [0], reason="x")
    reply = await coordinator.reject_groups(
        first.row.number,
        first.row.lease_id,
        [1],
        reason="sequences[0].masks: 3 values for 2 tokens",
    )
    assert (reply.dead, reply.requeued) == (1, 2)
    assert tags(await coordinator.deliver(LeaseRequest())) == [1, 3, 4]
    [dead] = coordinator.dead()
    assert dead.reason == "rejected by the trainer: sequences[0].masks: 3 values for 2 tokens"
    assert coordinator.explain().dead == {"rejected by the trainer": 1}
    assert coordinator.ledger().dead_reasons == {"rejected by the trainer": 1}
    check_balance(coordinator.ledger())
    with pytest.raises(LeaseLost):
        await coordinator.ack(first.row.number, first.row.lease_id)


async def test_no_group_larger_than_the_batch_is_queued_wherever_it_comes_from() -> None:
    coordinator = await started(batch_size=8)
    await joined(coordinator, group_size=8)
    await coordinator.accept([incoming(6, env_id=0, tag=1), incoming(6, tag=2)])
    assert (coordinator.ledger().buffered, coordinator.ledger().queued) == (1, 1)
    await resumed(coordinator, 0, batch_size=4)
    await coordinator.disconnect_env(0)  # what was buffered waits no longer
    ledger = coordinator.ledger()
    assert (ledger.buffered, ledger.queued, ledger.dead) == (0, 0, 2)
    numbers = [dead.number for dead in coordinator.dead()]
    assert await coordinator.requeue_dead(numbers) == 0
    assert coordinator.ledger().dead == 2
    assert coordinator.explain().dead == {"larger than the trainer's batch of 4 sequences": 2}
    check_balance(coordinator.ledger())


async def test_group_that_is_stored_while_a_trainer_with_smaller_batches_registers_is_dead() -> (
    None
):
    store = SlowAppends()
    coordinator = Coordinator(store)
    await coordinator.open()
    sending = asyncio.create_task(coordinator.accept([incoming(5), incoming(4, tag=1)]))
    await asyncio.sleep(0.01)
    await coordinator.register(RegisterTrainer(**registration(batch_size=4)))
    store.may_answer.set()
    await sending
    for run in (coordinator, await restarted(coordinator, store)):
        assert run.explain().dead == {"larger than the trainer's batch of 4 sequences": 1}
        assert run.ledger().queued == 1


async def test_the_number_of_queued_groups_is_bounded() -> None:
    assert RunPolicy().max_queued_groups is not None
    coordinator = await started(batch_size=2, policy=RunPolicy(max_queued_groups=3))
    for tag in range(3):
        await coordinator.accept([incoming(1, tag=tag)])
    with pytest.raises(
        Overloaded, match=r"3 groups are queued, the bound is 3 \(--max-queued-groups\)"
    ):
        await coordinator.accept([incoming(1)])
    assert await coordinator.deliver() is not None
    await coordinator.accept([incoming(1)])


async def test_environments_that_send_what_they_are_asked_for_get_their_shares() -> None:
    run, num_taken, sizes = await started(32), [0, 0, 0], (8, 4, 16)
    for weight, size in zip((1, 2, 1), sizes, strict=True):
        await joined(run, desired_name=f"of {size}", weight=weight, group_size=size)
    for _ in range(60):
        for env_id, size in enumerate(sizes):
            while True:
                status = run.status_env(env_id)
                if status.self_queue_size * size >= 64 * (status.wanted_share or 0):
                    break
                await run.accept([incoming(size, env_id=env_id, tag=env_id)])
        for env_id in tags(await trained(run)):
            num_taken[env_id] += sizes[env_id]
    shares = [num / sum(num_taken) for num in num_taken]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.05)


class RunMachine(RuleBasedStateMachine):
    """Random histories with restarts: what went in is trained on once, or accounted for, in exact batches."""

    BATCH = 6

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock(1000.0)
        self.store = MemoryStore()
        self.policy = RunPolicy(
            lease_ttl_s=100, env_timeout_s=1000, max_deliveries=4, keep_trained_batches=2
        )
        self.sizes: dict[int, int] = {}
        self.ids: dict[str, int] = {}
        self.leases: list[Delivery] = []
        self.dead_leases: list[Delivery] = []
        self.acked: dict[int, list[int]] = {}
        """Tags of acknowledged batches by step, without those after the step of a resume: each group is in one."""
        self.has_resumed = False
        self.restart()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.loop.close()

    @initialize(may_resume=st.booleans())
    def begin(self, may_resume: bool) -> None:
        self.may_resume = may_resume
        self.run(self.coordinator.register(RegisterTrainer(**registration(batch_size=self.BATCH))))
        self.run(self.coordinator.deliver())
        for share in (None, 0.3):
            self.run(joined(self.coordinator, group_size=3, min_batch_allocation=share))

    @rule()
    def restart(self) -> None:
        self.coordinator = Coordinator(self.store, policy=self.policy, clock=self.clock)
        self.run(self.coordinator.open())

    @rule(num=st.integers(1, 4), env_id=st.sampled_from([None, 0, 1, 7]), has_id=st.booleans())
    def accept(self, num: int, env_id: int | None, has_id: bool) -> None:
        tag = len(self.sizes)
        group_id = f"id{tag}" if has_id else None
        [receipt] = self.run(
            self.coordinator.accept([incoming(num, env_id=env_id, group_id=group_id, tag=tag)])
        )
        assert not receipt.is_duplicate
        self.sizes[tag] = num
        if group_id is not None:
            self.ids[group_id] = tag

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), other=st.booleans())
    def accept_again(self, data: st.DataObject, other: bool) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.ids)))
        tag = self.ids[group_id]
        again = incoming(self.sizes[tag], group_id=group_id, tag=tag + 1000 if other else tag)
        if other:
            with pytest.raises(GroupError, match="other content"):
                self.run(self.coordinator.accept([again]))
        else:
            assert self.run(self.coordinator.accept([again]))[0].is_duplicate

    @rule()
    def lease(self) -> None:
        delivery = self.run(self.coordinator.deliver(LeaseRequest()))
        self.forget_expired()
        if delivery is None:
            assert self.coordinator.explain().batch == "none"
            return
        assert sum(self.sizes[tag] for tag in tags(delivery)) == self.BATCH
        in_hand = {tag for each in self.leases for tag in tags(each)}
        assert not in_hand & set(tags(delivery))
        self.leases.append(delivery)

    @rule(is_whole=st.booleans())
    def take_plain(self, is_whole: bool) -> None:
        before = self.coordinator.status().current_step
        delivery = self.run(self.coordinator.deliver())
        self.forget_expired()
        if delivery is None:
            return
        if is_whole:
            assert self.run(self.coordinator.end_plain(delivery.row))
            self.coordinator.note_receipt(delivery.row)
            self.acked[delivery.row.step] = tags(delivery)
        else:
            self.run(self.coordinator.give_back(delivery.row))
            assert self.coordinator.status().current_step <= before

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.leases))
        self.leases.remove(batch)
        self.run(self.coordinator.ack(batch.row.number, batch.row.lease_id))
        assert batch.row.step not in self.acked
        self.acked[batch.row.step] = tags(batch)
        self.run(self.coordinator.ack(batch.row.number, batch.row.lease_id))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.leases))
        self.leases.remove(batch)
        self.run(self.coordinator.release(batch.row.number, batch.row.lease_id))
        self.dead_leases.append(batch)

    @precondition(lambda self: self.dead_leases)
    @rule(data=st.data())
    def ack_too_late(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.dead_leases))
        with pytest.raises(LeaseLost):
            self.run(self.coordinator.ack(batch.row.number, batch.row.lease_id))

    @rule(seconds=st.sampled_from([1.0, 60.0, 101.0]))
    def wait(self, seconds: float) -> None:
        for batch in self.leases:
            self.run(self.coordinator.heartbeat(batch.row.number, batch.row.lease_id))
        self.clock.now_s += seconds
        self.run(self.coordinator.tick())
        self.forget_expired(seconds > 100)

    def forget_expired(self, is_over: bool = False) -> None:
        if is_over:
            self.dead_leases += self.leases
            self.leases = []

    @precondition(lambda self: self.may_resume)
    @rule(back=st.integers(0, 3), mode=st.sampled_from(["replay", "requeue", "discard"]))
    def resume(self, back: int, mode: str) -> None:
        step = max(0, self.coordinator.status().current_step - back)
        reply = self.run(resumed(self.coordinator, step, resume=mode))
        assert reply.step == self.coordinator.status().current_step == step
        self.has_resumed = True
        self.acked = {number: each for number, each in self.acked.items() if number <= step}
        self.dead_leases += self.leases
        self.leases = []
        held = self.coordinator.ledger()
        assert held.leased == 0

    @rule(back=st.integers(0, 2))
    def checkpoint(self, back: int) -> None:
        self.run(self.coordinator.checkpoint(self.coordinator.status().current_step - back))

    @rule()
    def revive(self) -> None:
        dead = [group.number for group in self.coordinator.dead()]
        assert self.run(self.coordinator.requeue_dead(dead)) == len(dead)

    def counted(self, ledger: Ledger) -> dict[str, Any]:
        counts = ledger.model_dump(exclude={"duplicates", "rejected", "produced"})
        return counts | {"trained": counts["trained"] + counts.pop("delivered_unconfirmed")}

    @invariant()
    def balances(self) -> None:
        ledger = self.coordinator.ledger()
        check_balance(ledger)
        assert ledger.produced == len(self.sizes) + sum(ledger.rejected.values())
        assert ledger.leased == sum(len(tags(batch)) for batch in self.leases)
        again = Coordinator(self.store, policy=self.policy, clock=self.clock)
        self.run(again.open())
        # A receipt is stored with the next change.
        assert self.counted(again.ledger()) == self.counted(ledger)
        assert again.status() == self.coordinator.status()
        counts = Counter(tag for batch in self.acked.values() for tag in batch)
        assert max(counts.values(), default=1) == 1
        if not self.has_resumed:
            assert self.counted(ledger)["trained"] == len(counts)


TestRunMachine = RunMachine.TestCase
TestRunMachine.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize(
    ("batch_size", "minimums", "queued", "wanted"),
    [
        pytest.param(4, (None, 0.5, None), [(0, 4), (2, 4)], (1, 2), id="minimum"),
        pytest.param(8, (None, 0.75), [(0, 3), *[(1, 1)] * 5], (1, 1), id="share"),
        pytest.param(8, (), [(None, 3)] * 3, (None, 2), id="sizes"),
        pytest.param(16, (), [(None, 4)] * 3, (None, 4), id="too_few"),
    ],
)
async def test_full_run_lets_in_what_its_next_batch_waits_for(
    batch_size: int,
    minimums: tuple[float | None, ...],
    queued: list[tuple[int | None, int]],
    wanted: tuple[int | None, int],
) -> None:
    coordinator = await started(batch_size, policy=RunPolicy(max_queued_sequences=4))
    for index, share in enumerate(minimums):
        await joined(coordinator, desired_name=str(index), group_size=1, min_batch_allocation=share)
    await coordinator.accept([incoming(size, env_id=env_id) for env_id, size in queued])
    assert coordinator.explain().batch == "none"
    assert coordinator.overload() is None
    if batch_size < 16:
        with pytest.raises(Overloaded, match="waits for other groups than these"):
            await coordinator.accept([incoming(3, env_id=0)])
    await coordinator.accept([incoming(wanted[1], env_id=wanted[0])])
    assert await coordinator.deliver() is not None


class FailingReads(MemoryStore):
    failure: BaseException | None = None

    async def read(self, numbers: Sequence[int]) -> list[bytes]:
        if self.failure is not None:
            raise self.failure
        return await super().read(numbers)


@pytest.mark.parametrize(
    "failure", [KeyError(0), StoreFull("no file to spare"), OSError(24), asyncio.CancelledError()]
)
async def test_plain_delivery_that_fails_before_it_begins_is_not_held_for_ever(
    failure: BaseException,
) -> None:
    store = FailingReads()
    store.failure = failure
    coordinator = await started(2, store=store)
    await coordinator.accept([incoming(2, tag=5)])
    with pytest.raises(type(failure)):
        await coordinator.deliver()
    assert (coordinator.ledger().queued, coordinator.ledger().leased) == (1, 0)
    store.failure = None
    delivery = await coordinator.deliver()
    assert delivery is not None
    assert (tags(delivery), delivery.row.step) == ([5], 1)


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "lowered"])
async def test_waiting_trainer_is_woken_when_a_minimum_ends(is_silent: bool) -> None:
    clock = Clock(1000.0)
    coordinator = await started(2, policy=RunPolicy(env_timeout_s=60), clock=clock)
    await joined(coordinator, env_uid="u", min_batch_allocation=1.0)
    await coordinator.accept([incoming(2)])
    assert await coordinator.deliver() is None
    async with asyncio.timeout(30), asyncio.TaskGroup() as waiting:
        waiting.create_task(coordinator.arrivals.wait(60))
        await asyncio.sleep(0)
        if is_silent:
            clock.now_s += 61
            await coordinator.tick()
        else:
            await joined(coordinator, env_uid="u")
    assert await coordinator.deliver() is not None


async def test_end_of_a_delivery_from_before_a_reset_does_not_touch_the_next_run() -> None:
    coordinator = await started(2)
    await coordinator.accept([incoming(2)])
    old = await coordinator.deliver()
    await coordinator.reset()
    await coordinator.register(RegisterTrainer(**registration(batch_size=2)))
    await coordinator.accept([incoming(2)])
    await check_end_of_earlier(old, coordinator)
    assert old is not None
    with pytest.raises(UnknownBatch):
        await coordinator.ack(old.row.number, old.row.lease_id)


async def test_end_of_a_delivery_from_before_a_resume_does_not_touch_the_replayed_batch() -> None:
    coordinator = await started(2)
    await coordinator.accept([incoming(2)])
    old = await coordinator.deliver()
    await resumed(coordinator, 0)
    await check_end_of_earlier(old, coordinator)


async def check_end_of_earlier(old: Delivery | None, coordinator: Coordinator) -> None:
    """Check that only the end of the next plain delivery counts."""
    new = await coordinator.deliver()
    assert old is not None
    assert new is not None
    assert not await coordinator.end_plain(old.row)
    await coordinator.give_back(old.row)
    assert coordinator.ledger().leased == 1
    assert await coordinator.end_plain(new.row)


async def test_items_of_a_process_that_ended_are_not_those_of_its_successor() -> None:
    coordinator = await started()
    await joined(coordinator)
    losses: Any = '{"suspicious_canary": 9, "dropped_x": 2}'
    asked = StatusQuery(env_id=0, items_in_flight=3, oldest_item_s=20.0, losses=losses)
    coordinator.note_items(asked)
    assert coordinator.state.environments.get(0).num_lost == 2  # what is suspicious is kept
    await coordinator.disconnect_env(0)
    await joined(coordinator)
    [view] = coordinator.explain().environments
    assert (view.env_id, view.items_in_flight, view.oldest_item_s) == (0, None, None)


async def test_name_of_an_environment_cannot_forge_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = await started()
    with caplog.at_level(logging.INFO):
        await joined(coordinator, desired_name="a\n2026-01-01 INFO run default reset")
        await coordinator.disconnect_env(0)
    assert len(caplog.messages) == 2
    assert all("\n" not in message for message in caplog.messages)


async def test_odd_groups_that_never_add_up_are_queued_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = await started(batch_size=12)
    await joined(coordinator, group_size=4)
    for tag in range(10):
        await coordinator.accept([incoming(3, env_id=0, tag=tag)])
    assert (coordinator.ledger().buffered, coordinator.explain().batch) == (10, "none")
    [receipt] = await coordinator.accept([incoming(3, env_id=0, tag=10)])
    assert receipt.buffer_size == 0
    assert "do not add up to its group_size of 4" in caplog.text
    assert tags(await coordinator.deliver()) == [0, 1, 2, 3]


async def test_group_size_beyond_the_batch_buffers_nothing() -> None:
    coordinator = await started(batch_size=4)
    await joined(coordinator, group_size=2**31 - 1)
    assert await coordinator.accept([incoming(4, env_id=0)]) == [Receipt(env_id=0)]
    assert await coordinator.deliver() is not None


async def test_group_whose_sender_left_while_it_was_stored_is_queued() -> None:
    store = SlowAppends()
    coordinator = Coordinator(store)
    await coordinator.open()
    sending = asyncio.create_task(coordinator.accept([incoming(2, group_id="a")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    store.may_answer.set()
    [receipt] = await coordinator.accept([incoming(2, group_id="a")])
    assert receipt.is_duplicate
    assert coordinator.ledger().queued == 1


async def test_calls_of_a_run_that_was_closed_meanwhile_are_refused(tmp_path: Path) -> None:
    coordinator = Coordinator(DiskStore(tmp_path, min_free_bytes=0))
    await coordinator.open()
    await coordinator.register(RegisterTrainer(**registration(batch_size=2)))
    await coordinator.accept([incoming(2)])
    batch = await trained(coordinator)
    await coordinator.close()
    for call in (
        coordinator.accept([incoming(2)]),
        coordinator.ack(batch.row.number, batch.row.lease_id),
        coordinator.reset(),
    ):
        with pytest.raises(RunReset):
            await call


async def test_oldest_dead_groups_make_room_for_newer_ones() -> None:
    policy = RunPolicy(max_deliveries=1, keep_dead_bytes=4)
    store = MemoryStore()
    coordinator = await started(2, policy=policy, store=store)
    for tag in (11, 12):
        await coordinator.accept([incoming(2, tag=tag)])
        batch = await leased(coordinator)
        await coordinator.release(batch.row.number, batch.row.lease_id)
    coordinator = await restarted(coordinator, store)
    assert await coordinator.requeue_dead([1]) == 1
    await coordinator.accept([incoming(2, tag=13), incoming(2, tag=14)])
    for _ in range(3):
        batch = await leased(coordinator)
        await coordinator.release(batch.row.number, batch.row.lease_id)
    await coordinator.tick()
    assert [group.number for group in coordinator.dead()] == [2, 3]
    assert coordinator.ledger().dead == 4
    assert store.usage().payload_bytes == 4


async def test_group_that_grew_too_old_while_an_expiry_was_stored_is_not_delivered() -> None:
    class Busy(MemoryStore):
        meanwhile: Coroutine[Any, Any, None] | None = None

        async def commit(self, change: Change) -> None:
            await super().commit(change)
            work, self.meanwhile = self.meanwhile, None
            if work is not None:
                await work

    store, clock = Busy(), Clock(1000.0)
    policy = RunPolicy(max_staleness=1, lease_ttl_s=10)
    coordinator = await started(2, policy=policy, store=store, clock=clock)
    await coordinator.accept([incoming(2, version=0)])
    await leased(coordinator)
    clock.now_s += 11
    store.meanwhile = coordinator.set_policy(5)  # while the end of the lease is stored
    assert await coordinator.deliver() is None
    assert coordinator.ledger().expired == 1


async def test_process_that_lost_its_place_cannot_disconnect_its_successor() -> None:
    clock = Clock(1000.0)
    coordinator = await started(policy=RunPolicy(env_timeout_s=60), clock=clock)
    await joined(coordinator, env_uid="old")
    clock.now_s += 61
    await coordinator.tick()
    await joined(coordinator, env_uid="new")
    with pytest.raises(EnvironmentNotFound, match="registered by another process"):
        await coordinator.disconnect_env(0, env_uid="old")
    assert coordinator.explain().environments[0].state == "active"
    await coordinator.disconnect_env(0, env_uid="new")
    assert coordinator.explain().environments[0].state == "disconnected"


async def test_an_environment_ahead_of_its_share_is_still_asked_for_its_minimum() -> None:
    """Without the minimum no batch is cut: an environment that is asked for nothing would stop the run."""
    coordinator = await started(16)
    await joined(coordinator, desired_name="small", weight=0.0, min_batch_allocation=1 / 16)
    await joined(coordinator, desired_name="large")
    for _ in range(4):
        groups = [incoming(4, env_id=0), *(incoming(4, env_id=1) for _ in range(6))]
        await coordinator.accept(groups)
        await trained(coordinator)
    assert coordinator.status_env(0).wanted_share == 1 / 16


async def test_hundreds_of_environments_are_asked_for_one_batch_together() -> None:
    coordinator = await started(16)
    for number in range(400):
        weight = 1.0 if number % 2 else 3.0
        await joined(coordinator, desired_name=f"{number}", weight=weight)
    wanted = [coordinator.status_env(env_id).wanted_share for env_id in range(400)]
    assert sum(wanted) == pytest.approx(1.0)
    assert wanted[0] == pytest.approx(3 * wanted[1])


async def test_an_environment_without_weight_is_asked_for_a_little() -> None:
    coordinator = await started(16)
    for number, weight in enumerate([0.0, -1.0, 1.0, 1.0]):
        await joined(coordinator, desired_name=f"{number}", weight=weight)
    wanted = [coordinator.status_env(env_id).wanted_share for env_id in range(4)]
    assert wanted == [0.0025, 0.0025, 0.5, 0.5]
