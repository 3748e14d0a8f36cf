"""The limiter: slots, shares, fairness, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.inference.servers.limiter import AsyncSemWithAdaptiveWeight


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_never_more_holders_than_slots() -> None:
    limiter = AsyncSemWithAdaptiveWeight(3)
    held = most = 0

    async def hold() -> None:
        nonlocal held, most
        async with limiter:
            held += 1
            most = max(most, held)
            await asyncio.sleep(0)
            held -= 1

    await asyncio.gather(*(hold() for _ in range(50)))
    assert most == 3
    assert limiter._value == 3


async def test_waiters_are_served_in_order_and_nobody_overtakes() -> None:
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
    await _settle()
    assert sum(task.done() for task in tasks) == 2
    limiter.update_weight(1.0)
    await _settle()
    assert all(task.done() for task in tasks)
    assert limiter._value == 0


async def test_a_weight_of_zero_still_leaves_one_slot() -> None:
    limiter = AsyncSemWithAdaptiveWeight(4)
    limiter.update_weight(0.0)
    async with asyncio.timeout(1):
        await limiter.acquire()
    assert limiter.locked()


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_cancelled_waiter_keeps_no_slot(handed_over: bool) -> None:
    limiter = AsyncSemWithAdaptiveWeight(1)
    await limiter.acquire()
    waiter = asyncio.create_task(limiter.acquire())
    await _settle()
    if handed_over:
        limiter.release()  # the waiter owns the slot now, but has not run yet
        waiter.cancel()
    else:
        waiter.cancel()
        await _settle()
        limiter.release()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert limiter._value == 1
    assert not limiter.locked()


def test_a_limiter_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        AsyncSemWithAdaptiveWeight(0)
