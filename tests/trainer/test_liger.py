"""What `--use_liger` asks of liger-kernel, and what it refuses; the kernels themselves need a GPU (tests/gpu)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from atroposlib.errors import ConfigError, MissingDependency
from example_trainer.config import TrainerConfig
from example_trainer.liger import apply_liger
from example_trainer.model import load_policy
from tests.tiny_model import make_tiny_model

CUDA = torch.device("cuda")
MODEL = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))


def install(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> list[dict[str, Any]]:
    """Put a liger-kernel in place that knows the model types and records what it is asked."""
    asked: list[dict[str, Any]] = []
    names = ["liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"]
    modules = {name: ModuleType(name) for name in names}
    patches = modules[names[-1]]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(kinds)  # type: ignore[attr-defined]
    patches._apply_liger_kernel_to_instance = lambda **given: asked.append(given)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_liger_replaces_layers_and_leaves_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install(monkeypatch, "qwen2")
    apply_liger(MODEL, CUDA)
    assert asked == [{"model": MODEL, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_a_model_without_liger_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install(monkeypatch, "llama", "gemma")
    with pytest.raises(ConfigError, match="'qwen2', only for gemma, llama"):
        apply_liger(MODEL, CUDA)
    assert asked == []


def test_liger_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingDependency, match=r"atroposlib\[gpu\]"):
        apply_liger(MODEL, CUDA)


def test_liger_is_refused_on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_tiny_model(tmp_path_factory.mktemp("model"))
    with pytest.raises(ConfigError, match="--use_liger.*CUDA alone.*cpu"):
        load_policy(TrainerConfig(model_name=str(model), device="cpu", use_liger=True))
