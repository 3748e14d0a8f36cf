"""Where the tests of this directory run, and what they compare.

They need a CUDA device. `ATROPOS_REHEARSE_GPU=1 pytest -m gpu tests/gpu` runs on the CPU what can run there, so that
none fails for its own mistakes on the day that there is a device.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from example_trainer.config import TrainerConfig
from example_trainer.data import Batch, make_batch
from example_trainer.model import Policy, load_policy
from example_trainer.parallel import whole
from example_trainer.step import StepResult, data_options
from tests.trainer.helpers_trainer import make_group, one_step

REHEARSES = os.environ.get("ATROPOS_REHEARSE_GPU") == "1"
DEVICE = "cpu" if REHEARSES else "cuda"
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REHEARSES or torch.cuda.is_available()), reason="torch sees no CUDA device"
    ),
    pytest.mark.timeout(300),  # Triton compiles kernels on first use
    pytest.mark.filterwarnings("ignore"),  # such as dynamo's, about tensors that it looks into
]
needs_cuda = pytest.mark.skipif(REHEARSES, reason="the CPU has nothing to rehearse of it")
GROUPS = [make_group([1.0, 0.0, 0.3, 0.8], seed=s, length=9 + 40 * s) for s in range(3)]


def config_for(model_dir: Path, tmp_path: Path, **changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {
        "device": DEVICE,
        "attention": "sdpa",
        "dtype": "bfloat16",
        "lr": 1e-3,
        "save_path": tmp_path / "saved",
        "weights_dir": tmp_path / "weights",
    }
    return TrainerConfig(model_name=str(model_dir), **fields | changes)


def steps(policy: Policy, config: TrainerConfig, optimizer: Any) -> Iterator[StepResult]:
    """Take a step on GROUPS each time that the next result is asked for."""
    while True:
        yield one_step(policy, config, GROUPS, optimizer=optimizer)


def logprobs(policy: Policy, batch: Batch) -> Tensor:
    """Return the log-probability of every trained token, in an order that no layout changes."""
    found = []
    for micro_batch in batch.micro_batches:
        micro_batch = micro_batch.to(policy.device)
        own_N = policy.logprobs(micro_batch).logprobs_N
        lengths = torch.bincount(micro_batch.positions.sequence_N).tolist()
        labels = micro_batch.positions.labels_N.split(lengths)
        found += [(tuple(a.tolist()), b) for a, b in zip(labels, own_N.split(lengths), strict=True)]
    return torch.cat([own for _, own in sorted(found, key=lambda pair: pair[0])])


@dataclasses.dataclass(frozen=True)
class Computed:
    """What a model computes for GROUPS."""

    logprobs: Tensor
    gradient: Tensor
    """Of the mean logprob with respect to all weights."""

    def check(self, expected: "Computed", *, mean: float, cosine: float) -> None:
        """Compare with float32: the mean difference of logprobs in nats, and the direction of the gradient."""
        assert (self.logprobs - expected.logprobs).abs().mean() < mean
        found = torch.nn.functional.cosine_similarity(self.gradient, expected.gradient, dim=0)
        assert found > cosine


def compute(config: TrainerConfig) -> Computed:
    """Load the model and compute, without changing it; the results are on the CPU."""
    policy = load_policy(config)
    own = logprobs(policy, make_batch(GROUPS, data_options(config, policy)))
    own.mean().backward()
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    # A router's bias or an expert that no token reaches has none.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    gradient = torch.cat([whole(each).flatten().cpu() for each in gradients])
    return Computed(own.detach().cpu(), gradient)


def exact(model_dir: Path, tmp_path: Path, **changes: Any) -> Computed:
    """Compute in float32 on the CPU with eager attention."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention": "eager"}
    return compute(config_for(model_dir, tmp_path, **settings | changes))
