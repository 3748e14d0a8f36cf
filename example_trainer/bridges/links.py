"""The open way from the trainer to one vLLM: what it is asked while weights are sent to it.

Called by `transfer.py` in the first process, which freezes and resumes the engine around it.
"""

from __future__ import annotations

import base64
import logging
import pickle  # noqa: TID251 - what vLLM asks for; nothing is unpickled here
import re
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from atroposlib.errors import ConfigError, EngineError, EngineUnavailable
from example_trainer.bridges.buckets import Bucket
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.bridges.nccl import NcclChannel, nccl_version, new_nccl_id

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Channel(Protocol):
    """A way for bytes to the processes of one engine."""

    def broadcast(self, tensor: Tensor) -> None:
        """Return when every process of the engine has `tensor`."""

    def close(self) -> None: ...


class Meeting(NamedTuple):
    """How trainer and engine come together."""

    where: dict[str, Any]
    """What the engine is told of it."""
    join: Callable[[], Channel]
    """The trainer's half; returns when the engine has done its own."""


Meet = Callable[[int, torch.device, float], Meeting]
"""Of the number of processes, the trainer being the first, the trainer's device, and seconds to wait."""


def meet_over_nccl(world_size: int, device: torch.device, timeout_s: float) -> Meeting:
    unique_id = new_nccl_id()
    return Meeting(
        {"nccl_unique_id_b64": _base64(unique_id)},
        lambda: NcclChannel(unique_id, world_size=world_size, device=device),
    )


class Link:
    """The open way to one vLLM, which was started for `backend`."""

    backend = ""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._end_what_was_begun()

    def begin(self) -> None:
        """Prepare the engine for buckets."""
        self.engine.control.post("/start_weight_update")

    def send(self, bucket: Bucket, shared: Any) -> None:
        """Return when the engine has the bucket; `shared` is what `IpcBuffer.share` returned, None without."""
        raise NotImplementedError

    def finish(self) -> None:
        """Tell the engine that it has had all buckets."""
        self.engine.control.post("/finish_weight_update")

    def close(self) -> None:
        try:
            self.engine.control.post("/shutdown_weight_transfer_engine")
        except EngineError as error:
            logger.warning("%s", error)

    def _end_what_was_begun(self) -> None:
        """End an update that a killed trainer began: vLLM refuses to begin another. All weights follow at once."""
        self.engine.require_transfer(self.backend)
        try:
            self.engine.control.post("/finish_weight_update")
        except EngineError as error:
            logger.debug("no update was under way: %s", error)
        else:
            logger.warning(
                "engine %s: ended a weight update that an earlier trainer did not finish",
                self.engine.control.url,
            )


class NcclLink(Link):
    """vLLM with `--weight-transfer-config '{"backend": "nccl"}'` (0.32): each bucket is one broadcast of bytes.

    vLLM fills its receive buffer until it is above `packed_buffer_size_bytes`: with the bucket's size as that of the
    buffer, one call receives exactly one broadcast.
    """

    backend = "nccl"

    def __init__(
        self,
        engine: VllmEngine,
        *,
        device: torch.device,
        bucket_bytes: int,
        timeout_s: float,
        meet: Meet = meet_over_nccl,
    ) -> None:
        super().__init__(engine)
        self._timeout_s = timeout_s
        control = engine.control
        if meet is meet_over_nccl:
            require_same_nccl(control, nccl_version())
        world_size = 1 + int(control.get("/get_world_size").json()["world_size"])
        meeting = meet(world_size, device, timeout_s)
        body = meeting.where | {
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": bucket_bytes,
            "packed_num_buffers": 1,
        }
        self._channel = together(
            lambda: control.post("/init_weight_transfer_engine", {"init_info": body}),
            meeting.join,
            what=f"engine {control.url}: /init_weight_transfer_engine",
            timeout_s=timeout_s,
        )

    def send(self, bucket: Bucket, shared: Any) -> None:
        control = self.engine.control
        packed = bucket.packed()
        together(
            lambda: control.post("/update_weights", {"update_info": describe(bucket)}),
            lambda: self._channel.broadcast(packed),
            what=f"engine {control.url}: /update_weights",
            timeout_s=self._timeout_s,
        )

    def close(self) -> None:
        super().close()
        self._channel.close()


class IpcLink(Link):
    """vLLM on the trainer's own GPUs, with the ipc backend and VLLM_ALLOW_INSECURE_SERIALIZATION=1."""

    backend = "ipc"

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine)
        engine.control.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def send(self, bucket: Bucket, shared: Any) -> None:
        info = describe(bucket) | {
            "tensor_sizes": bucket.sizes,
            "ipc_handles_pickled": _base64(pickle.dumps(shared)),
        }
        self.engine.control.post("/update_weights", {"update_info": info})


def describe(bucket: Bucket) -> dict[str, Any]:
    return {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}


def require_same_nccl(control: Control, own: tuple[int, int, int]) -> None:
    """Raise ConfigError where the engine names another version of NCCL: two versions do not speak to each other."""
    info = control.look("/server_info", params={"config_format": "json"})
    system = info.get("system_env") if isinstance(info, dict) else None
    found = re.search(r"nvidia-nccl-cu\d+==(\d+)\.(\d+)\.(\d+)", str(system))
    if found is None:
        logger.info("engine %s does not say which version of NCCL it has", control.url)
    elif tuple(map(int, found.groups())) != own:
        raise ConfigError(
            f"--transfer_backend nccl: engine {control.url} has NCCL {'.'.join(found.groups())}, the trainer "
            f"{'.'.join(map(str, own))}; install the same nvidia-nccl in both environments, or use --bridge reload"
        )


def together(ask: Callable[[], Any], act: Callable[[], T], *, what: str, timeout_s: float) -> T:
    """Ask an engine for its half of something while doing one's own; return what `act` returns when both are done.

    The first failure of either is raised at once: the other half may never end, since its peer is gone, and is left
    behind in a thread that does not keep the process alive. EngineUnavailable after `timeout_s`.
    """
    asked, acted = _in_background(ask), _in_background(act)
    done, pending = wait([asked, acted], timeout=timeout_s, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise EngineUnavailable(f"{what}: not done after {timeout_s:.0f} s")
    return acted.result()


def _in_background(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
