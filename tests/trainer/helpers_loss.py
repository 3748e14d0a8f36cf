"""A slow reference of every objective: one python float at a time, written from the papers' formulas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from example_trainer.config import TrainerConfig
from example_trainer.data import Positions


@dataclass(frozen=True)
class Case:
    """Trained positions of a few sequences, as python lists per sequence."""

    own: list[list[float]]
    sampled: list[list[float]]
    advantages: list[list[float]]
    reference: list[list[float]]
    teacher: list[list[dict[int, float]]]
    """Per position, token id -> log-probability; token 0 is the label."""
    own_teacher: list[list[dict[int, float]]]
    supervised: list[bool]


def random_case(seed: int, *, lengths: Sequence[int] = (3, 1, 5)) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> float:
        return scale * float(torch.randn((), generator=rng, dtype=torch.float64))

    own = [[-1.0 + normal(0.3) for _ in range(n)] for n in lengths]
    return Case(
        own=own,
        sampled=[[value + normal(0.5) for value in row] for row in own],
        advantages=[[normal(1.0) for _ in row] for row in own],
        reference=[[value + normal(0.3) for value in row] for row in own],
        teacher=[[{0: -0.4 + normal(0.1), 3: -1.7} for _ in row] for row in own],
        own_teacher=[[{0: value, 3: -2.0 + normal(0.2)} for value in row] for row in own],
        supervised=[False] * len(lengths),
    )


def weights_of(case: Case, loss_mean: str, constant: float) -> list[float]:
    """Return the weight of each position of each sequence."""
    num_tokens = sum(map(len, case.own))
    if loss_mean == "token":
        return [1 / num_tokens for _ in case.own]
    if loss_mean == "sequence":
        return [1 / (len(case.own) * len(row)) for row in case.own]
    return [1 / (len(case.own) * constant) for _ in case.own]


def slow_loss(
    objective: TrainerConfig,
    case: Case,
    weights: Sequence[float],
    own: Sequence[Sequence[float]],
) -> float:
    """Return the loss at logprobs `own`; what the papers hold constant is computed at `case.own`."""
    total = 0.0
    for s, row in enumerate(own):
        length = len(row)
        frozen = case.own[s]
        gaps = [frozen[t] - case.sampled[s][t] for t in range(length)]
        for t in range(length):
            if case.supervised[s]:
                total += weights[s] * -case.advantages[s][t] * row[t]
                continue
            advantage = case.advantages[s][t]
            if objective.distill_coef and objective.distill_loss == "reverse_kl":
                advantage += objective.distill_coef * (case.teacher[s][t][0] - case.sampled[s][t])
            base = case.sampled[s]
            if objective.ratio_level == "sequence":
                log_ratio = sum(row[i] - base[i] for i in range(length)) / length
                still = sum(gaps) / length
            else:
                log_ratio, still = row[t] - base[t], gaps[t]
            ratio, constant = math.exp(log_ratio), math.exp(still)
            low = 1 - objective.clip_eps
            high = 1 + (objective.clip_eps_high or objective.clip_eps)
            correction = slow_correction(objective, gaps, t)
            if objective.surrogate == "clip":
                gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
                if advantage < 0:
                    gain = max(gain, objective.dual_clip * advantage)
                if correction is not None:
                    gain *= correction / constant
            elif objective.surrogate == "cispo":
                weight = min(max(constant, low), high)
                if correction is not None:
                    weight = min(correction, high)
                gain = weight * advantage * row[t]
            else:
                gain = (1.0 if correction is None else correction) * advantage * row[t]
            total -= weights[s] * gain
            if objective.kl_coef:
                d = case.reference[s][t] - row[t]
                # Constant for k2 and live for k3, whose own gradient is that of another divergence.
                kl = min(math.exp(gaps[t]), 10.0)
                if objective.kl_estimator == "k2":
                    kl *= d * d / 2
                else:
                    kl *= math.exp(row[t] - frozen[t]) * (math.exp(d) - d - 1)
                total += weights[s] * objective.kl_coef * kl
            if objective.distill_coef and objective.distill_loss == "forward_kl":
                named = {**case.own_teacher[s][t], 0: row[t]}
                kl = sum(
                    math.exp(p) * (p - named[token]) for token, p in case.teacher[s][t].items()
                )
                total += weights[s] * objective.distill_coef * kl
    return total


def slow_correction(objective: TrainerConfig, gaps: Sequence[float], t: int) -> float | None:
    if objective.correction == "none":
        return None
    weight = math.exp(sum(gaps) if objective.correction_level == "sequence" else gaps[t])
    if objective.correction == "tis":
        return min(weight, objective.correction_cap)
    if objective.correction == "decoupled":
        return weight
    if weight > objective.correction_cap:
        return 0.0
    if objective.correction == "icepop" and weight < objective.correction_floor:
        return 0.0
    return weight


def slow_gradient(
    loss: Callable[[Sequence[Sequence[float]]], float], own: Sequence[Sequence[float]]
) -> list[float]:
    """Return the central differences, sequence after sequence."""
    slopes = []
    for s, row in enumerate(own):
        for t in range(len(row)):
            around = []
            for step in (1e-6, -1e-6):
                moved = [list(values) for values in own]
                moved[s][t] += step
                around.append(loss(moved))
            slopes.append((around[0] - around[1]) / 2e-6)
    return slopes


def flat(values: Sequence[Sequence[Any]]) -> torch.Tensor:
    return torch.tensor([value for row in values for value in row], dtype=torch.float64)


def positions_of(case: Case, weights: Sequence[float]) -> Positions:
    lengths = [len(row) for row in case.own]
    ids = sorted(case.teacher[0][0])
    return Positions(
        labels_N=torch.zeros(sum(lengths), dtype=torch.int64),
        sampled_logprobs_N=flat(case.sampled),
        advantages_N=flat(case.advantages),
        weights_N=flat([[w] * n for w, n in zip(weights, lengths, strict=True)]),
        temperature_N=torch.ones(sum(lengths), dtype=torch.float64),
        sequence_N=flat([[i] * n for i, n in enumerate(lengths)]).long(),
        num_sequences=len(lengths),
        is_supervised_N=flat(
            [[is_it] * n for is_it, n in zip(case.supervised, lengths, strict=True)]
        ).bool(),
        ref_logprobs_N=flat(case.reference),
        teacher_ids_NK=torch.tensor([ids] * sum(lengths)),
        teacher_logprobs_NK=torch.stack(
            [flat([[p[token] for p in row] for row in case.teacher]) for token in ids], dim=1
        ),
    )
