"""Whole steps without the numbers: what the dry runs on `meta` and on pretended CUDA devices share."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atroposlib.scored_data import ScoredGroup
from benchmarks.trainer import SCALES
from example_trainer.config import TrainerConfig
from example_trainer.data import Batch
from example_trainer.model import Policy, PolicyModule
from example_trainer.objective import OBJECTIVES
from example_trainer.parallel import World
from example_trainer.trained_groups import StepTrace
from tests.trainer.helpers_trainer import make_group

aten = torch.ops.aten
EVERY_TERM = {"kl_coef": 0.3, "entropy_coef": 0.05, "distill_coef": 0.4}
CORRECTIONS = ("tis", "mis", "icepop", "decoupled")
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "off", "batch_size": 5},
    "packed": {"packing": "on", "max_microbatch_tokens": 48},
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora": True},
    "LoRA, checkpointing": {"lora": True, "gradient_checkpointing": True},
}
STEPS = [
    *((name, layout, "whole") for name in OBJECTIVES for layout in LAYOUTS),
    *(("grpo", layout, way) for way in WAYS if way != "whole" for layout in LAYOUTS),
]
"""(objective, layout, way): a way changes the forward pass, which knows no objective, so one shows it."""
CASES_OF_A_GPU = [SCALES["qwen2.5"].trainer[-1], *SCALES["qwen2.5"].memory]
"""What `make gpu` measures of steps."""


def make_groups() -> list[ScoredGroup]:
    """Return groups of the current version 1, an older and an unknown one, with every optional field."""
    ids = [[[1, 2][: t % 3] for t in range(8 + i)] for i in range(2)]
    teacher = [[[-0.5, -1.5][: len(k)] for k in row] for row in ids]
    references = [[-1.0] * (8 + i) for i in range(2)]
    return [
        make_group([1.0, 0.0, 0.3], seed=1, policy_version=1),
        make_group([1.0, 0.5], seed=2, policy_version=0, ref_logprobs=references),
        make_group([1.0, 0.0], seed=3, policy_version=None, overrides=[{"sft": True}, {}]),
        make_group(
            [1.0, 0.5], seed=4, policy_version=1, distill_token_ids=ids, distill_logprobs=teacher
        ),
    ]


def config_for_dry_run(model_dir: Path, out: Path, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = {"device": "cpu", "seq_len": 64, "save_path": out, "threads": 1}
    return TrainerConfig(model_name=str(model_dir), **settings | changes)


def policy_of(model: Any, device: str) -> Policy:
    """Return a model that was not loaded from anywhere, computing in bfloat16."""
    return Policy(
        model=model,
        tokenizer=None,
        device=torch.device(device),
        dtype=torch.bfloat16,
        module=PolicyModule(model),
    )


def trace_of(policy: Policy, batch: Batch) -> StepTrace:
    """Return a trace of every group, on the policy's device."""
    world = World(rank=0, size=1, device=policy.device)
    return StepTrace(dict(enumerate(make_groups())), batch, step=1, world=world)


class OneDevice(TorchDispatchMode):
    """Stands in for a device: refuses operations on tensors of two, and makes up the numbers that are read from it.

    Kernels on `meta` let indices, the second factor of a product and operations in place be on another device. Scalars
    on the CPU are allowed, as CUDA allows them. A boolean index selects everything.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = [each for each in tensors if each.device.type == self._device]
        there = [each for each in tensors if each.device.type != self._device and each.dim()]
        is_copy = operation in (aten._to_copy.default, aten.copy_.default)
        if here and there and not is_copy:
            raise RuntimeError(f"{operation}: tensors on {self._device} and {there[0].device}")
        if operation is aten._local_scalar_dense.default and (
            here or isinstance(tensors[0], FakeTensor)
        ):
            return 0.5 if tensors[0].is_floating_point() else 1
        if here and is_copy and str(kwargs.get("device")) == "cpu":
            return torch.full(here[0].shape, 0.5, dtype=kwargs.get("dtype") or here[0].dtype)
        if operation is aten.index.Tensor:
            args = (args[0], [_all_of(each) for each in args[1]])
        return operation(*args, **kwargs)


def _all_of(index: Tensor | None) -> Tensor | None:
    if index is None or index.dtype != torch.bool:
        return index
    assert index.dim() == 1
    return torch.zeros(len(index), dtype=torch.int64, device=index.device)
