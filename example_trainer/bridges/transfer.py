"""The transfer bridge: weights go from the trainer's memory into running engines, without a disk between.

Parameters are gathered one by one (every process takes part), cast to the published dtype, packed in buckets and
handed to each vLLM in turn: over NCCL to GPUs of its own, or over CUDA IPC on the trainer's GPU.
Guarantee: when `publish` returns, every engine samples from the new weights and says so; requests in
flight were frozen meanwhile. An engine whose transfer breaks off stays frozen rather than sample from half of each.

Tested on the CPU, over gloo, against a peer and vLLM's own receiving code; NCCL and CUDA IPC themselves were never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from atroposlib.errors import ConfigError
from example_trainer.bridges.buckets import Bucket, buckets, require_plain_names
from example_trainer.bridges.control import Control, for_each, require_healthy
from example_trainer.bridges.engines import RunningEngine, VllmEngine, identify
from example_trainer.bridges.links import IpcLink, Link, Meet, NcclLink, meet_over_nccl
from example_trainer.model import Policy


class IpcBuffer:
    """GPU memory of one process that an engine on the same GPU may open; one export serves a whole update.

    A worker of vLLM opens the copy of its own GPU, so every process keeps one and they exchange handles.
    """

    def __init__(self, policy: Policy, num_bytes: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        largest = max(p.numel() for p in policy.model.parameters()) * policy.dtype.itemsize
        self._world = policy.world
        self._buffer = torch.empty(max(num_bytes, largest), dtype=torch.uint8, device=policy.device)
        _, arguments = reduce_tensor(self._buffer)
        gpu = str(torch.cuda.get_device_properties(policy.device).uuid)
        handles: list[dict[str, Any]] = [{gpu: arguments}]
        if self._world.size > 1:
            handles = [{} for _ in range(self._world.size)]
            dist.all_gather_object(handles, {gpu: arguments}, group=self._world.control)
        self._handles = {gpu: value for handle in handles for gpu, value in handle.items()}

    def share(self, bucket: Bucket) -> dict[str, Any]:
        """Copy the bucket in, in every process; return the handles by GPU. `release` before the next."""
        packed = bucket.packed()
        self._buffer[: packed.numel()].copy_(packed)
        torch.cuda.current_stream(self._buffer.device).synchronize()
        self._world.barrier()
        return self._handles

    def release(self) -> None:
        """Wait until the engines have read what was shared."""
        self._world.barrier()


class TransferBridge:
    """A `WeightBridge` to engines that run already; `urls` are without `/v1`."""

    name = "transfer"

    def __init__(
        self,
        *,
        urls: Sequence[str],
        backend: str = "nccl",
        bucket_bytes: int = 512 * 2**20,
        timeout_s: float = 600.0,
        api_key: str | None = None,
        meet: Meet = meet_over_nccl,
    ) -> None:
        self._controls = [Control(url, timeout_s=timeout_s, api_key=api_key) for url in urls]
        self._is_ipc = backend == "ipc"
        self._bucket_bytes = bucket_bytes
        self._meet = meet
        self._timeout_s = timeout_s
        self._links: list[Link] = []

    def start(self, policy: Policy, version: int) -> None:
        """Open the way to every engine, once it is healthy, and hand the initial weights over."""
        require_plain_names(policy)
        if self._is_ipc and policy.device.type != "cuda":
            raise ConfigError(
                f"--transfer_backend ipc: shares GPU memory, and the trainer runs on {policy.device}"
            )
        if policy.world.is_main:
            for_each(self._controls, lambda c: c.get("/health"), retry_s=self._timeout_s)
            for control in self._controls:
                self._links.append(self._open(identify(control), policy.device))
        self.publish(policy, version)

    def publish(self, policy: Policy, version: int) -> int:
        """Hand the weights to every engine; EngineError naming engine, route and answer when one breaks off."""
        ipc = IpcBuffer(policy, self._bucket_bytes) if self._is_ipc else None
        with ExitStack() as frozen:
            for link in self._links:  # only the first process has links
                frozen.enter_context(link.engine.frozen(resume_after_error=False))
                link.begin()
            for bucket in buckets(policy, self._bucket_bytes):
                shared = ipc.share(bucket) if ipc else None
                for link in self._links:
                    link.send(bucket, shared)
                if ipc:
                    ipc.release()
            for link in self._links:
                link.finish()
                link.engine.forget_cache()
                link.engine.set_version(version)
        for link in self._links:
            link.engine.check_version(version)
        return version

    def check(self) -> None:
        require_healthy(self._controls)

    def close(self) -> None:
        """Leave the groups and close the connections; the engines keep running."""
        while self._links:
            self._links.pop().close()
        for control in self._controls:
            control.close()

    def _open(self, engine: RunningEngine, device: torch.device) -> Link:
        if not isinstance(engine, VllmEngine):
            raise ConfigError(
                f"--bridge transfer: engine {engine.control.url} is {engine.kind}; use --bridge reload"
            )
        if self._is_ipc:
            return IpcLink(engine)
        return NcclLink(
            engine,
            device=device,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            meet=self._meet,
        )
