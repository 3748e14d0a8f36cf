"""Broadcasts of bytes from the trainer to the processes of one vLLM, over the NCCL library that torch has loaded.

torch's own binding of `ncclCommInitRank` cannot be called on Python 3.11 and 3.12 (pytorch#38019), and vLLM's classes
for the trainer's side need vLLM in the trainer's environment. Called by `links.py`; it does not know what is broadcast.

Loading the library, its version, unique ids and errors were run; a communicator needs a GPU, and none was ever opened.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from atroposlib.errors import ConfigError, EngineError

ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0
"""ncclDataType_t and ncclRedOp_t of nccl.h."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise ConfigError(
            f"--transfer_backend nccl: {error}; it comes with torch's CUDA build"
        ) from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [pointer]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommDestroy.argtypes = [pointer]
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        reason, detail = library.ncclGetErrorString(status), library.ncclGetLastError(None)
        raise EngineError(f"{name}: {reason.decode()} {detail.decode()}".strip())


def nccl_version() -> tuple[int, int, int]:
    """Return such as (2, 29, 7)."""
    found = ctypes.c_int()
    _call("ncclGetVersion", ctypes.byref(found))
    return found.value // 10_000, found.value // 100 % 100, found.value % 100


def new_nccl_id() -> bytes:
    """Return a fresh unique id, by which the processes of one communicator find each other."""
    unique_id = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(unique_id))
    return bytes(unique_id)


class NcclChannel:
    """A communicator whose rank 0 is the trainer; its first collective is the reduction of one float, as in vLLM."""

    def __init__(self, unique_id: bytes, *, world_size: int, device: torch.device) -> None:
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            _call(
                "ncclCommInitRank",
                ctypes.byref(self._comm),
                world_size,
                _UniqueId.from_buffer_copy(unique_id),
                0,
            )
            one = torch.zeros(1, device=device)
            stream = torch.cuda.current_stream(device)
            where = one.data_ptr()
            _call("ncclAllReduce", where, where, 1, _FLOAT32, _SUM, self._comm, stream.cuda_stream)
            stream.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        """Return when every process of the engine has the bytes."""
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream(tensor.device)
            where, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            _call("ncclBroadcast", where, where, size, _UINT8, 0, self._comm, stream.cuda_stream)
            stream.synchronize()

    def close(self) -> None:
        if self._comm:
            _call("ncclCommDestroy", self._comm)
            self._comm = ctypes.c_void_p()
