"""`memory.py`: what a step needs, against figures worked out by hand, and the flag that it names."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from example_trainer.memory import (
    GIB,
    Sizes,
    bytes_per_token,
    needs,
    sizes_of,
    what_does_not_fit,
)
from example_trainer.model import load_policy
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_dry_run import config_for_dry_run

HALF_BILLION = Sizes(
    num_parameters=494_000_000,
    num_trained=494_000_000,
    num_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    microbatch_tokens=8192,
)
SEVEN_BILLION = dataclasses.replace(
    HALF_BILLION,
    num_parameters=7_600_000_000,
    num_trained=7_600_000_000,
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18_944,
    checkpoints=True,
)
THREE_BILLION = dataclasses.replace(
    SEVEN_BILLION,
    num_parameters=3_100_000_000,
    num_trained=3_100_000_000,
    num_layers=36,
    hidden_size=2048,
    intermediate_size=11_008,
)


def test_half_a_billion_parameters_without_checkpointing_are_45_gb_of_activations() -> None:
    sizes = dataclasses.replace(HALF_BILLION, microbatch_tokens=32_768)
    assert bytes_per_token(sizes) / 24 == pytest.approx(56 * 1024, rel=0.02)
    found = needs(sizes, 80 * GIB)
    assert found["activations"] == pytest.approx(45e9, rel=0.03)
    assert found["weights"] + found["gradients"] + found["optimizer"] == 16 * 494_000_000


@pytest.mark.parametrize(
    ("sizes", "changes", "gpu_gib", "words"),
    [
        (HALF_BILLION, {}, 80, None),
        (HALF_BILLION, {"engine_share": 0.45}, 80, None),
        (HALF_BILLION, {"engine_share": 0.45, "microbatch_tokens": 32_768}, 80, "--max_microbatch"),
        (HALF_BILLION, {}, 16, "--gradient_checkpointing true"),
        (HALF_BILLION, {"checkpoints": True}, 16, None),
        (THREE_BILLION, {}, 80, None),
        (THREE_BILLION, {"engine_share": 0.45}, 80, "--vllm_gpu"),
        (THREE_BILLION, {}, 40, "adamw_8bit"),
        (SEVEN_BILLION, {}, 64, "torchrun"),
        (SEVEN_BILLION, {"num_processes": 4}, 80, None),
        (SEVEN_BILLION, {"num_trained": 40_000_000, "frozen_bytes": 2}, 80, None),
    ],
)
def test_what_does_not_fit_is_said_with_the_flag_that_mends_it(
    sizes: Sizes, changes: dict[str, Any], gpu_gib: int, words: str | None
) -> None:
    line = what_does_not_fit(dataclasses.replace(sizes, **changes), gpu_gib * GIB)
    if words is None:
        assert line is None
    else:
        assert line is not None
        assert words in line
        assert f"of this GPU's {gpu_gib} (weights" in line
        assert "\n" not in line


def test_the_tokens_that_it_names_fit() -> None:
    sizes = dataclasses.replace(HALF_BILLION, engine_share=0.45, microbatch_tokens=32_768)
    line = what_does_not_fit(sizes, 80 * GIB)
    assert line is not None
    tokens = int(line.rpartition(" ")[2])
    assert what_does_not_fit(dataclasses.replace(sizes, microbatch_tokens=tokens), 80 * GIB) is None


def test_sizes_are_read_off_the_model(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "model")
    config = config_for_dry_run(model_dir, tmp_path, lora=True, optimizer="adamw_8bit", kl_coef=0.1)
    policy = load_policy(config)
    found = sizes_of(policy, config, shares_gpu=True)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert 0 < found.num_trained == trained < found.num_parameters
    assert (found.num_layers, found.hidden_size, found.intermediate_size) == (2, 32, 64)
    assert (found.state_bytes, found.has_reference, found.engine_share) == (2, False, 0.45)
    assert (found.microbatch_tokens, found.computes_bytes, found.frozen_bytes) == (32_768, 4, 4)
