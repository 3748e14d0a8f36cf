"""The trainer's processes, started by torchrun, each with a shard of weights and optimizer (FSDP2).

Only the first process talks to the hub and the engines; `broadcast` sends its decisions to the others, so that all take
the same step. Every process gets the whole batch and computes its share of the micro-batches. One process exchanges
nothing; its only shard is the whole, cast for the forward pass. Called by `training.py`, `model.py` and
`checkpointing.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import distribute_tensor

from example_trainer.data import MicroBatch, without_weight

QUIET_TIMEOUT = timedelta(days=7)
"""The other processes wait in a broadcast while the first waits for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of this run, and this one's rank."""

    rank: int
    size: int
    device: torch.device
    control: Any = None
    """Process group for bytes and barriers, on the CPU; None with one process."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, data: bytes | None) -> bytes | None:
        """Return the first process's `data`, not empty, in every process; None if it is None."""
        if self.size == 1:
            return data
        length = torch.tensor(len(data or b""))
        dist.broadcast(length, src=0, group=self.control)
        if not length:
            return None
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.is_main and data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self.control)
        return buffer.numpy().tobytes()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def for_another_thread(self) -> World:
        """Return these processes with a control group of its own, since calls in one group must not interleave.

        Every process must call it.
        """
        if self.size == 1:
            return self
        return replace(self, control=dist.new_group(backend="gloo", timeout=QUIET_TIMEOUT))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over the processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return values
        on_cpu = values.detach().to("cpu", copy=True)
        dist.all_reduce(on_cpu, op=operation, group=self.control)
        return on_cpu.to(values.device)

    def share(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this process's part, equally many for each process so that collective calls match.

        Micro-batches of similar size go to different processes; a missing one is the last one, with weight 0.
        """
        if self.size == 1:
            return list(micro_batches)
        mine = list(micro_batches[self.rank :: self.size])
        most = -(-len(micro_batches) // self.size)
        if len(mine) < most:
            mine.append(without_weight(micro_batches[-1]))
        return mine

    def shard(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        dtype: torch.dtype,
        *,
        offloads: bool = False,
        is_frozen: bool = False,
    ) -> None:
        """Shard the parameters of each layer, then the remaining ones, over the processes (in place).

        A forward or backward pass gathers a layer's parameters in `dtype` and frees them after it, the remaining ones
        after the backward pass, or, if `is_frozen`, after the forward pass. Gradients are summed in float32. With one
        process FSDP only casts; the process group that it needs has no other member to find. With `offloads`, shards,
        gradients and optimizer are in host memory, where the optimizer then computes.
        """
        if self.size == 1 and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(self.device.type, (self.size,))
        precision = MixedPrecisionPolicy()
        if dtype != torch.float32:
            # Inputs are left as they are: layers compute what they do in a model that is loaded in `dtype`.
            precision = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        pinned = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        offload = pinned if offloads else OffloadPolicy()
        for each in (*layers, module):
            frees = is_frozen or None  # None: all but the root
            options = {"mp_policy": precision, "offload_policy": offload}
            fully_shard(each, mesh=mesh, reshard_after_forward=frees, **options)

    @torch.no_grad()
    def fill(self, model: nn.Module, read: nn.Module | None) -> None:
        """Distribute the weights that the first process read, one parameter at a time.

        Buffers go to the device also where parameters stay on the host: FSDP moves only parameters for a layer.
        """
        parts = [] if read is None else [*read.named_parameters(), *read.named_buffers()]
        source = dict(parts)
        for name, parameter in model.named_parameters():
            whole_tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            if self.is_main:
                whole_tensor.copy_(source[name])
            mine = distribute_tensor(whole_tensor, parameter.device_mesh, parameter.placements)
            parameter.copy_(mine)
        for name, buffer in list(model.named_buffers()):
            value = torch.empty_like(buffer, device=self.device)
            if self.is_main:
                value.copy_(source[name])
            dist.broadcast(value, src=0)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, value)


ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@contextmanager
def processes(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started; a world of one process without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        if device.index is not None:  # else kernels of libraries run on device 0
            torch.cuda.set_device(device)
        yield World(rank=0, size=1, device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Offloaded gradients are clipped on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        control = dist.new_group(backend="gloo", timeout=QUIET_TIMEOUT)
        yield World(rank=dist.get_rank(), size=size, device=device, control=control)
    finally:
        dist.destroy_process_group()


def whole(value: Tensor) -> Tensor:
    """Gather a sharded tensor; return any other unchanged."""
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def host_copy(value: Tensor) -> Tensor:
    """Return a copy in the host's memory; that of a GPU's tensor is pinned, since copying to other memory is slower."""
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value)
