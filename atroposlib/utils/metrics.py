"""Summaries of lists of numbers for metric dictionaries. Pure; called by environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def get_std_min_max_avg(
    name: str, data: Sequence[float], metrics_dict: dict[str, Any]
) -> dict[str, Any]:
    """Add `<name>_mean`, `_std` (population), `_max` and `_min` (if there are data) to `metrics_dict`; return it.

    >>> get_std_min_max_avg("len", [1, 3], {})
    {'len_mean': 2.0, 'len_std': 1.0, 'len_max': 3.0, 'len_min': 1.0}
    """
    if len(data) == 0:
        return metrics_dict
    for stat in ("mean", "std", "max", "min"):
        metrics_dict[f"{name}_{stat}"] = float(getattr(np, stat)(data))
    return metrics_dict
