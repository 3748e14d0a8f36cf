"""The line about a run: rate of the last minute, time left, reasons, what it waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from atroposlib.runtime.process import process
from atroposlib.runtime.progress import Progress
from atroposlib.runtime.serve import Timings, serve
from tests.runtime.helpers_runtime import LoopbackHub, ScriptedEnv, make_group, until

KNOWN: dict[str, Any] = {
    "wanted": None, "mean_score": None, "dropped": {}, "failed": {}, "num_empty": 0,
    "num_in_flight": 4, "waits_for": None,
}  # fmt: skip


def test_rate_is_that_of_the_last_minute_and_gives_the_time_left() -> None:
    progress = Progress(0.0)
    counts = {30.0: 10, 60.0: 20, 90.0: 80}
    lines = [progress.line(t, num_groups=n, **KNOWN | {"wanted": 200}) for t, n in counts.items()]
    assert lines == [
        "10 of 200 groups; 20.0 a minute; 10 min left; 4 items in flight",
        "20 of 200 groups; 20.0 a minute; 9 min left; 4 items in flight",
        "80 of 200 groups; 70.0 a minute; 2 min left; 4 items in flight",
    ]


def test_drops_are_named_by_reason_with_what_the_run_waits_for() -> None:
    line = Progress(0.0).line(
        10.0,
        num_groups=0,
        **KNOWN
        | {"mean_score": 0.25, "dropped": {"too_long": 1, "equal_scores": 3}, "num_in_flight": 0}
        | {"failed": {"TimeoutError": 2}, "num_empty": 7, "waits_for": "the engine"},
    )
    assert line == (
        "0 groups; 0.0 a minute; mean score 0.250; dropped: equal_scores 3, too_long 1;"
        " failed attempts: TimeoutError 2; 7 items gave no group;"
        " 0 items in flight; waiting for the engine"
    )


async def test_serve_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    timings = Timings(tick_s=0.01, register_s=0.02, progress_s=0.02)
    async with LoopbackHub(batch_size=4) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=1)
        stop = asyncio.Event()
        with caplog.at_level(logging.INFO, logger="atroposlib.runtime.progress"):
            run = asyncio.create_task(serve(env, timings=timings, stop=stop))
            await until(lambda: "waiting for the trainer, which has enough groups" in caplog.text)
            stop.set()
            await run
    assert "step 0 of 1000: 2 groups; " in caplog.text
    assert "mean score 0.500; 0 items in flight" in caplog.text


async def test_an_evaluation_that_stops_training_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LoopbackHub(batch_size=4) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=1)
        stop = asyncio.Event()
        env.eval_runner = asyncio.create_task(stop.wait())  # type: ignore[assignment]
        with caplog.at_level(logging.INFO, logger="atroposlib.runtime.progress"):
            timings = Timings(tick_s=0.01, register_s=0.02, progress_s=0.02)
            run = asyncio.create_task(serve(env, timings=timings, stop=stop))
            await until(lambda: "waiting for the evaluation (eval_handling)" in caplog.text)
            stop.set()
            await run


async def test_a_line_that_cannot_be_made_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "line", lambda self, now, **counts: 1 / 0)

    async def answer(item: int) -> Any:
        await asyncio.sleep(0.05)
        return make_group()

    path = str(tmp_path / "g.jsonl")
    env = ScriptedEnv(answer=answer, total_steps=8, data_path_to_save_groups=path)
    assert (await process(env, timings=Timings(progress_s=0.01))).num_groups == 8
    assert "the line about the run could not be made" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_process_shows_its_progress(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    async def answer(item: int) -> Any:
        await asyncio.sleep(0.05)
        return make_group()

    env = ScriptedEnv(
        answer=answer, total_steps=8, data_path_to_save_groups=str(tmp_path / "g.jsonl")
    )
    with caplog.at_level(logging.INFO, logger="atroposlib.runtime.progress"):
        await process(env, timings=Timings(progress_s=0.02))
    assert "of 8 groups; " in caplog.text
