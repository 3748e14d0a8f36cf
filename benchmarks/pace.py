"""How long does the trainer wait for batches, how old are the groups it gets, and how many are thrown away?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/pace.py` runs the hub, a scripted engine whose answers take time,
environments, and a trainer whose steps take time as processes: with default settings and with the original's default of
8 items in flight. One row per case: the share of the time that the trainer waits, the policy versions that groups lie
behind when they are trained on, and the share of the groups that became too old and were thrown away. `--virtual`
simulates the same, and more cases, in virtual time (ten minutes of CPU); `--settings N` simulates N random settings,
10,000 in twenty minutes of CPU. `--outage` kills one of two engines and starts it again: one row per phase.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import yaml

from atroposlib.client import TrainerClient, TrainerRegistration
from benchmarks._hub_process import listening, running, running_hub
from benchmarks._pace_settings import Findings, try_setting
from benchmarks._pace_simulation import Environment, Outcome, Sample, simulate

BATCH_SIZE = 64
MEAN_S = 2.0
MAX_STALENESS = 4
"""Older groups are thrown away."""
NUM_TOKENS = 16
"""Of an answer."""
ENOUGH_SLOTS = 40
"""Answers that an engine gives at once, in the outage: at steps of 5 s the trainer takes 25.6 on average."""
DEFAULT, ORIGINAL = None, 8
"""Items in flight: as the trainer needs, and the original's default."""
SWEEP = (4, 8, 12, 16, 24, 32, 48)
"""More are never in flight here: three batches of groups of four are 48."""
MAY_WAIT = 0.05
"""Of the fixed numbers, the best is the least stale that waits no longer than this, else the one that waits least."""


class Case(NamedTuple):
    shape: str
    step_s: float
    group_size: int
    useful: float
    """Share of the items that give a group."""
    num_environments: int = 1

    def __str__(self) -> str:
        return (
            f"{self.shape} | {self.step_s:g} | {self.group_size} | {self.useful:.0%} |"
            f" {self.num_environments}"
        )


CASE_COLUMNS = "answers | step s | group | useful | environments"
OUTCOME_COLUMNS = "staleness mean, max | thrown away"
CASES = [
    Case(shape, step_s, group_size, useful, num_environments)
    for shape in ("exponential", "log-normal")
    for step_s in (5.0, 1.0, 0.2)
    for group_size in (4, 16)
    for useful in (1.0, 0.3)
    for num_environments in (1, 3)
]
MEASURED = [
    Case("exponential", 5.0, 4, 1.0),
    Case("log-normal", 5.0, 4, 1.0),
    Case("exponential", 5.0, 4, 0.3),
    Case("exponential", 5.0, 4, 1.0, 3),
    Case("exponential", 1.0, 4, 1.0),
]


def print_head(*columns: str) -> None:
    head = f"| {' | '.join(columns)} |"
    print(head + "\n" + "|---" * (head.count("|") - 1) + "|")


def answers(case: Case) -> Sample:
    """Return a function that samples how long an item takes: as long as the slowest answer of its group."""

    def sample(rng: random.Random) -> float:
        if case.shape == "exponential":
            return max(rng.expovariate(1 / MEAN_S) for _ in range(case.group_size))
        return max(rng.lognormvariate(math.log(MEAN_S) - 0.5, 1) for _ in range(case.group_size))

    return sample


def simulated(case: Case, num_workers: int | None) -> Outcome:
    environments = [
        Environment(
            duration_s=answers(case),
            groups_per_item=case.useful,
            group_size=case.group_size,
            weight=1 / case.num_environments,
            num_workers=num_workers,
        )
        for _ in range(case.num_environments)
    ]
    return simulate(
        environments,
        batch_size=BATCH_SIZE,
        step_s=lambda _: case.step_s,
        max_staleness=MAX_STALENESS,
    )


def best_fixed(case: Case) -> tuple[int, Outcome]:
    """Return the best fixed number of items in flight, found by trying them."""
    tried = {number: simulated(case, number) for number in SWEEP}

    def rank(number: int) -> tuple[float, float]:
        found = tried[number]
        return round(max(0.0, found.waits - MAY_WAIT), 2), found.staleness

    best = min(SWEEP, key=rank)
    return best, tried[best]


def show(found: Outcome) -> str:
    return f"{found.waits:.0%} | {found.staleness:.2f}, {found.max_staleness} | {found.thrown_away:.0%}"


def virtual() -> None:
    best_columns = f"best number | waits | {OUTCOME_COLUMNS}"
    default_columns = f"waits, default | {OUTCOME_COLUMNS}"
    print_head(CASE_COLUMNS, "waits, 8 in flight", OUTCOME_COLUMNS, best_columns, default_columns)
    for case in CASES:
        number, best = best_fixed(case)
        columns = [
            show(simulated(case, ORIGINAL)),
            str(number),
            show(best),
            show(simulated(case, DEFAULT)),
        ]
        print(f"| {case} | {' | '.join(columns)} |", flush=True)


def long_items() -> None:
    """Print what it brings to begin known long items first: one item of 100 takes ten times as long."""
    case = CASES[0]
    sample = answers(case)

    def heavy_tailed(rng: random.Random) -> float:
        return sample(rng) * (10 if rng.random() < 0.01 else 1)

    print_head("order of the items", "waits", OUTCOME_COLUMNS)
    for num_known, name in ((1, "as they come"), (16, "longest of 16"), (100, "longest of 100")):
        env = Environment(duration_s=longest_first(heavy_tailed, num_known=num_known))
        found = simulate(
            [env],
            batch_size=BATCH_SIZE,
            step_s=lambda _: case.step_s,
            max_staleness=MAX_STALENESS,
            num_steps=1000,
        )
        print(f"| {name} | {show(found)} |", flush=True)


def longest_first(sample: Sample, *, num_known: int) -> Sample:
    """Sample `num_known` durations at a time and return the longest first."""
    known: list[float] = []

    def longest(rng: random.Random) -> float:
        if not known:
            known.extend(sorted(sample(rng) for _ in range(num_known)))
        return known.pop()

    return longest


def settings(num_settings: int) -> None:
    """Print the distribution of what random settings show."""
    found = [try_setting(seed, num_steps=80) for seed in range(num_settings)]
    print_head("of the settings", "mean", "50 %", "95 %", "99 %", "99.9 %", "all")
    for name in Findings._fields:
        values = sorted(float(getattr(each, name)) for each in found)
        most = [values[math.ceil(part * len(values)) - 1] for part in (0.5, 0.95, 0.99, 0.999, 1.0)]
        columns = [f"{value:.3f}" for value in (statistics.fmean(values), *most)]
        print(f"| {name}, at most | {' | '.join(columns)} |")
    within = statistics.fmean(each.drift < 1 for each in found)
    fed = statistics.fmean(each.waits <= MAY_WAIT for each in found)
    print(f"waits at most {MAY_WAIT:.0%}: {fed:.2%}; shares within one group: {within:.2%}")


class Steps(NamedTuple):
    """What a trainer saw in some steps."""

    waits: float
    """Share of the time."""
    staleness: list[int]
    """Of the groups."""

    def __str__(self) -> str:
        return f"{self.waits:.0%} | {statistics.fmean(self.staleness):.2f}, {max(self.staleness)}"


class Run:
    """A hub, environments and a trainer; engines are started before."""

    def __init__(
        self,
        stack: ExitStack,
        case: Case,
        num_workers: int | None,
        engine_urls: Sequence[str],
        directory: Path,
    ) -> None:
        self._case = case
        self._hub = stack.enter_context(running_hub("memory", directory=directory))
        self._trainer = stack.enter_context(TrainerClient(self._hub.base_url))
        self._trainer.register(
            TrainerRegistration(
                wandb_group="pace",
                wandb_project="pace",
                batch_size=BATCH_SIZE,
                max_token_len=64,
                checkpoint_dir="",
                save_checkpoint_interval=0,
                starting_step=0,
                num_steps=10**6,
                max_staleness=MAX_STALENESS,
            )
        )
        self._version = 0
        self._environments = [
            stack.enter_context(
                environment(case, num_workers, self._hub.base_url, engine_urls, directory, index)
            )
            for index in range(case.num_environments)
        ]

    def train(self, num_steps: int) -> Steps:
        staleness: list[int] = []
        waited_s = 0.0
        began = time.monotonic()
        for _ in range(num_steps):
            asked = time.monotonic()
            while (batch := self._trainer.lease_batch(wait_s=10.0)) is None:
                if any(process.poll() is not None for process in self._environments):
                    raise RuntimeError(f"an environment of the case {self._case} has ended")
            waited_s += time.monotonic() - asked
            staleness += [self._version - int(group.tokens[0]) for group in batch.groups]
            time.sleep(self._case.step_s)
            self._trainer.ack(batch)
            self._version += 1
            self._trainer.publish_policy(self._version)
        return Steps(waited_s / (time.monotonic() - began), staleness)

    def thrown_away(self) -> float:
        """Return the share of the groups that became too old."""
        ledger = httpx.get(f"{self._hub.base_url}/ledger").raise_for_status().json()
        return float(ledger["expired"] / (ledger["expired"] + ledger["trained"]))


def measured(case: Case, num_workers: int | None, *, num_steps: int, directory: Path) -> str:
    """Run processes; return the columns of a row."""
    with ExitStack() as stack:
        _, engine_url = stack.enter_context(engine(case, directory))
        run = Run(stack, case, num_workers, [engine_url], directory)
        run.train(num_steps // 3)
        counted = run.train(num_steps - num_steps // 3)
        return f"{counted} | {run.thrown_away():.0%}"


def outage(num_steps: int, directory: Path) -> None:
    """Kill one of two engines, each of which can just feed the trainer alone, and start it again."""
    case = MEASURED[0]
    ages = "staleness mean, max"
    print_head("engines", "waits, first 4 steps", ages, "waits, later steps", ages)
    with ExitStack() as stack:
        _, kept_url = stack.enter_context(engine(case, directory, num_slots=ENOUGH_SLOTS))
        killed, url = stack.enter_context(engine(case, directory, num_slots=ENOUGH_SLOTS))
        run = Run(stack, case, DEFAULT, [kept_url, url], directory)
        run.train(4)

        def show_phase(name: str) -> None:
            print(f"| {name} | {run.train(4)} | {run.train(num_steps - 4)} |", flush=True)

        show_phase("two")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        show_phase("one killed")
        port = httpx.URL(url).port or 0
        stack.enter_context(engine(case, directory, num_slots=ENOUGH_SLOTS, port=port))
        show_phase("started again")
        print(f"thrown away: {run.thrown_away():.0%}")


@contextmanager
def engine(
    case: Case, directory: Path, *, num_slots: int = 0, port: int = 0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve an engine whose answers take as long as the case says; yield its process and its address."""
    latency: dict[str, object] = {"first_token_s": MEAN_S, "distribution": "exponential"}
    if case.shape == "log-normal":
        latency = {"first_token_s": MEAN_S * math.exp(-0.5), "sigma": 1.0}
    script = json.dumps({"latency": latency, "num_slots": num_slots})
    log_path = directory / f"engine-{time.monotonic_ns()}.log"
    module = "atroposlib.inference.scripted_engine"
    argv = ["-m", module, "--script", script, "--port", str(port)]
    with running(argv, log_path=log_path) as process:
        yield process, listening(process, log_path)


def environment(
    case: Case,
    num_workers: int | None,
    hub_url: str,
    engine_urls: Sequence[str],
    directory: Path,
    index: int,
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Serve an environment of the case during the block."""
    settings: dict[str, object] = {
        "rollout_server_url": hub_url,
        "group_size": case.group_size,
        "max_token_length": NUM_TOKENS,
        "useful": case.useful,
    }
    if num_workers is not None:
        settings["max_num_workers"] = num_workers
    name = f"env-{index}-{time.monotonic_ns()}"
    server = {"server_type": "vllm", "model_name": "scripted"}
    servers = [{**server, "base_url": f"{url}/v1"} for url in engine_urls]
    config = {"env": settings, "openai": servers}
    config_path = directory / f"{name}.yaml"
    config_path.write_text(yaml.safe_dump(config))
    script = Path(__file__).with_name("_pace_env.py")
    argv = [str(script), "serve", f"--config={config_path}"]
    return running(argv, log_path=directory / f"{name}.log")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", action="store_true", help="simulate all cases")
    parser.add_argument(
        "--steps", type=int, default=24, help="per measurement; the first third is not counted"
    )
    parser.add_argument("--settings", type=int, default=0, help="simulate random settings")
    parser.add_argument("--outage", action="store_true", help="kill one of two engines")
    options = parser.parse_args(argv)
    if options.settings:
        settings(options.settings)
        return
    if options.virtual:
        virtual()
        long_items()
        return
    if options.outage:
        with tempfile.TemporaryDirectory() as name:
            outage(options.steps, Path(name))
        return
    default_columns = f"waits, default | {OUTCOME_COLUMNS}"
    print_head(CASE_COLUMNS, "waits, 8 in flight", OUTCOME_COLUMNS, default_columns)
    with tempfile.TemporaryDirectory() as name:
        for case in MEASURED:
            columns = [
                measured(case, number, num_steps=options.steps, directory=Path(name))
                for number in (ORIGINAL, DEFAULT)
            ]
            print(f"| {case} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
