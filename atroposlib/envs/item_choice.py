"""Which item a `DatasetEnv` asks next: more often those whose groups have answers of different scores.

A belief about an item is the decayed number of its solved and unsolved answers, a Beta posterior of its success rate p.
A group of G answers has a gradient only if its scores differ; with right and wrong answers that happens with the
probability 1 - p^G - (1-p)^G. As in MoPPS (Qu et al. 2025, arXiv 2507.04632), p is drawn from the posterior of each of
some random candidates; the item with the highest probability is asked (in MoPPS the one with p nearest to 0.5). Every
tenth item comes from a fixed order, so the next N*10 items have each of N items at least once. The choice is a function
of the beliefs, the seed and the number of the item: a restart with the same beliefs continues it. Processes of one run
keep their own. `benchmarks/README.md` has the tokens that it saves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

Beliefs: TypeAlias = dict[str, list[float]]
"""[solved, unsolved] answers by class (of one item, or of several that the author names), older ones counted less."""

KEPT = 0.6
"""Share of the counts that remains at the next group: the policy changes."""
NUM_CANDIDATES = 12
PLAIN_EVERY = 10
"""One in so many items comes from the fixed order."""
_PRIOR = 1.0
"""Solved and unsolved answers of a class without any: every p is equally likely."""


def num_solved(scores: Sequence[float], *, success_score: float) -> int:
    """Return how many answers of a group count as solved, for scores of any kind.

    What matters is whether the next group's scores will differ. If they differ, those above the middle between lowest
    and highest count, for scores of 0 and 1 the right ones: neither all nor none, so the belief moves away from the
    ends. If they are equal, all or none count, depending on `success_score`: both ends predict equal scores. A scale
    between the lowest and the highest score of all items would call an item whose answers all earn one half uncertain.

    >>> [num_solved(scores, success_score=1.0) for scores in ([0, 1, 1], [0.2, 0.3, 0.9], [0.5, 0.5], [1, 1])]
    [2, 1, 0, 2]
    """
    lowest, highest = min(scores), max(scores)
    threshold = success_score if lowest == highest else (lowest + highest) / 2
    return sum(score >= threshold for score in scores)


def updated(belief: Sequence[float], *, solved: int, unsolved: int) -> list[float]:
    """Return a belief after a group."""
    return [round(KEPT * old + num, 3) for old, num in zip(belief, (solved, unsolved), strict=True)]


def chance_to_differ(p: float, group_size: int) -> float:
    """Return the probability that answers of success rate `p` are neither all solved nor all unsolved.

    >>> chance_to_differ(0.5, 2), chance_to_differ(1.0, 8)
    (0.5, 0.0)
    """
    return 1.0 - p**group_size - (1.0 - p) ** group_size


def most_promising(
    classes: Sequence[str], beliefs: Beliefs, *, group_size: int, rng: random.Random
) -> int:
    """Return the place of the class whose draw from its posterior is the most likely to give different scores.

    One whose group is awaited for the first time, or that gave none, comes after all others: it may never give one.
    """

    def drawn(name: str) -> tuple[float, float]:
        counts = beliefs.get(name)
        if counts is not None and not any(counts):
            return 0.0, rng.random()
        p = rng.betavariate(*(_PRIOR + count for count in counts or (0.0, 0.0)))
        return chance_to_differ(p, group_size), rng.random()

    draws = [drawn(name) for name in classes]
    return draws.index(max(draws))


def plain_place(number: int, num_items: int) -> int | None:
    """Return the place in the fixed order of item `number`, counted from 0, if it comes from there.

    >>> [plain_place(number, 2) for number in (0, 1, 10, 20)]
    [0, None, 1, 0]
    """
    turn, rest = divmod(number, PLAIN_EVERY)
    return None if rest else turn % num_items
