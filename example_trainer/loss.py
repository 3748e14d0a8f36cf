"""The losses: pure functions of tensors, no model and no configuration.

Shapes: B sequences, T positions, V vocabulary. Position t predicts the token after it, so every `*_BT` tensor here is
already shifted. A position is trained when its label is not -100. Called by `training.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atroposlib.scored_data import IGNORE_INDEX


class GrpoLoss(NamedTuple):
    """One micro-batch's share of the step's loss, and what the metrics need of it."""

    loss: Tensor
    """Scalar, with gradient; the sum over a step's micro-batches is the step's loss."""
    num_clipped: Tensor
    """Trained positions where the clip removes the gradient; scalar."""
    kl_sum: Tensor
    """Sum of the KL estimate over the trained positions; scalar, 0 without a reference."""


def token_logprobs(logits_BTV: Tensor, labels_BT: Tensor, temperature_B: Tensor) -> Tensor:
    """Return log-softmax(logits / temperature)[label] in float32, `[B, T]`; 0 where the label is -100.

    Row by row, so that float32 logits of one sequence at most exist at a time outside the autograd graph's own copies.
    """
    index_BT = labels_BT.clamp(min=0)
    rows = []
    for logits_TV, index_T, temperature in zip(logits_BTV, index_BT, temperature_B, strict=True):
        scaled_TV = logits_TV.float() / temperature
        chosen_T = scaled_TV.gather(1, index_T[:, None])[:, 0]
        rows.append(chosen_T - scaled_TV.logsumexp(dim=1))
    return torch.stack(rows).masked_fill(labels_BT == IGNORE_INDEX, 0.0)


def grpo_loss(
    logprobs_BT: Tensor,
    *,
    sampled_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    weights_BT: Tensor,
    clip_eps: float,
    kl_coef: float = 0.0,
    ref_logprobs_BT: Tensor | None = None,
) -> GrpoLoss:
    """Return the clipped policy-gradient loss against the logprobs the tokens were sampled with.

    Per position, with r = exp(logprob - sampled logprob) and advantage A:
    `-min(r A, clip(r, 1 - eps, 1 + eps) A)`, the minimum for both signs of A (PPO, arXiv 1707.06347, eq. 7). So the
    gradient stops where A > 0 and r > 1 + eps, and where A < 0 and r < 1 - eps. With `kl_coef` the estimate
    `exp(d) - d - 1`, d = reference - logprob (GRPO, arXiv 2402.03300, eq. 4), is added.

    `weights_BT` holds each position's share of the step's mean and is 0 where nothing is trained.
    """
    trained_BT = weights_BT > 0
    # The exponent is zeroed where nothing is trained: a filler must not become inf, whose gradient times 0 is NaN.
    log_ratio_BT = (logprobs_BT - sampled_logprobs_BT).masked_fill(~trained_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    objective_BT = torch.minimum(
        ratio_BT * advantages_BT, ratio_BT.clamp(1 - clip_eps, 1 + clip_eps) * advantages_BT
    )
    token_loss_BT = -objective_BT
    kl_sum = logprobs_BT.new_zeros(())
    if ref_logprobs_BT is not None:
        gap_BT = (ref_logprobs_BT - logprobs_BT).masked_fill(~trained_BT, 0.0)
        kl_BT = gap_BT.exp() - gap_BT - 1
        token_loss_BT = token_loss_BT + kl_coef * kl_BT
        kl_sum = kl_BT.detach().sum()
    clipped_BT = trained_BT & (
        ((advantages_BT > 0) & (ratio_BT > 1 + clip_eps))
        | ((advantages_BT < 0) & (ratio_BT < 1 - clip_eps))
    )
    return GrpoLoss((token_loss_BT * weights_BT).sum(), clipped_BT.sum(), kl_sum)
