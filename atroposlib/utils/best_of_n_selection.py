"""Choose a candidate by a primary score, ties by a secondary one. Pure; called by environments."""

from __future__ import annotations

from collections.abc import Sequence


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """Return the index with the best primary score, of ties the best secondary score, of ties the first.

    Raises ValueError for no candidates or lists of different lengths.

    >>> select_best_index([1.0, 3.0, 3.0], [10, 30, 20])
    2
    """
    if not primary_scores:
        raise ValueError("primary_scores is empty: there is nothing to choose from")
    if len(primary_scores) != len(secondary_scores):
        raise ValueError(
            f"{len(primary_scores)} primary scores but {len(secondary_scores)} secondary scores"
        )
    primary_sign = -1 if primary_higher_is_better else 1
    secondary_sign = 1 if secondary_lower_is_better else -1
    return min(
        range(len(primary_scores)),
        key=lambda i: (primary_sign * primary_scores[i], secondary_sign * secondary_scores[i]),
    )
