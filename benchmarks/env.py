"""How many completions does an environment process handle per CPU second, and how long is its event loop blocked?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/env.py` runs `serve` as a process, with an engine process that answers
at once and a `run-api` process whose batches are fetched at once. It prints a row per source of tokens and per length.
CPU is that of the environment's process with all its threads. A second table is of `process`, with its file and page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks._env_text import save_tokenizer
from benchmarks._hub_load import PACKED, Site, acknowledge, register_trainer, take_batch
from benchmarks._hub_process import (
    START_TIMEOUT_S,
    Hub,
    cpu_s,
    listening,
    memory_bytes,
    running,
    running_hub,
)
from benchmarks._table import Table

GROUP_SIZE = 8
GROUPS_PER_BATCH = 2
NUM_FILE_GROUPS = 500
"""That `process` writes."""


class Case(NamedTuple):
    """One row."""

    path: str
    """Source of the tokens, as in `BenchmarkConfig.path`."""
    num_tokens: int
    num_workers: int = 8
    """Items in flight."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.num_tokens}:{self.num_workers}"


CASES = [
    Case("chat", 512),
    Case("chat", 2048),
    Case("managed", 512),
    Case("managed", 2048),
    Case("managed", 32768),
    Case("managed", 32768, num_workers=1),
]
ORIGINAL = {("chat", 512): (530, 100), ("chat", 2048): (263, 233)}
ORIGINAL |= {("managed", 512): (230, 165), ("managed", 2048): (60, 589)}
"""NousResearch/atropos 296a0bc, measured the same way on the same kind of machine: completions per CPU second, and the
99th percentile in ms of the CPU time between two ticks of its event loop."""


class Row(NamedTuple):
    num_groups: int
    wall_s: float
    cpu_s: float
    loop_cpu_ms: list[float]
    late_ms: list[float]
    rss_mb: float


@contextmanager
def running_engine(tokenizer: Path, lengths: Sequence[int], *, directory: Path) -> Iterator[str]:
    """Yield the address of an engine that answers at once."""
    log_path = directory / "engine.log"
    script = str(Path(__file__).with_name("_env_engine.py"))
    argv = [script, str(tokenizer), ",".join(map(str, lengths))]
    with running(argv, log_path=log_path) as process:
        yield f"{listening(process, log_path)}/v1"


class Sink:
    """A trainer that fetches every batch at once and discards it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.num_groups = 0

    async def run(self) -> None:
        with self._site.connect() as connection:
            while True:
                taken = await take_batch(self._site, connection, PACKED, wait_s=5)
                if taken is not None:
                    self.num_groups += taken.num_groups
                    await acknowledge(connection, taken)


@contextlib.asynccontextmanager
async def draining(hub: Hub) -> AsyncIterator[Sink]:
    site = Site(hub=hub, is_packed=True, is_leasing=True)
    with site.connect() as connection:
        batch_size = GROUPS_PER_BATCH * GROUP_SIZE
        await register_trainer(connection, batch_size=batch_size, max_token_len=2**20)
    sink = Sink(site)
    task = asyncio.create_task(sink.run())
    try:
        yield sink
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(
    case: Case, *, engine_url: str, tokenizer: Path, directory: Path, seconds: float
) -> Row:
    """Serve for `seconds` after a warm-up, in the second half with the probe on."""
    probe_path, log_path = directory / "probe.json", directory / f"env-{case.name}.log"
    with running_hub("memory", directory=directory) as hub:
        async with draining(hub) as sink:
            argv = [
                str(Path(__file__).with_name("_env_process.py")),
                "serve",
                f"--env.rollout_server_url={hub.base_url}",
                f"--env.tokenizer_name={tokenizer}",
                f"--env.path={case.path}",
                f"--env.max_token_length={case.num_tokens}",
                f"--env.max_num_workers={case.num_workers}",
                f"--openai.base_url={engine_url}",
            ]
            with running(argv, log_path=log_path, PROBE_PATH=str(probe_path)) as process:
                warm_from = 2 if case.num_tokens > 8192 else 20
                deadline = time.monotonic() + START_TIMEOUT_S
                while sink.num_groups < warm_from:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"no groups came:\n{log_path.read_text()[-3000:]}")
                    await asyncio.sleep(0.1)
                groups, cpu, began = sink.num_groups, cpu_s(process.pid), time.perf_counter()
                await asyncio.sleep(seconds / 2)
                groups, cpu = sink.num_groups - groups, cpu_s(process.pid) - cpu
                wall_s = time.perf_counter() - began
                process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(seconds / 2)
                process.send_signal(signal.SIGUSR1)
                rss_mb = memory_bytes(process.pid, "VmHWM") / 1e6
    probed = json.loads(probe_path.read_text())
    return Row(groups, wall_s, cpu, probed["loop_cpu_ms"], probed["late_ms"], rss_mb)


def process_cpu_s(case: Case, num_groups: int, *, engine_url: str, directory: Path) -> float:
    """Return the CPU seconds of one run of `process` that writes `num_groups`, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("_env_process.py")), "process"),
            f"--env.tokenizer_name={directory / 'tokenizer'}",
            f"--env.path={case.path}",
            f"--env.max_token_length={case.num_tokens}",
            f"--env.total_steps={num_groups}",
            f"--env.data_path_to_save_groups={directory / f'{num_groups}.jsonl'}",
            f"--openai.base_url={engine_url}",
        ],
        env={**os.environ, "PROBE_PATH": str(directory / "probe.json")},
        check=True,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quantiles(values: Sequence[float]) -> str:
    """Format median, 99th percentile and maximum."""
    if len(values) < 2:
        return "-"
    p99 = statistics.quantiles(values, n=100, method="inclusive")[98]
    return f"{statistics.median(values):.3g} / {p99:.3g} / {max(values):.3g}"


def add_row(table: Table, case: Case, row: Row) -> None:
    completions = GROUP_SIZE * row.num_groups
    rate, p99_ms = ORIGINAL.get((case.path, case.num_tokens), ("-", "-"))
    table.row(
        {"managed": "managed_server", "chat": "openai chat + tokenize_for_trainer"}[case.path],
        case.num_tokens,
        case.num_workers,
        f"{completions / row.cpu_s:,.0f}",
        rate,
        f"{1e3 * row.cpu_s / max(1, row.num_groups):.1f}",
        quantiles(row.loop_cpu_ms),
        p99_ms,
        quantiles(row.late_ms),
        f"{completions / row.wall_s:,.0f}",
        f"{row.rss_mb:.0f}",
    )


async def run(arguments: argparse.Namespace) -> None:
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    lengths = sorted({case.num_tokens for case in cases})
    with tempfile.TemporaryDirectory(prefix="env-") as folder:
        directory = Path(folder)
        tokenizer = directory / "tokenizer"
        save_tokenizer(tokenizer)
        table = Table(
            f"The environment process: groups of {GROUP_SIZE}",
            "path",
            "completion tokens",
            "items in flight",
            "completions per CPU s",
            "the original",
            "CPU ms per group",
            "loop CPU between ticks, p50 / p99 / max ms",
            "the original's p99",
            "ticks late (net), p50 / p99 / max ms",
            "completions per wall s",
            "peak RSS MB",
        )
        with running_engine(tokenizer, lengths, directory=directory) as engine_url:
            for case in cases:
                row = await measure(
                    case,
                    engine_url=engine_url,
                    tokenizer=tokenizer,
                    directory=directory,
                    seconds=arguments.seconds,
                )
                add_row(table, case, row)
            table = Table("process", "path", "completion tokens", "completions per CPU s")
            for case in (case for case in cases if case.num_tokens == 512):
                costs = [
                    process_cpu_s(case, num_groups, engine_url=engine_url, directory=directory)
                    for num_groups in (2, NUM_FILE_GROUPS)
                ]
                rate = GROUP_SIZE * (NUM_FILE_GROUPS - 2) / (costs[1] - costs[0])
                table.row(case.path, case.num_tokens, f"{rate:,.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="*", choices=names, help="some of the rows")
    parser.add_argument("--seconds", type=float, default=12.0, help="per row, after the warm-up")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    asyncio.run(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
