"""`--liger`: which of liger-kernel's functions is called with what; it needs Triton, so tests/gpu runs the kernels."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from atroposlib.errors import ConfigError
from example_trainer.model import load_policy
from tests.trainer.helpers_dry_run import config_for_dry_run
from tests.trainer.helpers_models import make_model

NAME = "liger_kernel.transformers.monkey_patch"


def test_a_model_gets_ligers_kernels_but_for_the_loss_before_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, bool, dict[str, Any]]] = []

    def apply(model: Any, **settings: Any) -> None:
        given.append((type(model).__name__, hasattr(model, "peft_config"), settings))

    package = ModuleType(NAME)
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply}  # type: ignore[attr-defined]
    package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, package)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    known = make_model(Qwen3Config, tmp_path / "known")
    load_policy(config_for_dry_run(known, tmp_path, liger=True, lora=True))
    without = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert given == [("Qwen3ForCausalLM", False, without)]
    unknown = make_model(Qwen3MoeConfig, tmp_path / "unknown")
    with pytest.raises(ConfigError, match="^--liger: .* nothing for Qwen3MoeForCausalLM"):
        load_policy(config_for_dry_run(unknown, tmp_path, liger=True))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    model_dir = make_model(Qwen3Config, tmp_path / "model")
    with pytest.raises(ConfigError, match="liger_kernel"):
        load_policy(config_for_dry_run(model_dir, tmp_path, liger=True))
