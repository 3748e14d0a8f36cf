"""`--compile_layers` changes no number of a step; a compiler of C++ takes the place of Triton's here."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from example_trainer.model import load_policy, transformer_layers
from example_trainer.step import StepResult
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_dry_run import LAYOUTS, config_for_dry_run, make_groups
from tests.trainer.helpers_trainer import one_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of dynamo, about tensors that it looks into
]


def step_of(model_dir: Path, out: Path, **changes: Any) -> StepResult:
    config = config_for_dry_run(model_dir, out, **changes)
    policy = load_policy(config)
    compiled = [layer._compiled_call_impl for layer in transformer_layers(policy.model)]
    assert all((call is not None) == config.compile_layers for call in compiled)
    return one_step(policy, config, make_groups(), version=1)


@pytest.mark.parametrize(
    "changes",
    [LAYOUTS["padded"], LAYOUTS["packed"] | {"gradient_checkpointing": True}],
    ids=["padded", "packed, checkpointing"],
)
def test_compiled_layers_take_the_same_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    model_dir = make_tiny_model(tmp_path / "model", num_layers=2)
    plain = step_of(model_dir, tmp_path / "plain", **changes)
    fused = step_of(model_dir, tmp_path / "fused", compile_layers=True, **changes)
    assert fused.loss == pytest.approx(plain.loss, rel=1e-4)
    assert fused.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
