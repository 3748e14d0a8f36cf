"""The limiter when its limit changes and when requests come again."""

from __future__ import annotations

import asyncio
import random

import pytest

from atroposlib.inference.servers.limiter import AsyncSemWithAdaptiveWeight


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lower_limit_takes_nothing_away_and_a_higher_one_lets_in_at_once() -> None:
    limiter = AsyncSemWithAdaptiveWeight(8)
    for _ in range(6):
        await limiter.acquire()
    limiter.update_limit(4)
    waiter = asyncio.create_task(limiter.acquire())
    limiter.release()
    await settle()
    assert (limiter.in_use, limiter.capacity, waiter.done()) == (5, 4, False)
    limiter.update_limit(6)
    await settle()
    assert (limiter.in_use, waiter.done()) == (6, True)
    assert limiter._value == 2


def test_the_share_is_taken_of_the_limit_which_never_exceeds_the_cap() -> None:
    limiter = AsyncSemWithAdaptiveWeight(10)
    limiter.update_weight(0.5)
    capacities = []
    for limit in (100, 8, 2, 1):
        limiter.update_limit(limit)
        capacities.append(limiter.capacity)
    assert capacities == [5, 4, 1, 1]


async def test_whoever_comes_again_goes_before_those_that_wait() -> None:
    limiter = AsyncSemWithAdaptiveWeight(1)
    await limiter.acquire()
    order: list[str] = []

    async def take(name: str, *, first: bool = False) -> None:
        await limiter.acquire(first=first)
        order.append(name)
        limiter.release()

    tasks = [asyncio.create_task(take(name)) for name in ("a", "b")]
    await settle()
    tasks.append(asyncio.create_task(take("again", first=True)))
    await settle()
    limiter.release()
    await asyncio.gather(*tasks)
    assert order == ["again", "a", "b"]


@pytest.mark.parametrize("seed", range(20))
async def test_no_slot_is_lost_or_made_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    limiter = AsyncSemWithAdaptiveWeight(5)
    held = 0

    async def hold() -> None:
        nonlocal held
        await limiter.acquire(first=rng.random() < 0.3)
        held += 1
        try:
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        finally:
            held -= 1
            limiter.release()

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(hold()))
        action = rng.random()
        if action < 0.2:
            rng.choice(tasks).cancel()
        elif action < 0.3:
            limiter.update_limit(rng.randint(1, 8))
        elif action < 0.4:
            limiter.update_weight(rng.random())
        if rng.random() < 0.7:
            await asyncio.sleep(0)
        assert held <= limiter.in_use <= 5
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (held, limiter.in_use, limiter._value) == (0, 0, 5)
