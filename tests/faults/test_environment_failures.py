"""Failures of an environment's own code: when they end the run, what is logged, what is counted.

In one process, with a hub on a loopback port.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import EnvError
from atroposlib.runtime.process import process
from atroposlib.runtime.serve import serve
from tests.faults.closing import MARK, closing_counts
from tests.runtime.helpers_runtime import (
    FAST,
    LoopbackHub,
    ScriptedEnv,
    make_group,
    produced,
    until,
)

pytestmark = pytest.mark.e2e


async def test_item_whose_group_is_refused_asks_for_its_backlog_once() -> None:
    attempts: Counter[int] = Counter()

    class Asking(ScriptedEnv):
        async def collect_trajectories(self, item: int) -> Any:
            attempts[item] += 1
            group = make_group()
            if item == 0 and attempts[0] == 1:
                group["masks"] = group["masks"][:1]
            return group, [100] if item == 0 else []

    async with LoopbackHub(batch_size=4) as hub, hub.serve(Asking, num_items=2) as env:
        await until(lambda: attempts[100] > 0 and not env.running_items)
    outbox: Any = env.group_sink
    assert attempts == {0: 2, 1: 1, 100: 1}
    assert (outbox.num_stored, outbox.dropped) == (3, {"malformed": 1})


async def test_override_that_fails_after_the_groups_are_handed_over_does_not_give_them_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(ScriptedEnv):
        async def handle_env(self, item_uuid: Any) -> Any:
            await super().handle_env(item_uuid)
            raise OSError("the author's own log is full")

    caplog.set_level(logging.INFO)
    async with LoopbackHub(batch_size=4) as hub, hub.serve(Failing, num_items=3) as env:
        await until(lambda: caplog.text.count("the author's own log is full") >= 3)
    outbox: Any = env.group_sink
    assert env.started == [0, 1, 2]
    assert (outbox.num_accepted, outbox.num_stored) == (3, 3)
    counts = closing_counts(caplog.text + MARK + "{}")
    assert (counts["started"], counts["with groups"], counts["failed"]) == (3, 3, {})


@pytest.mark.parametrize("is_over", [True, False])
async def test_failures_of_one_moment_end_the_run_only_if_a_later_attempt_fails_too(
    is_over: bool,
) -> None:
    """A process that was stopped finds all its items past their deadlines, more than may fail in a row."""
    num_workers, max_failures = 8, 4
    has_struck = asyncio.Event()

    async def answer(item: int) -> Any:
        await has_struck.wait()
        first = len(env.started) <= num_workers
        return TimeoutError("too late") if first or not is_over else make_group()

    async with LoopbackHub(batch_size=16) as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url,
            answer=answer,
            num_items=num_workers,
            max_num_workers=num_workers,
            max_consecutive_failures=max_failures,
        )
        run = asyncio.create_task(serve(env, timings=FAST, stop=(stop := asyncio.Event())))
        await until(lambda: len(env.running_items) == num_workers)
        has_struck.set()
        if is_over:
            await until(lambda: produced(hub) == num_workers or run.done())
            stop.set()
            assert (await run).num_stored == num_workers
        else:
            with pytest.raises(EnvError, match=r"9 items in a row failed with TimeoutError"):
                await run


@pytest.mark.parametrize("raised", [SystemExit(2), KeyboardInterrupt()])
@pytest.mark.parametrize("hook", ["setup", "get_next_item", "evaluate", "handle_env"])
async def test_exit_from_a_hook_is_its_failure_and_stops_no_loop(
    hook: str, raised: BaseException
) -> None:
    async def fail(self: Any, *_: Any) -> Any:
        raise raised

    exiting = type("Exiting", (ScriptedEnv,), {hook: fail})
    async with LoopbackHub(batch_size=4) as hub:
        env = exiting(
            rollout_server_url=hub.url, steps_per_eval=1, max_consecutive_failures=4, total_steps=2
        )
        run = asyncio.create_task(serve(env, timings=FAST))
        while hook == "evaluate" and not run.done():
            await hub.take_batch()
            await asyncio.sleep(0.01)
        if hook == "evaluate":  # training continues
            assert (await run).num_stored >= 4
        else:
            with pytest.raises(EnvError, match=f"code raised {type(raised).__name__}"):
                await run
        assert hub.coordinator.state.environments.num_active == 0


async def test_process_tries_an_item_again_whose_group_is_malformed(tmp_path: Path) -> None:
    def answer(item: int) -> Any:
        group = make_group()
        if item == 1 and env.started.count(1) == 1:
            group["masks"] = group["masks"][:1]
        return group

    env = ScriptedEnv(
        answer=answer,
        total_steps=4,
        max_num_workers=1,
        data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
    )
    assert (await process(env)).num_groups == 4
    assert env.started == [0, 1, 1, 2, 3]


async def test_process_asks_for_the_backlog_of_the_last_item(tmp_path: Path) -> None:
    class Asking(ScriptedEnv):
        async def collect_trajectories(self, item: int) -> Any:
            self.started.append(item)
            return make_group(), [item + 10] if item < 10 else []

    env = Asking(
        num_items=2,
        total_steps=9,
        max_num_workers=4,
        data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
    )
    assert (await process(env)).num_groups == 4
    assert env.started == [0, 1, 10, 11]
