"""Start slots: how many requests start in one round of the event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

from atroposlib.inference.servers.admission import STARTS_PER_ROUND, StartTurns, start_turn


async def rounds_of(start: Callable[[], Awaitable[None]], num_tasks: int) -> list[int]:
    """Start tasks at once; return how many began in each round of the loop."""
    began = 0
    counts: list[int] = []

    async def begin() -> None:
        nonlocal began
        await start()
        began += 1

    tasks = [asyncio.create_task(begin()) for _ in range(num_tasks)]
    while began < num_tasks:
        before = began
        await asyncio.sleep(0)
        if began > before:
            counts.append(began - before)
    await asyncio.gather(*tasks)
    return counts


async def test_a_few_requests_start_at_once_and_many_are_spread_over_rounds() -> None:
    assert await rounds_of(StartTurns(per_round=4).take, 4) == [4]
    counts = await rounds_of(StartTurns(per_round=4).take, 30)
    assert (sum(counts), max(counts)) == (30, 4)


async def test_requests_start_in_order_of_arrival() -> None:
    slots, order = StartTurns(per_round=2), []

    async def begin(i: int) -> None:
        await slots.take()
        order.append(i)

    await asyncio.gather(*(begin(i) for i in range(9)))
    assert order == list(range(9))


async def test_a_cancelled_waiter_takes_no_slot() -> None:
    slots = StartTurns(per_round=1)
    tasks = [asyncio.create_task(slots.take()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False, False]


def test_every_event_loop_has_its_own_queue() -> None:
    async def leave_waiting() -> None:
        waiting = [asyncio.create_task(start_turn()) for _ in range(3 * STARTS_PER_ROUND)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()

    asyncio.run(leave_waiting())
    assert asyncio.run(rounds_of(start_turn, 2 * STARTS_PER_ROUND)) == [
        STARTS_PER_ROUND,
        STARTS_PER_ROUND,
    ]


def test_a_closed_event_loop_is_released() -> None:
    loops = [asyncio.new_event_loop() for _ in range(3)]
    for loop in loops:
        loop.run_until_complete(start_turn())
        loop.close()
    references = [weakref.ref(loop) for loop in loops]
    del loop
    loops.clear()
    gc.collect()
    assert [reference() is None for reference in references[:2]] == [True, True]
