"""`memory.py`: what a step needs, against figures worked out by hand, and the flag that it names."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from example_trainer.config import TrainerConfig
from example_trainer.grpo import main
from example_trainer.memory import (
    GIB,
    Sizes,
    bytes_per_token,
    needs,
    sizes_of,
    what_does_not_fit,
)
from example_trainer.model import load_policy
from tests.processes import ROOT
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_dry_run import config_for_dry_run

HALF_BILLION = Sizes(
    num_parameters=494_000_000,
    num_trained=494_000_000,
    num_root=136_000_000,
    num_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    microbatch_tokens=8192,
)
SEVEN_BILLION = dataclasses.replace(
    HALF_BILLION,
    num_parameters=7_600_000_000,
    num_trained=7_600_000_000,
    num_root=1_090_000_000,
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18_944,
    checkpoints=True,
)
THREE_BILLION = dataclasses.replace(
    SEVEN_BILLION,
    num_parameters=3_100_000_000,
    num_trained=3_100_000_000,
    num_root=311_000_000,
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
        (
            SEVEN_BILLION,
            {},
            64,
            ": use --cpu_offload true",
        ),
        (SEVEN_BILLION, {}, 12, "torchrun"),
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


LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)
QWEN_32B = Qwen2Config(
    hidden_size=5120,
    intermediate_size=27_648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152_064,
)
"""The sizes of Llama-3.1-8B and Qwen2.5-32B: 8,030,261,248 and 32,763,876,352 parameters on their cards."""


def planned(model: Any, directory: Path, *flags: str) -> list[str]:
    """Return the lines that `atropos-grpo --plan` prints for a directory with nothing but a config."""
    model.save_pretrained(directory)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["--plan", "true", "--model_name", str(directory), *flags]) == 0
    return printed.getvalue().splitlines()


def test_a_plan_for_8b_on_eight_gpus(tmp_path: Path) -> None:
    title, *rows, total, verdict = planned(LLAMA_8B, tmp_path, "--gradient_checkpointing", "true")
    assert "8.03B parameters, 8.03B trained" in title
    # An eighth of 4, 4 and 8 bytes per parameter. Gathered: root group 1.05e9 and layers of 218e6, two of these in
    # bfloat16, and gradients of the root group and one layer in bfloat16 and float32.
    gathered = 2 * (1.0507e9 + 2 * 218.1e6) + 6 * (1.0507e9 + 218.1e6)
    activations = 32768 * (32 * 2 * 4096 + 21 * 4096 + 8 * 14_336)
    found = {name: float(size) for name, size in map(str.split, rows)}
    expected = [8.0303e9 / 2, 8.0303e9 / 2, 8.0303e9, 0, gathered, activations, 1.5 * GIB, 0]
    assert list(found.values()) == pytest.approx([size / GIB for size in expected], abs=0.06)
    assert float(total.split()[1]) == pytest.approx(sum(expected) / GIB, abs=0.1)
    assert (total.split()[2:], verdict) == (["of", "80"], "fits")


def test_a_plan_for_32b_names_the_flags_that_make_it_fit(tmp_path: Path) -> None:
    *rows, total, verdict = planned(QWEN_32B, tmp_path)
    found = {row.split()[0]: float(row.split()[1]) for row in rows[1:]}
    states = found["weights"] + found["gradients"] + found["optimizer"]
    assert states == pytest.approx(2 * 32.764e9 / GIB, abs=0.1)
    assert found["gathered"] == pytest.approx(16.1, abs=0.1)
    assert float(total.split()[1]) > 200
    assert verdict == (
        "use --gradient_checkpointing true, --optimizer adamw_8bit, --max_microbatch_tokens 8192"
    )
    flags = verdict.removeprefix("use ").replace(",", "").split()
    assert planned(QWEN_32B, tmp_path, *flags)[-1] == "fits"
    longer = (*flags[:-2], "--seq_len", "32768")  # fewer tokens than a sequence are no micro-batch
    assert planned(QWEN_32B, tmp_path, *longer)[-1] == "use --activation_offload true"
    two = (*flags[:2], *flags[-2:], "--plan_gpus", "2")
    *_, verdict = planned(QWEN_32B, tmp_path, *two)
    assert verdict == "use --cpu_offload true --optimizer adamw"
    assert planned(QWEN_32B, tmp_path, *two, *verdict.split()[1:])[-1] == "fits"


MODELS: dict[str, Any] = {
    "14B": Qwen2Config(
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152_064,
    ),
    "32B": QWEN_32B,
    "72B": Qwen2Config(
        hidden_size=8192,
        intermediate_size=29_568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=152_064,
    ),
    "235B, 22B active": Qwen3MoeConfig(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        vocab_size=151_936,
    ),
}
"""The sizes of Qwen2.5 and of Qwen3-235B-A22B."""


def test_the_readmes_table_of_sizes_is_what_the_plan_says(tmp_path: Path) -> None:
    readme = (ROOT / "example_trainer" / "README.md").read_text()
    table = readme.split("| model | GPUs | flags | GiB |")[1].split("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")] for row in table.splitlines()[2:]]
    planned_rows = [row for row in rows if row[1] != "any"]
    assert {row[1] for row in planned_rows} == MODELS.keys()
    usual = ("--gradient_checkpointing", "true", "--max_microbatch_tokens", "8192")
    for _, name, num_gpus, flags, gib, *_ in planned_rows:
        flags = (*usual, "--plan_gpus", num_gpus, *flags.split())
        *_, total, verdict = planned(MODELS[name], tmp_path, *flags)
        assert (total.split()[1], verdict) == (gib, "fits"), (name, flags)


def test_an_optimizer_of_the_gpu_is_refused_off_it() -> None:
    with pytest.raises(ValueError, match="--optimizer adamw_8bit .* --cpu_offload"):
        TrainerConfig(model_name="m", optimizer="adamw_8bit", cpu_offload=True)


def test_a_plan_for_adapters_counts_a_frozen_base_in_bfloat16(tmp_path: Path) -> None:
    *rows, _, verdict = planned(
        LLAMA_8B, tmp_path, "--lora", "true", "--gradient_checkpointing", "true"
    )
    found = {row.split()[0]: float(row.split()[1]) for row in rows[1:]}
    assert found["weights"] == pytest.approx(2 * 8.03e9 / 8 / GIB, abs=0.1)
    assert found["optimizer"] < 0.1  # of 42M parameters in adapters
    assert verdict == "fits"


def test_a_plan_for_no_model_names_it(tmp_path: Path) -> None:
    assert main(["--plan", "true", "--model_name", str(tmp_path / "nothing")]) == 2
