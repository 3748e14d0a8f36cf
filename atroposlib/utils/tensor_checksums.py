"""One line per tensor by which the trainer and the engine find out whether they hold the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """Return dtype, shape and the XXH3 hash (128 bits) of the values in memory order: `float32[2, 3] 0f3c...`."""
    return f"{describe_tensor(tensor)} {xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of the values in memory order."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def describe_tensor(tensor: Tensor) -> str:
    """Return dtype and shape: `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def some_of(lines: Sequence[str], *, num_shown: int = 3) -> str:
    """Return the first of several tensors' lines, and how many there are if that is not all."""
    shown = "; ".join(lines[:num_shown])
    return shown if len(lines) <= num_shown else f"{shown}; ... ({len(lines)} in all)"
