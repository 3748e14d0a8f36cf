"""Lets vLLM's NCCL weight transfer run on the CPU: broadcasts go through the store where both sides meet.

`install` is called by the trainer's process, and by vLLM's own through its entry point for plugins. All else is
vLLM's: trainer engine, routes, packing, layerwise reload.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_common, packed_tensor


class StoreCommunicator:
    """What `PyNcclCommunicator` is on a GPU."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        self.group = StatelessProcessGroup.create(host, port, rank, world_size)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.group.broadcast(tensor, src))

    def destroy(self) -> None: ...


class Stream:
    def synchronize(self) -> None: ...


def install() -> None:
    nccl_common.stateless_init_process_group = StoreCommunicator
    packed_tensor._get_streams = lambda device, count: (Stream(),) * count
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *device: None  # type: ignore[assignment]
