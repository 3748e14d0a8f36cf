"""Reward functions that loop, fork, fill memory, exit or hang in C cost their own score and nothing else.

What an environment makes of an answer without a score: tests/envs/test_unjudged_answers.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.rewards import RewardWorkers
from tests.faults import bad_rewards
from tests.faults.bad_rewards import KINDS, SCORE
from tests.faults.drivers import children, cpu_s, eventually, is_alive
from tests.processes import Process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl"),
]

HANG_S = 1.5
"""Deadline of calls that are to reach it."""
PATIENT_S = 60.0
"""Deadline of all others: none of them waits for it."""


def noted(folder: Path) -> list[int]:
    """Return the processes that the reward functions said they left."""
    return [int(file.stem) for file in folder.glob("*.pid")]


def survivors(folder: Path) -> list[int]:
    return [pid for pid in noted(folder) if is_alive(pid)]


@pytest.mark.parametrize("misdeed", KINDS, ids=lambda each: each.__name__)
async def test_a_misdeed_costs_its_own_score_and_leaves_nothing_behind(
    misdeed: Callable[[str], Any], tmp_path: Path
) -> None:
    """Also beside it, other calls get their scores."""
    reason = KINDS[misdeed]
    async with RewardWorkers(num_workers=2) as workers:
        timeout_s = HANG_S if reason == "timeout" else PATIENT_S
        folder = str(tmp_path)
        beside = [workers.run(bad_rewards.behave, folder, timeout_s=PATIENT_S) for _ in range(3)]
        outcome, *others = await asyncio.gather(
            workers.run(misdeed, folder, timeout_s=timeout_s), *beside
        )
        assert others == [SCORE] * 3
        assert getattr(outcome, "reason", outcome) == (SCORE if reason is None else reason)
        assert workers.failures == ({} if reason is None else {reason: 1})
        assert await workers.run(bad_rewards.behave, folder, timeout_s=PATIENT_S) == SCORE
    assert survivors(tmp_path) == []


async def test_worker_whose_calls_leave_processes_behind_is_replaced(tmp_path: Path) -> None:
    async with RewardWorkers() as workers:
        for _ in range(40):
            outcome = await workers.run(
                bad_rewards.leave_a_program, str(tmp_path), timeout_s=PATIENT_S
            )
            assert outcome == SCORE
            assert len(survivors(tmp_path)) <= 17
        assert len(noted(tmp_path)) == 40
        assert workers.failures == {}
    assert survivors(tmp_path) == []


async def test_worker_ends_although_a_fork_of_the_environment_holds_its_pipe(
    tmp_path: Path,
) -> None:
    workers = RewardWorkers()
    assert await workers.run(bad_rewards.leave_a_daemon, str(tmp_path), timeout_s=PATIENT_S)
    fork = sleeping_fork()
    try:
        await workers.close()
        assert survivors(tmp_path) == []
    finally:
        collect(fork)


def sleeping_fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def collect(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("misdeed", ["fork_and_wait", "leave_a_daemon", "hang_in_regex"])
async def test_environment_that_is_killed_leaves_no_process_of_its_rewards(
    misdeed: str, tmp_path: Path
) -> None:
    script = (
        "import asyncio\n"
        "from atroposlib.envs.rewards import RewardWorkers\n"
        "from tests.faults import bad_rewards\n"
        "async def main():\n"
        "    workers = RewardWorkers()\n"
        f"    call = workers.run(bad_rewards.{misdeed}, {str(tmp_path)!r}, timeout_s=600)\n"
        "    task = asyncio.create_task(call)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    num_noted = {"fork_and_wait": 4, "leave_a_daemon": 1, "hang_in_regex": 0}[misdeed]
    parent = Process("environment", ["-c", script], log_path=tmp_path / "log")

    def is_under_way() -> bool:
        assert parent.popen.poll() is None, parent.log()[-4000:]
        found = children(parent.popen.pid)
        is_busy = misdeed != "hang_in_regex" or any(cpu_s(pid) > 1.0 for pid in found)
        return len(found) >= 2 and len(noted(tmp_path)) == num_noted and is_busy

    try:
        await eventually(is_under_way, timeout_s=60, what="the misdeed is under way")
        found = children(parent.popen.pid)
    finally:
        parent.popen.kill()
        parent.popen.wait()
    await eventually(
        lambda: not any(map(is_alive, found)) and not survivors(tmp_path),
        timeout_s=30,
        what="all have gone",
    )
