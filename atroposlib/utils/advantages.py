"""Returns and advantages from (possibly jagged) nested lists of rewards. Pure numpy; called by environments.

Jagged input stays jagged: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

NestedNumbers: TypeAlias = Any
"""A number, or a sequence or array of these, nested to any depth."""


class Stats(TypedDict):
    """Population statistics."""

    mean: float
    var: float


def allclose_to_first(
    values: ArrayLike,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    return_vector: bool = False,
) -> bool | NDArray[np.bool_]:
    """Return whether every entry along axis 0 is close to the first; with `return_vector`, per entry.

    >>> allclose_to_first([1.0, 1.0, 2.0], return_vector=True).tolist()
    [True, True, False]
    """
    array = np.asarray(values)
    close = np.isclose(array, array[:1], rtol=rtol, atol=atol, equal_nan=equal_nan)
    if return_vector:
        vector: NDArray[np.bool_] = close.reshape(len(array), -1).all(axis=1)
        return vector
    return bool(close.all())


def compute_stats(data: NestedNumbers) -> Stats:
    """Return mean and population variance of all numbers in `data`; ValueError if there are none.

    >>> compute_stats([1, [2, 3]])["mean"]
    2.0
    """
    numbers = np.fromiter(_numbers(data), dtype=np.float64)
    if numbers.size == 0:
        raise ValueError("compute_stats needs at least one number")
    return Stats(mean=float(numbers.mean()), var=float(numbers.var()))


def compute_discounted_returns(
    rewards: Sequence[float] | NDArray[Any], gamma: float
) -> NDArray[np.float32]:
    """Return G[t] = r[t] + gamma * G[t + 1] for every step, as float32.

    >>> compute_discounted_returns([1, 1, 1], 0.5).tolist()
    [1.75, 1.5, 1.0]
    """
    steps = np.asarray(rewards, dtype=np.float64)
    returns = np.zeros(steps.shape, dtype=np.float64)
    later = 0.0
    for t in reversed(range(len(steps))):
        later = returns[t] = steps[t] + gamma * later
    return returns.astype(np.float32)


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float]] | Sequence[NDArray[Any]],
    gamma: float | None = None,
    std_tol: float = 1e-8,
) -> list[NDArray[np.float32]]:
    """Return the advantage of every step of every trajectory (GRPO with process supervision, arXiv:2402.03300, 4.1.3).

    Rewards are normalised by mean and standard deviation over all steps of the group; a step's advantage is the sum of
    the normalised rewards from that step on (`gamma` None), or their discounted return. ValueError if the deviation is
    below `std_tol`.
    """
    stats = compute_stats(rewards)
    std = stats["var"] ** 0.5
    if std < std_tol:
        raise ValueError(
            f"the rewards have a standard deviation of {std:g}, below std_tol {std_tol:g}: "
            "a group of equal rewards has no advantages"
        )
    return [
        compute_discounted_returns(
            (np.asarray(trajectory, dtype=np.float64) - stats["mean"]) / std,
            1.0 if gamma is None else gamma,
        )
        for trajectory in rewards
    ]


def _numbers(data: NestedNumbers) -> Iterator[float]:
    if isinstance(data, str | bytes) or not hasattr(data, "__iter__"):
        yield float(data)
        return
    for entry in data.reshape(-1) if isinstance(data, np.ndarray) else data:
        yield from _numbers(entry)
