"""The losses: pure functions of tensors and of the settings of the objective, no model.

Shapes: N trained positions of S sequences, K tokens that a teacher lists. A loss combines four choices, which
`objective.py` names: the level of the probability ratio, the surrogate, the correction for differences between sampler
and trainer, and the mean (computed in `data.py`, as weights). Called by `step.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from example_trainer.config import TrainerConfig
from example_trainer.data import Positions
from example_trainer.objective import KlEstimator


class LossShare(NamedTuple):
    """One micro-batch's share of the step's loss, and sums over its trained positions for the metrics.

    Ratio and clip count policy-gradient positions only; only `loss` has a gradient.
    """

    loss: Tensor
    """Scalar; the sum over a step's micro-batches is the step's loss."""
    num_policy: Tensor
    """Positions trained by the policy gradient; the others are supervised."""
    num_clipped: Tensor
    """Positions where the clip removes or limits the gradient."""
    num_rejected: Tensor
    """Positions with a correction weight of 0, and those of rejected sequences."""
    ratio_sum: Tensor
    """Ratio of trainer to sampler, before any clip."""
    kl_sum: Tensor
    """Estimated KL to the reference, weighted by the ratio of trainer to sampler; 0 without one."""
    sampled_kl_sum: Tensor
    """Sampled minus own logprob: the k1 estimate of the KL of sampler to trainer."""
    entropy_sum: Tensor
    distill_sum: Tensor
    """Forward-KL distillation loss; 0 without a teacher."""


class LogprobSums(NamedTuple):
    """Sums over the policy-gradient positions of a micro-batch, for means and standard deviations."""

    own_sum: Tensor
    own_square_sum: Tensor
    sampled_sum: Tensor
    sampled_square_sum: Tensor
    raised_own_sum: Tensor
    """Over positions whose advantage is above 0."""
    num_raised: Tensor
    lowered_own_sum: Tensor
    """Over positions whose advantage is below 0."""
    num_lowered: Tensor


MAX_LOG_RATIO = 20.0
"""Nats beyond which a ratio stays as it is, and has no gradient: its exponential would overflow at 88."""

MAX_KL_WEIGHT = 10.0
"""Limit of the ratio of trainer to sampler that weighs the KL of a position, so that one token is never the step."""


class PolicyLoss(NamedTuple):
    """The loss of a micro-batch, and where it was clipped."""

    share: LossShare
    clipped_N: Tensor
    """bool, the positions that `share.num_clipped` counts."""


def logprob_sums(positions: Positions, logprobs_N: Tensor) -> LogprobSums:
    is_policy_N = ~positions.is_supervised_N
    own_N, sampled_N = logprobs_N.detach()[is_policy_N], positions.sampled_logprobs_N[is_policy_N]
    raised_N = positions.advantages_N[is_policy_N] > 0
    lowered_N = positions.advantages_N[is_policy_N] < 0
    return LogprobSums(
        own_sum=own_N.sum(),
        own_square_sum=own_N.square().sum(),
        sampled_sum=sampled_N.sum(),
        sampled_square_sum=sampled_N.square().sum(),
        raised_own_sum=(own_N * raised_N).sum(),
        num_raised=raised_N.sum(),
        lowered_own_sum=(own_N * lowered_N).sum(),
        num_lowered=lowered_N.sum(),
    )


def policy_loss(
    config: TrainerConfig,
    positions: Positions,
    logprobs_N: Tensor,
    *,
    entropy_N: Tensor,
    ref_logprobs_N: Tensor | None = None,
    teacher_logprobs_own_NK: Tensor | None = None,
) -> PolicyLoss:
    """Return the loss of a micro-batch; `teacher_logprobs_own_NK`: the policy's of `positions.teacher_ids_NK`."""
    is_policy_N = ~positions.is_supervised_N
    # Supervised positions are zeroed before the exponential: inf times 0 would be NaN.
    gap_N = torch.where(is_policy_N, logprobs_N - positions.sampled_logprobs_N, 0.0)
    advantages_N = positions.advantages_N
    if config.distill_coef and config.distill_loss == "reverse_kl":
        advantages_N = advantages_N + config.distill_coef * reverse_kl_advantages(positions)
    gap_N = gap_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_ratio_N = gap_N
    if config.ratio_level == "sequence":
        log_ratio_N = sequence_mean(gap_N, positions)
    ratio_N = log_ratio_N.exp()
    correction_N = correction_weights(config, gap_N.detach(), positions)
    low, high = 1 - config.clip_eps, 1 + (config.clip_eps_high or config.clip_eps)
    is_corrected = config.correction != "none"
    if config.surrogate == "clip":
        # PPO's minimum of two products, with the upper bound of dual-clip PPO (arXiv 1912.09729) for A < 0.
        limited_N = torch.where(
            advantages_N > 0, ratio_N.clamp(max=high), ratio_N.clamp(low, config.dual_clip)
        )
        outside_N = (limited_N != ratio_N) & (advantages_N != 0)
        gain_N = limited_N * advantages_N
        if is_corrected:  # the correction's weight in place of the ratio's value
            gain_N = gain_N * (correction_N / ratio_N.detach())
    elif config.surrogate == "cispo":
        outside_N = (ratio_N > high) | (ratio_N < low)
        limited_N = correction_N.clamp(max=high) if is_corrected else ratio_N.clamp(low, high)
        gain_N = limited_N.detach() * advantages_N * logprobs_N
    else:
        outside_N = torch.zeros_like(is_policy_N)
        gain_N = correction_N * advantages_N * logprobs_N
    rejected_N = rejected_positions(config, gap_N.detach(), positions)
    gain_N = gain_N.masked_fill(rejected_N, 0.0)
    loss_N = torch.where(is_policy_N, -gain_N, -positions.advantages_N * logprobs_N)
    kl_N = torch.zeros_like(gap_N)
    if ref_logprobs_N is not None and config.kl_coef:
        kl_N = kl_estimate(logprobs_N, ref_logprobs_N, config.kl_estimator)
        kl_N = gap_N.detach().exp().clamp(max=MAX_KL_WEIGHT) * kl_N
        loss_N = loss_N + config.kl_coef * kl_N
    if config.entropy_coef:
        loss_N = loss_N - config.entropy_coef * entropy_N
    distill_N = torch.zeros_like(gap_N)
    teacher_NK = positions.teacher_logprobs_NK
    if config.distill_coef and config.distill_loss == "forward_kl" and teacher_NK is not None:
        assert teacher_logprobs_own_NK is not None
        distill_N = forward_kl(teacher_NK, teacher_logprobs_own_NK)
        loss_N = loss_N + config.distill_coef * distill_N
    clipped_N = outside_N & is_policy_N
    share = LossShare(
        loss=(loss_N * positions.weights_N).sum(),
        num_policy=is_policy_N.sum(),
        num_clipped=clipped_N.sum(),
        num_rejected=(((correction_N == 0) | rejected_N) & is_policy_N).sum(),
        ratio_sum=(gap_N.detach().exp() * is_policy_N).sum(),
        kl_sum=kl_N.detach().sum(),
        sampled_kl_sum=-gap_N.detach().sum(),
        entropy_sum=entropy_N.detach().sum(),
        distill_sum=distill_N.detach().sum(),
    )
    return PolicyLoss(share, clipped_N)


def correction_weights(config: TrainerConfig, gap_N: Tensor, positions: Positions) -> Tensor:
    """Return the weight of each position that the clip lets through, instead of the ratio; w = exp(own - sampled).

    "tis" min(w, cap) (truncated importance sampling, Ionides 2008); "mis" w where w <= cap, else 0 (masked); "icepop" w
    where floor <= w <= cap, else 0 (masked on both sides, arXiv 2510.18855); "decoupled" w (arXiv 2110.00641). At the
    sequence level w is the product over the sequence. Without a correction all are 1.
    """
    if config.correction == "none":
        return torch.ones_like(gap_N)
    if config.correction_level == "sequence":
        gap_N = sequence_sum(gap_N, positions)[positions.sequence_N]
        gap_N = gap_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_N = gap_N.exp()
    if config.correction == "tis":
        return weight_N.clamp(max=config.correction_cap)
    if config.correction == "decoupled":
        return weight_N
    floor = config.correction_floor if config.correction == "icepop" else 0.0
    return torch.where((weight_N <= config.correction_cap) & (weight_N >= floor), weight_N, 0.0)


def rejected_positions(config: TrainerConfig, gap_N: Tensor, positions: Positions) -> Tensor:
    """Return whether `reject_mean_ratio` or `veto_ratio` drops the sequence of each position, `[N]`."""
    rejected_N = torch.zeros_like(positions.is_supervised_N)
    if config.reject_mean_ratio is not None:
        rejected_N = sequence_mean(gap_N, positions).abs() > math.log(config.reject_mean_ratio)
    if config.veto_ratio is not None:
        is_far_N = (gap_N < math.log(config.veto_ratio)).to(gap_N.dtype)
        rejected_N = rejected_N | (sequence_sum(is_far_N, positions)[positions.sequence_N] > 0)
    return rejected_N


def kl_estimate(own_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(own || reference) at tokens sampled from own.

    k3 `exp(d) - d - 1`, k2 `d * d / 2`, d = reference - own (http://joschu.net/blog/kl-approx.html). k3 is multiplied
    by own / own, 1 in value, because the probability of the sample also has a gradient (arXiv 2512.02556). The gradient
    of both is `-d` times that of the logprob, in expectation the gradient of the KL.
    """
    d_N = reference_N - own_N
    if estimator == "k2":
        return d_N.square() / 2
    return (own_N - own_N.detach()).exp() * (d_N.exp() - d_N - 1)


def forward_kl(teacher_NK: Tensor, own_NK: Tensor) -> Tensor:
    """Return `sum_k p_k (log p_k - log q_k)` over the tokens that the teacher lists, p being its probabilities."""
    named_NK = teacher_NK.isfinite()
    teacher_NK = torch.where(named_NK, teacher_NK, 0.0)
    terms_NK = teacher_NK.exp() * (teacher_NK - own_NK)
    return torch.where(named_NK, terms_NK, 0.0).sum(dim=1)


def reverse_kl_advantages(positions: Positions) -> Tensor:
    """Return `teacher - sampled` logprob of the sampled token; 0 if the teacher does not list it.

    Maximising it by policy gradient minimises KL(own || teacher) on the policy's own samples.
    """
    ids_NK, teacher_NK = positions.teacher_ids_NK, positions.teacher_logprobs_NK
    if ids_NK is None or teacher_NK is None:
        return torch.zeros_like(positions.advantages_N)
    found_NK = (ids_NK == positions.labels_N[:, None]) & teacher_NK.isfinite()
    of_label_N = torch.where(found_NK, teacher_NK, -torch.inf).amax(dim=1)
    return torch.where(found_NK.any(dim=1), of_label_N - positions.sampled_logprobs_N, 0.0)


def sequence_sum(values_N: Tensor, positions: Positions) -> Tensor:
    """Return the sum over each sequence, `[S]`."""
    zeros_S = values_N.new_zeros(positions.num_sequences)
    return zeros_S.index_add(0, positions.sequence_N, values_N)


def sequence_mean(values_N: Tensor, positions: Positions) -> Tensor:
    """Return, at each position, the mean over its sequence, `[N]`."""
    length_S = sequence_sum(torch.ones_like(values_N), positions)
    return (sequence_sum(values_N, positions) / length_S.clamp(min=1))[positions.sequence_N]
