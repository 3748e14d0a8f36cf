"""The trainer's metrics, shown as one line for each step and as a curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from atroposlib.utils.json_lines import decode_object

StepMetrics: TypeAlias = Mapping[str, Any]
"""One line of the trainer's metrics file."""

_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def step_of(line: str) -> StepMetrics | None:
    """Return a line with the keys that are shown; None for a line of a trainer that writes others."""
    try:
        found = decode_object(line.encode())
    except ValueError:
        return None
    return found if {"reward_mean", "num_trained_tokens", "wall_s"} <= found.keys() else None


def describe_step(metrics: StepMetrics) -> str:
    """Return one line: reward, throughput, staleness, queue, agreement of engine and trainer.

    >>> describe_step({"reward_mean": 0.5, "num_trained_tokens": 1500, "wall_s": 0.5})
    'reward 0.500  3,000 trained tok/s  staleness -  queue -  logprob gap -'
    """
    tokens_per_s = metrics["num_trained_tokens"] / max(metrics["wall_s"], 1e-9)
    return (
        f"reward {metrics['reward_mean']:.3f}  {tokens_per_s:,.0f} trained tok/s  "
        f"staleness {_number(metrics.get('staleness_mean'), '.1f')}  "
        f"queue {_number(metrics.get('queue_size'), 'd')}  "
        f"logprob gap {_number(metrics.get('logprob_gap_max'), '.1e')}"
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def sparkline(values: list[float], *, width: int) -> str:
    """Draw values between 0 and 1 as one line of at most `width` blocks, averaging neighbours.

    >>> sparkline([0.0, 0.5, 1.0], width=3)
    ' ▄█'
    """
    if not values:
        return ""
    num_columns = min(width, len(values))
    edges = [round(column * len(values) / num_columns) for column in range(num_columns + 1)]
    means = [
        sum(values[left:right]) / (right - left)
        for left, right in zip(edges[:-1], edges[1:], strict=True)
    ]
    return "".join(_BLOCKS[round(min(max(mean, 0.0), 1.0) * 8)] for mean in means)
