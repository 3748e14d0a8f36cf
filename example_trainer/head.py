"""Log-probabilities out of hidden states, without ever holding logits for more than a few positions.

Shapes: N trained positions, H hidden size, V vocabulary, K tokens asked about per position. A vocabulary of 150,000
makes float32 logits of 8,192 positions 4.9 GB, and softmax, gradient and autograd's copies as much again; here they
exist for one block at a time, forward and backward. Called by `model.py`; knows nothing of losses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 2**26
"""Size of one block of float32 logits on the CPU; a few hundred positions keep matrix products busy."""
GPU_CHUNK_BYTES = 2**29
"""The same elsewhere: a block reads and writes the whole gradient of the weight, so it should hold many positions."""


class HeadOutput(NamedTuple):
    """What the losses need of a distribution over the vocabulary; differentiable, float32 (float64 in, float64 out)."""

    logprobs_NK: Tensor
    """log-softmax(logits / temperature) of the tokens asked about."""
    entropy_N: Tensor
    """Of the same distribution, in nats."""


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
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # The backward pass, which runs without autocast, must repeat the same products.
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(device))
    logprobs_NK, entropy_N = _Head.apply(
        hidden_NH, weight_VH, bias_V, ids_NK, temperature_N, chunk_size
    )
    return HeadOutput(logprobs_NK, entropy_N)


def logits_logprobs(logits_NV: Tensor, *, ids_NK: Tensor, temperature_N: Tensor) -> HeadOutput:
    """Return the same from logits that exist already: for models whose head is more than a matrix."""
    scaled_NV = _wide(logits_NV) / temperature_N[:, None]
    log_sum_N = scaled_NV.logsumexp(dim=1)
    logprobs_NK = scaled_NV.gather(1, ids_NK) - log_sum_N[:, None]
    probs_NV = (scaled_NV - log_sum_N[:, None]).exp()
    return HeadOutput(logprobs_NK, log_sum_N - (probs_NV * scaled_NV).sum(dim=1))


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _logits(
    hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: Tensor, block: Tensor
) -> Tensor:
    """Compute logits into the first rows of `block`, the same memory for one block after the other."""
    logits = block[: len(hidden)]
    if hidden.dtype == block.dtype:
        torch.mm(hidden, weight_VH.T, out=logits)
    else:
        logits.copy_(hidden @ weight_VH.T)
    if bias_V is not None:
        logits += bias_V
    return logits.div_(temperature[:, None])


class _Head(torch.autograd.Function):
    """Keeps hidden states and one number per position; the backward pass computes the logits again."""

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
        num_positions = len(hidden_NH)
        logprobs_NK = torch.empty(ids_NK.shape, dtype=wide, device=hidden_NH.device)
        log_sum_N, entropy_N = (
            torch.empty(num_positions, dtype=wide, device=hidden_NH.device) for _ in range(2)
        )
        shape = (min(chunk_size, num_positions), len(weight))
        block, spare = (torch.empty(shape, dtype=wide, device=hidden_NH.device) for _ in range(2))
        for start in range(0, num_positions, chunk_size):
            cut = slice(start, start + chunk_size)
            logits = _logits(hidden_NH[cut], weight, bias_V, temperature_N[cut], block)
            largest = logits.amax(dim=1, keepdim=True)
            relative = torch.sub(logits, largest, out=spare[: len(logits)]).exp_()  # to the largest
            total = relative.sum(dim=1)
            log_sum = total.log().add_(largest[:, 0])
            logprobs_NK[cut] = logits.gather(1, ids_NK[cut]) - log_sum[:, None]
            log_sum_N[cut] = log_sum
            entropy_N[cut] = log_sum - relative.mul_(logits).sum(dim=1) / total
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, ids_NK, temperature_N, log_sum_N, entropy_N
        )
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return logprobs_NK, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """With z = logits / T and p = softmax(z): dlogprob_k/dz = onehot(k) - p, dentropy/dz = -p (log p + entropy)."""
        grad_logprobs_NK, grad_entropy_N = gradients
        hidden_NH, weight_VH, bias_V, ids_NK, temperature_N, log_sum_N, entropy_N = (
            ctx.saved_tensors
        )
        weight = weight_VH.to(hidden_NH.dtype)
        if grad_logprobs_NK is None:
            grad_logprobs_NK = torch.zeros_like(ids_NK, dtype=log_sum_N.dtype)
        # Sums over many blocks are kept wide: bfloat16 would lose the small contributions.
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = grad_bias_V = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=log_sum_N.dtype)
        if bias_V is not None and ctx.needs_input_grad[2]:
            grad_bias_V = torch.zeros_like(bias_V, dtype=log_sum_N.dtype)
        shape = (min(ctx.chunk_size, len(hidden_NH)), len(weight))
        block = torch.empty(shape, dtype=log_sum_N.dtype, device=hidden_NH.device)
        for start in range(0, len(hidden_NH), ctx.chunk_size):
            cut = slice(start, start + ctx.chunk_size)
            logits = _logits(hidden_NH[cut], weight, bias_V, temperature_N[cut], block)
            log_probs = logits.sub_(log_sum_N[cut][:, None])
            if grad_entropy_N is None:
                grad_logits = log_probs.exp_()
                grad_logits.mul_(grad_logprobs_NK[cut].sum(dim=1, keepdim=True).neg_())
            else:
                probs = log_probs.exp()
                grad_logits = probs * -grad_logprobs_NK[cut].sum(dim=1, keepdim=True)
                inner = log_probs.add_(entropy_N[cut][:, None]).mul_(probs)
                grad_logits -= inner.mul_(grad_entropy_N[cut][:, None])
            grad_logits.scatter_add_(1, ids_NK[cut], grad_logprobs_NK[cut])
            grad_logits.div_(temperature_N[cut][:, None])
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(dim=0)
            narrow = grad_logits.to(hidden_NH.dtype)
            grad_hidden_NH[cut] = narrow @ weight
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, narrow.T, hidden_NH[cut])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        if grad_bias_V is not None and bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Do `total += a @ b` in place; a narrower product is rounded once per block on a GPU, never on the CPU."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        total += a @ b
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
