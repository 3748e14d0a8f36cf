"""Log-probabilities from hidden states, with logits in memory for one block of positions at a time.

Shapes: N trained positions, H hidden size, V vocabulary, K requested tokens per position. With a vocabulary of 150,000,
float32 logits of 8,192 positions take 4.9 GB, and softmax, gradient and autograd's copies as much again each. Called by
`model.py`; independent of the losses.

On CUDA the matrix products read bfloat16 and write float32, and all operations on a logit are compiled into one kernel
forward and one backward. Counted at 8,192 positions, V = 151,936 and H = 896, a logit then costs 36 bytes of memory
traffic, against 108 with one kernel per operation: 13 ms and 40 ms at an H100's 3.35 TB/s.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**26
"""Size of a block of float32 logits on the CPU; a few hundred positions make matrix products efficient."""
GPU_CHUNK_BYTES = 2**30
"""The same on other devices: each block reads and writes the weight's whole gradient, so fewer are faster."""


class HeadOutput(NamedTuple):
    """Values that the losses need; differentiable, float32 (float64 for float64 input)."""

    logprobs_NK: Tensor
    """log-softmax(logits / temperature) of the requested tokens."""
    entropy_N: Tensor
    """Entropy of softmax(logits / temperature), in nats."""


def head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    *,
    ids_NK: Tensor,
    temperature_N: Tensor,
    chunk_size: int | None = None,
) -> HeadOutput:
    """Return the log-probabilities of `ids_NK` under `hidden @ weight.T + bias`; the products run in hidden's dtype."""
    device = hidden_NH.device.type
    if chunk_size is None:
        chunk_bytes = CHUNK_BYTES if device == "cpu" else GPU_CHUNK_BYTES
        chunk_size = max(1, chunk_bytes // (4 * weight_VH.shape[0]))
    logprobs_NK, entropy_N = _Head.apply(
        hidden_NH, weight_VH, bias_V, ids_NK, temperature_N, chunk_size
    )
    return HeadOutput(logprobs_NK, entropy_N)


def logits_logprobs(logits_NV: Tensor, *, ids_NK: Tensor, temperature_N: Tensor) -> HeadOutput:
    """Return the same from given logits, for models whose head is more than a matrix."""
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    scaled_NV = wide_NV / temperature_N[:, None]
    log_sum_N = scaled_NV.logsumexp(dim=1)
    logprobs_NK = scaled_NV.gather(1, ids_NK) - log_sum_N[:, None]
    probs_NV = (scaled_NV - log_sum_N[:, None]).exp()
    return HeadOutput(logprobs_NK, log_sum_N - (probs_NV * scaled_NV).sum(dim=1))


def _logits(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None, block: Tensor) -> Tensor:
    """Compute logits into the first rows of `block`, whose memory all blocks share."""
    logits = block[: len(hidden)]
    if hidden.dtype == block.dtype:
        torch.mm(hidden, weight_VH.T, out=logits)
    elif hidden.is_cuda:
        torch.mm(hidden, weight_VH.T, out_dtype=block.dtype, out=logits)
    else:
        logits.copy_(hidden @ weight_VH.T)
    if bias_V is not None:
        logits += bias_V
    return logits


def _sums(
    logits: Tensor, temperature: Tensor, ids: Tensor, room: Tensor | None, spare: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of `ids`, log-sum-exp and entropy; overwrites `room` and `spare` unless they are None."""
    scaled = torch.div(logits, temperature[:, None], out=room)
    largest = scaled.amax(dim=1, keepdim=True)
    relative = torch.sub(scaled, largest, out=spare).exp_()  # to the largest
    total = relative.sum(dim=1)
    log_sum = total.log() + largest[:, 0]
    logprobs = scaled.gather(1, ids) - log_sum[:, None]
    return logprobs, log_sum, log_sum - relative.mul_(scaled).sum(dim=1) / total


def _gradient(
    logits: Tensor,
    temperature: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
    room: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits of tokens that are not requested; overwrites `room` unless it is None.

    With z = logits / T and p = softmax(z): dlogprob_k/dz = onehot(k) - p, dentropy/dz = -p (log p + entropy).
    """
    log_probs = torch.div(logits, temperature[:, None], out=room).sub_(log_sum[:, None])
    sums = grad_logprobs.sum(dim=1, keepdim=True)
    if grad_entropy is None:
        return log_probs.exp_().mul_(-sums / temperature[:, None]).to(dtype)
    probs = log_probs.exp()
    inner = log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(sums)
    return inner.mul_(probs).div_(-temperature[:, None]).to(dtype)


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled; if compilation fails, warn once and call it uncompiled from then on."""
    compiled = torch.compile(function)
    is_usable = True

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal is_usable
        if is_usable:
            try:
                return compiled(*arguments)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
                is_usable = False
                logger.warning(
                    "%s could not be compiled and runs slower and in more memory: %s: %s",
                    function.__name__,
                    type(error).__name__,
                    str(error).strip().partition("\n")[0],
                )
        return function(*arguments)

    return call


class _Head(torch.autograd.Function):
    """Saves hidden states and per-position values; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_NK: Tensor,
        temperature_N: Tensor,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH.to(hidden_NH.dtype)
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        num_positions, is_cuda = len(hidden_NH), hidden_NH.is_cuda
        empty = functools.partial(torch.empty, dtype=wide, device=hidden_NH.device)
        logprobs_NK = empty(ids_NK.shape)
        log_sum_N, entropy_N = empty(num_positions), empty(num_positions)
        block = empty((min(chunk_size, num_positions), len(weight)))
        spare = None if is_cuda else torch.empty_like(block)
        sums = _fused(_sums) if is_cuda else _sums
        for start in range(0, num_positions, chunk_size):
            cut = slice(start, start + chunk_size)
            logits = _logits(hidden_NH[cut], weight, bias_V, block)
            rooms = (None, None) if spare is None else (logits, spare[: len(logits)])
            logprobs_NK[cut], log_sum_N[cut], entropy_N[cut] = sums(
                logits, temperature_N[cut], ids_NK[cut], *rooms
            )
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, ids_NK, temperature_N, log_sum_N, entropy_N
        )
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return logprobs_NK, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_NK, grad_entropy_N = gradients
        hidden_NH, weight_VH, bias_V, ids_NK, temperature_N, log_sum_N, entropy_N = (
            ctx.saved_tensors
        )
        is_cuda = hidden_NH.is_cuda
        weight = weight_VH.to(hidden_NH.dtype)
        if grad_logprobs_NK is None:
            grad_logprobs_NK = torch.zeros_like(ids_NK, dtype=log_sum_N.dtype)
        # Sums over many blocks are float32 or wider: bfloat16 would lose small contributions.
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = grad_bias_V = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=log_sum_N.dtype)
        if bias_V is not None and ctx.needs_input_grad[2]:
            grad_bias_V = torch.zeros_like(bias_V, dtype=log_sum_N.dtype)
        shape = (min(ctx.chunk_size, len(hidden_NH)), len(weight))
        block = torch.empty(shape, dtype=log_sum_N.dtype, device=hidden_NH.device)
        gradient = _fused(_gradient) if is_cuda else _gradient
        for start in range(0, len(hidden_NH), ctx.chunk_size):
            cut = slice(start, start + ctx.chunk_size)
            logits, ids = _logits(hidden_NH[cut], weight, bias_V, block), ids_NK[cut]
            rest = (
                temperature_N[cut],
                log_sum_N[cut],
                entropy_N[cut],
                grad_logprobs_NK[cut],
                None if grad_entropy_N is None else grad_entropy_N[cut],
            )
            at_ids = _gradient(logits.gather(1, ids), *rest, log_sum_N.dtype, None)
            grad_logits = gradient(logits, *rest, hidden_NH.dtype, None if is_cuda else logits)
            # These logits are no longer read: their memory sums the gradients of a token that is requested twice.
            own = logits.scatter_(1, ids, 0.0).scatter_add_(1, ids, grad_logprobs_NK[cut])
            at_ids += own.gather(1, ids) / temperature_N[cut][:, None]
            grad_logits.scatter_(1, ids, at_ids.to(hidden_NH.dtype))
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(dim=0, dtype=grad_bias_V.dtype)
            grad_hidden_NH[cut] = grad_logits @ weight
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, grad_logits.T, hidden_NH[cut])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total += a @ b` in place, with the product in `total`'s precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
