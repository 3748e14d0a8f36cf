"""The limiter: slots, shares, changes of the limit, fairness, retries, cancellation."""

from __future__ import annotations

import asyncio
import random

import pytest

from atroposlib.inference.servers.admission import AsyncSemWithAdaptiveWeight


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_are_served_in_order() -> None:
    limiter = AsyncSemWithAdaptiveWeight(1)
    order: list[int] = []

    async def hold(i: int) -> None:
        async with limiter:
            order.append(i)
            await asyncio.sleep(0)

    await asyncio.gather(*(hold(i) for i in range(20)))
    assert order == list(range(20))


async def test_a_smaller_share_lets_fewer_in_and_a_larger_one_wakes_waiters_at_once() -> None:
    limiter = AsyncSemWithAdaptiveWeight(10)
    limiter.update_weight(0.2)
    assert limiter.min_val() == 8.0
    tasks = [asyncio.create_task(limiter.acquire()) for _ in range(10)]
    await settle()
    assert sum(task.done() for task in tasks) == 2
    limiter.update_weight(1.0)
    await settle()
    assert all(task.done() for task in tasks)
    assert limiter._value == 0


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_cancelled_waiter_keeps_no_slot(handed_over: bool) -> None:
    limiter = AsyncSemWithAdaptiveWeight(1)
    await limiter.acquire()
    waiter = asyncio.create_task(limiter.acquire())
    await settle()
    if handed_over:
        limiter.release()  # the waiter owns the slot now, but has not run yet
        waiter.cancel()
    else:
        waiter.cancel()
        await settle()
        limiter.release()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert limiter._value == 1
    assert not limiter.locked()


def test_a_limiter_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        AsyncSemWithAdaptiveWeight(0)


async def test_a_lower_limit_takes_no_held_slot_and_a_higher_one_admits_at_once() -> None:
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
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (held, limiter.in_use, limiter._value) == (0, 0, 5)
