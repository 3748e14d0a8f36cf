"""The publish contract against a real vLLM on the trainer's GPU: what its weight checker says of every publication.

ATROPOS_VLLM_PYTHON: an interpreter with vLLM. Each start takes about a minute.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from atroposlib.errors import EngineProtocolError
from example_trainer.bridges import make_bridge, running
from example_trainer.contract import EngineCheck, tensors_in
from example_trainer.model import load_policy
from example_trainer.optim import make_optimizer
from example_trainer.vllm_process import make_engine
from example_trainer.weights import WeightsDirectory
from tests.gpu.helpers_gpu import ON_GPU, REHEARSES, config_for, steps
from tests.processes import free_port
from tests.trainer.helpers_models import make_model
from tests.vllm.helpers_vllm import vllm_python

pytestmark = [*ON_GPU, pytest.mark.timeout(600)]
SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "moe_intermediate_size": 64,
}  # vLLM's kernels need these


@pytest.mark.parametrize(
    ("kind", "bridge"),
    [(Qwen3Config, "reload"), (Qwen3MoeConfig, "reload"), (Qwen3MoeConfig, "lora")],
)
def test_vllm_has_loaded_what_was_published(
    kind: type[PretrainedConfig],
    bridge: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the first publication it keeps some tensors in a form of its own; the others agree after the second.

    Of a third, which is compared here too, one value is another: the contract finds it. An adapter is loaded.
    """
    caplog.set_level("INFO")
    monkeypatch.setattr(EngineCheck, "NUM_CHECKED", 3)
    config = config_for(
        make_model(kind, tmp_path / "model", **SIZES),
        tmp_path,
        bridge=bridge,
        vllm_python=str(vllm_python()),
        vllm_port=free_port(),
        vllm_gpu=0,
        gpu_memory_utilization=0.3,
        max_model_len=128,
        engine_args="--enforce-eager",
        log_dir=tmp_path / "logs",
        lora_target_modules=["q_proj", "o_proj"],
    )
    policy = load_policy(config)
    results = steps(policy, config, make_optimizer(policy, config))
    with ExitStack() as stack:
        weights = stack.enter_context(WeightsDirectory(config, policy))
        torch.cuda.empty_cache()
        stack.enter_context(make_engine(config, Path(config.model_name)))
        way = stack.enter_context(closing(make_bridge(config, weights, is_stopping=lambda: False)))
        way.start(policy, 0)
        next(results)
        torch.cuda.empty_cache()
        assert way.publish(policy, 1) == 1
        if bridge == "lora":
            return
        compared = re.search(r"(\d+) loaded tensors are compared", caplog.text)
        assert compared
        assert int(compared[1]) >= (9 if REHEARSES else 13)  # the CPU build packs all but norms

        def one_differs(directory: Path) -> Iterator[tuple[str, Any]]:
            for name, value in tensors_in(directory):
                yield name, value + 1 if name == "model.norm.weight" else value

        monkeypatch.setattr(running, "tensors_in", one_differs)
        next(results)
        with pytest.raises(EngineProtocolError, match=r"not loaded.*model\.norm\.weight"):
            way.publish(policy, 2)
