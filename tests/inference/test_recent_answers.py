"""The time per token of servers: from the fleet's recent answers."""

from __future__ import annotations

import pytest

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ServerHarness
from atroposlib.inference.servers.admission import NUM_ANSWERS, Door, seconds_per_token


def fleet_of(num: int) -> list[Door]:
    fleet = [Door(APIServerConfig()) for _ in range(num)]
    for door in fleet:
        door.fleet = fleet
    return fleet


def answered(fleet: list[Door], number: int, *, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        fleet[number].answered(10, began=0.0, now=seconds)


def times(fleet: list[Door]) -> list[float]:
    return seconds_per_token([server.recent for server in fleet])


def test_without_answers_all_servers_are_equally_fast() -> None:
    assert times(fleet_of(2)) == [1.0, 1.0]


def test_a_server_that_became_slower_is_known_after_as_many_answers_as_count() -> None:
    fleet = fleet_of(2)
    for seconds in (1.0, 4.0):
        for _ in range(3 * NUM_ANSWERS):
            answered(fleet, 0, seconds=seconds)
            answered(fleet, 1, seconds=1.0)
    assert times(fleet) == pytest.approx([0.4, 0.1], rel=0.15)


def test_a_slow_server_is_forgotten_while_only_others_answer() -> None:
    fleet = fleet_of(2)
    answered(fleet, 0, seconds=8.0, times=8)
    answered(fleet, 1, seconds=1.0, times=8)
    assert times(fleet)[0] > 0.6
    answered(fleet, 1, seconds=1.0, times=20 * NUM_ANSWERS)
    assert times(fleet) == pytest.approx([0.1, 0.1], rel=0.05)


async def test_failures_and_scores_of_prompts_say_nothing_about_the_speed() -> None:
    server = ServerHarness(APIServerConfig(model_name="m"), respond=lambda request: "fine")
    server.fail(EngineUnavailable("answered 500", status=500))
    await server.chat_completion(messages=[{"role": "user", "content": "hello"}])
    assert (server.recent.num, server.recent.tokens) == (0, 0)  # the harness reports no usage
    await server.tokens_and_logprobs_completion(input_ids=[65], n=3)
    assert (server.recent.num, server.recent.tokens) == (1, len("fine") + 1)
