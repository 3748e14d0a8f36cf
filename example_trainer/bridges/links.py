"""The open way from the trainer to one engine, per kind of engine: what it is asked while weights are sent to it.

Called by `transfer.py` in the first process, which freezes and resumes the engine around it.
"""

from __future__ import annotations

import logging
import math
import pickle  # noqa: TID251 - what vLLM asks for; nothing is unpickled here
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from atroposlib.errors import EngineError, EngineRejected
from example_trainer.bridges.buckets import Bucket
from example_trainer.bridges.channels import (
    Channel,
    GroupChannel,
    NcclChannel,
    base64_of,
    new_nccl_id,
    open_store,
    together,
)
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import RunningEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a link needs to know to meet its engine."""

    device: torch.device
    address: str
    bucket_bytes: int
    timeout_s: float

    @property
    def group_backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"


class Link(Protocol):
    """The open way to one engine."""

    engine: RunningEngine

    def begin(self) -> None:
        """Prepare the engine for buckets."""

    def send(self, bucket: Bucket, shared: Any) -> None:
        """Return when the engine has the bucket; `shared` is what `IpcBuffer.share` returned, None without."""

    def finish(self) -> None:
        """Tell the engine that it has had all buckets."""

    def close(self) -> None: ...


class SglangLink:
    """SGLang: a process group that lives as long as the bridge; it receives each tensor in a broadcast of its own."""

    def __init__(self, engine: RunningEngine, wiring: Wiring) -> None:
        self.engine = engine
        self._wiring = wiring
        control = engine.control
        info = control.look("/server_info") or control.look("/get_server_info")
        world_size = 1 + num_workers(info)
        store = open_store(world_size=world_size, timeout_s=wiring.timeout_s)
        self._name = group_name(store.port)
        body = {
            "master_address": wiring.address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": self._name,
            "backend": wiring.group_backend,
        }
        self._channel: Channel = together(
            lambda: control.post("/init_weights_update_group", body),
            lambda: GroupChannel(
                store,
                name=self._name,
                backend=wiring.group_backend,
                world_size=world_size,
                timeout_s=wiring.timeout_s,
            ),
            what=f"engine {control.url}: /init_weights_update_group",
            timeout_s=wiring.timeout_s,
        )

    def begin(self) -> None: ...

    def send(self, bucket: Bucket, shared: Any) -> None:
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self._name,
            "flush_cache": False,
            "abort_all_requests": False,
        }

        def broadcast() -> None:
            for tensor in bucket.tensors:
                self._channel.broadcast(tensor.contiguous())

        together(
            lambda: self.engine.control.post("/update_weights_from_distributed", body),
            broadcast,
            what=f"engine {self.engine.control.url}: /update_weights_from_distributed",
            timeout_s=self._wiring.timeout_s,
        )

    def finish(self) -> None: ...

    def close(self) -> None:
        try:
            self.engine.control.post("/destroy_weights_update_group", {"group_name": self._name})
        except EngineError as error:
            logger.warning("%s", error)
        self._channel.close()


class VllmLink:
    """vLLM with `--weight-transfer-config '{"backend": "nccl"}'` (0.32): each bucket is one broadcast of bytes.

    vLLM fills its receive buffer until it is above `packed_buffer_size_bytes`: with the bucket's size as that of the
    buffer, one call receives exactly one broadcast.
    """

    def __init__(self, engine: RunningEngine, wiring: Wiring) -> None:
        self.engine = engine
        self._wiring = wiring
        control = engine.control
        _require_vllm_backend(control, "nccl")
        world_size = 1 + int(control.get("/get_world_size").json()["world_size"])
        body: dict[str, Any] = {
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": wiring.bucket_bytes,
            "packed_num_buffers": 1,
        }
        if wiring.device.type == "cuda":
            unique_id = new_nccl_id()
            body["nccl_unique_id_b64"] = base64_of(unique_id)

            def join() -> Channel:
                return NcclChannel(unique_id, world_size=world_size, device=wiring.device)
        else:  # vLLM transfers nothing on the CPU; a peer in a test joins a group over a store, as vLLM would
            store = open_store(world_size=world_size, timeout_s=wiring.timeout_s)
            body |= {"master_address": wiring.address, "master_port": store.port}
            name = group_name(store.port)

            def join() -> Channel:
                return GroupChannel(
                    store,
                    name=name,
                    backend=wiring.group_backend,
                    world_size=world_size,
                    timeout_s=wiring.timeout_s,
                )

        self._channel = together(
            lambda: control.post("/init_weight_transfer_engine", {"init_info": body}),
            join,
            what=f"engine {control.url}: /init_weight_transfer_engine",
            timeout_s=wiring.timeout_s,
        )

    def begin(self) -> None:
        self.engine.control.post("/start_weight_update")

    def send(self, bucket: Bucket, shared: Any) -> None:
        info = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        packed = bucket.packed()
        together(
            lambda: self.engine.control.post("/update_weights", {"update_info": info}),
            lambda: self._channel.broadcast(packed),
            what=f"engine {self.engine.control.url}: /update_weights",
            timeout_s=self._wiring.timeout_s,
        )

    def finish(self) -> None:
        self.engine.control.post("/finish_weight_update")

    def close(self) -> None:
        try:
            self.engine.control.post("/shutdown_weight_transfer_engine")
        except EngineError as error:
            logger.warning("%s", error)
        self._channel.close()


class VllmIpcLink:
    """vLLM on the trainer's own GPUs, with the ipc backend and VLLM_ALLOW_INSECURE_SERIALIZATION=1."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        _require_vllm_backend(engine.control, "ipc")
        engine.control.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def begin(self) -> None:
        self.engine.control.post("/start_weight_update")

    def send(self, bucket: Bucket, shared: Any) -> None:
        info = {
            "names": bucket.names,
            "dtype_names": bucket.dtypes,
            "shapes": bucket.shapes,
            "tensor_sizes": bucket.sizes,
            "ipc_handles_pickled": base64_of(pickle.dumps(shared)),
        }
        self.engine.control.post("/update_weights", {"update_info": info})

    def finish(self) -> None:
        self.engine.control.post("/finish_weight_update")

    def close(self) -> None:
        try:
            self.engine.control.post("/shutdown_weight_transfer_engine")
        except EngineError as error:
            logger.warning("%s", error)


def num_workers(server_info: Any) -> int:
    """Return how many processes hold the engine's weights; 1 where the engine does not tell.

    >>> num_workers({"tp_size": 4, "pp_size": 2}), num_workers(["something else"])
    (8, 1)
    """
    info = server_info if isinstance(server_info, dict) else {}
    sizes = [info.get("tp_size"), info.get("pp_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def group_name(port: int) -> str:
    """Name the group that meets at the store on `port`; no two of one process may have the same."""
    return f"atropos_weights_{port}"


def _require_vllm_backend(control: Control, backend: str) -> None:
    """Raise EngineRejected unless vLLM was started for `backend`: asked without, its engine dies."""
    info = control.look("/server_info", params={"config_format": "json"})
    config = info.get("vllm_config") if isinstance(info, dict) else None
    if not isinstance(config, dict) or "weight_transfer_config" not in config:
        raise EngineRejected(
            f"engine {control.url}: /server_info names no weight transfer; the transfer bridge needs vLLM 0.32 or "
            "later with VLLM_SERVER_DEV_MODE=1"
        )
    found = config["weight_transfer_config"]
    if not isinstance(found, dict) or found.get("backend") != backend:
        raise EngineRejected(
            f"engine {control.url}: weight transfer is {found!r}; start vLLM with "
            f'--weight-transfer-config \'{{"backend": "{backend}"}}\''
        )
