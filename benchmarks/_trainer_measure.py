"""How the processes of `trainer.py` read time and memory, and how they hand the figures over.

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
from typing import Any


@dataclass(kw_only=True)
class Result:
    """What a process measured; lists hold one value per measured step."""

    cpu_s: list[float] = field(default_factory=list)
    """User and system time of the whole process."""
    wall_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    """Of one step."""
    peak_bytes: int = 0
    """Most memory in use during any step, the loaded model not counted: RSS, or what torch allocated on the GPU."""
    loaded_bytes: int = 0
    """In use when the model was loaded."""
    expected_bytes: int = 0
    """What `example_trainer.memory` says that the step needs in all."""
    losses: list[float] = field(default_factory=list)
    """Of every step, warm-up included."""
    grad_norms: list[float] = field(default_factory=list)
    num_parameters: int = 0
    note: str = ""

    def print(self) -> None:
        """Write the one line that `trainer.py` looks for."""
        sys.stdout.write(f"\n{MARK}{json.dumps(asdict(self))}\n")
        sys.stdout.flush()


MARK = "result: "


def result_in(output: str) -> Result:
    """Find the result in everything that a process printed."""
    (line,) = (line for line in output.splitlines() if line.startswith(MARK))
    return Result(**json.loads(line.removeprefix(MARK)))


class Peak:
    """Most memory in use while measured, beyond what was in use when this was made."""

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
            # VmHWM starts again at VmRSS: proc(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self) -> None:
        if self._cuda:
            self._cuda.synchronize()
        peak = self._cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")
        self.num_bytes = max(self.num_bytes, peak - self.base_bytes)


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measure the block; the figure is there when it has ended."""
    peak = Peak(device)
    peak.begin()
    yield peak
    peak.end()


class Meter:
    """Reads time and memory of one step after the other; made when the model has just been loaded."""

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
