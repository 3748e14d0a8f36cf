"""Measure time and memory in the processes of `trainer.py`, and return the results to it.

Runs in the environment of either side, so it imports nothing of this project, and torch only for GPU memory.
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
from typing import Any


@dataclass(kw_only=True)
class Result:
    """Measurements of a process; lists have one value per measured step."""

    cpu_s: list[float] = field(default_factory=list)
    """User and system time of the whole process."""
    wall_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    """Per step."""
    peak_bytes: int = 0
    """Peak memory during the steps, without the loaded model: RSS, or torch's allocations on the GPU."""
    loaded_bytes: int = 0
    """In use after the model was loaded."""
    expected_bytes: int = 0
    """Total that `example_trainer.memory` estimates for the step."""
    losses: list[float] = field(default_factory=list)
    """Of every step, warm-up included."""
    grad_norms: list[float] = field(default_factory=list)
    num_parameters: int = 0
    note: str = ""

    def print(self) -> None:
        """Write the line that `result_in` reads."""
        sys.stdout.write(f"\n{MARK}{json.dumps(asdict(self))}\n")
        sys.stdout.flush()


MARK = "result: "


def result_in(output: str) -> Result:
    """Find the result in a process's output."""
    (line,) = (line for line in output.splitlines() if line.startswith(MARK))
    return Result(**json.loads(line.removeprefix(MARK)))


class Peak:
    """Peak memory while measured, minus the memory in use when this was created."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda if device.startswith("cuda") else None
        gc.collect()
        self.base_bytes = self._cuda.memory_allocated() if self._cuda else _status_bytes("VmRSS")
        self.num_bytes = 0

    def begin(self) -> None:
        if self._cuda:
            self._cuda.synchronize()
            self._cuda.reset_peak_memory_stats()
        else:
            # Reset VmHWM to VmRSS: proc(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self) -> None:
        if self._cuda:
            self._cuda.synchronize()
        peak = self._cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")
        self.num_bytes = max(self.num_bytes, peak - self.base_bytes)


class Meter:
    """Measures time and memory of each step; create it right after loading the model."""

    def __init__(self, model: Any, *, device: str, num_warmup: int = 0) -> None:
        for parameter in model.parameters():
            parameter.sum()  # weights may be mapped from the file and not yet in memory
        self._peak = Peak(device)
        self.result = Result(
            num_parameters=sum(p.numel() for p in model.parameters()),
            loaded_bytes=self._peak.base_bytes,
        )
        self._num_warmup = num_warmup
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


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux")
