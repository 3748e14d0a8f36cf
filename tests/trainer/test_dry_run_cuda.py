"""Forward pass, losses, gap check and metrics on CUDA tensors that are only pretended, with torch's CUDA build.

`FakeTensorMode` checks shapes, types and devices as the CUDA kernels would, bfloat16 and autocast included, and needs
no device. `.ci/cuda_env.sh` makes the environment: `pytest -m cuda_wheel tests/trainer/test_dry_run_cuda.py`.

What this cannot reach: the backward pass and the optimizer's step (autograd asks the driver for the device; the meta
dry run has both), numbers, memory, speed, kernels of flash attention and Triton, streams, NCCL, several processes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import Policy, load_policy
from example_trainer.objective import OBJECTIVES
from example_trainer.optim import make_optimizer
from example_trainer.step import data_options, describe_result, take_step
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_dry_run import (
    CORRECTIONS,
    EVERY_TERM,
    LAYOUTS,
    OneDevice,
    config_for_dry_run,
    make_groups,
)

pytestmark = [
    pytest.mark.cuda_wheel,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch is not a CUDA build"),
    pytest.mark.filterwarnings("ignore"),
]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora": True},
}


class Loaded(NamedTuple):
    policy: Policy
    reference: Policy
    mode: FakeTensorMode


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """Models without numbers are not changed by a step: one of each serves every test."""
    model_dir = make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = {}
    for way, changes in WAYS.items():
        config = config_for_dry_run(model_dir, model_dir, **changes)
        policy, reference = (on_cuda(load_policy(config), mode) for _ in range(2))
        assert {p.device.type for p in policy.model.parameters()} == {"cuda"}
        found[way] = Loaded(policy, reference, mode)
    return found


def on_cuda(policy: Policy, mode: FakeTensorMode) -> Policy:
    with mode:
        policy.model.to_empty(device="cuda")
    return dataclasses.replace(policy, device=torch.device("cuda:0"))


@pytest.fixture(autouse=True)
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks the driver says yes; the backward pass, which would not run without one, is left out."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)


def take_one_step(model: Loaded, dtype: torch.dtype, **changes: Any) -> None:
    config = config_for_dry_run(Path("model"), Path("out"), **changes)
    policy, reference = (dataclasses.replace(each, dtype=dtype) for each in model[:2])
    with model.mode, OneDevice("cuda"):
        optimizer = make_optimizer(policy, config)
        options = data_options(config, policy)
        batch = make_batch(make_groups(), options)
        assert len(batch.micro_batches) > 1
        gap = LogprobGap(policy, limit=None)
        frozen = reference if config.kl_coef else None
        result = take_step(policy, optimizer, batch, config, 1, gap, frozen)
        described = describe_result(result, batch)
    assert described["loss"] is not None
    assert described["logprob_gap_max"] is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_forward_losses_gap_and_metrics_of_every_objective_stay_on_the_gpu(
    models: dict[str, Loaded], name: str, layout: str, way: str, dtype: torch.dtype
) -> None:
    changes = {"objective": name} | EVERY_TERM | LAYOUTS[layout] | WAYS[way]
    take_one_step(models[way], dtype, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_forward_and_losses_of_every_correction_stay_on_the_gpu(
    models: dict[str, Loaded], correction: str, layout: str
) -> None:
    changes = {"correction": correction, "distill_coef": 0.3, "distill_loss": "reverse_kl"}
    take_one_step(models["whole"], torch.bfloat16, **changes, **LAYOUTS[layout])
