"""What both sides of `trainer.py` share: the prepared batch, and how time and memory of a step are read.

Runs in the environment of either side, so it imports nothing of this project; torch only to ask the GPU.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What both sides are asked to do; every sequence belongs to a group of `group_size`."""

    device: str
    dtype: str
    """Of the forward pass, over float32 weights."""
    attention: str
    checkpointing: bool
    packing: bool
    """Honoured by this project's side alone."""
    sequences_per_micro_batch: int
    num_micro_batches: int
    group_size: int
    seq_len: int
    prompt_len: int
    lr: float
    clip: float
    max_grad_norm: float
    warmup_steps: int
    steps: int
    threads: int


class Batch(NamedTuple):
    """The sequences of the step, one after the other; the first `prompt_len` tokens of each are the prompt."""

    tokens: list[NDArray[np.int64]]
    logprobs: list[NDArray[np.float32]]
    """Sampled, of the completion."""
    scores: NDArray[np.float64]
    advantages: NDArray[np.float64]


@dataclass(kw_only=True)
class Result:
    """Of one run; lists hold one value per measured step."""

    cpu_s: list[float] = field(default_factory=list)
    """User and system time of the whole process."""
    wall_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory in use during any step, the loaded model not counted: RSS, or what torch allocated on the GPU."""
    losses: list[float] = field(default_factory=list)
    """Of every step, warm-up included."""
    grad_norms: list[float] = field(default_factory=list)
    num_parameters: int = 0
    note: str = ""


def write(directory: Path, spec: Spec, batch: Batch) -> None:
    (directory / "spec.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
    np.savez(
        directory / "batch.npz",
        lengths=[len(sequence) for sequence in batch.tokens],
        tokens=np.concatenate(batch.tokens),
        logprobs=np.concatenate(batch.logprobs),
        scores=batch.scores,
        advantages=batch.advantages,
    )


def read_spec(directory: Path) -> Spec:
    return Spec(**json.loads((directory / "spec.json").read_text(encoding="utf-8")))


def read_batch(directory: Path, spec: Spec) -> Batch:
    with np.load(directory / "batch.npz") as arrays:
        lengths = arrays["lengths"]
        return Batch(
            tokens=np.split(arrays["tokens"], np.cumsum(lengths)[:-1]),
            logprobs=np.split(arrays["logprobs"], np.cumsum(lengths - spec.prompt_len)[:-1]),
            scores=arrays["scores"],
            advantages=arrays["advantages"],
        )


class Peak:
    """Most memory in use while measured, beyond what was in use when this was made."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda if device.startswith("cuda") else None
        gc.collect()
        self._base = self._cuda.memory_allocated() if self._cuda else _status_bytes("VmRSS")
        self.num_bytes = 0

    def begin(self) -> None:
        if self._cuda:
            self._cuda.synchronize()
            self._cuda.reset_peak_memory_stats()
        else:
            # VmHWM starts again at VmRSS: proc(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self) -> None:
        if self._cuda:
            self._cuda.synchronize()
        peak = self._cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")
        self.num_bytes = max(self.num_bytes, peak - self._base)


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measure the block; the figure is there when it has ended."""
    peak = Peak(device)
    peak.begin()
    yield peak
    peak.end()


class Meter:
    """Reads time and memory of one step after the other; made when the model has just been loaded."""

    def __init__(self, spec: Spec, model: Any) -> None:
        self.result = Result(num_parameters=sum(p.numel() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.sum()  # weights may be mapped from the file and not yet in memory
        self._peak = Peak(spec.device)
        self._num_warmup = spec.warmup_steps
        self._num_begun = 0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        self._num_begun += 1
        if self._num_begun > self._num_warmup:
            self._peak.begin()
        self._began = (time.process_time(), time.perf_counter())

    def end(self) -> None:
        if self._num_begun <= self._num_warmup:
            return
        self._peak.end()
        self.result.cpu_s.append(time.process_time() - self._began[0])
        self.result.wall_s.append(time.perf_counter() - self._began[1])
        self.result.peak_bytes = self._peak.num_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def print(self) -> None:
        sys.stdout.write("\n" + json.dumps(asdict(self.result)) + "\n")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux")
