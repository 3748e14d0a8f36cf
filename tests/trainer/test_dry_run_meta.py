"""Whole steps on the `meta` device, backward pass and optimizer included: no operation mixes tensors of two devices.

What this cannot reach: numbers (those read from the device are made up), kernels and their limits, bfloat16 (FSDP does
not cast on `meta`: float32 only), the fused AdamW kernel (the plain one takes its place), several processes, saving the
weights to disk. `test_dry_run_cuda.py` reaches bfloat16 and the choices that are made for CUDA.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks import _trainer_ours
from benchmarks._trainer_work import Spec, build_model
from example_trainer import checkpointing
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.memory import needs, sizes_of
from example_trainer.model import Policy, load_policy, reference_of
from example_trainer.optim import make_optimizer
from example_trainer.parallel import World
from example_trainer.step import data_options, describe_result, take_step
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_dry_run import (
    CASES_OF_A_GPU,
    CORRECTIONS,
    EVERY_TERM,
    LAYOUTS,
    STEPS,
    WAYS,
    OneDevice,
    config_for_dry_run,
    make_groups,
    policy_of,
    trace_of,
)

META = World(rank=0, size=1, device=torch.device("meta"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)


class Loaded(NamedTuple):
    policy: Policy
    reference: Any


@pytest.fixture(scope="module")
def load(model_dir: Path) -> Callable[[str], Loaded]:
    """Return a function of the way; models without numbers are not changed by a step, so that one serves every test."""

    @functools.cache
    def load(way: str) -> Loaded:
        config = config_for_dry_run(model_dir, model_dir, **WAYS[way])
        policy = load_policy(config, META)
        assert {p.device.type for p in policy.model.parameters()} == {"meta"}
        return Loaded(policy, reference_of(policy, config))

    return load


def take_one_step(model: Loaded, **changes: Any) -> None:
    """Take a whole step, and count what a checkpoint would hold after it."""
    config = config_for_dry_run(Path("model"), Path("out"), **changes)
    policy = model.policy
    reference = model.reference if config.kl_coef else None
    optimizer = make_optimizer(policy, config)
    options = data_options(config, policy)
    batch = make_batch(make_groups(), options)
    assert len(batch.micro_batches) > 1
    with OneDevice("meta"):
        gap = LogprobGap(policy, limit=None)
        trace = trace_of(policy, batch)
        result = take_step(policy, optimizer, batch, config, 1, gap, reference, trace)
        assert len(trace.lines()) == batch.num_groups
        described = describe_result(result, batch)
        assert described["loss"] is not None
        assert described["logprob_gap_max"] is not None
        checkpointing._make_state(optimizer)
    held = checkpointing._tensors(policy, optimizer)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert len(held) == 4 * len(trained)  # weights, two moments and the step


@pytest.fixture(autouse=True)
def plain_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *args, **kwargs: plain(*args, **kwargs | {"fused": False})
    )


# A drill except for one layout and way. The test of corrections has the other layout.
@pytest.mark.parametrize(
    ("name", "layout", "way"),
    [
        pytest.param(*step, marks=() if step[1:] == ("padded", "whole") else pytest.mark.drill)
        for step in STEPS
    ],
)
def test_a_step_of_every_objective_stays_on_its_device(
    load: Callable[[str], Loaded], name: str, layout: str, way: str
) -> None:
    take_one_step(load(way), objective=name, **EVERY_TERM, **LAYOUTS[layout], **WAYS[way])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_step_of_every_correction_stays_on_its_device(
    load: Callable[[str], Loaded], correction: str, level: str
) -> None:
    changes = {"correction": correction, "correction_level": level, "distill_coef": 0.3}
    take_one_step(load("whole"), distill_loss="reverse_kl", **changes, **LAYOUTS["packed"])


@pytest.mark.parametrize(
    "operation",
    [
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here + there,
        lambda here, there: here.add_(there),
        lambda here, there: here[there.long()],
        lambda here, there: here.view(2, 2) @ there.view(2, 2),
    ],
    ids=["cat", "add", "add in place", "index", "product"],
)
def test_the_dry_run_refuses_tensors_of_two_devices(operation: Any) -> None:
    """Else it would show nothing."""
    here, there = torch.zeros(4, device="meta"), torch.zeros(4)
    with OneDevice("meta"), pytest.raises(RuntimeError):
        operation(here, there)
    with OneDevice("meta"):
        operation(here, torch.zeros(4, device="meta"))


@pytest.mark.parametrize("case", CASES_OF_A_GPU, ids=lambda case: case.name)
def test_what_a_gpu_benchmark_trains_has_the_size_of_qwen_and_fits_a_card_of_80_gb(
    case: Spec,
) -> None:
    with torch.device("meta"):
        model = build_model(case.shape)
    policy = policy_of(model, "meta")
    sizes = sizes_of(policy, _trainer_ours.config_of(case), shares_gpu=False)
    # The parameters that the model cards of Qwen2.5 give.
    published = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688}
    assert sizes.num_parameters == sizes.num_trained == published[case.shape]
    assert sizes.microbatch_tokens == 8192
    assert sum(needs(sizes, 0).values()) < 75 * 2**30
