"""Prefer shorter answers: penalties by the number of sampled tokens. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.scored_data import IGNORE_INDEX, ScoredDataGroup

PENALTY_STARTS_AT = 0.5
"""Fraction of max_token_length above which an answer is penalized."""


def num_trained(mask: Sequence[int]) -> int:
    """Return the number of trained tokens.

    >>> num_trained([-100, 7, 7])
    2
    """
    return len(mask) - mask.count(IGNORE_INDEX)


def length_penalties(
    masks: Sequence[Sequence[int]], max_token_length: int, *, starts_at: float = PENALTY_STARTS_AT
) -> list[float]:
    """Return 0 up to the fraction `starts_at` of the limit, then linearly up to 1 at the limit.

    >>> length_penalties([[7] * 40, [7] * 75, [7] * 200], max_token_length=100)
    [0.0, 0.5, 1.0]
    """
    start = starts_at * max_token_length
    overruns = [(num_trained(mask) - start) / (max_token_length - start) for mask in masks]
    return [min(max(overrun, 0.0), 1.0) for overrun in overruns]


def prefer_shorter(group: ScoredDataGroup, max_token_length: int) -> ScoredDataGroup:
    """If all answers of a group score 1, score them by length: 1 up to half of the limit, then linearly down to 0.

    >>> prefer_shorter({"masks": [[7] * 40, [7] * 75, [7] * 200], "scores": [1.0, 1.0, 1.0]}, 100)["scores"]
    [1.0, 0.5, 0.0]
    """
    if min(group["scores"]) == 1.0:
        penalties = length_penalties(group["masks"], max_token_length)
        group["scores"] = [1.0 - penalty for penalty in penalties]
    return group
