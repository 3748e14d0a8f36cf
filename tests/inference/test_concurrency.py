"""The concurrency controller against simulated servers, in virtual time: throughput, recovery, storms, fairness."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from simulated_engine import Client, SimulatedEngine

from atroposlib.inference.servers.concurrency import (
    MAX_PAUSE_S,
    ConcurrencyController,
    ServerLoad,
    read_load,
)

TOKEN_TIME_S = 0.01
CAP = 512


class FixedLimit(ConcurrencyController):
    """No adaptation: as many requests as are allowed."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, initial=limit)

    def _set(self, limit: float) -> None:
        pass


def client(**options: Any) -> Client:
    return Client(ConcurrencyController(CAP), **options)


def rate_until(engine: SimulatedEngine, until: float) -> float:
    """Run on and return the tokens per second that all clients together got meanwhile."""
    began, before = engine.now, sum(one.num_tokens for one in engine.clients)
    engine.run(until)
    return (sum(one.num_tokens for one in engine.clients) - before) / (until - began)


def recovery_s(engine: SimulatedEngine, *, best: float, window_s: float = 3.0) -> float:
    """Run on and return the seconds after which the throughput of a window is 90 % of the best."""
    began = engine.now
    while rate_until(engine, engine.now + window_s) < 0.9 * best:
        if engine.now - began > 120:
            break
    return engine.now - began


def lognormal(rng: random.Random) -> int:
    return max(1, int(rng.lognormvariate(5.0, 0.8)))


SERVERS: dict[str, dict[str, Any]] = {
    "queues": {},
    "queues, lognormal lengths": {"lengths": lognormal},
    "queues, equal lengths": {"lengths": lambda rng: 200},
    "tells its load": {"reports_every_s": 2.0},
    "refuses": {"queue": 0, "retry_after_s": 1.0},
    "queues 16, then refuses": {"queue": 16},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SERVERS)
def test_throughput_is_back_within_30_s_of_a_change_of_capacity(kind: str, seed: int) -> None:
    engine = SimulatedEngine([client()], slots=64, seed=seed, **SERVERS[kind])
    engine.run(60)
    for slots in (8, 64):
        engine.set_slots(slots)
        assert recovery_s(engine, best=slots / TOKEN_TIME_S) <= 30
        engine.run(engine.now + 30)
        assert rate_until(engine, engine.now + 60) >= 0.95 * slots / TOKEN_TIME_S


# Without spread in the lengths, tokens up to three times as slow as the best pass for batching.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [kind for kind in SERVERS if kind != "queues, equal lengths"])
def test_queue_in_front_of_a_busy_server_stays_short(kind: str, seed: int) -> None:
    engine = SimulatedEngine([client()], slots=64, seed=seed, **SERVERS[kind])
    engine.run(60)
    waiting = []
    while engine.now < 180:
        engine.run(engine.now + 1)
        waiting.append(len(engine.waiting))
    assert sum(waiting) / len(waiting) <= 32
    assert max(waiting) <= 128  # of the 448 that would wait without a limit


@pytest.mark.parametrize("lengths", [lambda rng: rng.randint(50, 350), lognormal, lambda rng: 200])
@pytest.mark.parametrize("overhead_tokens", [5.0, 300.0])
def test_a_server_that_is_fine_loses_less_than_5_percent(
    lengths: Callable[[random.Random], int], overhead_tokens: float
) -> None:
    def token_time(running: int) -> float:
        return TOKEN_TIME_S * (1 + running / 64)  # a larger batch makes every token slower

    rates = []
    for controller in (ConcurrencyController(CAP), FixedLimit(CAP)):
        engine = SimulatedEngine(
            [Client(controller)],
            slots=10**4,
            token_time=token_time,
            lengths=lengths,
            overhead_tokens=overhead_tokens,
        )
        engine.run(240)
        rates.append(rate_until(engine, 600))
    assert rates[0] >= 0.95 * rates[1]


def test_longer_answers_do_not_look_like_overload() -> None:
    engine = SimulatedEngine([client()], slots=10**4)
    engine.run(60)
    assert engine.clients[0].controller.limit == CAP
    engine.lengths = lambda rng: rng.randint(500, 3500)
    limits = []
    while engine.now < 240:
        engine.run(engine.now + 1)
        limits.append(engine.clients[0].controller.limit)
    assert min(limits) >= 0.8 * CAP
    assert sum(limits) / len(limits) >= 0.95 * CAP


def test_a_server_that_thrashes_is_kept_near_its_knee() -> None:
    def token_time(running: int) -> float:
        return TOKEN_TIME_S * max(1.0, running / 64) ** 1.5

    rates = []
    for controller in (ConcurrencyController(CAP), FixedLimit(CAP), FixedLimit(64)):
        engine = SimulatedEngine([Client(controller)], slots=10**4, token_time=token_time)
        engine.run(60)
        rates.append(rate_until(engine, 240))
    ours, unlimited, best = rates
    assert ours >= 0.7 * best
    assert ours >= 1.5 * unlimited


def test_storms_of_refusals_end() -> None:
    clients = [client() for _ in range(3)]
    engine = SimulatedEngine(clients, slots=64, queue=0)
    engine.run(60)
    engine.set_slots(8)
    engine.run(120)
    before = sum(one.num_refused for one in clients)
    rate = rate_until(engine, 180)
    refused_per_s = (sum(one.num_refused for one in clients) - before) / 60
    assert rate >= 0.95 * 8 / TOKEN_TIME_S
    assert refused_per_s <= 2.0
    assert sum(one.controller.limit for one in clients) <= 12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["tells its load", "refuses"])
def test_environments_that_share_a_server_get_equal_parts(kind: str, seed: int) -> None:
    clients = [client(starts_at=at) for at in (0, 20, 60)]
    engine = SimulatedEngine(clients, slots=64, seed=seed, **SERVERS[kind])
    engine.run(120)
    before = [one.num_tokens for one in clients]
    rate = rate_until(engine, 300)
    equal = rate * 180 / len(clients)
    parts = [(one.num_tokens - num) / equal for one, num in zip(clients, before, strict=True)]
    assert min(parts) >= 0.8
    assert max(parts) <= 1.2
    assert rate >= 0.95 * 64 / TOKEN_TIME_S


@pytest.mark.parametrize("starts", [(0, 0), (0, 0, 0, 0), (0, 20, 60)])
def test_nobody_starves_at_a_server_that_tells_nothing(starts: tuple[float, ...]) -> None:
    # The others' queue cannot be told from a slow network then, so parts are far from equal.
    clients = [client(starts_at=at) for at in starts]
    engine = SimulatedEngine(clients, slots=64)
    engine.run(120)
    before = [one.num_tokens for one in clients]
    rate = rate_until(engine, 300)
    parts = [one.num_tokens - num for one, num in zip(clients, before, strict=True)]
    assert min(parts) >= 0.1 * max(parts)
    assert rate >= 0.95 * 64 / TOKEN_TIME_S


def test_shares_that_the_hub_gives_divide_the_server() -> None:
    clients = []
    for share in (0.75, 0.25):
        one = client(weight=share)
        one.controller.share = share
        clients.append(one)
    engine = SimulatedEngine(clients, slots=64, reports_every_s=2.0)
    engine.run(60)
    before = [one.num_tokens for one in clients]
    rate = rate_until(engine, 180)
    parts = [one.num_tokens - num for one, num in zip(clients, before, strict=True)]
    assert parts[0] / sum(parts) == pytest.approx(0.75, abs=0.05)
    assert rate >= 0.95 * 64 / TOKEN_TIME_S
    assert len(engine.waiting) <= 16  # one allowance for all, not one for each


def test_a_server_that_becomes_slower_is_not_taken_for_an_overloaded_one() -> None:
    engine = SimulatedEngine([client()], slots=10**4)
    engine.run(60)
    engine.token_time = lambda running: 3 * TOKEN_TIME_S
    engine.run(120)
    assert rate_until(engine, 240) >= 0.95 * CAP / (3 * TOKEN_TIME_S)


def test_a_pause_for_new_weights_costs_little() -> None:
    engine = SimulatedEngine([client()], slots=10**4)
    engine.run(60)
    engine.token_time = lambda running: 1e9
    engine.run(65)
    engine.token_time = lambda running: TOKEN_TIME_S
    assert recovery_s(engine, best=CAP / TOKEN_TIME_S) <= 10


# Single rules.


def test_limit_stays_between_one_and_the_cap() -> None:
    controller = ConcurrencyController(3)
    assert controller.limit == 3
    for second in range(50):
        controller.start(second)
        controller.refuse(second, started_at=second)
    assert controller.limit == 1
    for second in range(100, 200):
        num_sent = controller.limit
        for _ in range(num_sent):
            controller.start(second)
        for _ in range(num_sent):
            controller.finish(second + 0.5, started_at=second, num_tokens=10)
    assert controller.limit == 3
    assert controller.in_flight == 0


def test_requests_sent_before_a_decrease_do_not_decrease_again() -> None:
    controller = ConcurrencyController(64)
    for _ in range(64):
        controller.start(0.0)
    for _ in range(20):
        controller.refuse(1.0, started_at=0.0)
    assert controller.limit == 60
    assert controller.paused_until == 0.0


def test_a_server_that_refuses_everything_is_left_alone_for_as_long_as_it_says() -> None:
    controller = ConcurrencyController(8)
    for second in (1.0, 2.0, 3.0):
        assert controller.paused_until == 0.0
        controller.start(second)
        controller.refuse(second, started_at=second, retry_after_s=20.0)
    assert controller.paused_until == 23.0
    controller.start(23.0)
    controller.refuse(23.0, started_at=23.0, retry_after_s=1e6)
    assert controller.paused_until == 23.0 + MAX_PAUSE_S


def test_a_timeout_takes_back_more_than_a_refusal() -> None:
    limits = []
    for timed_out in (False, True):
        controller = ConcurrencyController(64)
        for _ in range(64):
            controller.start(0.0)
        controller.refuse(5.0, started_at=0.0, timed_out=timed_out)
        limits.append(controller.limit)
    assert limits == [60, 45]


def test_what_is_not_used_does_not_grow() -> None:
    controller = ConcurrencyController(CAP)
    for second in range(500):
        controller.start(second)
        controller.finish(second + 0.5, started_at=second, num_tokens=10)
    assert controller.limit == 64


def test_load_is_read_from_prometheus_pages() -> None:
    vllm = (
        b"# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        b"# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0",model_name="m"} 12.0\n'
        b'vllm:num_requests_running{engine="1",model_name="m"} 3.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0\n'
        b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
    )
    assert read_load(vllm) == ServerLoad(running=15.0, waiting=4.0)
    sglang = b'sglang:num_running_reqs{model_name="m"} 7\nsglang:num_queue_reqs{model_name="m"} 0\n'
    assert read_load(sglang) == ServerLoad(running=7.0, waiting=0.0)
    assert read_load(b"process_cpu_seconds_total 3.0\n") is None
    assert read_load(b"vllm:num_requests_running 1.0\n") is None


def test_a_page_that_is_not_an_engines_tells_no_load() -> None:
    lines = b"vllm:num_requests_running %s\nvllm:num_requests_waiting 1\n"
    assert read_load(lines % b"1e-05") == ServerLoad(running=1e-05, waiting=1.0)
    for value in (b"e", b"1.2.3", b"NaN", b"+", b"1e", b""):
        assert read_load(lines % value) is None, value
    assert read_load(b"<html>It works!</html>") is None
    assert read_load(b"\xff\xfe") is None
