"""Judge what runs leave behind: tasks, processes, open files, a blocked event loop, work of a cancelled item."""

from __future__ import annotations

import asyncio
from typing import Any

from atroposlib.checker.answers import EMPTY
from atroposlib.checker.calls import ENOUGH_RUNS, GRACE_S, copy_of, leaked
from atroposlib.checker.execution import Execution
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import collect

_LEAK_RULES = ("no_leaked_tasks", "no_leaked_handles", "no_leaked_processes")


async def judge_leaks(execution: Execution) -> None:
    """Fail if every run left a task, a process or an open file behind."""
    if len(execution.tasks) <= ENOUGH_RUNS:
        execution.verdicts.skip("too few items ran", *_LEAK_RULES)
        return
    for name in _LEAK_RULES:
        execution.verdicts.look(name, len(execution.tasks))
    tasks = leaked(execution.tasks)
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=4 * GRACE_S)
    if len(tasks) >= ENOUGH_RUNS:
        what = f"every run left a task of {_name_of(tasks.pop())} behind"
        execution.verdicts.fail("no_leaked_tasks", what)
    if processes := leaked(execution.processes):
        execution.verdicts.fail(
            "no_leaked_processes", f"every run left one behind, like {processes.pop()}"
        )
        execution.verdicts.skip(
            "processes are left, and their pipes with them", "no_leaked_handles"
        )
    if leaked(execution.handles):
        execution.verdicts.fail("no_leaked_handles", "every run left a file, socket or pipe open")


def judge_stalls(execution: Execution) -> None:
    """Fail if a function blocked the loop in several runs; a single time may be an import."""
    if len(execution.tasks) < ENOUGH_RUNS:
        execution.verdicts.skip("too few items ran", "loop_stays_free")
    execution.verdicts.look("loop_stays_free", len(execution.tasks))
    for where, blocked_s in execution.watch.stalls.items():
        if len(blocked_s) >= ENOUGH_RUNS:
            longest_ms = 1000 * max(blocked_s.values())
            execution.verdicts.fail(
                "loop_stays_free", f"{where} blocked it for up to {longest_ms:.0f} ms"
            )


async def judge_cancelling(execution: Execution, env: BaseEnv) -> None:
    """Cancel an item that waits for the engine: it ends cancelled, and its tasks with it."""
    if execution.verdicts.has_failed("collects"):
        execution.verdicts.skip("items fail", "cancellable")
        return
    before = asyncio.all_tasks()
    execution.engine.script([EMPTY])
    execution.engine.hold()
    task = asyncio.ensure_future(collect(env, copy_of(execution.items[0])))
    asked = asyncio.ensure_future(execution.engine.asked.wait())
    try:
        await asyncio.wait(
            {task, asked}, timeout=execution.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done() or not asked.done():
            execution.verdicts.skip("the item does not wait for the engine", "cancellable")
            return
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        if not task.done():
            execution.verdicts.fail("cancellable", "it continued after task.cancel()", item=0)
        elif not task.cancelled():
            error = task.exception()
            ending = "returned" if error is None else f"raised {type(error).__name__}"
            execution.verdicts.fail(
                "cancellable", f"it {ending} instead of ending cancelled", item=0
            )
        else:
            execution.verdicts.look("cancellable")
        if task.cancelled() and (left := asyncio.all_tasks() - before - {task, asked}):
            # The engine still holds requests, so tasks that end now were cancelled with the item.
            _, pending = await asyncio.wait(left, timeout=4 * GRACE_S)
            if pending:
                what = f"a cancelled item left a task of {_name_of(pending.pop())} behind"
                execution.verdicts.fail("no_leaked_tasks", what, item=0)
    finally:
        execution.engine.release()
        asked.cancel()
        await asyncio.wait({task, asked}, timeout=GRACE_S)
        task.cancel()


def _name_of(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", repr(coroutine)))
