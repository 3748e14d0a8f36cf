"""One process of `trl_worker`'s command on the CPU, with stand-ins for what needs a GPU.

    accelerate launch ... -m tests.other_trainers.trl_process --model_name M --hub_url U --output_dir D --max_steps 3

Writes `rank-R.safetensors` (its whole parameters after the last step) and, in the first process, the weights that were
sent last as `sent.safetensors`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import HfArgumentParser
from trl.experimental.async_grpo import async_grpo_trainer, packing

from example_trainer.other_trainers.trl_worker import HubConfig, train


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: Any,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """`flash_attn_varlen_func` one segment after the other; a segment's queries are the last of its keys."""
    assert causal
    assert window_size == (-1, -1)
    out = torch.empty_like(query)
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    for i in range(len(bounds_q) - 1):
        q = query[bounds_q[i] : bounds_q[i + 1]].transpose(0, 1)
        k = key[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1)
        v = value[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1)
        num_q, num_k = q.shape[1], k.shape[1]
        seen = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, -torch.inf)
        out[bounds_q[i] : bounds_q[i + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


class Sent:
    """TRL's `WeightTransferProtocol`: keeps the weights that were sent last."""

    weights: dict[str, torch.Tensor]

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: weight.clone() for name, weight in iterator}

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


STAND_INS = [
    (packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=plain_attention)),
    (async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None),
]
"""TRL's attention is a CUDA kernel, and it asks the GPU for its name."""


def run(argv: list[str]) -> None:
    [config] = HfArgumentParser(HubConfig).parse_args_into_dataclasses(argv)
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if is_sharded:
        # accelerate 1.15 applies FSDP to types with a device only, although FSDP2 itself runs on gloo.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    sent = Sent()
    trainer = train(config, sent)
    weights = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    assert all(isinstance(value, DTensor) == is_sharded for value in weights.values())
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in weights.items()
    }
    rank = trainer.accelerator.process_index
    save_file(
        {n: v.detach() for n, v in whole.items()},
        Path(config.output_dir) / f"rank-{rank}.safetensors",
    )
    if rank == 0:
        save_file(sent.weights, Path(config.output_dir) / "sent.safetensors")


if __name__ == "__main__":
    for stand_in in STAND_INS:
        setattr(*stand_in)
    run(sys.argv[1:])
