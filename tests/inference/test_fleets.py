"""Fleets of two to eight servers with one bad member: every call is answered, within the attempts that one call has."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.admission import MAX_ATTEMPTS, best
from atroposlib.inference.servers.api_server import TokenCompletions
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from tests.builders.simulated_servers import (
    Behaviour,
    batching,
    most_free_slots,
    simulate,
    with_slots,
)

NUM_CALLS, AT_ONCE, ANSWER_S = 160, 32, 0.01


class Member(ServerHarness):
    """Answers after 10 ms, unless it is a bad one."""

    def __init__(
        self, number: int, fault: Exception | None = None, *, takes_s: float = 0.0
    ) -> None:
        url = f"http://127.0.0.1:{number + 1}/v1"
        super().__init__(
            APIServerConfig(model_name="m", base_url=url, server_type="vllm"),
            respond=lambda request: "fine",
        )
        self.fault = fault
        self.delay_s = takes_s

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        call = await super()._begin(kwargs)
        if self.fault is not None:
            raise self.fault
        return call


def fleet(num: int, bad: Member) -> ServerManager:
    """Return a manager of `num` servers, the bad one first."""
    members: list[Any] = [bad, *(Member(i, takes_s=ANSWER_S) for i in range(1, num))]
    manager = ServerManager([member.config for member in members])
    for member in members:
        member.fleet = members
    manager.servers = members
    return manager


FAULTS = {
    "dead": ConnectionResetError("no server listens"),
    "failing": EngineUnavailable("answered 500", status=500),
    "refusing": EngineHttpRejected("the model 'm' does not exist", status=404),
    "lying": EngineProtocolError("3 logprobs for 4 token ids"),
    "busy": EngineUnavailable("answered 503", status=503),
}


class Calls:
    """Calls with an id of their own, a few of them at once, and how often each was sent."""

    def __init__(self, manager: ServerManager) -> None:
        self._manager = manager
        self.answers: list[TokenCompletions] = []

    async def run(self) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def call(number: int) -> None:
            async with slots:
                answer = await self._manager.tokens_and_logprobs_completion(
                    input_ids=[65, number], max_tokens=8
                )
                self.answers.append(answer)

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CALLS):
                group.create_task(call(number))

    def attempts(self) -> list[int]:
        servers: Sequence[Any] = self._manager.servers
        sent = Counter(tuple(r["input_ids"]) for server in servers for r in server.requests)
        return sorted(sent.values())


@pytest.mark.parametrize("num", [2, 8])
@pytest.mark.parametrize("kind", FAULTS)
async def test_every_call_is_answered_despite_one_bad_member(kind: str, num: int) -> None:
    bad = Member(0, FAULTS[kind])
    manager = fleet(num, bad)
    calls = Calls(manager)
    await calls.run()
    assert len(calls.answers) == NUM_CALLS
    assert calls.attempts()[-1] <= MAX_ATTEMPTS
    # The first ones go to it at once; afterwards it is tried now and then.
    assert len(bad.requests) <= AT_ONCE + 8


@pytest.mark.parametrize("num", [2, 8])
async def test_a_slow_member_gets_its_share_of_the_calls_in_flight_and_no_more(num: int) -> None:
    slow = Member(0, takes_s=20 * ANSWER_S)
    calls = Calls(fleet(num, slow))
    await calls.run()
    assert calls.attempts() == [1] * NUM_CALLS
    assert len(slow.requests) <= 2 * AT_ONCE / num + NUM_CALLS / num / 5


async def test_a_bad_request_is_refused_by_two_servers_and_blames_neither() -> None:
    manager = fleet(4, Member(0))
    for server in manager.servers:
        assert isinstance(server, Member)
        server.fault = EngineHttpRejected("the prompt is too long", status=400)
    with pytest.raises(EngineRejected, match="too long"):
        await manager.tokens_and_logprobs_completion(input_ids=[65])
    servers: list[Any] = list(manager.servers)
    assert sum(len(server.requests) for server in servers) == 2
    assert [server.is_avoided(time.monotonic()) for server in servers] == [False] * 4


async def test_a_fleet_that_is_down_uses_up_the_attempts_of_one_call() -> None:
    manager = fleet(4, Member(0))
    for server in manager.servers:
        assert isinstance(server, Member)
        server.fault = FAULTS["failing"]
    with pytest.raises(EngineUnavailable, match="gave up after 3 attempts"):
        await manager.tokens_and_logprobs_completion(input_ids=[65])
    servers: list[Any] = list(manager.servers)
    assert sum(len(server.requests) for server in servers) == MAX_ATTEMPTS


async def test_new_sessions_avoid_a_server_that_failed_recently() -> None:
    bad = Member(0, FAULTS["failing"])
    manager = fleet(2, bad)
    await manager.tokens_and_logprobs_completion(input_ids=[65])
    async with manager.managed_server() as managed:
        assert managed.server is not bad


# Servers of unequal speed, in virtual time.

STEADY = [(5.0, 35.0)]


def gain(servers: list[Behaviour], num_requests: int, **options: Any) -> float:
    """Return the tokens per second, relative to a choice by free slots alone."""
    [[ours], [by_slots]] = (
        simulate(servers, num_requests, spans=STEADY, choice=choice, **options)
        for choice in (best, most_free_slots)
    )
    return ours.tokens_per_s / by_slots.tokens_per_s


@pytest.mark.parametrize(
    ("kind", "num", "least", "num_clients"), [(with_slots, 8, 1.2, 4), (batching, 16, 1.1, 1)]
)
def test_few_requests_prefer_the_faster_server(
    kind: Callable[[float], Behaviour], num: int, least: float, num_clients: int
) -> None:
    assert gain([kind(1), kind(4)], num, num_clients=num_clients) >= least


def test_equal_servers_lose_nothing() -> None:
    assert gain([with_slots(1), with_slots(1)], 32) >= 0.98


def test_many_requests_wait_less_at_the_slower_server() -> None:
    servers = [with_slots(1), with_slots(4)]
    [[ours], [by_slots]] = (
        simulate(servers, 128, spans=STEADY, choice=choice) for choice in (best, most_free_slots)
    )
    assert ours.p99_s <= 0.8 * by_slots.p99_s
    assert ours.tokens_per_s >= 0.98 * by_slots.tokens_per_s


def test_a_server_that_is_slow_for_a_while_is_avoided_then_and_used_again_later() -> None:
    servers = [with_slots(), with_slots()]
    changes = {80.0: with_slots(8), 120.0: with_slots()}
    before, meanwhile, after = simulate(
        servers, 16, spans=[(0, 80), (90, 120), (130, 210)], changes=changes
    )
    assert meanwhile.tokens_per_s >= 0.65 * before.tokens_per_s  # by free slots: 0.56
    assert after.tokens_per_s >= 0.97 * before.tokens_per_s


def test_a_server_that_fails_at_once_does_not_look_fast_and_is_fully_used_again() -> None:
    servers = [with_slots(), with_slots()]
    changes = {20.0: replace(with_slots(), refuses_with=500), 30.0: with_slots()}
    before, meanwhile, after = simulate(
        servers, 64, spans=[(5, 20), (20, 30), (60, 75)], changes=changes
    )
    assert meanwhile.tokens_per_s >= 0.5 * before.tokens_per_s
    assert after.tokens_per_s >= 0.97 * before.tokens_per_s
