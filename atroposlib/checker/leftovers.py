"""Judge what runs leave behind: tasks, processes, open files, a blocked event loop, work of a cancelled item."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from atroposlib.checker.answers import EMPTY
from atroposlib.checker.calls import ENOUGH_RUNS, GRACE_S, copy_of, leaked
from atroposlib.checker.execution import STOCKS, Execution
from atroposlib.envs.collecting import collect


async def judge_leaks(execution: Execution) -> None:
    """Fail if every run left a task, a process or an open file behind."""
    if execution.num_runs <= ENOUGH_RUNS:
        execution.report.skip("too few items ran", *STOCKS)
    for rule, stock in execution.stocks.items():
        execution.report.look(rule, execution.num_runs)
        left = leaked(stock)
        if left and rule == "no_leaked_tasks":
            _, left = await asyncio.wait(left, timeout=4 * GRACE_S)
            left = left if len(left) >= ENOUGH_RUNS else set()
        if left:
            execution.report.fail(rule, f"every run left one behind, like {_shown(left.pop())}")
    execution.report.dismiss("no_leaked_processes", "no_leaked_handles")  # their pipes


def judge_stalls(execution: Execution) -> None:
    """Fail if a function blocked the loop in several runs; a single time may be an import."""
    if execution.num_runs < ENOUGH_RUNS:
        execution.report.skip("too few items ran", "loop_stays_free")
    execution.report.look("loop_stays_free", execution.num_runs)
    for where, blocked_s in execution.watch.stalls.items():
        if len(blocked_s) >= ENOUGH_RUNS:
            longest_ms = 1000 * max(blocked_s.values())
            execution.report.fail(
                "loop_stays_free", f"{where} blocked it for up to {longest_ms:.0f} ms"
            )


async def judge_cancelling(execution: Execution) -> None:
    """Cancel an item that waits for the engine: it ends cancelled, and its tasks with it."""
    report = execution.report
    if report.has_failed("collects"):
        report.skip("collects fails", "cancellable")
        return
    before, engine = asyncio.all_tasks(), execution.engine
    engine.script([EMPTY])
    engine.hold()
    task = asyncio.ensure_future(collect(execution.env, copy_of(execution.items[0])))
    task.add_done_callback(lambda _: engine.asked.set())
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.asked.wait(), execution.timeout_s)
        if task.done() or not engine.asked.is_set():
            report.skip("the item does not wait for the engine", "cancellable")
            return
        report.look("cancellable")
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        if not task.done():
            report.fail("cancellable", "it continued after task.cancel()", item=0)
        elif not task.cancelled():
            error = task.exception()
            ending = "returned" if error is None else f"raised {type(error).__name__}"
            report.fail("cancellable", f"it {ending} instead of ending cancelled", item=0)
        elif left := asyncio.all_tasks() - before - {task}:
            # The engine still holds requests, so tasks that end now were cancelled with the item.
            _, pending = await asyncio.wait(left, timeout=4 * GRACE_S)
            if pending:
                what = f"a cancelled item left one behind, like {_shown(pending.pop())}"
                report.fail("no_leaked_tasks", what, item=0)
    finally:
        engine.release()
        await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()


def _shown(thing: Any) -> str:
    """Return a task's coroutine function, a process as it shows itself, a descriptor by its number."""
    if not isinstance(thing, asyncio.Task):
        return f"descriptor {thing}" if isinstance(thing, int) else repr(thing)
    coroutine = thing.get_coro()
    return str(getattr(coroutine, "__qualname__", repr(coroutine)))
