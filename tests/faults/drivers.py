"""What the fault tests drive a hub with: recognisable groups, producers that retry, trainers that crash, an account.

Every group can be made again from its first two tokens, so a reader compares it whole: a damaged or exchanged group
cannot pass. `Traffic` is the account: what a producer was told is stored must be committed by the trainer exactly once.
No test lives here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from atroposlib.client import (
    AnotherExperiment,
    HubClient,
    LeasedBatch,
    LeaseExpired,
    TrainerClient,
    TrainerRegistration,
    UnknownEnvironment,
)
from atroposlib.errors import HubUnavailable
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from tests.api import helpers_api
from tests.processes import Process, answers, free_port, wait_for

T = TypeVar("T")

BATCH_SIZE = 16
SIZES = (2, 4, 8)
"""Sequences of groups in turn; any multiple of BATCH_SIZE sequences of them can be cut into exact batches."""
LOAD_TOKENS = 512


class GroupKey(NamedTuple):
    """Tells groups apart; the first two tokens of every sequence."""

    producer: int
    index: int


class CorruptGroup(AssertionError):
    """A group came back other than it was sent."""


# Groups


def make_group(
    key: GroupKey, *, num_sequences: int, num_tokens: int = LOAD_TOKENS, env_id: int | None = None
) -> ScoredGroup:
    """Make the one group that has this key and shape."""
    rng = np.random.default_rng((*key, num_sequences, num_tokens))
    tokens = rng.integers(0, 150_000, (num_sequences, num_tokens), dtype=np.int64)
    tokens[:, 0], tokens[:, 1] = key
    masks = tokens.copy()
    masks[:, :2] = -100
    logprobs = -rng.random((num_sequences, num_tokens), dtype=np.float32).astype(np.float64)
    logprobs[:, :2] = 1.0
    group = {
        "tokens": tokens,
        "masks": masks,
        "scores": rng.random(num_sequences),
        "inference_logprobs": logprobs,
        "group_id": f"{key.producer}-{key.index}",
        "env_id": env_id,
    }
    return check_group(group, strictness=Strictness.MEANING)


def read_group(group: ScoredGroup) -> GroupKey:
    """Return the group's key. Raises `CorruptGroup` unless every value is as it was made."""
    lengths = set(group.lengths.tolist())
    if len(lengths) != 1 or group.num_tokens < 2:
        raise CorruptGroup(f"lengths {group.lengths.tolist()}")
    key = GroupKey(int(group.tokens[0]), int(group.tokens[1]))
    made = make_group(key, num_sequences=group.num_sequences, num_tokens=lengths.pop())
    for name in ("tokens", "masks", "scores", "inference_logprobs"):
        if not np.array_equal(getattr(made, name), getattr(group, name)):
            raise CorruptGroup(f"{key}: {name} differ")
    return key


def size_of(index: int) -> int:
    return SIZES[index % len(SIZES)]


# Hub


_RUN_WITH_FEW_FILES = """
import resource, sys
from atroposlib.cli.run_api import main
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)),) * 2)
sys.exit(main())
"""


@dataclass(slots=True)
class HubProcess:
    """`run-api` on one port and one data directory, to be killed and started again."""

    directory: Path
    flags: tuple[str, ...] = ()
    max_files: int | None = None
    """Open files and connections that the system lets it have; None: as many as this process may."""
    port: int = field(default_factory=free_port)
    process: Process | None = None
    start_times_s: list[float] = field(default_factory=list)
    """From starting the process to its first answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.popen.pid

    def launch(self) -> None:
        """Start the process and do not wait for it."""
        assert self.process is None or self.process.popen.poll() is not None
        argv = ["-m", "atroposlib.cli.run_api", "--port", str(self.port)]
        if self.max_files is not None:
            argv[:2] = ["-c", _RUN_WITH_FEW_FILES, str(self.max_files)]
        if not {"--memory", "--database"} & set(self.flags):
            argv += ["--data-dir", str(self.directory / "data")]
        self.process = Process("hub", [*argv, *self.flags], log_path=self.directory / "hub.log")

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        began = time.monotonic()
        self.launch()
        assert self.process is not None
        wait_for(lambda: answers(f"{self.url}/readyz"), timeout_s=60, process=self.process)
        self.start_times_s.append(time.monotonic() - began)

    def kill(self) -> None:
        """SIGKILL to the hub alone; what it started must notice by itself."""
        assert self.process is not None
        assert self.process.popen.poll() is None, self.process.log()[-4000:]
        os.kill(self.pid, signal.SIGKILL)
        self.process.popen.wait()

    def stop(self) -> int:
        return 0 if self.process is None else self.process.stop()

    def forget(self) -> None:
        """Begin a new run."""
        assert answers(f"{self.url}/reset_data", timeout_s=30)

    def register(self, **changes: Any) -> None:
        """Register a trainer, and let environments in."""
        with TrainerClient(self.url) as trainer:
            trainer.register(registration(**changes))
            assert trainer.lease_batch() is None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)


@contextmanager
def hub_process(directory: Path, *flags: str, max_files: int | None = None) -> Iterator[HubProcess]:
    """A running hub for the length of the block; whatever it left behind is killed at the end."""
    hub = HubProcess(directory, flags, max_files)
    try:
        hub.start()
        yield hub
    finally:
        hub.stop()
        if hub.process is not None:
            kill_group(hub.pid)


def kill_group(pgid: int) -> None:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all have gone


def has_group_ended(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return True
    return False


def is_alive(pid: int) -> bool:
    """Does the process exist, and is not a zombie that its new parent has yet to collect?"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def stop_whole(process: Process, *, code: int = 0, times: int = 1) -> None:
    """Send SIGTERM, the second time after a second; the process must end with `code`, and all that it started."""
    popen = process.popen
    assert popen.poll() is None, process.log()[-6000:]
    descendants = children(popen.pid)
    for pause_s in (0.0, 1.0)[:times]:
        await asyncio.sleep(pause_s)
        popen.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 90) == code, process.log()[-6000:]
    assert has_group_ended(popen.pid), f"{process.name} left processes of its group behind"
    survivors = [pid for pid in descendants if is_alive(pid)]
    assert survivors == [], f"{process.name} left {survivors} behind"


async def eventually(
    condition: Callable[[], bool], *, timeout_s: float, what: str, interval_s: float = 0.02
) -> float:
    """Wait until `condition` holds and return the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(interval_s)
    return time.monotonic() - began


def drilled(name: str, drill: tuple[Any, int], *, slow: tuple[Any, int]) -> pytest.MarkDecorator:
    """Parametrize a test by a value for drills and one that is run by name, each with its limit in seconds."""
    (short, limit_s), (long, long_limit_s) = drill, slow
    marks = [pytest.mark.slow, pytest.mark.timeout(long_limit_s)]
    return pytest.mark.parametrize(
        name,
        [pytest.param(short, marks=pytest.mark.timeout(limit_s)), pytest.param(long, marks=marks)],
    )


def assert_balanced(ledger: dict[str, Any]) -> None:
    places = ("queued", "buffered", "leased", "trained", "delivered_unconfirmed")
    places += ("expired", "dead", "discarded")
    total = sum(ledger[place] for place in places) + sum(ledger["rejected"].values())
    assert ledger["produced"] == total, ledger


# Producers


@dataclass(slots=True)
class Producer:
    """Sends one group after another and retries each until the hub has acknowledged it."""

    number: int
    url: str
    timeout_s: float = 5.0
    pause_s: float = 0.005
    num_tokens: int = LOAD_TOKENS
    """Of each sequence."""
    may_send: Callable[[], bool] = lambda: True
    """Asked before each new group: keeps the queue short."""
    experiment: str | None = None
    """What its groups are for; while the hub holds another one, each is tried again."""
    acknowledged: dict[GroupKey, float] = field(default_factory=dict)
    """When (monotonic) the hub said that it has the group."""
    num_attempts: int = 0
    num_duplicates: int = 0
    """Attempts that the hub answered with "I have it"."""
    num_for_another: int = 0
    """Attempts that were refused because the hub held another experiment."""
    num_sequences: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        rng = random.Random(self.number)
        async with HubClient(self.url, timeout_s=self.timeout_s) as hub:
            while not stop.is_set():
                if self.may_send():
                    await self.send_next(hub, rng)
                await asyncio.sleep(self.pause_s * 2 * rng.random())

    async def send_next(
        self, hub: HubClient, rng: random.Random, num_sequences: int | None = None
    ) -> None:
        index = len(self.acknowledged)
        key = GroupKey(self.number, index)
        size = num_sequences or size_of(index)
        group = make_group(key, num_sequences=size, num_tokens=self.num_tokens)
        while True:
            self.num_attempts += 1
            try:
                receipt = await hub.send([group], experiment=self.experiment)
            except (HubUnavailable, UnknownEnvironment, AnotherExperiment) as e:
                self.num_for_another += isinstance(e, AnotherExperiment)
                await asyncio.sleep(0.02 + 0.1 * rng.random())
            else:
                break
        self.num_duplicates += receipt.status == "duplicate"
        self.num_sequences += size
        self.acknowledged[key] = time.monotonic()


# Trainers


def registration(**changes: Any) -> TrainerRegistration:
    """What our trainer registers, with batches as `size_of` makes groups for."""
    fields = {"batch_size": BATCH_SIZE, "max_token_len": LOAD_TOKENS, "num_steps": 1_000_000}
    return TrainerRegistration(**helpers_api.registration(**fields | changes))


class Crash(Exception):
    """The simulated trainer loses everything since its checkpoint."""


class _Stopped(Exception):
    """The simulated trainer was told to stop."""


@dataclass(slots=True)
class LeaseTrainer:
    """Leases, acknowledges, writes checkpoints, and forgets all since the last one when it "crashes".

    `run` is synchronous and belongs in a thread; the fields may be read from others. Run again, it resumes.
    """

    url: str
    experiment: str | None = None
    crash_chance: float = 0.0
    checkpoint_every: int = 4
    pause_s: float = 0.0
    """After each batch."""
    timeout_s: float = 5.0
    seed: int = 0
    must_drain: threading.Event = field(default_factory=threading.Event)
    """From now on write a checkpoint whenever there is no batch."""
    must_stop: threading.Event = field(default_factory=threading.Event)
    committed: Counter[GroupKey] = field(default_factory=Counter)
    """Groups in checkpoints: what the training run really learned from."""
    pending: list[GroupKey] = field(default_factory=list)
    """Trained since the last checkpoint."""
    step: int = 0
    """Of the last checkpoint."""
    is_registered: bool = False
    last_ack: float = 0.0
    num_batches: int = 0
    num_crashes: int = 0
    num_fenced: int = 0
    """Acknowledgements that were refused because the lease was gone."""
    num_failed: int = 0
    """Calls that found the hub unavailable."""
    replayed: int = 0
    requests_s: list[float] = field(default_factory=list)
    """How long each `GET /batch` took, which the hub may hold for 0.2 s."""

    @property
    def num_seen(self) -> int:
        return len(self.committed) + len(self.pending)

    def run(self) -> None:
        rng = random.Random(self.seed)
        resume_step = self.step if self.is_registered else None
        self.pending = []
        while not self.must_stop.is_set():
            try:
                with TrainerClient(self.url, timeout_s=self.timeout_s, retry_for_s=0) as hub:
                    reply = self._retry(
                        hub.register,
                        registration(),
                        experiment=self.experiment,
                        resume_step=resume_step,
                    )
                    self.is_registered = True
                    self.replayed += reply.replayed or 0
                    self._train(hub, rng)
            except _Stopped:
                return
            except Crash:
                self.num_crashes += 1
                self.pending, resume_step = [], self.step

    def _train(self, hub: TrainerClient, rng: random.Random) -> None:
        step, num_unsaved = self.step, 0
        crash_at: str | None = None
        while True:
            if crash_at is None and rng.random() < self.crash_chance:
                crash_at = rng.choice(("leased", "acknowledged", "saved", "committed"))
            batch = self._retry(self._lease, hub)
            if batch is not None:
                keys = [read_group(group) for group in batch.groups]
                num_sequences = sum(group.num_sequences for group in batch.groups)
                assert num_sequences == BATCH_SIZE, f"a batch of {num_sequences} sequences"
                assert batch.step == step + 1, f"step {batch.step} after {step}"
                _crash_if(crash_at == "leased")
                try:
                    self._retry(hub.ack, batch)
                except LeaseExpired:
                    self.num_fenced += 1
                    raise Crash from None
                self.last_ack = time.monotonic()
                self.pending += keys
                self.num_batches += 1
                time.sleep(self.pause_s)
                step, num_unsaved = batch.step, num_unsaved + 1
                _crash_if(crash_at == "acknowledged")
            is_idle = batch is None and self.must_drain.is_set()
            if num_unsaved >= self.checkpoint_every or (is_idle and num_unsaved):
                # The checkpoint file is written: from here on these groups have been learned from.
                self.committed.update(self.pending)
                self.pending, self.step, num_unsaved = [], step, 0
                _crash_if(crash_at == "saved")
                self._retry(hub.checkpoint, step)
                _crash_if(crash_at == "committed")

    def _lease(self, hub: TrainerClient) -> LeasedBatch | None:
        began = time.monotonic()
        try:
            return hub.lease_batch(0.2)
        finally:
            self.requests_s.append(time.monotonic() - began)

    def _retry(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Repeat while the hub is unavailable. Raises `_Stopped` when told to stop."""
        while not self.must_stop.is_set():
            try:
                return call(*args, **options)
            except HubUnavailable:
                self.num_failed += 1
                time.sleep(0.03)
        raise _Stopped


def _crash_if(is_due: bool) -> None:
    if is_due:
        raise Crash


@dataclass(slots=True)
class Traffic:
    """Producers and one trainer, and whether what went in came out."""

    producers: list[Producer]
    trainer: LeaseTrainer
    stop_producing: asyncio.Event = field(default_factory=asyncio.Event)
    producing: list[asyncio.Task[None]] = field(default_factory=list)
    training: asyncio.Task[None] | None = None

    @property
    def num_acknowledged(self) -> int:
        return sum(len(each.acknowledged) for each in self.producers)

    @property
    def last_acknowledged(self) -> float:
        return max((max(p.acknowledged.values(), default=0.0) for p in self.producers), default=0.0)

    def check(self) -> None:
        """Raise what a producer or the trainer raised."""
        for task in [*self.producing, *([self.training] if self.training else [])]:
            if task.done():
                task.result()

    async def progress(self, num_groups: int) -> None:
        """Wait until more than `num_groups` are acknowledged: fewer would be too little load to show anything."""

        def is_done() -> bool:
            self.check()
            return self.num_acknowledged > num_groups

        await eventually(is_done, timeout_s=60, what=f"{num_groups} groups; {self.account()}")

    async def finish(self) -> None:
        """Stop producing, let the trainer commit every group, and assert: none lost, none twice."""
        self.stop_producing.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*self.producing)
            first = self.producers[0]
            async with HubClient(first.url, timeout_s=first.timeout_s) as hub:
                while sum(each.num_sequences for each in self.producers) % BATCH_SIZE:
                    await first.send_next(hub, random.Random(0), num_sequences=2)
        self.trainer.must_drain.set()
        total = self.num_acknowledged

        def is_done() -> bool:
            self.check()
            return len(self.trainer.committed) >= total

        await eventually(is_done, timeout_s=60, what=f"{total} groups committed: {self.account()}")
        self.trainer.must_stop.set()
        assert self.training is not None
        await self.training
        assert set(self.trainer.committed) == {
            key for each in self.producers for key in each.acknowledged
        }, self.account()
        twice = [key for key, count in self.trainer.committed.items() if count != 1]
        assert twice == [], f"committed twice: {twice[:10]}; {self.account()}"

    def account(self) -> str:
        trainer = self.trainer
        return (
            f"{self.num_acknowledged} groups acknowledged in"
            f" {sum(each.num_attempts for each in self.producers)} attempts,"
            f" {sum(each.num_duplicates for each in self.producers)} duplicates absorbed;"
            f" {len(trainer.committed)} committed in {trainer.num_batches} batches,"
            f" {trainer.num_crashes} trainer crashes, {trainer.replayed} groups replayed,"
            f" {trainer.num_fenced} acknowledgements fenced"
        )


@asynccontextmanager
async def traffic(
    url: str,
    *,
    trainer: LeaseTrainer,
    num_producers: int = 4,
    num_tokens: int = LOAD_TOKENS,
    max_ahead: int = 100,
) -> AsyncIterator[Traffic]:
    """Producers and a trainer at work for the length of the block; call `finish` for the verdict.

    The producers are at most `max_ahead` groups ahead of the trainer.
    """
    running = Traffic([], trainer)

    def may_send() -> bool:
        return running.num_acknowledged - trainer.num_seen < max_ahead

    for number in range(num_producers):
        producer = Producer(number, url, timeout_s=trainer.timeout_s, may_send=may_send)
        producer.num_tokens = num_tokens
        running.producers.append(producer)
        running.producing.append(asyncio.create_task(producer.run(running.stop_producing)))
    running.training = asyncio.create_task(asyncio.to_thread(trainer.run))
    try:
        yield running
    finally:
        trainer.must_stop.set()
        for task in running.producing:
            task.cancel()
        *_, ended = await asyncio.gather(
            *running.producing, running.training, return_exceptions=True
        )
        if isinstance(ended, BaseException):
            raise ended  # why nothing was trained any more


# What the system says of processes


def peak_rss_bytes(*pids: int) -> int:
    """Highest resident memory so far of these processes, each at its own highest."""
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        if "VmHWM:" in status:  # a zombie has none
            total += int(status.split("VmHWM:")[1].split()[0]) * 1024
    return total


def forget_peak(pid: int) -> None:
    """Count the highest resident memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, of all its threads, of a process; 0 once it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_children(pid: int) -> list[int]:
    """Return the children of all its threads: a child belongs to the thread that started it."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # the thread has just ended
    return found


def children(pid: int) -> list[int]:
    """Return all descendants."""
    found = own_children(pid)
    return found + [each for child in found for each in children(child)]
