"""Every objective against a slow float64 reference, and the sign rules of the clip."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.data import DataOptions, Positions, make_batch
from example_trainer.loss import LossShare, policy_loss
from example_trainer.objective import OBJECTIVES
from tests.trainer.helpers_loss import (
    Case,
    flat,
    positions_of,
    random_case,
    slow_gradient,
    slow_loss,
    weights_of,
)
from tests.trainer.helpers_trainer import make_group

ALL = {name: name for name in OBJECTIVES}


def objective_named(name: str, **changes: Any) -> TrainerConfig:
    return TrainerConfig(model_name="m", objective=name, **changes)  # type: ignore[arg-type]


def run(
    objective: TrainerConfig, case: Case, positions: Positions
) -> tuple[LossShare, list[float]]:
    """Return the loss and its gradient with respect to the own logprobs."""
    own_N = flat(case.own).requires_grad_()
    others = [flat([[p[3] for p in row] for row in case.own_teacher])]
    share, _ = policy_loss(
        objective,
        positions,
        own_N,
        entropy_N=torch.zeros_like(own_N),
        ref_logprobs_N=positions.ref_logprobs_N,
        teacher_logprobs_own_NK=torch.stack([own_N, *others], dim=1),
    )
    share.loss.backward()
    assert own_N.grad is not None
    return share, own_N.grad.tolist()


def assert_equals_reference(objective: TrainerConfig, case: Case, loss_mean: str) -> None:
    weights = weights_of(case, loss_mean, 7.0)
    share, gradient = run(objective, case, positions_of(case, weights))

    def slow(own: Sequence[Sequence[float]]) -> float:
        return slow_loss(objective, case, weights, own)

    assert share.loss.item() == pytest.approx(slow(case.own), abs=1e-9)
    assert gradient == pytest.approx(slow_gradient(slow, case.own), abs=1e-6)


@pytest.mark.parametrize("correction", ["none", "tis", "mis", "icepop", "decoupled"])
@pytest.mark.parametrize("loss_mean", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient_equal_a_slow_reference(
    name: str, loss_mean: str, correction: Any
) -> None:
    for seed in range(3):
        objective = objective_named(
            name,
            correction=correction,
            correction_cap=1.2,
            correction_floor=0.8,
            dual_clip=1.4,
            kl_coef=0.1,
        )
        assert_equals_reference(objective, random_case(seed), loss_mean)


@pytest.mark.parametrize("correction", ["tis", "mis", "icepop", "decoupled"])
def test_corrections_of_whole_sequences_equal_a_slow_reference(correction: Any) -> None:
    objective = objective_named("grpo", correction=correction, correction_level="sequence")
    assert_equals_reference(objective, random_case(4), "token")


@pytest.mark.parametrize("distill_loss", ["forward_kl", "reverse_kl"])
def test_distillation_equals_a_slow_reference(distill_loss: Any) -> None:
    objective = objective_named("grpo", distill_coef=0.7, distill_loss=distill_loss)
    assert_equals_reference(objective, random_case(5), "token")


def test_supervised_sequences_are_trained_by_likelihood_beside_the_others() -> None:
    case = dataclasses.replace(random_case(6), supervised=[False, True, False])
    assert_equals_reference(objective_named("grpo"), case, "token")


def test_an_entropy_bonus_lowers_the_loss_by_its_weighted_mean() -> None:
    case = random_case(7)
    positions = positions_of(case, weights_of(case, "token", 1.0))
    entropy_N = torch.linspace(0.1, 0.9, len(positions.labels_N), dtype=torch.float64)
    own_N = flat(case.own)
    plain, with_bonus = (
        policy_loss(
            TrainerConfig(model_name="m", entropy_coef=coef), positions, own_N, entropy_N=entropy_N
        ).share.loss
        for coef in (0.0, 0.5)
    )
    assert (plain - with_bonus).item() == pytest.approx(0.5 * entropy_N.mean().item())


@pytest.mark.parametrize("drift", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_term_has_the_gradient_of_the_kl_for_samples_of_an_older_policy(
    estimator: Any, drift: float
) -> None:
    """The expectation is exact: one position per token of the vocabulary, weighted by its probability."""
    num_tokens = 8
    torch.manual_seed(3)
    noise, own, reference = torch.randn(3, num_tokens, dtype=torch.float64)
    own.requires_grad_()
    sampled_N = (own.detach() + drift * noise).log_softmax(0)
    case = random_case(0, lengths=[num_tokens])
    positions = dataclasses.replace(
        positions_of(case, [1.0]),
        sampled_logprobs_N=sampled_N,
        advantages_N=torch.zeros_like(sampled_N),
        weights_N=sampled_N.exp(),
    )
    own_N, reference_N = own.log_softmax(0), reference.log_softmax(0)
    loss = policy_loss(
        TrainerConfig(model_name="m", kl_coef=1.0, kl_estimator=estimator),
        positions,
        own_N,
        entropy_N=torch.zeros_like(sampled_N),
        ref_logprobs_N=reference_N,
    ).share.loss
    kl = (own_N.exp() * (own_N - reference_N)).sum()
    if estimator == "k3":
        assert loss.item() == pytest.approx(kl.item())
    [found] = torch.autograd.grad(loss, own, retain_graph=True)
    [wanted] = torch.autograd.grad(kl, own)
    torch.testing.assert_close(found, wanted)


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
        (-1.0, 2.9, True),
        (-1.0, 3.1, False),  # the dual clip
    ],
)
def test_the_clip_stops_the_gradient_only_past_its_own_side(
    advantage: float, ratio: float, has_gradient: bool, level: Any
) -> None:
    case = dataclasses.replace(
        random_case(0, lengths=[1]),
        own=[[-1.0 + math.log(ratio)]],
        sampled=[[-1.0]],
        advantages=[[advantage]],
    )
    objective = TrainerConfig(model_name="m", ratio_level=level, clip_eps=0.2, clip_eps_high=0.3)
    share, gradient = run(objective, case, positions_of(case, [1.0]))
    assert gradient[0] == pytest.approx(-advantage * ratio if has_gradient else 0.0, abs=1e-9)
    assert share.num_clipped.item() == (0 if has_gradient else 1)


@pytest.mark.parametrize(
    ("correction", "advantage", "ratio", "weight"),
    [
        ("tis", 1.0, 1.1, 1.1),  # the weight once, not squared
        ("tis", 1.0, 1.5, 0.0),  # past the clip
        ("tis", -1.0, 0.7, 0.0),
        ("tis", -1.0, 1.5, 1.5),
        ("tis", -1.0, 2.5, 2.0),  # truncated
        ("mis", 1.0, 1.5, 0.0),
        ("mis", -1.0, 1.9, 1.9),
        ("mis", -1.0, 2.5, 0.0),
        ("icepop", 1.0, 0.6, 0.6),
        ("icepop", 1.0, 0.4, 0.0),  # below the floor
        ("icepop", -1.0, 0.7, 0.0),
        ("decoupled", 1.0, 1.1, 1.1),
        ("decoupled", 1.0, 1.5, 0.0),
        ("decoupled", -1.0, 2.5, 2.5),
        ("tis", -1.0, 3.1, 0.0),  # past the dual clip
    ],
)
def test_a_correction_weighs_the_tokens_that_the_clip_lets_through(
    correction: Any, advantage: float, ratio: float, weight: float
) -> None:
    case = dataclasses.replace(
        random_case(0, lengths=[1]),
        own=[[-1.0 + math.log(ratio)]],
        sampled=[[-1.0]],
        advantages=[[advantage]],
    )
    objective = TrainerConfig(model_name="m", correction=correction)
    share, gradient = run(objective, case, positions_of(case, [1.0]))
    assert gradient[0] == pytest.approx(-advantage * weight, abs=1e-9)
    is_outside = ratio > 1.2 if advantage > 0 else ratio < 0.8 or ratio > 3
    assert share.num_clipped.item() == is_outside


@pytest.mark.parametrize(
    ("correction", "weight"), [("none", 5.0), ("tis", 2.0), ("mis", 0.0), ("decoupled", 5.0)]
)
def test_a_correction_replaces_the_weight_of_cispo_within_its_upper_bound(
    correction: Any, weight: float
) -> None:
    case = dataclasses.replace(
        random_case(0, lengths=[1]), own=[[-1.0]], sampled=[[-3.0]], advantages=[[1.0]]
    )
    objective = objective_named("cispo", correction=correction)
    share, gradient = run(objective, case, positions_of(case, [1.0]))
    assert gradient[0] == pytest.approx(-weight)  # the ratio is 7.4
    assert share.num_clipped.item() == 1


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "reinforce"])
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [True, True, True]),
        ({"reject_mean_ratio": 1.5}, [True, False, True]),  # the mean of 0.1, of 0.5, of -0.2
        ({"reject_mean_ratio": 1.2}, [True, False, False]),
        ({"veto_ratio": 0.1}, [True, True, False]),
        ({"veto_ratio": 0.01}, [True, True, True]),
    ],
    ids=str,
)
def test_sequences_too_far_from_the_sampler_are_rejected_whole(
    changes: dict[str, Any], kept: list[bool], surrogate: Any
) -> None:
    gaps = [[0.1, 0.1], [0.5, 0.6, 0.4], [2.0, -2.6, 0.0]]
    case = random_case(0, lengths=[2, 3, 3])
    case = dataclasses.replace(
        case,
        sampled=[
            [o - g for o, g in zip(*rows, strict=True)] for rows in zip(case.own, gaps, strict=True)
        ],
        advantages=[[-1.0] * len(row) for row in gaps],
    )
    objective = objective_named("grpo", surrogate=surrogate, clip_eps=1.0, dual_clip=10, **changes)
    share, gradient = run(objective, case, positions_of(case, [0.1] * 3))
    trained = [is_kept for is_kept, row in zip(kept, gaps, strict=True) for _ in row]
    assert [slope != 0 for slope in gradient] == trained
    assert share.num_rejected.item() == trained.count(False)


def test_cispo_keeps_the_gradient_of_tokens_that_ppo_would_clip() -> None:
    case = dataclasses.replace(
        random_case(0, lengths=[1]), own=[[-1.0]], sampled=[[-3.0]], advantages=[[1.0]]
    )
    objective = TrainerConfig(model_name="m", surrogate="cispo", clip_eps=1.0, clip_eps_high=4.0)
    share, gradient = run(objective, case, positions_of(case, [1.0]))
    assert gradient[0] == pytest.approx(-5.0)  # exp(2) = 7.4 is cut to 1 + 4
    assert share.num_clipped.item() == 1


def test_sums_for_the_metrics_count_policy_positions_only() -> None:
    case = dataclasses.replace(random_case(8), supervised=[True, False, False])
    objective = TrainerConfig(
        model_name="m", correction="icepop", correction_cap=1.1, correction_floor=0.9
    )
    share, _ = run(objective, case, positions_of(case, [0.1] * 3))
    gaps = [o - s for i in (1, 2) for o, s in zip(case.own[i], case.sampled[i], strict=True)]
    assert share.num_policy.item() == len(gaps) == 6
    assert share.ratio_sum.item() == pytest.approx(sum(map(math.exp, gaps)))
    assert share.sampled_kl_sum.item() == pytest.approx(-sum(gaps))
    rejected = sum(not 0.9 <= math.exp(gap) <= 1.1 for gap in gaps)
    assert share.num_rejected.item() == rejected > 0


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
    share, _ = policy_loss(objective_named(name), positions, own_N, entropy_N=zeros_N)
    assert share.num_clipped / share.num_policy < 1e-3
