"""Do the engines sample from the weights we think they do? Sampled logprobs against the trainer's own.

A permanent assertion that costs nothing: every sequence of the current policy version is compared in the training
forward. Sequences of an older version differ because the policy has moved; `sampled_kl_mean` and `ratio_mean` show
them. Sums stay on the device until the step ends. Called by `step.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atroposlib.errors import EngineError
from example_trainer.data import UNKNOWN_VERSION, MicroBatch
from example_trainer.model import Policy

logger = logging.getLogger(__name__)


class GapLimits(NamedTuple):
    """What is normal on unchanged weights; nats."""

    mean: float
    kl: float


LIMITS = {
    torch.float32: GapLimits(mean=1e-3, kl=1e-4),
    # Kernels of two programs: a standard deviation of 0.05 per token, a maximum of 0.48 in 3,900 tokens (TRL #6789),
    # which is a mean of 0.04 and a KL of 0.00125. A maximum says nothing: it grows with the number of tokens.
    torch.bfloat16: GapLimits(mean=0.1, kl=0.01),
}
"""Of the forward pass's precision; beyond them the step is warned of."""


class LogprobGapError(EngineError):
    """Engine and trainer disagree by more than `--max_logprob_gap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapReport:
    """Nats over the trained positions that the current policy version sampled; None where there were none."""

    maximum: float | None
    mean: float | None
    kl: float | None
    """KL of sampler to trainer, the k3 estimate (http://joschu.net/blog/kl-approx.html)."""


class LogprobGap:
    """Collects the comparisons of one step after the other."""

    def __init__(self, policy: Policy, *, limit: float | None) -> None:
        self._policy = policy
        self._limit = limit
        self._warned: set[str] = set()
        """Whose samples were beyond the limits when last compared."""
        self._begin()

    def _begin(self) -> None:
        # Of the current and of an unknown version: count, sum of |d|, sum of k3, and apart the largest |d|.
        self._sums = torch.zeros(2, 3, dtype=torch.float64, device=self._policy.device)
        self._largest = torch.zeros(2, dtype=torch.float64, device=self._policy.device)

    def observe(self, micro_batch: MicroBatch, logprobs_N: Tensor, version: int) -> None:
        """Note what a training forward under the weights of `version` computed."""
        positions = micro_batch.positions
        difference_N = logprobs_N.detach().double() - positions.sampled_logprobs_N
        version_N = micro_batch.version_S[positions.sequence_N]
        for i, compared in enumerate((version, UNKNOWN_VERSION)):
            d_N = difference_N * ((version_N == compared) & ~positions.is_supervised_N)
            count = ((version_N == compared) & ~positions.is_supervised_N).sum()
            self._sums[i] += torch.stack([count, d_N.abs().sum(), (d_N.exp() - 1 - d_N).sum()])
            self._largest[i] = torch.maximum(self._largest[i], d_N.abs().amax())

    def settle(self, version: int) -> GapReport:
        """Return the step's report and begin the next; LogprobGapError if the current version is off by too much."""
        world = self._policy.world
        sums, largest = world.sum(self._sums).tolist(), world.max(self._largest).tolist()
        self._begin()
        current, unknown = (
            _report(count, absolute, k3, most)
            for (count, absolute, k3), most in zip(sums, largest, strict=True)
        )
        self._warn("an unknown policy version", unknown)
        if self._limit is not None and current.mean is not None and current.mean > self._limit:
            raise LogprobGapError(
                f"sampled logprobs of policy version {version} differ from the trainer's own by {current.mean:.3g} "
                f"nats in the mean, {current.maximum:.3g} at most (--max_logprob_gap {self._limit:g}): the engine does "
                "not sample from the published weights, --logprobs_mode does not say what it reports, or the groups do "
                "not say their temperature (generation_params; atroposlib adds it unless one item has several)"
            )
        self._warn("the current policy version", current)
        return current

    def _warn(self, what: str, report: GapReport) -> None:
        """Warn once, and again only if all was well in between."""
        if report.mean is None or report.kl is None:
            return
        limits = LIMITS[self._policy.dtype]
        if report.mean <= limits.mean and report.kl <= limits.kl:
            self._warned.discard(what)
        elif what not in self._warned:
            self._warned.add(what)
            logger.warning(
                "sampled logprobs of %s differ from the trainer's own by %.3g nats in the mean (KL %.3g, "
                "at most %.3g); %g and %g are normal",
                what,
                report.mean,
                report.kl,
                report.maximum,
                *limits,
            )


def _report(count: float, absolute: float, k3: float, largest: float) -> GapReport:
    if not count:
        return GapReport(maximum=None, mean=None, kl=None)
    return GapReport(maximum=largest, mean=absolute / count, kl=k3 / count)
