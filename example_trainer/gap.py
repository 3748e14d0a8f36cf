"""Do the engines sample from the weights we think they do? Sampled logprobs against the trainer's own.

A permanent assertion: every sequence of the current policy version is compared, free of charge, in the training
forward. Sequences of an older version are compared once, at the first use of that version, with the weights that were
published as it. The latter only warns: `policy_version` is the oldest that sampled a token, and a sequence that was in
flight during a hand-over holds tokens of two.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from atroposlib.errors import EngineError
from example_trainer.data import UNKNOWN_VERSION, Batch, DataOptions, MicroBatch, collate
from example_trainer.model import Policy
from example_trainer.weights import WeightsDirectory

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.05
"""Nats. bfloat16 kernels of two programs differ by up to about this on single tokens."""

_SEQUENCES_COMPARED = 16
"""Of an older version: enough to see wrong weights, few enough to cost nothing."""


class LogprobGapError(EngineError):
    """Engine and trainer disagree by more than `--max_logprob_gap`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapReport:
    """Nats over the trained positions of one step; None when nothing could be compared."""

    maximum: float | None
    mean: float | None


class LogprobGap:
    """Collects the comparisons of one step after the other."""

    def __init__(
        self,
        policy: Policy,
        weights: WeightsDirectory,
        options: DataOptions,
        *,
        limit: float | None,
    ) -> None:
        self._policy = policy
        self._weights = weights
        self._options = options
        self._limit = limit
        self._seen: set[int] = set()
        """Older versions compared already."""
        self._warned: set[int] = set()
        self._current: list[Tensor] = []
        """Gaps at trained positions, one tensor per micro-batch."""
        self._unknown: list[Tensor] = []
        self._older: list[Tensor] = []

    def observe(self, micro_batch: MicroBatch, logprobs_N: Tensor, version: int) -> None:
        """Note what a training forward under the weights of `version` computed."""
        gap_N = _gap(micro_batch, logprobs_N)
        version_N = micro_batch.version_S[micro_batch.positions.sequence_N]
        sampled_N = ~micro_batch.positions.is_supervised_N
        for wanted, found in ((version, self._current), (UNKNOWN_VERSION, self._unknown)):
            found.append(gap_N[(version_N == wanted) & sampled_N])

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def compare_older(self, batch: Batch, version: int) -> None:
        """Compare each version other than `version` that is used for the first time, while its weights are on disk.

        One process only: weights from disk cannot stand in for those that are split.
        """
        if self._policy.world.size > 1:
            return
        rows = [row for row in batch.rows if not row.is_supervised]
        for older in {row.version for row in rows} - self._seen - {version, UNKNOWN_VERSION}:
            self._seen.add(older)
            parameters = self._weights.parameters(older, self._policy.device)
            if parameters is None:
                continue
            some = [row for row in rows if row.version == older][:_SEQUENCES_COMPARED]
            micro_batch = collate(some, self._options).to(self._policy.device)
            own = self._policy.logprobs(micro_batch, parameters=parameters)
            gap_N = _gap(micro_batch, own.logprobs_N)
            by_sequence = gap_N.split([len(row.trained) for row in some])
            # The median sequence: those that were in flight during a hand-over belong to no single version.
            typical = sorted(by_sequence, key=lambda gap: gap.max().item())[(len(some) - 1) // 2]
            self._older.append(typical)
            self._warn(older, typical)

    def settle(self, version: int) -> GapReport:
        """Return the step's report and begin the next; LogprobGapError if the current version is off by too much."""
        world = self._policy.world
        current, unknown, older = (
            torch.cat(found) if found else torch.zeros(0)
            for found in (self._current, self._unknown, self._older)
        )
        self._current, self._unknown, self._older = [], [], []
        self._warn(UNKNOWN_VERSION, unknown)
        self._warn(version, current)
        largest = world.max(torch.tensor([_largest(current), _largest(older)])).tolist()
        if self._limit is not None and largest[0] > self._limit:
            raise LogprobGapError(
                f"sampled logprobs of policy version {version} differ from the trainer's own by up to "
                f"{largest[0]:.3g} nats (--max_logprob_gap {self._limit:g}): the engine does not sample from "
                "the published weights, or reports processed logprobs (--logprobs_mode processed)"
            )
        compared = torch.cat([current, older]).double()
        total, count = world.sum(torch.tensor([compared.sum().item(), compared.numel()])).tolist()
        if not count:
            return GapReport(maximum=None, mean=None)
        return GapReport(maximum=max(largest), mean=total / count)

    def _warn(self, version: int, gap: Tensor) -> None:
        if version in self._warned or not gap.numel() or gap.max().item() <= WARN_ABOVE:
            return
        self._warned.add(version)
        of = (
            "an unknown policy version"
            if version == UNKNOWN_VERSION
            else f"policy version {version}"
        )
        logger.warning(
            "sampled logprobs of %s differ from the trainer's own by up to %.3g nats (mean %.3g)",
            of,
            gap.max().item(),
            gap.mean().item(),
        )


def _largest(gaps: Tensor) -> float:
    return gaps.max().item() if gaps.numel() else 0.0


def _gap(micro_batch: MicroBatch, logprobs_N: Tensor) -> Tensor:
    """Return `|sampled - own|` at the trained positions."""
    return (logprobs_N.detach() - micro_batch.positions.sampled_logprobs_N).abs()
