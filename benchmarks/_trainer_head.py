"""The memory that log-probabilities of a large vocabulary take: one measurement for a process that does nothing else.

`python -m benchmarks._trainer_head POSITIONS VOCABULARY HIDDEN DEVICE DTYPE` prints it as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import NamedTuple

import torch

from benchmarks._trainer_measure import peak_memory
from example_trainer.head import head_logprobs


class HeadMemory(NamedTuple):
    peak_bytes: int
    """Beyond inputs and weight, gradients included; resident memory on the CPU, allocated on a GPU."""
    logits_bytes: int
    """One float32 tensor of all logits."""
    cpu_s: float


def head_memory(
    num_positions: int, vocabulary: int, *, hidden: int, device: str, dtype: str = "float32"
) -> HeadMemory:
    """Compute log-probabilities and their gradient once; the process should have done little before."""
    rng = torch.Generator().manual_seed(0)
    narrow = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    states = torch.randn(num_positions, hidden, generator=rng).to(device, narrow).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=rng).to(device).requires_grad_()
    ids = torch.randint(0, vocabulary, (num_positions, 1), generator=rng).to(device)
    temperature = torch.ones(num_positions, device=device)
    began = time.process_time()
    with peak_memory(device) as peak:
        out = head_logprobs(states, weight, None, ids_NK=ids, temperature_N=temperature)
        out.logprobs_NK.sum().backward()
    return HeadMemory(peak.num_bytes, 4 * num_positions * vocabulary, time.process_time() - began)


def main() -> None:
    num_positions, vocabulary, hidden, device, dtype = sys.argv[1:]
    found = head_memory(
        int(num_positions), int(vocabulary), hidden=int(hidden), device=device, dtype=dtype
    )
    sys.stdout.write(json.dumps(found._asdict()) + "\n")


if __name__ == "__main__":
    main()
