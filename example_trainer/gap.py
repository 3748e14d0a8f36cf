"""Check that engines sample from the published weights: compare sampled logprobs with the trainer's own.

The comparison uses the training forward, so it is always on. It covers tokens of the current and of an unknown
policy version, but not those of an answer that other weights began, whose keys stay in the engine's cache;
`sampled_kl_mean` and `ratio_mean` show how far older ones differ. Sums stay on the device until the step ends. Called
by `step.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atroposlib.errors import EngineError
from atroposlib.scored_data import UNKNOWN_VERSION
from example_trainer.data import MicroBatch
from example_trainer.model import Policy

logger = logging.getLogger(__name__)


class GapLimits(NamedTuple):
    """Largest normal values for unchanged weights, in nats."""

    mean: float
    kl: float


LIMITS = {
    torch.float32: GapLimits(mean=1e-3, kl=1e-4),
    # Kernels of two programs differ by a standard deviation of 0.05 per token, at most 0.48 in 3,900 tokens (TRL
    # #6789): a mean of 0.04, a KL of 0.00125. The maximum has no limit: it grows with the number of tokens.
    torch.bfloat16: GapLimits(mean=0.1, kl=0.01),
}
"""By precision of the forward pass; a step beyond them is logged as a warning."""


class LogprobGapError(EngineError):
    """Engine and trainer disagree by more than `--max_logprob_gap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapReport:
    """Nats over the trained positions sampled by one policy version; None if there are none."""

    maximum: float | None = None
    mean: float | None = None
    kl: float | None = None
    """KL of sampler to trainer, the k3 estimate (http://joschu.net/blog/kl-approx.html)."""


class LogprobGap:
    """Accumulates the comparisons of a step."""

    def __init__(self, policy: Policy, *, limit: float | None) -> None:
        self._policy = policy
        self._limit = limit
        self._warned: set[str] = set()
        """Which comparisons exceeded the limits last time."""
        self._begin()

    def _begin(self) -> None:
        # Row 0: current version, row 1: unknown version; columns: count, sum of |d|, sum of k3.
        self._sums = torch.zeros(2, 3, dtype=torch.float64, device=self._policy.device)
        self._largest = torch.zeros(2, dtype=torch.float64, device=self._policy.device)

    def observe(self, micro_batch: MicroBatch, logprobs_N: Tensor, version: int) -> None:
        """Add the logprobs that a training forward computed with the weights of `version`."""
        positions = micro_batch.positions
        difference_N = logprobs_N.detach().double() - positions.sampled_logprobs_N
        is_sampled_N = _as_begun(micro_batch) & ~positions.is_supervised_N
        for i, compared in enumerate((version, UNKNOWN_VERSION)):
            is_compared_N = (micro_batch.version_N == compared) & is_sampled_N
            d_N = difference_N * is_compared_N
            count = is_compared_N.sum()
            self._sums[i] += torch.stack([count, d_N.abs().sum(), (d_N.exp() - 1 - d_N).sum()])
            self._largest[i] = torch.maximum(self._largest[i], d_N.abs().amax())

    def settle(self, version: int) -> GapReport:
        """Return the current version's report and reset; raise LogprobGapError if its mean exceeds the limit."""
        world = self._policy.world
        sums, largest = world.sum(self._sums).tolist(), world.max(self._largest).tolist()
        self._begin()
        current, unknown = (
            GapReport(maximum=most, mean=absolute / count, kl=k3 / count) if count else GapReport()
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
        """Warn when the limits are first exceeded, and again only after a report within them."""
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
                *(what, report.mean, report.kl, report.maximum, *limits),
            )


def _as_begun(micro_batch: MicroBatch) -> Tensor:
    """Return [N] bool: the version that sampled this token sampled the first of its run of trained tokens, too."""
    place_N, version_N = micro_batch.trained_N, micro_batch.version_N
    is_next_N = (place_N.diff() == 1) & (micro_batch.positions.sequence_N.diff() == 0)
    at_N = torch.arange(len(place_N), device=place_N.device)
    first_N = torch.cat([at_N[:1], at_N[1:] * ~is_next_N]).cummax(0).values
    return version_N == version_N[first_N]
