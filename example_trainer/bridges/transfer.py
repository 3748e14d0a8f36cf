"""The transfer bridge: send weights from the trainer's memory to running vLLM engines, without a disk.

vLLM's own trainer side sends them (vLLM 0.32, installed beside the trainer): one NCCL broadcast to engines on other
GPUs, or CUDA IPC on the trainer's GPU. Guarantee: when `publish` returns, every engine samples from the new weights and
reports their version; requests in flight pause meanwhile. After an error the engines stay paused, because they may hold
parts of two versions. NCCL and CUDA IPC have not been run (see the README).
"""

from __future__ import annotations

import base64
import logging
import pickle  # noqa: TID251 - what vLLM reads; nothing is unpickled here
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atroposlib.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable, require
from example_trainer.adapters import by_layer, merged_weights, plain_name
from example_trainer.background import in_background
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.bridges.running import RunningEngines
from example_trainer.contract import EngineCheck
from example_trainer.model import Policy, base_model
from example_trainer.parallel import whole

logger = logging.getLogger(__name__)


class Parameter(NamedTuple):
    """One published parameter, as vLLM's `ParamMeta` describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class PolicyWeights:
    """A policy's weights as vLLM's `WeightSource`: in the published dtype, with adapters merged.

    Tied parameters appear once, as in a checkpoint. Iteration gathers one parameter, or adapted layer, at a time: every
    process must iterate to the end.
    """

    def __init__(self, policy: Policy) -> None:
        if getattr(base_model(policy.model), "_weight_conversions", None):  # such as fused experts
            raise ConfigError(
                f"--bridge transfer: the parameters of {type(base_model(policy.model)).__name__} are named and shaped "
                "differently in a checkpoint, which is what engines load; use --bridge reload"
            )
        self.policy = policy
        self._parameters = dict(policy.model.named_parameters())

    def metadata(self) -> list[Parameter]:
        """Describe what iteration yields, without gathering anything."""
        return [
            Parameter(plain_name(name), self.policy.dtype, tuple(parameter.shape))
            for name, parameter in self._parameters.items()
            if ".lora_" not in name
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self.policy.is_adapted:
            for name, parameter in self._parameters.items():  # cast first: half the traffic
                yield name, whole(parameter.detach().to(self.policy.dtype))
            return
        for names in by_layer(self._parameters):
            state = {name: whole(self._parameters[name].detach()) for name in names}
            for name, value in merged_weights(state, self.policy.model).items():
                yield name, value.to(self.policy.dtype)


class EngineClient:
    """vLLM's `VLLMWeightSyncClient`: sends each call of vLLM's trainer side to all engines concurrently."""

    def __init__(self, engines: Sequence[VllmEngine], *, backend: str) -> None:
        self.engines = engines
        self.failed: Future[None] = Future()
        """Gets the first failure of a call, whose collective then never ends."""
        self.ranks = [1]
        """Rank of each engine's first process in the NCCL group, then the group's size; the trainer's rank is 0."""
        for engine in engines if backend == "nccl" else ():
            size = engine.control.call("GET", "/get_world_size").json()["world_size"]
            self.ranks.append(self.ranks[-1] + int(size))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [init_info] * len(self.engines)
        if "rank_offset" in init_info:
            infos = [init_info | {"rank_offset": rank} for rank in self.ranks[:-1]]
        self._post("/init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = {name: value for name, value in update_info.items() if value is not None}
        if handles := info.pop("ipc_handles", None):
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._post("/update_weights", [{"update_info": info}] * len(self.engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update")

    def _post(self, route: str, bodies: Sequence[Any] | None = None) -> None:
        pairs = zip(self.engines, bodies or [None] * len(self.engines), strict=True)
        calls = [in_background(partial(each.control.post, route, body)) for each, body in pairs]
        try:
            for call in wait(calls, return_when=FIRST_EXCEPTION).done:
                call.result()
        except EngineError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise


def vllm_sender(
    weights: PolicyWeights, client: EngineClient, *, backend: str, bucket_bytes: int
) -> Any:
    """Connect vLLM's trainer side to the engines; return its `TrainerWeightTransferEngine`."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_ip, get_open_port

    rank = weights.policy.world.rank
    if backend == "ipc":
        largest = max(p.numel() for p in weights.policy.model.parameters())
        num_bytes = max(bucket_bytes, largest * weights.policy.dtype.itemsize)
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=num_bytes)
    else:
        where = (get_ip(), get_open_port())  # VLLM_HOST_IP overrides the address
        info = NCCLTrainerInitInfo(
            *where, client.ranks[-1], rank=rank, packed_buffer_size_bytes=bucket_bytes
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=weights)


class TransferBridge(RunningEngines):
    """A `WeightBridge`; `urls` are addresses of vLLMs without `/v1`."""

    def __init__(
        self,
        *,
        backend: str = "nccl",
        bucket_bytes: int = 512 * 2**20,
        open_sender: Callable[..., Any] = vllm_sender,
        **engines: Any,
    ) -> None:
        super().__init__(**engines)
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._open_sender = open_sender
        self._client = EngineClient([], backend=backend)
        self._sender: Any = None
        self._version = 0
        self._num_checked = 0

    def start(self, policy: Policy, version: int) -> None:
        """Wait until every engine is healthy, connect, and send the initial weights."""
        weights = PolicyWeights(policy)
        if self._open_sender is vllm_sender:
            if policy.device.type != "cuda":
                raise ConfigError(
                    f"--transfer_backend {self._backend}: GPU to GPU, and the trainer runs on {policy.device}; use "
                    "--bridge reload"
                )
            require("vllm.distributed.weight_transfer.nccl_engine", extra="transfer")
        if policy.world.is_main:
            self.wait_healthy()
            engines = [self._ready(control) for control in self._controls]
            self._client = EngineClient(engines, backend=self._backend)
        settings = {"backend": self._backend, "bucket_bytes": self._bucket_bytes}
        connect = partial(self._open_sender, weights, self._client, **settings)
        self._sender = self._watched(connect, policy)
        self.publish(policy, version)

    def begin(self, policy: Policy, version: int) -> Callable[[], int]:
        """Publish at once: what is sent is the memory that training changes."""
        served = self.publish(policy, version)
        return lambda: served

    def publish(self, policy: Policy, version: int) -> int:
        """Send the weights to every engine; raise EngineError naming engine, route and answer if one refuses."""
        engines = self._client.engines  # empty except in the first process
        with ExitStack() as frozen:
            for engine in engines:
                frozen.enter_context(engine.frozen(resume_after_error=False))
            self._watched(self._sender.send_weights, policy)
            for engine in engines:
                engine.forget_cache()
                engine.set_version(version)
            self._check_weights(policy)
        self._version = version
        for engine in engines:
            engine.check_version(version)
        return version

    def _check_weights(self, policy: Policy) -> None:
        """Compare what the engines hold with the policy after the first publications; every process must call it.

        The first process then holds the weights once more, in CPU memory.
        """
        if self._num_checked == EngineCheck.NUM_CHECKED:
            return
        self._num_checked += 1
        is_main = policy.world.is_main
        sent = {name: value.cpu() for name, value in PolicyWeights(policy) if is_main}
        for engine in self._client.engines:
            engine.check_weights(lambda: sent)

    def check_engine(self, control: Control) -> None:
        """Also raise if the engine was restarted: it has left the group, which only a resumed run joins again."""
        super().check_engine(control)
        self.engine_at(control).check_version(self._version)

    def close(self) -> None:
        """Leave the group and close the connections; the engines keep running."""
        sender, self._sender = self._sender, None
        if sender is not None:
            for engine in self._client.engines:
                with suppress(EngineError):  # it may have ended
                    engine.control.post("/shutdown_weight_transfer_engine")
            sender.shutdown()
        super().close()

    def _watched(self, action: Callable[[], Any], policy: Policy) -> Any:
        """Return the result of `action`; raise at once if a call to an engine fails, or on a timeout.

        `action` may then hang; it runs in a daemon thread, which does not keep the process alive.
        """

        def act() -> Any:
            is_cuda = policy.device.type == "cuda"  # a new thread uses device 0
            try:
                with torch.cuda.device(policy.device) if is_cuda else nullcontext():
                    if is_cuda:
                        torch.cuda.synchronize()  # vLLM reads the weights on its own streams
                    return action()
            except RuntimeError as error:  # from NCCL, CUDA or the rendezvous store
                raise EngineUnavailable(f"--bridge transfer: {error}") from error

        if not policy.world.is_main:
            return act()
        acted = in_background(act)
        done = wait([acted, self._client.failed], self._timeout_s, FIRST_COMPLETED).done
        try:
            if not done:
                raise EngineUnavailable(
                    f"--bridge transfer: an engine has not taken its part for {self._timeout_s:.0f} s"
                )
            return [future.result() for future in done][0]
        except BaseException:
            self._sender = None  # the group is broken: closing it would hang, too
            raise

    def _ready(self, control: Control) -> VllmEngine:
        """Return the engine; raise EngineError or ConfigError if it does not support this transfer."""
        engine = self.engine_at(control)
        if not isinstance(engine, VllmEngine):
            raise ConfigError(
                f"--bridge transfer: engine {control.url} is {engine.kind}; use --bridge reload"
            )
        found = engine.config("weight_transfer_config").get("backend")
        if found != self._backend:  # vLLM crashes on a transfer that it was not started for
            raise EngineRejected(
                f"engine {control.url}: its weight transfer is {found!r}; --bridge transfer needs vLLM 0.32 or "
                f'later with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{{"backend": "{self._backend}"}}\''
            )
        if self._backend == "nccl" and torch.cuda.is_available():
            require_same_nccl(engine, torch.cuda.nccl.version())
        with suppress(EngineError):  # raised when no update is active, the normal case
            control.post("/finish_weight_update")
            logger.warning("engine %s: ended an update that another trainer left open", control.url)
        return engine


def require_same_nccl(engine: VllmEngine, own: tuple[int, ...]) -> None:
    """Raise ConfigError if the engine reports another NCCL version: different versions cannot communicate."""
    found = re.search(r"nvidia-nccl-cu\d+==(\d+)\.(\d+)\.(\d+)", str(engine.info.get("system_env")))
    if found and tuple(map(int, found.groups())) != own:
        raise ConfigError(
            f"--transfer_backend nccl: engine {engine.control.url} has NCCL {'.'.join(found.groups())}, the trainer "
            f"{'.'.join(map(str, own))}; install the same vllm in both environments, or use --bridge reload"
        )
