"""The loss against a slow float64 reference, and the sign rules of its clip."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from example_trainer.loss import grpo_loss, token_logprobs

EPS = 0.2


def reference_loss(
    logprobs: Sequence[Sequence[float]],
    sampled: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    trained: Sequence[Sequence[bool]],
    reference: Sequence[Sequence[float]],
    kl_coef: float,
) -> float:
    """The token mean of PPO's clipped objective and the k3 estimate, one python float at a time."""
    terms = []
    for row in range(len(logprobs)):
        for t in range(len(logprobs[row])):
            if not trained[row][t]:
                continue
            ratio = math.exp(logprobs[row][t] - sampled[row][t])
            clipped = min(max(ratio, 1 - EPS), 1 + EPS)
            advantage = advantages[row][t]
            gap = reference[row][t] - logprobs[row][t]
            kl = math.exp(gap) - gap - 1
            terms.append(-min(ratio * advantage, clipped * advantage) + kl_coef * kl)
    return sum(terms) / len(terms)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_loss_and_its_gradient_equal_a_slow_reference(kl_coef: float) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (3, 7)
    logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64)
    sampled = logprobs + 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64)
    reference = logprobs + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    trained = torch.rand(shape, generator=generator) < 0.7
    leaf = logprobs.clone().requires_grad_()
    result = grpo_loss(
        leaf,
        sampled_logprobs_BT=sampled,
        advantages_BT=advantages,
        weights_BT=trained.double() / trained.sum(),
        clip_eps=EPS,
        kl_coef=kl_coef,
        ref_logprobs_BT=reference,
    )
    result.loss.backward()

    def slow(values: torch.Tensor) -> float:
        return reference_loss(
            values.tolist(),
            sampled.tolist(),
            advantages.tolist(),
            trained.tolist(),
            reference.tolist(),
            kl_coef,
        )

    assert result.loss.item() == pytest.approx(slow(logprobs), abs=1e-12)
    for row in range(shape[0]):
        for t in range(shape[1]):
            up, down = logprobs.clone(), logprobs.clone()
            up[row, t] += 1e-6
            down[row, t] -= 1e-6
            slope = (slow(up) - slow(down)) / 2e-6
            assert leaf.grad is not None
            assert leaf.grad[row, t].item() == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize(
    ("advantage", "ratio", "has_gradient"),
    [
        (1.0, 1.5, False),  # already far more likely than when sampled: enough
        (1.0, 0.5, True),
        (-1.0, 0.5, False),  # already far less likely: enough
        (-1.0, 1.5, True),  # bad and more likely than when sampled: must be pushed back
        (1.0, 1.1, True),
        (-1.0, 0.9, True),
    ],
)
def test_the_clip_stops_the_gradient_only_past_its_own_side(
    advantage: float, ratio: float, has_gradient: bool
) -> None:
    logprobs = torch.tensor([[-1.0 + math.log(ratio)]], requires_grad=True)
    result = grpo_loss(
        logprobs,
        sampled_logprobs_BT=torch.tensor([[-1.0]]),
        advantages_BT=torch.tensor([[advantage]]),
        weights_BT=torch.ones(1, 1),
        clip_eps=EPS,
    )
    result.loss.backward()
    assert logprobs.grad is not None
    gradient = logprobs.grad.item()
    assert gradient == pytest.approx(-advantage * ratio if has_gradient else 0.0, abs=1e-6)
    assert result.num_clipped.item() == (0 if has_gradient else 1)


def test_fillers_at_untrained_positions_never_reach_the_gradient() -> None:
    logprobs = torch.tensor([[0.0, -1.0]], requires_grad=True)
    result = grpo_loss(
        logprobs,
        sampled_logprobs_BT=torch.tensor([[-1e4, -1.0]]),
        advantages_BT=torch.tensor([[1.0, 1.0]]),
        weights_BT=torch.tensor([[0.0, 1.0]]),
        clip_eps=EPS,
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0]]


def test_token_logprobs_are_log_softmax_at_the_label_under_the_temperature() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, -100, 4], [0, 2, -100]])
    found = token_logprobs(logits, labels, torch.tensor([1.0, 2.0]))
    for row, temperature in enumerate((1.0, 2.0)):
        for t in range(3):
            label = int(labels[row, t])
            exponentials = [math.exp(float(x) / temperature) for x in logits[row, t]]
            wanted = 0.0 if label < 0 else math.log(exponentials[label] / sum(exponentials))
            assert found[row, t].item() == pytest.approx(wanted, abs=1e-6)
