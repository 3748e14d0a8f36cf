"""Sums over all environments of a run against plain sums, after any calls."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atroposlib.api.run.environments import (
    GAIN,
    MIN_ENV_WEIGHT,
    NUM_BATCHES,
    Environment,
    Environments,
    Shares,
)
from atroposlib.api.schemas import RegisterEnv

TIMEOUT_S = 60.0
BATCH_SIZE = 16

uids = st.sampled_from([None, "a", "b", "c"])
counts = st.dictionaries(st.one_of(st.none(), st.integers(-1, 12)), st.integers(0, 16), max_size=4)


class EnvironmentsAgainstSums(RuleBasedStateMachine):
    """Environments register, call, fall silent and leave while batches are delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.environments = Environments()
        self.shares = Shares()
        self.records: dict[int, dict[int, tuple[float, float]]] = {}
        """Each environment's fair share and the share taken, of recent batches."""
        self.now = 1000.0
        self.floors = (self.environments.version, dict[int, float]())

    @rule(
        uid=uids,
        weight=st.sampled_from([0.0, 0.001, 0.3, 1.0, 1e12]),
        minimum=st.sampled_from([None, 0.0, 0.1, 0.3, 2.0]),
        tokens=st.sampled_from([-1, 512, 2**62]),
    )
    def register(self, uid: str | None, weight: float, minimum: float | None, tokens: int) -> None:
        registration = RegisterEnv(
            max_token_length=tokens,
            desired_name="env",
            weight=weight,
            group_size=1,
            min_batch_allocation=minimum,
            env_uid=uid,
        )
        same = [each for each in self.environments if uid and each.registration.env_uid == uid]
        gone = [each for each in self.environments if not each.is_active]
        num_before = len(self.environments)
        found = self.environments.register(registration, now=self.now)
        assert found.env_id == next((each.env_id for each in [*same, *gone]), num_before)

    @precondition(lambda self: len(self.environments))
    @rule(number=st.integers(0, 10**6), is_end=st.booleans())
    def call(self, number: int, is_end: bool) -> None:
        environment = self.environments.get(number % len(self.environments))
        if is_end:
            self.environments.disconnect(environment)
        else:
            environment.last_seen = self.now
            if environment.is_silent:
                self.environments.end_silence(environment)

    @rule(seconds=st.sampled_from([0.0, 1.0, 29.0, 60.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = [each for each in self.active() if self.now - each.last_seen > TIMEOUT_S]
        assert self.environments.silence(now=self.now, timeout_s=TIMEOUT_S) == late
        assert all(each.is_silent for each in late)

    @rule(is_copy=st.booleans())
    def start_again(self, is_copy: bool) -> None:
        if is_copy:
            earlier = Environments()
            earlier.restore([each.saved() for each in list(self.environments)[1:]], now=self.now)
            self.environments.adopt(earlier)
        else:
            self.environments.restore([each.saved() for each in self.environments], now=self.now)

    @rule(number=st.integers(0, 20), taken=counts, left=counts)
    def deliver(
        self, number: int, taken: dict[int | None, int], left: dict[int | None, int]
    ) -> None:
        self.records.pop(number, None)
        own = {each.env_id: self.own_share(each) for each in self.active()}
        able = {
            env_id: (taken.get(env_id, 0) + left.get(env_id, 0)) / BATCH_SIZE
            + max(0.0, share - self.wanted(env_id, share))
            for env_id, share in own.items()
        }
        fair = divided(own, able)
        self.records[number] = {e: (x, taken.get(e, 0) / BATCH_SIZE) for e, x in fair.items()}
        if len(self.records) > NUM_BATCHES:
            del self.records[next(iter(self.records))]
        self.shares.deliver(
            number, self.environments.own_shares(), taken=taken, left=left, batch_size=BATCH_SIZE
        )

    @rule(number=st.integers(0, 20))
    def give_back(self, number: int) -> None:
        self.records.pop(number, None)
        self.shares.forget(number)

    def active(self) -> list[Environment]:
        return [each for each in self.environments if each.is_active]

    def demand(self) -> float:
        return sum(each.demand for each in self.active())

    def own_share(self, environment: Environment) -> float:
        part = environment.demand / self.demand() if self.demand() else 0.0
        part = max(MIN_ENV_WEIGHT / max(1, len(self.active())), part)
        return max(0.0, 1 - sum(each.share for each in self.active())) * part + environment.share

    def wanted(self, env_id: int, own: float) -> float:
        recent = list(self.records.values())
        if not recent or env_id not in recent[-1]:
            return min(1.0, own)
        fair, taken = (
            fmean(batch[env_id][i] for batch in recent if env_id in batch) for i in (0, 1)
        )
        return min(1.0, max(0.0, max(own, fair) + GAIN * (fair - taken)))

    @invariant()
    def sums_are_those_of_the_environments(self) -> None:
        active = self.active()
        assert self.environments.num_active == len(active)
        minimums = {each.env_id: each.share for each in active if each.share}
        assert list(self.environments.sums.minimums.items()) == list(minimums.items())
        free = 1 - min(1.0, sum(minimums.values()))
        assert self.environments.sums.unallocated == pytest.approx(free)
        for each in self.environments:
            part = each.demand / self.demand() if self.demand() else 0.0
            weight = self.environments.sums.weights[each.env_id]
            assert weight == pytest.approx(max(MIN_ENV_WEIGHT, part))
            own = self.environments.sums.own[each.env_id]
            assert own == pytest.approx(self.own_share(each))
            shown = self.environments.own_shares()[each.env_id]
            assert shown == (own if each.is_active else 0.0)
            wanted = self.shares.wanted(each.env_id, own=own)
            assert wanted == pytest.approx(self.wanted(each.env_id, own), abs=1e-6)

    @invariant()
    def a_changed_minimum_has_another_version(self) -> None:
        version, minimums = self.floors
        now = dict(self.environments.sums.minimums)
        assert now == minimums or self.environments.version != version
        self.floors = (self.environments.version, now)


def divided(own: dict[int, float], able: dict[int, float]) -> dict[int, float]:
    """What `fair_shares` returns, one environment at a time: the least able compared with its share first."""
    shares = dict[int, float]()
    left = 1.0
    rest = sorted((e for e, share in own.items() if share > 0), key=lambda e: able[e] / own[e])
    while rest:
        scale = left / sum(own[e] for e in rest)
        env_id = rest.pop(0)
        shares[env_id] = min(able[env_id], own[env_id] * scale)
        left -= shares[env_id]
    return shares


TestEnvironmentsAgainstSums = EnvironmentsAgainstSums.TestCase
TestEnvironmentsAgainstSums.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
