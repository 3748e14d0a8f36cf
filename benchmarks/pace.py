"""How long does the trainer wait for batches, how old are the groups it gets, and how many are thrown away?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/pace.py` runs the hub, a scripted engine whose answers take time,
environments, and a trainer whose steps take time as processes: with default settings and with the original's default of
8 items in flight. One row per case: the share of the time that the trainer waits, the policy versions that groups lie
behind when they are trained on, and the share of the groups that became too old and were thrown away. `--outage` kills
one of two engines and starts it again: one row per phase.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import yaml

from atroposlib.client import TrainerClient, TrainerRegistration
from benchmarks._hub_process import listening, running, running_hub
from benchmarks._table import Table

BATCH_SIZE = 64
MEAN_S = 2.0
"""Of an answer."""
MAX_STALENESS = 4
"""Older groups are thrown away."""
NUM_TOKENS = 16
"""Of an answer."""
ENOUGH_SLOTS = 40
"""Answers that an engine gives at once, in the outage: at steps of 5 s the trainer takes 25.6 on average."""
DEFAULT, ORIGINAL = None, 8
"""Items in flight: as the trainer needs, and the original's default."""


class Case(NamedTuple):
    answers: str
    step_s: float
    group_size: int
    useful: float
    """Share of the items that give a group."""
    num_environments: int = 1


CASES = [
    Case("exponential", 5.0, 4, 1.0),
    Case("log-normal", 5.0, 4, 1.0),
    Case("exponential", 5.0, 4, 0.3),
    Case("exponential", 5.0, 4, 1.0, 3),
    Case("exponential", 1.0, 4, 1.0),
]


class Steps(NamedTuple):
    """What a trainer saw in some steps."""

    waits: float
    """Share of the time."""
    staleness: list[int]
    """Of the groups."""

    def cells(self) -> list[str]:
        mean, oldest = statistics.fmean(self.staleness), max(self.staleness)
        return [f"{self.waits:.0%}", f"{mean:.2f}, {oldest}"]


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
        argv = environment_argv(case, num_workers, self._hub.base_url, engine_urls, directory)
        self._environments = [
            stack.enter_context(
                running(argv, log_path=directory / f"env-{time.monotonic_ns()}.log")
            )
            for _ in range(case.num_environments)
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

    def thrown_away(self) -> str:
        """Return the share of the groups that became too old."""
        ledger = httpx.get(f"{self._hub.base_url}/ledger").raise_for_status().json()
        return f"{ledger['expired'] / (ledger['expired'] + ledger['trained']):.0%}"


def measured(case: Case, num_workers: int | None, *, num_steps: int, directory: Path) -> list[str]:
    """Run processes; return the columns of a row."""
    with ExitStack() as stack:
        _, engine_url = stack.enter_context(engine(case, directory))
        run = Run(stack, case, num_workers, [engine_url], directory)
        run.train(num_steps // 3)
        counted = run.train(num_steps - num_steps // 3)
        return [*counted.cells(), run.thrown_away()]


def outage(num_steps: int, directory: Path) -> None:
    """Kill one of two engines, each of which can just feed the trainer alone, and start it again."""
    case, ages = CASES[0], "staleness mean, max"
    columns = ("engines", "waits, first 4 steps", ages, "waits, later steps", ages, "thrown away")
    table = Table("An engine dies", *columns)
    with ExitStack() as stack:
        _, kept_url = stack.enter_context(engine(case, directory, num_slots=ENOUGH_SLOTS))
        killed, url = stack.enter_context(engine(case, directory, num_slots=ENOUGH_SLOTS))
        run = Run(stack, case, DEFAULT, [kept_url, url], directory)
        run.train(4)

        def show_phase(name: str) -> None:
            first, later = run.train(4), run.train(num_steps - 4)
            table.row(name, *first.cells(), *later.cells(), run.thrown_away())

        show_phase("two")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        show_phase("one killed")
        port = httpx.URL(url).port or 0
        stack.enter_context(engine(case, directory, num_slots=ENOUGH_SLOTS, port=port))
        show_phase("started again")


@contextmanager
def engine(
    case: Case, directory: Path, *, num_slots: int = 0, port: int = 0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve an engine whose answers take as long as the case says; yield its process and its address."""
    latency: dict[str, object] = {"first_token_s": MEAN_S, "distribution": "exponential"}
    if case.answers == "log-normal":
        latency = {"first_token_s": MEAN_S * math.exp(-0.5), "sigma": 1.0}
    script = json.dumps({"latency": latency, "num_slots": num_slots})
    log_path = directory / f"engine-{time.monotonic_ns()}.log"
    module = "atroposlib.inference.scripted_engine"
    argv = ["-m", module, "--script", script, "--port", str(port)]
    with running(argv, log_path=log_path) as process:
        yield process, listening(process, log_path)


def environment_argv(
    case: Case,
    num_workers: int | None,
    hub_url: str,
    engine_urls: Sequence[str],
    directory: Path,
) -> list[str]:
    """Write the configuration of an environment of the case; return the command that serves it."""
    settings: dict[str, object] = {
        "rollout_server_url": hub_url,
        "group_size": case.group_size,
        "max_token_length": NUM_TOKENS,
        "useful": case.useful,
    }
    if num_workers is not None:
        settings["max_num_workers"] = num_workers
    server = {"server_type": "vllm", "model_name": "scripted"}
    servers = [{**server, "base_url": f"{url}/v1"} for url in engine_urls]
    config_path = directory / f"env-{time.monotonic_ns()}.yaml"
    config_path.write_text(yaml.safe_dump({"env": settings, "openai": servers}))
    script = Path(__file__).with_name("_pace_env.py")
    return [str(script), "serve", f"--config={config_path}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="per measurement; the first third is not counted"
    )
    parser.add_argument("--outage", action="store_true", help="kill one of two engines")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.outage:
            outage(options.steps, directory)
            return
        ages = ("staleness mean, max", "thrown away")
        columns = ("waits, 8 in flight", *ages, "waits, default", *ages)
        table = Table("Waiting for batches", *Case._fields, *columns)
        for case in CASES:
            cells = [
                cell
                for number in (ORIGINAL, DEFAULT)
                for cell in measured(case, number, num_steps=options.steps, directory=directory)
            ]
            table.row(*case, *cells)


if __name__ == "__main__":
    main()
