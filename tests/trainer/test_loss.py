"""The clip's sign rules and the counts of the metrics; test_trainer_update.py has the gradients of all losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.data import DataOptions, Positions, make_batch
from example_trainer.loss import LossShare, policy_loss
from example_trainer.objective import OBJECTIVES
from tests.trainer.helpers_trainer import make_group


def run(
    own: Sequence[float],
    sampled: Sequence[float],
    *,
    advantage: float = 1.0,
    num_supervised: int = 0,
    **settings: Any,
) -> tuple[LossShare, list[float]]:
    """Return the loss of sequences of one position and weight 1, the first ones supervised, and its gradient."""
    ones_N = torch.ones(len(own), dtype=torch.float64)
    positions = Positions(
        labels_N=ones_N.long(),
        sampled_logprobs_N=torch.tensor(sampled, dtype=torch.float64),
        advantages_N=advantage * ones_N,
        weights_N=ones_N,
        temperature_N=ones_N,
        sequence_N=torch.arange(len(own)),
        num_sequences=len(own),
        is_supervised_N=torch.arange(len(own)) < num_supervised,
        ref_logprobs_N=None,
        teacher_ids_NK=None,
        teacher_logprobs_NK=None,
    )
    own_N = torch.tensor(own, dtype=torch.float64, requires_grad=True)
    config = TrainerConfig(model_name="m", **settings)
    share, _ = policy_loss(config, positions, own_N, entropy_N=torch.zeros_like(own_N))
    share.loss.backward()
    assert own_N.grad is not None
    return share, own_N.grad.tolist()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("advantage", "ratio", "has_gradient"),
    [
        (1.0, 1.5, False),  # already far more likely than when sampled: enough
        (1.0, 0.5, True),
        (-1.0, 0.5, False),  # already far less likely: enough
        (-1.0, 1.5, True),  # bad and more likely than when sampled: must be pushed back
        (1.0, 1.1, True),
        (-1.0, 0.9, True),
        (1.0, 1.25, True),  # the upper bound is 1.3
        (-1.0, 0.75, False),  # the lower is 0.8
    ],
)
def test_the_clip_stops_the_gradient_only_past_its_own_side(
    advantage: float, ratio: float, has_gradient: bool, level: Any
) -> None:
    bounds = {"ratio_level": level, "clip_eps": 0.2, "clip_eps_high": 0.3}
    share, [slope] = run([-1.0 + math.log(ratio)], [-1.0], advantage=advantage, **bounds)
    assert slope == pytest.approx(-advantage * ratio if has_gradient else 0.0, abs=1e-9)
    assert share.num_clipped.item() == (0 if has_gradient else 1)


def test_cispo_keeps_the_gradient_of_tokens_that_ppo_would_clip() -> None:
    share, [slope] = run([-1.0], [-3.0], surrogate="cispo", clip_eps=1.0, clip_eps_high=4.0)
    assert slope == pytest.approx(-5.0)  # exp(2) = 7.4 is cut to 1 + 4
    assert share.num_clipped.item() == 1


def test_sums_for_the_metrics_count_policy_positions_only() -> None:
    own, sampled = [-1.0, -1.0, -1.2, -0.7], [-2.0, -1.05, -0.9, -1.0]
    limits = {"correction": "icepop", "correction_cap": 1.1, "correction_floor": 0.9}
    share, _ = run(own, sampled, num_supervised=1, **limits)
    gaps = [o - s for o, s in zip(own[1:], sampled[1:], strict=True)]
    assert share.num_policy.item() == 3
    assert share.ratio_sum.item() == pytest.approx(sum(map(math.exp, gaps)))
    assert share.sampled_kl_sum.item() == pytest.approx(-sum(gaps))
    assert share.num_rejected.item() == 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_takes_the_rounding_of_an_engine_for_another_policy(name: str) -> None:
    """Unchanged weights, a standard deviation of 0.05 per token: the clip removes next to nothing."""
    groups = [make_group([1.0, 0.0, 0.3, 0.8], seed=s, length=500) for s in range(4)]
    options = DataOptions(seq_len=1024, max_sequences=100, max_tokens=10**6)
    (micro_batch,) = make_batch(groups, options).micro_batches
    positions = micro_batch.positions
    torch.manual_seed(0)
    own_N = positions.sampled_logprobs_N + 0.05 * torch.randn(len(positions.labels_N))
    zeros_N = torch.zeros_like(own_N)
    config = TrainerConfig(model_name="m", objective=name)  # type: ignore[arg-type]
    share, _ = policy_loss(config, positions, own_N, entropy_N=zeros_N)
    assert share.num_clipped / share.num_policy < 1e-3
