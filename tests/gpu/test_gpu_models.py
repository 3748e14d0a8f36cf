"""Every architecture and every kernel of attention loads on the device and computes what float32 does."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from example_trainer.contract import check_files
from example_trainer.data import make_batch
from example_trainer.model import load_policy
from example_trainer.optim import make_optimizer
from example_trainer.step import data_options
from example_trainer.weights import WeightsDirectory
from tests.gpu.helpers_gpu import (
    GROUPS,
    ON_GPU,
    REHEARSES,
    compute,
    config_for,
    exact,
    logprobs,
    needs_cuda,
    steps,
)
from tests.trainer.helpers_models import CHANGES, make_model

pytestmark = ON_GPU

HUB_KERNEL = os.environ.get("ATROPOS_HUB_KERNEL", "")
"""A kernel of the hub (org/name) that is in the cache of `kernels`."""
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
KERNELS = [
    (LlamaConfig, "eager"),
    (LlamaConfig, "sdpa"),
    (LlamaConfig, "flex_attention"),
    (LlamaConfig, "flash_attention_2"),
    (LlamaConfig, "flash_attention_3"),
    (LlamaConfig, "hub"),
    (Gemma2Config, "eager"),  # a soft cap on the scores
    (Gemma2Config, "flex_attention"),
    (Gemma2Config, "flash_attention_2"),
    (GptOssConfig, "eager"),  # a learned sink in each head
    (GptOssConfig, "flex_attention"),
    (GptOssConfig, "hub"),
]


def require_kernel(kernel: str) -> str:
    """Return the kernel's name for transformers, or skip with what it lacks."""
    package = PACKAGES.get(kernel, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if kernel == "hub" and not HUB_KERNEL:
        pytest.skip("ATROPOS_HUB_KERNEL names no kernel")
    if kernel == "flex_attention" and REHEARSES:
        pytest.skip("flex_attention has no backward pass on the CPU")
    return HUB_KERNEL if kernel == "hub" else kernel


@pytest.mark.parametrize("kind", CHANGES)
def test_an_architecture_loads_and_computes_in_bfloat16_what_it_does_in_float32(
    kind: type[PretrainedConfig], tmp_path: Path
) -> None:
    """On the CPU the means are 0.003 to 0.014 nats; the experts of Qwen3-Next differ, as four layers choose them."""
    model_dir = make_model(kind, tmp_path / "model")
    found = compute(config_for(model_dir, tmp_path, attention="auto"))
    loose = kind is Qwen3NextConfig
    limits = {"mean": 0.2, "cosine": 0.2} if loose else {"mean": 0.03, "cosine": 0.98}
    found.check(exact(model_dir, tmp_path), **limits)


@pytest.mark.parametrize(("kind", "kernel"), KERNELS)
def test_a_kernel_of_attention_gives_the_logprobs_and_gradient_of_eager_attention(
    kind: type[PretrainedConfig], kernel: str, tmp_path: Path
) -> None:
    name = require_kernel(kernel)
    model_dir = make_model(kind, tmp_path / "model")
    found = compute(config_for(model_dir, tmp_path, attention=name))
    found.check(exact(model_dir, tmp_path), mean=0.03, cosine=0.98)


@needs_cuda
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger_kernel is not installed"
)
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config, Qwen3MoeConfig, GptOssConfig])
def test_ligers_kernels_compute_what_the_models_own_do(
    kind: type[PretrainedConfig], tmp_path: Path
) -> None:
    """They take the place of functions of transformers' module for all models, which the end of the test undoes."""
    model_dir = make_model(kind, tmp_path / "model")
    expected = exact(model_dir, tmp_path)
    module = vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__])
    before = dict(module)
    try:
        found = compute(config_for(model_dir, tmp_path, attention="auto", liger=True))
    finally:
        module.update(before)
    found.check(expected, mean=0.03, cosine=0.98)


@pytest.mark.parametrize("targets", [[], ["q_proj", "gate_proj", "up_proj", "down_proj"]], ids=len)
@pytest.mark.parametrize("kind", [Qwen3MoeConfig, GptOssConfig])
def test_experts_are_trained_and_published(
    kind: type[PretrainedConfig], targets: list[str], tmp_path: Path
) -> None:
    """Whole, or by adapters; what is published, loaded again, has the logprobs of what was trained."""
    if targets and kind is GptOssConfig:
        targets = ["q_proj", "o_proj"]  # peft knows no names for its experts
    model_dir = make_model(kind, tmp_path / "model")
    changes: dict[str, Any] = {"attention": "eager", "lr": 0.01}
    adapters = {"lora": True, "lora_target_modules": targets} if targets else {}
    config = config_for(model_dir, tmp_path, **changes | adapters)
    policy = load_policy(config)
    results = steps(policy, config, make_optimizer(policy, config))
    assert all((next(results).grad_norm or 0.0) > 0.0 for _ in range(3))
    batch = make_batch(GROUPS, data_options(config, policy))
    with WeightsDirectory(config, policy) as weights, torch.no_grad():
        published = weights.take(3)()
        check_files(published)
        again = load_policy(config_for(published, tmp_path, **changes))
        first = load_policy(config_for(model_dir, tmp_path, **changes))
        trained, loaded, initial = (logprobs(each, batch) for each in (policy, again, first))
    assert (trained - initial).abs().mean() > 0.1
    assert (trained - loaded).abs().mean() < 0.03
