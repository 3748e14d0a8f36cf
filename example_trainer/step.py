"""One optimizer step: a batch in, new weights and the step's metrics out. Called by the loop (`training.py`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atroposlib.errors import AtroposError
from atroposlib.scored_data import ScoredGroup
from example_trainer.config import TrainerConfig
from example_trainer.data import Batch, DataOptions, MicroBatch, make_batch
from example_trainer.gap import GapReport, LogprobGap
from example_trainer.loss import (
    MAX_LOG_RATIO,
    LogprobSums,
    LossShare,
    PolicyLoss,
    logprob_sums,
    policy_loss,
)
from example_trainer.model import Policy, PolicyOutput, base_model, uses_flash
from example_trainer.optim import set_learning_rate
from example_trainer.parallel import whole
from example_trainer.trained_groups import StepTrace


class NotFinite(AtroposError):
    """The gradient of a batch is not finite."""


class Peak(NamedTuple):
    """The largest values at one position of a step, None if no position has one; and what each group pushed."""

    ratio: float | None
    """Ratio of trainer to sampler, before any clip."""
    share: float | None
    """Absolute gradient of the loss with respect to the position's logprob, by the sum of all positions'."""
    group: int | None
    """Position in the batch of the group that has the largest share."""
    group_shares: list[float]
    """[num_groups] sums of the positions' shares; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of one step; None if the batch had nothing to train."""

    lr: float
    loss: float | None
    grad_norm: float | None
    sums: dict[str, float]
    """Fields of `LossShare` and `LogprobSums`, summed over the batch."""
    gap: GapReport
    peak: Peak


class Peaks:
    """Watches the logprobs of a step for its `Peak`, on the device until the step ends; G groups."""

    def __init__(self, policy: Policy, num_groups: int) -> None:
        self._world = policy.world
        self._ratio = torch.full((), -torch.inf, dtype=torch.float64, device=policy.device)
        self._pushed_G, self._largest_G = self._ratio.new_zeros(2, num_groups)
        """Sum and maximum of the absolute gradients."""

    def observe(self, micro_batch: MicroBatch, logprobs_N: Tensor) -> None:
        """Note the ratios now, and the gradient when the backward pass reaches the logprobs."""
        positions = micro_batch.positions
        gap_N = logprobs_N.detach() - positions.sampled_logprobs_N
        highest = gap_N.masked_fill(positions.is_supervised_N, -torch.inf).amax()
        self._ratio = torch.maximum(self._ratio, highest)
        groups_S = torch.tensor([row.origin.group for row in micro_batch.rows])
        groups_N = groups_S.to(gap_N.device)[positions.sequence_N]

        def note(gradient_N: Tensor) -> None:
            push_N = gradient_N.abs().double()
            self._pushed_G.index_add_(0, groups_N, push_N)
            self._largest_G.scatter_reduce_(0, groups_N, push_N, "amax")

        logprobs_N.register_hook(note)

    def settle(self) -> Peak:
        """Return the peak over all processes, each of which must call it."""
        ratio = float(self._world.max(self._ratio))
        pushed = self._world.sum(self._pushed_G).tolist()
        largest = self._world.max(self._largest_G).tolist()
        total = sum(pushed)
        return Peak(
            ratio=math.exp(min(ratio, MAX_LOG_RATIO)) if ratio > -math.inf else None,
            share=max(largest) / total if total else None,
            group=largest.index(max(largest)) if total else None,
            group_shares=[push / total if total else 0.0 for push in pushed],
        )


def take_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: TrainerConfig,
    step: int,
    gap: LogprobGap,
    reference: Policy | None = None,
    trace: StepTrace | None = None,
) -> StepResult:
    """Accumulate the gradient over the micro-batches, compare logprobs with the engines', then update the weights.

    A batch with nothing to train leaves weights and optimizer unchanged, as does NotFinite.
    """
    lr = set_learning_rate(optimizer, config, step)
    frozen = reference if batch.lacks_reference else None
    names = (*LossShare._fields, *LogprobSums._fields, "router_sum")
    totals = torch.zeros(len(names), dtype=torch.float64, device=policy.device)
    peaks = Peaks(policy, batch.num_groups)
    for micro_batch, own, (share, clipped_N) in losses(policy, batch, config, frozen):
        if micro_batch.is_filler:
            continue
        gap.observe(micro_batch, own.logprobs_N, step)
        peaks.observe(micro_batch, own.logprobs_N)
        sums_of_logprobs = logprob_sums(micro_batch.positions, own.logprobs_N)
        if trace is not None:
            trace.observe(micro_batch, own.logprobs_N, own.entropy_N, clipped_N)
        added = (*share, *sums_of_logprobs, router_share(own, micro_batch, batch))
        totals += torch.stack([value.detach() for value in added])
    report = gap.settle(step)
    norm = update_weights(policy, optimizer, config) if batch.micro_batches else None
    sums = dict(zip(names, policy.world.sum(totals).tolist(), strict=True))
    loss = sums["loss"] if batch.micro_batches else None
    return StepResult(lr=lr, loss=loss, grad_norm=norm, sums=sums, gap=report, peak=peaks.settle())


def losses(
    policy: Policy, batch: Batch, config: TrainerConfig, frozen: Policy | None
) -> Iterator[tuple[MicroBatch, PolicyOutput, PolicyLoss]]:
    """Yield each of this process's micro-batches with its forward pass and loss; its backward pass follows."""
    for cpu_micro_batch in policy.world.share(batch.micro_batches):
        micro_batch = cpu_micro_batch.to(policy.device)
        own = policy.logprobs(micro_batch)
        loss = policy_loss(
            config,
            micro_batch.positions,
            own.logprobs_N,
            entropy_N=own.entropy_N,
            ref_logprobs_N=reference_logprobs(frozen, micro_batch),
            teacher_logprobs_own_NK=own.teacher_NK,
        )
        yield micro_batch, own, loss
        total = loss.share.loss + config.router_aux_coef * router_share(own, micro_batch, batch)
        (total * policy.world.size).backward()  # FSDP takes the mean over the processes


def router_share(own: PolicyOutput, micro_batch: MicroBatch, batch: Batch) -> Tensor:
    """Return the experts' load-balancing loss times the micro-batch's share of the batch's tokens; 0 without one."""
    if own.router_loss is None or micro_batch.is_filler:
        return own.entropy_N.new_zeros(())
    return own.router_loss * (sum(len(row.tokens) for row in micro_batch.rows) / batch.num_tokens)


def reference_logprobs(reference: Policy | None, micro_batch: MicroBatch) -> Tensor | None:
    """Return the environment's reference logprobs, with missing ones from the frozen reference.

    The reference runs for every micro-batch or for none, because every process of a sharded one must take part.
    """
    given_N = micro_batch.positions.ref_logprobs_N
    if reference is None:
        return given_N
    with torch.no_grad():
        own_N = reference.logprobs(micro_batch).logprobs_N
    return own_N if given_N is None else torch.where(given_N.isnan(), own_N, given_N)


def update_weights(
    policy: Policy, optimizer: torch.optim.Optimizer, config: TrainerConfig
) -> float:
    """Clip, apply and clear the gradient; return its norm before clipping. Raises NotFinite without applying it."""
    norm = clip_gradient(policy, config)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(norm):
        raise NotFinite("the gradient is not finite")
    return norm


def clip_gradient(policy: Policy, config: TrainerConfig) -> float:
    """Clip the gradient and return its norm before, over all processes."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    return float(whole(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)))


def groups_at_fault(
    policy: Policy,
    groups: Sequence[ScoredGroup],
    config: TrainerConfig,
    reference: Policy | None = None,
    oldest_version: int | None = None,
) -> list[int]:
    """Return the positions of the groups that alone have a gradient which is not finite; weights are left as they are.

    Every process must call it. It takes a forward and a backward pass per group.
    """
    found = []
    for position, group in enumerate(groups):
        options = data_options(config, policy)
        batch = make_batch([group], options, oldest_version=oldest_version)
        frozen = reference if batch.lacks_reference else None
        for _ in losses(policy, batch, config, frozen):
            pass
        if batch.micro_batches and not math.isfinite(clip_gradient(policy, config)):
            found.append(position)
        policy.model.zero_grad(set_to_none=True)
    return found


def describe_result(result: StepResult, batch: Batch) -> dict[str, Any]:
    """Return the metrics of the step, means over trained positions; None for a mean over nothing.

    `kl_mean` is the KL to the reference. `raised` and `lowered` are positions with an advantage above and below 0.
    """
    sums = result.sums

    def mean(total: str, count: str = "num_policy") -> float | None:
        return sums[total] / sums[count] if sums[count] else None

    def deviation(total: str, squares: str) -> float | None:
        average, square = mean(total), mean(squares)
        if average is None or square is None:
            return None
        return math.sqrt(max(square - average * average, 0.0))

    num_trained = max(1, batch.num_trained_tokens)
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "ratio_mean": mean("ratio_sum"),
        "ratio_max": result.peak.ratio,
        "token_share_max": result.peak.share,
        "clip_fraction": mean("num_clipped"),
        "rejected_fraction": mean("num_rejected"),
        "entropy_mean": sums["entropy_sum"] / num_trained if batch.micro_batches else None,
        "kl_mean": sums["kl_sum"] / num_trained if sums["kl_sum"] else None,
        "sampled_kl_mean": mean("sampled_kl_sum"),
        "router_loss": sums["router_sum"] or None,
        "distill_loss": sums["distill_sum"] / num_trained if sums["distill_sum"] else None,
        "logprob_mean": mean("own_sum"),
        "logprob_std": deviation("own_sum", "own_square_sum"),
        "sampled_logprob_mean": mean("sampled_sum"),
        "sampled_logprob_std": deviation("sampled_sum", "sampled_square_sum"),
        "raised_logprob_mean": mean("raised_own_sum", "num_raised"),
        "lowered_logprob_mean": mean("lowered_own_sum", "num_lowered"),
        "logprob_gap_max": result.gap.maximum,
        "logprob_gap_mean": result.gap.mean,
        "logprob_gap_kl": result.gap.kl,
    }


def data_options(config: TrainerConfig, policy: Policy | None = None) -> DataOptions:
    """Return the data options of the configuration, adapted to the model of `policy`."""
    packs = config.packing == "on"
    if config.packing == "auto" and policy is not None:
        # A recurrent state (Mamba, gated delta rule) would cross the borders of sequences.
        packs = uses_flash(policy.model) and not base_model(policy.model)._is_stateful
    on_gpu = policy is not None and policy.device.type == "cuda"
    # Without checkpointing, 32,768 positions of a 0.5B take 45 GB.
    most_tokens = 8192 if on_gpu and not config.gradient_checkpointing else 32768
    names = {field.name for field in dataclasses.fields(DataOptions)} - {"loss_constant"}
    return DataOptions(
        **config.model_dump(include=names),
        loss_constant=config.loss_constant or config.seq_len,
        max_sequences=config.batch_size,
        max_tokens=config.max_microbatch_tokens or most_tokens,
        layout="packed" if packs else "padded",
        keep_zero_advantage=bool(config.kl_coef or config.distill_coef or config.entropy_coef),
        processed_logprobs=config.reports_processed,
    )
