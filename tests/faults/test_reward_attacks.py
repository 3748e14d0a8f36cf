"""Programs of a model that attack their judge get the score they earned, and do not change those of other answers.

Every group holds a right program, some attacks and a wrong program. They are run in a sandbox below the reward
workers; the workers and this process hold the expected answer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome
from atroposlib.envs.rewards import RewardFailure, RewardWorkers
from atroposlib.envs.sandbox import ProcessSandbox, local_sandbox
from atroposlib.inference.harness import ServerHarness
from tests.builders.environments import Offline
from tests.faults import hostile_programs
from tests.faults.drivers import eventually
from tests.faults.hostile_programs import ATTACKS, HANG_S, PATIENT_S, RIGHT, WRONG

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

GROUP = 8
"""Attacks in one group."""


def attacks() -> dict[str, hostile_programs.Attack]:
    """Return those that the kernel can stop here."""
    shares_user = os.geteuid() != 0 and isinstance(local_sandbox(), ProcessSandbox)
    return {
        name: attack
        for name, attack in ATTACKS.items()
        if not (shares_user and attack.needs_separate_user)
    }


class Programs(Offline, DatasetEnv):
    """The row is the input; the answer is a program."""

    name = "programs"

    def load_rows(self, split: str) -> Any:
        return [secrets.token_hex(16)]

    def prompt(self, row: Any) -> Any:
        return "Write a program."

    async def score(self, row: Any, answer: str) -> Outcome:
        hangs = any(a.source == answer and a.ends == ("timeout",) for a in ATTACKS.values())
        judged = await self.in_worker(
            hostile_programs.judge,
            answer,
            row[::-1],
            f"answer-{row}",
            HANG_S if hangs else PATIENT_S,
        )
        if isinstance(judged, RewardFailure):
            return judged
        reason, passed = judged
        self.ends.append((answer, reason))
        return float(passed) if reason == "exit" else RewardFailure(reason=reason, detail="")


@pytest.mark.parametrize("backend", ["local", "plain"])
async def test_no_attack_earns_or_moves_a_sibling(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if backend == "plain":
        if isinstance(local_sandbox(), ProcessSandbox):
            pytest.skip("this machine has no other sandbox")
        without = os.pathsep.join(
            folder
            for folder in os.environ["PATH"].split(os.pathsep)
            if not (Path(folder) / "bwrap").exists()
        )
        monkeypatch.setenv("PATH", without)
    config = DatasetEnvConfig(
        group_size=GROUP + 2,
        use_wandb=False,
        num_reward_workers=3,
        reward_timeout_s=2 * PATIENT_S,
        max_token_length=100_000,
        num_eval_rows=0,
    )
    server = APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")
    env: Any = Programs(config, [server])
    env.ends = []
    assert len(ATTACKS) >= 25
    chosen = list(attacks().items())
    try:
        await env.setup()
        for some in _in_groups(chosen):
            sources = [RIGHT, *(attack.source for _, attack in some), WRONG]
            env.config.group_size = len(sources)
            env.server.servers = [ServerHarness(respond=lambda r, s=sources: s[r.choice])]
            env.ends.clear()
            group, _ = await env.collect_trajectories(env.train_rows[0])
            ends = dict(env.ends)
            for name, attack in some:
                assert ends[attack.source] in attack.ends, (name, ends[attack.source])
            # An attack that ends its program is as wrong as one that prints something.
            expected = [float(source == RIGHT) for source in sources]
            assert dict(zip(sources, group["scores"], strict=True)) == dict(
                zip(sources, expected, strict=True)
            )
            assert env.num_reward_failures == 0
    finally:
        await env.close()
    assert env.reward_workers.failures == {}
    assert not os.path.exists("/tmp/pickled-bomb-went-off")  # noqa: ASYNC240 - once, at the end
    is_plain = backend == "plain" or isinstance(local_sandbox(), ProcessSandbox)
    assert ("RUN WITHOUT BUBBLEWRAP" in caplog.text) == is_plain


def _in_groups(chosen: list[Any]) -> list[list[Any]]:
    return [chosen[start : start + GROUP] for start in range(0, len(chosen), GROUP)]


async def test_hung_program_ends_with_its_worker() -> None:
    # Command lines have the length of a program, not its text; this one's tells it from those of other tests.
    program = "import time; time.sleep(3600)".ljust(10_000 + secrets.randbelow(100_000))
    async with RewardWorkers() as workers:
        assert await workers.run(hostile_programs.judge, RIGHT, "", "x", 60.0, timeout_s=60)
        call = workers.run(hostile_programs.judge, program, "", "", 600.0, timeout_s=6.0)
        judging = asyncio.create_task(call)
        await eventually(lambda: is_running(program), timeout_s=20, what="the program runs")
        outcome = await judging
        assert isinstance(outcome, RewardFailure)
        assert outcome.reason == "timeout"
    await eventually(lambda: not is_running(program), timeout_s=20, what="the program ends")


def is_running(program: str) -> bool:
    """Whether a sandbox on this machine runs a program of this length."""
    settings = f"'num_source_bytes': {len(program)},".encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if settings in file.read_bytes():
                return True
        except OSError:
            continue  # it has just ended
    return False
