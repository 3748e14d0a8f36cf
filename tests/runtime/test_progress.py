"""The status of a run: rate of the last minute, time left, reasons, what it waits for, and the table at the end."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from atroposlib.runtime.process import process
from atroposlib.runtime.progress import Progress, RunStatus
from atroposlib.runtime.serve import Timings, serve
from tests.runtime.helpers_runtime import LoopbackHub, ScriptedEnv, until

OFTEN = Timings(tick_s=0.01, register_s=0.02, progress_s=0.02)


def line(progress: Progress, now: float, status: RunStatus) -> str:
    return "; ".join(f"{name} {text}" for name, text in progress.rows(now, status))


def test_rate_is_that_of_the_last_minute_and_gives_the_time_left() -> None:
    progress = Progress(0.0)
    counts = {30.0: 10, 60.0: 20, 90.0: 80}
    lines = [line(progress, t, RunStatus(num_made=n, wanted=200)) for t, n in counts.items()]
    assert lines == [
        "groups 10 of 200; rate 20.0/min; time left 10 min; tokens 0 in, 0 out",
        "groups 20 of 200; rate 20.0/min; time left 9 min; tokens 0 in, 0 out",
        "groups 80 of 200; rate 70.0/min; time left 2 min; tokens 0 in, 0 out",
    ]


def test_time_left_of_a_trainer_counts_its_steps() -> None:
    progress = Progress(0.0)
    status = RunStatus(num_made=8, step=3, total_steps=13)
    assert "time left" not in line(progress, 0.0, status)
    assert "step 5 of 13; groups 8; rate 0.0/min; time left 7 min" in line(
        progress, 100.0, replace(status, step=5)
    )


def test_losses_are_named_by_reason_with_what_the_run_waits_for() -> None:
    status = RunStatus(
        num_made=2,
        num_sent=1,
        mean_score=0.25,
        dropped={"too_long": 1, "equal_scores": 3},
        lost={"too_short": 5, "aborted": 0},
        failed={"TimeoutError": 2},
        num_without_groups=7,
        num_in_flight=0,
        num_wanted_in_flight=4,
        over_age={"an engine": 2, "its own code": 1},
        num_ready=1,
        trainer_wait_share=0.125,
        staleness=1.5,
        waits_for="the hub",
        broken_prefixes={"changed": 3},
        num_tokens_in=1500,
        num_tokens_out=20,
        num_tokens_trained=18,
    )
    assert line(Progress(0.0), 10.0, status) == (
        "groups 2; sent 1; rate 12.0/min; waiting for the hub;"
        " problem made no group of 7 of 9 items: lost_too_short; mean score 0.250;"
        " dropped equal_scores 3, too_long 1; lost too_short 5; turns not continued changed 3;"
        " failed attempts TimeoutError 2;"
        " items without groups 7; in flight 0 of 4;"
        " over age, waiting for an engine 2, its own code 1; ready 1; trainer waits 12%; staleness 1.5;"
        " tokens 1.5k in, 20 out; sampled tokens 18 to train"
    )


def test_table_has_the_rate_of_the_whole_run() -> None:
    progress = Progress(0.0)
    progress.rows(300.0, RunStatus(num_made=100))
    table = progress.table(
        600.0, RunStatus(num_made=100, wanted=100, num_in_flight=0, waits_for="the engine")
    )
    assert table.splitlines() == [
        "  duration  10 min",
        "  groups    100 of 100",
        "  rate      10.0/min",
        "  tokens    0 in, 0 out",
    ]


async def test_serve_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async with LoopbackHub(batch_size=4) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=1)
        stop = asyncio.Event()
        with caplog.at_level(logging.INFO, logger="atroposlib.runtime.progress"):
            run = asyncio.create_task(serve(env, timings=OFTEN, stop=stop))
            idle = (
                r"step 0 of 1000; groups 2; sent 2; rate [\d.]+/min;"
                r" waiting for the trainer, which has enough groups; mean score 0.500;"
                r" in flight 0 of 0; ready 2; tokens 0 in, 0 out; sampled tokens 8 to train\n"
            )
            await until(lambda: re.search(idle, caplog.text) is not None)
            stop.set()
            await run
    assert "the run in numbers\n  duration    " in caplog.text


async def test_pace_is_logged_at_every_step() -> None:
    logged: list[dict[str, float]] = []

    class Logging(ScriptedEnv):
        async def wandb_log(self, wandb_metrics: Any = None) -> None:
            logged.append(wandb_metrics)

    async with LoopbackHub(batch_size=4) as hub, hub.serve(Logging):
        await hub.train(3)
        await until(lambda: len(logged) > 0 and "pace/trainer_wait_share" in logged[-1])
    assert logged[-1].keys() == {
        *("pace/items_in_flight", "pace/items_wanted", "pace/items_over_age", "pace/groups_ready"),
        *("pace/trainer_wait_share", "pace/staleness"),
    }


async def test_an_evaluation_that_stops_training_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LoopbackHub(batch_size=4) as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, max_batches_offpolicy=1)
        stop = asyncio.Event()
        env.eval_runner = asyncio.create_task(stop.wait())  # type: ignore[assignment]
        with caplog.at_level(logging.INFO, logger="atroposlib.runtime.progress"):
            run = asyncio.create_task(serve(env, timings=OFTEN, stop=stop))
            await until(lambda: "waiting for the evaluation (eval_handling)" in caplog.text)
            stop.set()
            await run


async def test_a_status_that_cannot_be_made_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    class BrokenEnv(ScriptedEnv):
        def lost_answers(self) -> dict[str, int]:
            return {"never": 1 // 0}

    path = str(tmp_path / "g.jsonl")
    env = BrokenEnv(total_steps=8, data_path_to_save_groups=path)
    assert (await process(env, timings=OFTEN)).num_groups == 8
    assert "the status of the run could not be shown" in caplog.text
    assert "ZeroDivisionError" in caplog.text
