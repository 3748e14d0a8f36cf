"""Measure the memory of log-probabilities over a large vocabulary, once per process.

`python -m benchmarks._trainer_head POSITIONS VOCABULARY HIDDEN DEVICE`.
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks._trainer_measure import Peak, Result
from example_trainer.head import head_logprobs


def head_memory(num_positions: int, vocabulary: int, *, hidden: int, device: str) -> Result:
    """Compute log-probabilities and their gradient once, in a fresh process.

    The peak excludes inputs and weight and includes gradients.
    """
    rng = torch.Generator().manual_seed(0)
    narrow = torch.float32 if device == "cpu" else torch.bfloat16
    states = torch.randn(num_positions, hidden, generator=rng).to(device, narrow).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=rng).to(device).requires_grad_()
    ids = torch.randint(0, vocabulary, (num_positions, 1), generator=rng).to(device)
    temperature = torch.ones(num_positions, device=device)
    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    peak = Peak(device)
    peak.begin()
    out = head_logprobs(states, weight, None, ids_NK=ids, temperature_N=temperature)
    out.logprobs_NK.sum().backward()
    peak.end()
    logits_bytes = 4 * num_positions * vocabulary
    return Result(
        cpu_s=[time.process_time() - began_cpu_s],
        wall_s=[time.perf_counter() - began_s],
        num_tokens=num_positions,
        peak_bytes=peak.num_bytes,
        note=f"{peak.num_bytes / logits_bytes:.3f} of all logits",
    )


def main() -> None:
    num_positions, vocabulary, hidden = map(int, sys.argv[1:4])
    head_memory(num_positions, vocabulary, hidden=hidden, device=sys.argv[4]).print()


if __name__ == "__main__":
    main()
