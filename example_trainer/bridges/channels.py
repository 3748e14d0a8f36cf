"""Broadcasts from the trainer to the processes of one engine: the collective half of the transfer bridge.

The trainer is rank 0, the engine's processes follow. Two ways to meet, because engines differ: a torch process group
over a TCP store (SGLang; gloo in tests), and a bare NCCL communicator from a unique id (vLLM, whose process group is a
class of its own, takes that from strangers). Called by `transfer.py`; it does not know what is broadcast.
"""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from atroposlib.errors import EngineUnavailable

T = TypeVar("T")


class Channel(Protocol):
    """A way to one engine that is open."""

    def broadcast(self, tensor: Tensor) -> None:
        """Return when every process of the engine has `tensor`."""

    def close(self) -> None: ...


class GroupChannel:
    """A torch process group, as `init_process_group` would make it, beside the one that trainers form."""

    def __init__(
        self, store: dist.Store, *, name: str, backend: str, world_size: int, timeout_s: float
    ) -> None:
        # What init_process_group does, short of making it the default group, which is the trainers' own.
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world

        self._group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        self._store = store  # it serves the others for as long as the group lives

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
        _synchronize(tensor.device)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class NcclChannel:
    """A bare NCCL communicator; its first collective is the reduction of one float that vLLM begins with."""

    def __init__(self, unique_id: bytes, *, world_size: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._comm: Any = torch.cuda.nccl.init_rank(world_size, unique_id, 0)
            torch.cuda.nccl.all_reduce([torch.zeros(1, device=device)], comms=[self._comm])
            _synchronize(device)

    def broadcast(self, tensor: Tensor) -> None:
        with torch.cuda.device(tensor.device):
            torch.cuda.nccl.broadcast([tensor], root=0, comms=[self._comm])
            _synchronize(tensor.device)

    def close(self) -> None:
        self._comm = None  # its destructor ends the communicator


def new_nccl_id() -> bytes:
    """Return a fresh unique id of NCCL, 128 bytes."""
    return bytes(torch.cuda.nccl.unique_id())


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def open_store(*, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Serve a store on a free port of every interface."""
    return dist.TCPStore(
        "127.0.0.1",
        0,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def own_address(url: str) -> str:
    """Return the address from which this machine reaches the host of `url`."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])


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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
