"""Evaluation results as a table for terminals and Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from atroposlib.utils.estimates import Estimate

_COLUMNS = (
    *("Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"),
    *("95 % interval", "n"),
)
_BETTER_WHEN_HIGHER = ("correct", "acc")


def display_metrics_table(
    task_name: str, metrics: Mapping[str, Any], start_time: float, end_time: float
) -> None:
    """Write the table and the elapsed time to stdout; times are in seconds."""
    sys.stdout.write(metrics_table(task_name, metrics))
    sys.stdout.write(f"Evaluation took {end_time - start_time:.2f} seconds\n")


def metrics_table(task_name: str, metrics: Mapping[str, Any]) -> str:
    """Return one row per metric: numbers with four decimals, other values as text.

    An `Estimate` has its standard error, 95 % interval and number of values; for any other number they are n/a.
    """
    rows = [_COLUMNS]
    for index, (key, value) in enumerate(metrics.items()):
        name = key.removeprefix("eval/").replace("_", " ")
        arrow = "\u2191" if any(word in key for word in _BETTER_WHEN_HIGHER) else ""
        is_number = isinstance(value, Real)
        shown = f"{float(value):.4f}" if is_number else str(value)
        task = task_name if index == 0 else ""
        sign = "\u00b1" if is_number else ""
        rows.append((task, "1", "none", "", name, arrow, shown, sign, *uncertainty(value)))
    return table_of(rows)


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table; the first is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def uncertainty(value: Any) -> tuple[str, str, str]:
    """Return standard error, 95 % interval and n as text; n/a for a number that is no `Estimate`."""
    if not isinstance(value, Estimate):
        unknown = "n/a" if isinstance(value, Real) else ""
        return unknown, unknown, unknown
    stderr = "n/a" if value.stderr is None else f"{value.stderr:.4f}"
    has_interval = value.low is not None and value.high is not None
    interval = f"[{value.low:.4f}, {value.high:.4f}]" if has_interval else "n/a"
    return stderr, interval, str(value.n)


def _line(row: Sequence[str], widths: list[int]) -> str:
    cells = (f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True))
    return "|" + "|".join(cells) + "|"
