"""Reward functions that loop, fork, fill memory, exit or hang in C cost their own score and nothing else.

First the workers alone, one misdeed after another; then whole environments (real processes, hub, engine, trainer) under
each policy for answers that could not be judged. Some misdeeds keep two processors busy until their deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

from atroposlib.client import HubClient, TrainerClient
from atroposlib.envs.rewards import RewardWorkers
from atroposlib.inference.scripted_engine import ScriptedEngine
from atroposlib.scored_data import ScoredGroup
from tests.faults import bad_rewards
from tests.faults.answers import script
from tests.faults.bad_rewards import KINDS, SCORE
from tests.faults.closing import MARK
from tests.faults.drivers import (
    GroupKey,
    HubProcess,
    assert_balanced,
    children,
    cpu_s,
    eventually,
    hub_process,
    is_alive,
    kill_group,
    make_group,
    own_children,
    peak_rss_bytes,
    stop_whole,
)
from tests.processes import Process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl"),
]

HANG_S = 8.0
"""Deadline of calls that are to reach it; those beside them must not, on a busy machine either."""
PATIENT_S = 60.0
"""Deadline of all others: none of them waits for it."""


def noted(folder: Path) -> list[int]:
    """Return the processes that the reward functions said they left."""
    return [int(file.stem) for file in folder.glob("*.pid")]


def survivors(folder: Path) -> list[int]:
    return [pid for pid in noted(folder) if is_alive(pid)]


# The workers alone


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


# Whole environments

HANGING = [each.__name__ for each, reason in KINDS.items() if reason == "timeout"]
HARMLESS = [each.__name__ for each, reason in KINDS.items() if reason is None]
DEADLY = [each.__name__ for each in KINDS if each.__name__ not in HANGING + HARMLESS]
NUM_GOOD = 8


class Judged:
    """One environment process with rows of these kinds, under one policy."""

    def __init__(
        self, hub: HubProcess, engine: ScriptedEngine, folder: Path, policy: str, kinds: list[str]
    ) -> None:
        folder.mkdir()
        self.folder, self.policy, self.kinds = folder, policy, kinds
        rows = [*kinds, *(f"good {number}" for number in range(NUM_GOOD))]
        self.reasons = Counter(
            reason for each, reason in KINDS.items() if each.__name__ in kinds and reason
        )
        self.num_rows = len(rows)
        self.process = Process(
            policy,
            [
                *("-m", "tests.faults.reward_env", "serve"),
                f"--env.kinds={json.dumps(rows)}",
                f"--env.on_reward_failure={policy}",
                f"--env.fails_once={policy == 'retry'}",
                f"--env.folder={folder}",
                f"--env.wandb_name={policy}",
                f"--env.reward_timeout_s={HANG_S if 'timeout' in self.reasons else PATIENT_S}",
                f"--env.rollout_server_url={hub.url}",
                f"--env.data_path_to_save_groups={folder / 'groups.jsonl'}",
                f"--openai.base_url={engine.url}/v1",
            ],
            log_path=folder / "log",
        )

    def num_groups(self) -> int:
        groups = self.folder / "groups.jsonl"
        return groups.read_text().count("\n") if groups.exists() else 0

    def is_done(self) -> bool:
        assert self.process.popen.poll() is None, self.process.log()[-6000:]
        return self.num_groups() == self.num_rows

    async def stop(self) -> None:
        """SIGTERM; nothing that the environment or its rewards started may be left."""
        popen = self.process.popen
        # What a call forked off and left dead is its worker's to collect, for as long as that lives.
        await eventually(
            lambda: all(map(is_alive, own_children(popen.pid))),
            timeout_s=20,
            what="workers that died are collected",
        )
        await stop_whole(self.process)
        assert survivors(self.folder) == []

    def check_log(self) -> None:
        """Every answer that got no score is counted, by reason."""
        log = self.process.log()
        (calls, failed) = re.findall(r"(\d+) scoring calls; failed: (.*)", log)[-1]
        pairs = [] if failed == "none" else [each.split() for each in failed.split(", ")]
        assert {reason: int(number) for reason, number in pairs} == self.reasons
        num_failed = self.reasons.total()
        retried = num_failed if self.policy == "retry" else 0  # each went well then
        assert int(calls) == 4 * self.num_rows + retried
        unjudged = 0 if self.policy == "retry" else num_failed
        assert json.loads(re.findall(MARK + "(.*)", log)[-1]) == {"reward failures": unjudged}
        assert f"{self.num_rows} groups accepted, {self.num_rows} stored by the hub, 0 held" in log
        assert (
            f"{self.num_rows} items started: {self.num_rows} gave groups, 0 gave none, 0 given"
            in log
        )

    def expected_scores(self) -> Counter[tuple[float, ...]]:
        """The scores of every group, by what the policy makes of the answers without one."""
        good = (0.0, 1.0, 2.0, 3.0)
        failed = {
            "drop": (1.0, 2.0, 3.0),
            "mask": (2.0, 1.0, 2.0, 3.0),
            "retry": (SCORE, 1.0, 2.0, 3.0),
        }
        return Counter({good: NUM_GOOD}) + Counter({failed[self.policy]: len(self.kinds)})


async def train_all(hub: HubProcess, sizes: Counter[int]) -> list[ScoredGroup]:
    """Learn from everything queued: groups of three and of four sequences, in batches of twelve."""
    async with HubClient(hub.url) as client:
        for size, whole in ((3, 4), (4, 3)):
            for number in range(-sizes[size] % whole):
                filler = make_group(GroupKey(size, number), num_sequences=size, num_tokens=8)
                await client.send([filler])
    groups: list[ScoredGroup] = []

    def take() -> None:
        with TrainerClient(hub.url) as trainer:
            while (batch := trainer.lease_batch(wait_s=2.0)) is not None:
                trainer.ack(batch)
                groups.extend(batch.groups)
            trainer.checkpoint(trainer.status().current_step)

    await asyncio.to_thread(take)
    return groups


@pytest.mark.timeout(300)
async def test_run_goes_on_whatever_its_rewards_do_and_every_lost_score_is_counted(
    tmp_path: Path,
) -> None:
    with hub_process(tmp_path) as hub:
        async with ScriptedEngine(script()) as engine:
            hub.register(batch_size=12, max_token_len=64)
            kinds = {"drop": HANGING + DEADLY, "mask": DEADLY, "retry": DEADLY + HARMLESS}
            environments = [
                Judged(hub, engine, tmp_path / policy, policy, kinds[policy]) for policy in kinds
            ]
            try:
                for each in environments:
                    await eventually(
                        each.is_done,
                        timeout_s=120,
                        what=f"{each.policy}: {each.num_rows} groups, not {each.num_groups()}",
                        interval_s=0.1,
                    )
                peaks = [peak_rss_bytes(each.process.popen.pid) for each in environments]
                for each in environments:
                    await each.stop()
            finally:
                for each in environments:
                    kill_group(each.process.popen.pid)
                    each.process.popen.wait()
        expected = sum((each.expected_scores() for each in environments), Counter())
        sizes = Counter({3: 0, 4: 0})
        for scores, number in expected.items():
            sizes[len(scores)] += number
        groups = await train_all(hub, sizes)
        ledger = hub.get("/ledger")
    for each in environments:
        each.check_log()
    assert_balanced(ledger)
    own = [group for group in groups if group.env_id is not None]
    assert Counter(tuple(group.scores.tolist()) for group in own) == expected
    assert len({group.group_id for group in groups}) == len(groups)
    assert ledger["produced"] == ledger["trained"] == len(groups)
    for group in own:
        untrained = [
            not (group.sequence(i).masks != -100).any() for i in range(group.num_sequences)
        ]
        is_masked = group.scores.tolist() == [2.0, 1.0, 2.0, 3.0]
        assert untrained == [is_masked] + [False] * (group.num_sequences - 1)
    assert max(peaks) < 300 * 2**20
