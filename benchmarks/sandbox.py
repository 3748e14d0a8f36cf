"""How many programs per CPU second run in a sandbox, beside the bare interpreter?

Run it as `PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/sandbox.py`; `--docker-image python:3.11-slim` adds
containers. Each program prints the sum of two numbers that it reads. CPU time is that of this process and its
descendants, the medians of five rounds in which the rows alternate. A container's belongs to Docker's daemon, so it has
no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from atroposlib.envs.sandbox import (
    BubblewrapSandbox,
    DockerSandbox,
    ProcessSandbox,
    Sandbox,
    local_sandbox,
    run_code,
)
from benchmarks._hub_process import cpu_s
from benchmarks._table import Table

PROGRAM = "print(sum(map(int, input().split())))"
NUM_ROUNDS = 5
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


class Cost(NamedTuple):
    """Of one execution, in seconds."""

    cpu_s: float
    wall_s: float


def bare() -> str:
    """Run the program in the interpreter alone."""
    argv = [sys.executable, "-I", "-c", PROGRAM]
    return subprocess.run(argv, input="3 4", capture_output=True, text=True, check=True).stdout


def runner(box: Sandbox) -> Callable[[], str]:
    return lambda: run_code(PROGRAM, stdin="3 4", sandbox=box).stdout


def cost(run: Callable[[], str], num_runs: int) -> Cost:
    began, cpu = time.perf_counter(), cpu_s(os.getpid())
    for _ in range(num_runs):
        assert run() == "7\n"
        # bubblewrap leaves the first process of its namespace behind, whose descendants are the program.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return Cost((cpu_s(os.getpid()) - cpu) / num_runs, (time.perf_counter() - began) / num_runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="executions per round (20)")
    parser.add_argument("--docker-image", help="also measure containers of this image")
    flags = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    rows = {"bare interpreter": bare, "process with limits": runner(ProcessSandbox())}
    if isinstance(box := local_sandbox(), BubblewrapSandbox):
        rows["bubblewrap"] = runner(box)
    if flags.docker_image:
        rows["Docker"] = runner(DockerSandbox(flags.docker_image))
    costs: dict[str, list[Cost]] = {name: [] for name in rows}
    for _ in range(NUM_ROUNDS):
        for name, run in rows.items():
            costs[name].append(cost(run, flags.runs))
    table = Table("one program", "sandbox", "executions per CPU s", "CPU ms", "bare = 1", "wall ms")
    medians = {
        name: statistics.median(each.cpu_s for each in found) for name, found in costs.items()
    }
    for name, cpu in medians.items():
        cpu = float("nan") if name == "Docker" else cpu
        wall = statistics.median(each.wall_s for each in costs[name])
        table.row(name, 1 / cpu, cpu * 1e3, cpu / medians["bare interpreter"], wall * 1e3)


if __name__ == "__main__":
    main()
