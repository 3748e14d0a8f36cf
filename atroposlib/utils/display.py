"""Evaluation results as a table for terminals and Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

_COLUMNS = ("Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
_BETTER_WHEN_HIGHER = ("correct", "acc")


def display_metrics_table(
    task_name: str, metrics: Mapping[str, Any], start_time: float, end_time: float
) -> None:
    """Write the table and the elapsed time to stdout; times are in seconds."""
    sys.stdout.write(metrics_table(task_name, metrics))
    sys.stdout.write(f"Evaluation took {end_time - start_time:.2f} seconds\n")


def metrics_table(task_name: str, metrics: Mapping[str, Any]) -> str:
    """Return one row per metric: numbers with four decimals, other values as text."""
    rows = [_COLUMNS]
    for index, (key, value) in enumerate(metrics.items()):
        name = key.removeprefix("eval/").replace("_", " ")
        arrow = "\u2191" if any(word in key for word in _BETTER_WHEN_HIGHER) else ""
        is_number = isinstance(value, Real)
        rows.append(
            (
                task_name if index == 0 else "",
                "1",
                "none",
                "",
                name,
                arrow,
                f"{float(value):.4f}" if is_number else str(value),
                "\u00b1" if is_number else "",
                "0.0000" if is_number else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = (f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True))
    return "|" + "|".join(cells) + "|"
