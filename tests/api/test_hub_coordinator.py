"""The run as a state machine: nothing leaks, whatever the order of events."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atroposlib.api.coordinator import Coordinator, IncomingGroup, NotRegistered, Receipt
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.stores.base import Payload
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.errors import GroupError
from tests.api.helpers_api import environment, registration


def incoming(
    num_sequences: int, *, env_id: int | None = None, group_id: str | None = None, tag: int = 0
) -> IncomingGroup:
    return IncomingGroup(
        env_id=env_id,
        num_sequences=num_sequences,
        policy_version=tag,
        group_id=group_id,
        payload=Payload(packed=str(tag).encode()),
    )


def started(batch_size: int = 4, **changes: object) -> Coordinator:
    coordinator = Coordinator(MemoryStore(), new_uuid=lambda: 7)
    assert coordinator.register(Registration(**registration(batch_size=batch_size))) == 7
    assert coordinator.next_batch() is None
    return coordinator


def test_batch_carries_the_policy_versions_of_its_groups() -> None:
    coordinator = started()
    coordinator.accept([incoming(2, tag=5), incoming(2, tag=6)])
    batch = coordinator.next_batch()
    assert batch is not None
    assert batch.step == 1
    assert batch.policy_versions == [5, 6]
    assert [payload.packed for payload in batch.payloads] == [b"5", b"6"]


def test_no_batch_before_registration() -> None:
    with pytest.raises(NotRegistered, match="Call /register first"):
        Coordinator(MemoryStore()).next_batch()


def test_refused_group_leaves_no_trace_and_may_come_again_corrected() -> None:
    coordinator = started()
    with pytest.raises(GroupError, match=r"^tokens: 5 sequences, but a batch holds 4"):
        coordinator.accept([incoming(5, group_id="a")])
    assert coordinator.accept([incoming(4, group_id="a")]) == [Receipt(buffer_size=None)]
    assert coordinator.next_batch() is not None


def test_queue_that_cannot_make_a_batch_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = started(batch_size=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            coordinator.accept([incoming(3)])
            assert coordinator.next_batch() is None
    assert caplog.text.count("there is no batch although enough is queued") == 1


def test_environment_activity_is_stamped_with_the_injected_clock() -> None:
    times = iter(range(100))
    coordinator = Coordinator(MemoryStore(), clock=lambda: float(next(times)))
    coordinator.register(Registration(**registration()))
    coordinator.next_batch()
    coordinator.register_env(RegisterEnv(**environment()))
    coordinator.status_env(0)
    coordinator.accept([incoming(2, env_id=0)])
    assert next(times) == 3


class HubMachine(RuleBasedStateMachine):
    """Random histories: what went in comes out once, in exact batches, oldest first, and the ledger balances."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.coordinator = Coordinator(self.store)
        self.batch_size = 6
        self.is_registered = False
        self.num_envs = 0
        self.sent: dict[int, int] = {}
        self.delivered: list[int] = []
        self.step = 0

    @rule()
    def register_trainer(self) -> None:
        self.coordinator.register(Registration(**registration(batch_size=self.batch_size)))
        self.is_registered = True

    @rule(group_size=st.integers(1, 4), share=st.sampled_from([None, 0.2, 0.7]))
    def register_environment(self, group_size: int, share: float | None) -> None:
        body = environment(group_size=group_size, min_batch_allocation=share)
        if self.coordinator.register_env(RegisterEnv(**body)) is not None:
            self.num_envs += 1

    @rule(env_id=st.integers(0, 3))
    def disconnect(self, env_id: int) -> None:
        if env_id < self.num_envs:
            self.coordinator.disconnect_env(env_id)

    @rule(
        size=st.integers(1, 8),
        env_id=st.sampled_from([None, 0, 1, 2, -1]),
        num_copies=st.integers(1, 2),
    )
    def send(self, size: int, env_id: int | None, num_copies: int) -> None:
        tag = len(self.sent)
        each = incoming(size, env_id=env_id, group_id=str(tag), tag=tag)
        self.sent[tag] = size
        for _ in range(num_copies):
            try:
                self.coordinator.accept([each])
            except GroupError:
                assert self.is_registered
                assert size > self.batch_size
                self.sent[tag] = 0

    @rule()
    def take(self) -> None:
        if not self.is_registered:
            return
        batch = self.coordinator.next_batch()
        if batch is None:
            return
        self.step += 1
        tags = [int(payload.packed) for payload in batch.payloads]
        assert sum(self.sent[tag] for tag in tags) == self.batch_size
        assert batch.step == self.step
        self.delivered += tags

    @invariant()
    def nothing_leaks(self) -> None:
        ledger = self.coordinator.ledger()
        assert ledger.produced == (
            ledger.queued + ledger.buffered + ledger.delivered + sum(ledger.rejected.values())
        )
        assert ledger.delivered == len(self.delivered)
        assert max(Counter(self.delivered).values(), default=1) == 1
        assert len(self.store) == ledger.queued + ledger.buffered
        assert self.coordinator.status().current_step == self.step
        for env_id in range(self.num_envs):
            status = self.coordinator.status_env(env_id)
            assert status.queue_size >= 0
            assert 0.01 <= status.env_weight <= 1.0


HubMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
test_random_histories_leak_nothing = HubMachine.TestCase
