"""Two environments, a hub, an engine and a trainer under a schedule of faults: no group lost, none trained twice.

Every fault of `FAULTS` comes alone, then pairs of those that strike different parts come at once; meanwhile a quarter
of the environments' items go wrong in ways of their own (`faulty_env.py`). Then everything is mended, the environments
are stopped, the trainer learns from what is left, and the account must close.

The ten-minute variant: pytest -m slow tests/faults/test_environment_schedule.py -s
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from atroposlib.client import HubClient
from atroposlib.inference.scripted_engine import Fault as EngineFault
from atroposlib.inference.scripted_engine import ScriptedEngine
from atroposlib.scored_data import Strictness, check_group
from tests.faults.answers import answer_logprobs, answer_tokens, script
from tests.faults.closing import closing_counts
from tests.faults.drivers import (
    BATCH_SIZE,
    HubProcess,
    assert_balanced,
    drilled,
    eventually,
    hub_process,
    kill_group,
    stop_whole,
)
from tests.faults.faulty_env import kind_of
from tests.faults.proxy import Proxy, Toxics
from tests.processes import ROOT, Process

pytestmark = pytest.mark.e2e

GROUP_SIZE = 4
MAX_QUEUED = 5 * BATCH_SIZE
"""Of the hub, in sequences; the environments want to be a batch further ahead."""
RECOVERY_S = 90.0
"""Generous: the machine may be slow. What is asserted are counts."""


@dataclass(slots=True)
class Member:
    """One environment process and what it left behind."""

    run: str
    process: Process
    groups: Path

    def log(self) -> str:
        return self.process.log()

    def accepted(self) -> list[str]:
        """The prompts of the groups that the environment accepted, from its JSONL file."""
        if not self.groups.exists():
            return []
        rows = [json.loads(line) for line in self.groups.read_text().splitlines()]
        return [name_in(row["tokens"][0]) for row in rows]


def name_in(tokens: list[int]) -> str:
    text = bytes(token - 3 for token in tokens if token >= 3)
    return text.partition(b";")[0].decode()


@dataclass(slots=True)
class Stage:
    """Everything that runs."""

    directory: Path
    hub: HubProcess
    proxy: Proxy
    engine: ScriptedEngine
    rng: random.Random
    trainer: Process | None = None
    members: dict[str, Member] = field(default_factory=dict)
    """Environments that run, by name."""
    left: list[Member] = field(default_factory=list)
    """Those that have ended, after a check of how."""

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.json"

    @property
    def num_refusals(self) -> int:
        """How often the hub has said that it is full."""
        assert self.hub.process is not None
        return self.hub.process.log().count("status=429")

    @property
    def committed(self) -> dict[str, Any]:
        if not self.checkpoint.exists():
            return {"step": 0, "groups": []}
        saved: dict[str, Any] = json.loads(self.checkpoint.read_text())
        return saved

    def start_trainer(self) -> None:
        argv = ["-m", "tests.faults.journal_trainer", self.proxy.url, str(self.directory)]
        self.trainer = Process("trainer", argv, log_path=self.directory / "trainer.log")

    def start_environment(self, name: str) -> None:
        number = sum(each.run.startswith(name) for each in self.left)
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        process = Process(
            f"environment {name}",
            [
                str(ROOT / "tests" / "faults" / "faulty_env.py"),
                "serve",
                f"--env.run={name}{number}",
                f"--env.wandb_name={name}",
                f"--env.rollout_server_url={self.proxy.url}",
                f"--env.data_path_to_save_groups={folder / 'groups.jsonl'}",
                "--env.max_batches_offpolicy=6",
                f"--openai.base_url={self.engine.url}/v1",
            ],
            log_path=folder / f"{number}.log",
        )
        groups = folder / ("groups.jsonl" if number == 0 else f"groups_{number}.jsonl")
        self.members[name] = Member(f"{name}{number}", process, groups)

    async def stop_environment(self, name: str, *, code: int, times: int = 1) -> None:
        member = self.members.pop(name)
        self.left.append(member)
        await stop_whole(member.process, code=code, times=times)

    def check(self) -> None:
        """Fail with the log of whatever has ended by itself."""
        assert self.trainer is not None
        assert self.trainer.popen.poll() is None, self.trainer.log()[-4000:]
        for member in self.members.values():
            assert member.process.popen.poll() is None, member.log()[-6000:]

    async def progress(self, why: str) -> float:
        """Wait until the trainer has written a checkpoint with later groups; return the seconds it took."""
        step = self.committed["step"]

        def has_moved() -> bool:
            self.check()
            return bool(self.committed["step"] > step)

        return await eventually(
            has_moved, timeout_s=RECOVERY_S, what=f"a checkpoint after {why}", interval_s=0.1
        )

    def close(self) -> None:
        everyone = [*self.members.values(), *self.left]
        for process in [self.trainer, *(each.process for each in everyone)]:
            if process is not None:
                kill_group(process.popen.pid)
                process.popen.wait()


@asynccontextmanager
async def stage(directory: Path, *, seed: int) -> AsyncIterator[Stage]:
    flags = ("--max-queued-sequences", str(MAX_QUEUED), "--max-deliveries", "100")
    with hub_process(directory, *flags) as hub:
        async with ScriptedEngine(script()) as engine, Proxy(hub.port, seed=seed) as proxy:
            running = Stage(directory, hub, proxy, engine, random.Random(seed))
            try:
                running.start_trainer()
                for name in ("a", "b"):
                    running.start_environment(name)
                await running.progress("the start")
                yield running
            finally:
                running.close()


# Faults. Each strikes, and mends what it broke.


async def kill_hub(on: Stage) -> None:
    await asyncio.to_thread(on.hub.kill)
    await asyncio.sleep(on.rng.random())
    await asyncio.to_thread(on.hub.start)


async def take_hub_away(on: Stage) -> None:
    await asyncio.to_thread(on.hub.kill)
    await asyncio.sleep(10)
    await asyncio.to_thread(on.hub.start)


async def cut_network(on: Stage) -> None:
    for _ in range(8):
        await on.proxy.cut()
        await asyncio.sleep(0.4 * on.rng.random())
        await on.proxy.heal()
        await asyncio.sleep(0.4 * on.rng.random())


async def spoil_network(on: Stage) -> None:
    on.proxy.toxics = Toxics(reset_chance=0.05, slice_bytes=500, latency_s=0.01)
    await asyncio.sleep(4)
    await on.proxy.heal()


async def silence_network(on: Stage) -> None:
    on.proxy.toxics = Toxics(is_blackhole=True)
    await asyncio.sleep(4)
    await on.proxy.heal()


async def fill_hub(on: Stage) -> None:
    """The trainer hangs until the hub has told an environment that it is full."""
    assert on.trainer is not None
    before = on.num_refusals
    on.trainer.popen.send_signal(signal.SIGSTOP)
    try:
        await eventually(
            lambda: on.num_refusals > before,
            timeout_s=RECOVERY_S,
            what="the hub says that it is full",
            interval_s=0.1,
        )
        await asyncio.sleep(1)
    finally:
        on.trainer.popen.send_signal(signal.SIGCONT)


async def kill_trainer(on: Stage) -> None:
    assert on.trainer is not None
    on.trainer.popen.kill()
    on.trainer.popen.wait()
    await asyncio.sleep(on.rng.random())
    on.start_trainer()


async def spoil_engine(on: Stage) -> None:
    drops = (
        EngineFault(kind="drop_before", chance=0.15),
        EngineFault(kind="drop_in_body", chance=0.15),
    )
    errors = [EngineFault(kind="status", status=status, chance=0.1) for status in (500, 502, 503)]
    unwell = EngineFault(kind="status", path="/health", chance=0.3)
    on.engine.set_script(script(faults=[*errors, *drops, unwell]))
    await asyncio.sleep(4)
    on.engine.set_script(script())


async def take_engine_away(on: Stage) -> None:
    await on.engine.stop()
    await asyncio.sleep(4)
    await on.engine.start()


async def freeze_environment(on: Stage) -> None:
    member = on.members[on.rng.choice(sorted(on.members))]
    os.killpg(member.process.popen.pid, signal.SIGSTOP)
    await asyncio.sleep(4)
    os.killpg(member.process.popen.pid, signal.SIGCONT)


async def replace_environment(on: Stage) -> None:
    name = on.rng.choice(sorted(on.members))
    await on.stop_environment(name, code=0)
    on.start_environment(name)


async def replace_environment_while_the_hub_is_away(on: Stage) -> None:
    """Its groups go to a file, which is an error of that run, and its replacement sends them."""
    name = on.rng.choice(sorted(on.members))
    member = on.members[name]
    num_accepted = len(member.accepted())
    await eventually(
        lambda: len(member.accepted()) > num_accepted,
        timeout_s=RECOVERY_S,
        what=f"{member.run} is at work",
        interval_s=0.01,
    )
    await on.proxy.cut()
    await asyncio.sleep(1)
    await on.stop_environment(name, code=1, times=2)
    assert "groups could not be delivered" in member.log(), member.log()[-4000:]
    await on.proxy.heal()
    on.start_environment(name)


Fault = Callable[[Stage], Awaitable[None]]

FAULTS: dict[Fault, set[str]] = {
    kill_hub: {"hub"},
    take_hub_away: {"hub"},
    cut_network: {"network"},
    spoil_network: {"network"},
    silence_network: {"network"},
    fill_hub: {"hub", "network", "trainer", "engine", "environment"},
    kill_trainer: {"trainer"},
    spoil_engine: {"engine"},
    take_engine_away: {"engine"},
    freeze_environment: {"environment"},
    replace_environment: {"hub", "network", "engine", "environment"},
    replace_environment_while_the_hub_is_away: {
        *("hub", "network", "trainer", "engine", "environment"),
    },
}
"""And what must be left alone meanwhile."""


def schedule(rng: random.Random, *, num_pairs: int) -> list[list[Fault]]:
    """Every fault once, then pairs."""
    alone = [[fault] for fault in FAULTS]
    pairs = [[a, b] for a in FAULTS for b in FAULTS if not FAULTS[a] & FAULTS[b]]
    rng.shuffle(alone)
    return alone + rng.choices(pairs, k=num_pairs)


# The account


def check_skips(member: Member) -> dict[str, Any]:
    """Every item and every group of one environment is in one place, with its reason."""
    counts = closing_counts(member.log())
    author = Counter(counts["author"])
    attempts = author.pop("attempts at the hopeless")
    names = member.accepted()
    assert counts["accepted"] == len(names) == len(set(names)), member.run
    ended = counts["with groups"] + counts["without"] + counts["given up"]
    assert counts["started"] == ended + counts["unfinished"], counts
    assert counts["with groups"] == counts["accepted"] + counts["dropped"]["equal_scores"], counts
    assert counts["without"] == author["gave none"], counts
    assert counts["dropped"]["equal_scores"] == author["equal"], counts
    assert counts["dropped"]["malformed"] == author["malformed"], counts
    assert set(counts["dropped"]) <= {"equal_scores", "malformed"}, counts
    assert counts["failed"]["RuntimeError"] == author["raised"], counts
    assert counts["failed"]["GroupError"] == author["malformed"], counts
    assert counts["failed"]["ExitRaised"] == author["exited"], counts
    known = {"RuntimeError", "GroupError", "ExitRaised", "TimeoutError"}
    assert set(counts["failed"]) <= known, counts
    assert counts["given up as"]["RuntimeError"] == attempts.pop("3", 0), counts
    assert set(attempts) <= {"1", "2"}, attempts  # under way at the end
    assert counts["given up"] == counts["given up as"].total(), counts
    kinds = Counter(kind_of(int(name.partition("/")[2])) for name in names)
    assert not kinds["raises always"] + kinds["gives none"] + kinds["scores are equal"], kinds
    return counts


async def fill_up(url: str, num_groups: int) -> list[str]:
    """Send so many groups that everything queued fits whole batches; return their names."""
    names = []
    async with HubClient(url) as hub:
        for number in range(-num_groups % (BATCH_SIZE // GROUP_SIZE)):
            name = f"filler/{number}"
            prompt = [1, *(byte + 3 for byte in f"{name};".encode())]
            answers = [answer_tokens(prompt, choice) for choice in range(GROUP_SIZE)]
            group = {
                "tokens": [prompt + answer for answer in answers],
                "masks": [[-100] * len(prompt) + answer for answer in answers],
                "scores": [float(choice) for choice in range(GROUP_SIZE)],
                "inference_logprobs": [
                    [1.0] * len(prompt) + answer_logprobs(prompt, answer) for answer in answers
                ],
                "group_id": name,
            }
            await hub.send([check_group(group, strictness=Strictness.MEANING)])
            names.append(name)
    return names


@drilled("num_pairs", (2, 600), slow=(70, 2400))
async def test_no_group_is_lost_or_trained_twice_under_a_schedule_of_faults(
    num_pairs: int, tmp_path: Path
) -> None:
    began = time.monotonic()
    slowest_s = 0.0
    async with stage(tmp_path, seed=4) as on:
        for faults in schedule(on.rng, num_pairs=num_pairs):
            async with asyncio.TaskGroup() as striking:
                for fault in faults:
                    striking.create_task(fault(on))
            names = " and ".join(fault.__name__ for fault in faults)
            slowest_s = max(slowest_s, await on.progress(names))

        for name in list(on.members):
            await on.stop_environment(name, code=0)
        accepted = [name for member in on.left for name in member.accepted()]
        accepted += await fill_up(on.hub.url, len(accepted))
        (tmp_path / "drain").touch()
        await eventually(
            lambda: len(on.committed["groups"]) >= len(accepted),
            timeout_s=RECOVERY_S,
            what=f"{len(accepted)} groups committed, not {len(on.committed['groups'])}",
            interval_s=0.2,
        )
        ledger = on.hub.get("/ledger")
        committed = Counter(on.committed["groups"])
    twice = {name: count for name, count in committed.items() if count > 1}
    assert twice == {}, f"trained twice: {twice}"
    assert set(committed) == set(accepted)
    assert_balanced(ledger)
    assert (ledger["produced"], ledger["trained"]) == (len(accepted), len(accepted)), ledger
    assert ledger["rejected"] == {}, ledger
    counts = [check_skips(member) for member in on.left]
    # What one had to leave in a file, its replacement has sent.
    assert sum(each["stored"] for each in counts) == sum(each["accepted"] for each in counts)
    given_up = sum((each["given up as"] for each in counts), Counter())
    print(
        f"{len(FAULTS) + 2 * num_pairs} faults in {time.monotonic() - began:.0f} s, slowest recovery"
        f" {slowest_s:.1f} s; {len(on.left)} environment processes, {len(accepted)} groups accepted,"
        f" all committed once in {on.committed['step']} steps; ledger duplicates"
        f" {ledger['duplicates']}; items: {sum(each['started'] for each in counts)} started,"
        f" {sum(each['without'] for each in counts)} gave none, given up {dict(given_up)},"
        f" {sum(each['unfinished'] for each in counts)} unfinished; engine {dict(on.engine.counts)}"
    )
    assert given_up["RuntimeError"] > 0
