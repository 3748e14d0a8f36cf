"""Judge what runs leave behind: tasks, processes, open files, a blocked event loop."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from atroposlib.checker.calls import ENOUGH_RUNS, GRACE_S, PROC, leaked
from atroposlib.checker.execution import STOCKS, Execution


async def judge_leaks(execution: Execution) -> None:
    """Fail if every run left a task, a process or an open file behind."""
    if execution.num_runs <= ENOUGH_RUNS:
        execution.report.skip("too few items ran", *STOCKS)
    if not PROC.exists():
        execution.report.skip("this machine has no /proc", "no_leaked_processes")
    for rule, stock in execution.stocks.items():
        execution.report.look(rule, execution.num_runs)
        left = leaked(stock)
        if left and rule == "no_leaked_tasks":
            _, left = await asyncio.wait(left, timeout=4 * GRACE_S)
            left = left if len(left) >= ENOUGH_RUNS else set()
        if left:
            execution.report.fail(rule, f"every run left one behind, like {_shown(left.pop())}")
    gc.collect()
    for what, count in execution.unclosed.items():
        if count >= ENOUGH_RUNS:
            execution.report.fail("no_leaked_handles", f"{what}, {count} times")
    execution.report.dismiss("no_leaked_processes", "no_leaked_handles")  # their pipes


def judge_stalls(execution: Execution) -> None:
    """Fail if a call blocked the loop in several runs; a single time may be an import.

    Calls of several tasks that compute one after another, as agents do that each build a client, are only noted.
    """
    if execution.num_runs < ENOUGH_RUNS:
        execution.report.skip("too few items ran", "loop_stays_free")
    execution.report.look("loop_stays_free", execution.num_runs)
    for where, stall in list(execution.watch.together.items()):
        if execution.watch.stalls[where].num_runs >= ENOUGH_RUNS:
            longest_s = execution.watch.stalls[where].longest_s
            what = f"{where} blocked it for up to {1000 * longest_s:.0f} ms"
            execution.report.fail("loop_stays_free", what)
        elif stall.num_runs >= ENOUGH_RUNS:
            what = f"short calls of {where} by several tasks blocked it for {1000 * stall.longest_s:.0f} ms together"
            execution.report.note("loop_stays_free", what)


def _shown(thing: Any) -> str:
    """Return a task's coroutine function, a process as it shows itself, a descriptor by its number."""
    if not isinstance(thing, asyncio.Task):
        return f"descriptor {thing}" if isinstance(thing, int) else repr(thing)
    coroutine = thing.get_coro()
    return str(getattr(coroutine, "__qualname__", repr(coroutine)))
