"""Evaluation results as a table for terminals and Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from atroposlib.utils.estimates import Estimate
from atroposlib.utils.wording import columns_of

_COLUMNS = (
    *("Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"),
    *("95 % interval", "n"),
)
TABLE_COLUMNS = 100
"""Narrower terminals show metrics as a list."""
_BETTER_WHEN_HIGHER = ("correct", "acc")


def display_metrics_table(
    task_name: str, metrics: Mapping[str, Any], start_time: float, end_time: float
) -> None:
    """Write the table and the elapsed time to stdout; times are in seconds."""
    columns = columns_of(sys.stdout)
    is_narrow = columns is not None and columns < TABLE_COLUMNS
    sys.stdout.write((metrics_list if is_narrow else metrics_table)(task_name, metrics))
    sys.stdout.write(f"Evaluation took {end_time - start_time:.2f} seconds\n")


def metrics_table(task_name: str, metrics: Mapping[str, Any]) -> str:
    """Return one row per metric: numbers with four decimals, other values as text.

    An `Estimate` has its standard error, 95 % interval and number of values; for any other number they are n/a.
    """
    rows = [_COLUMNS]
    for index, (key, value) in enumerate(metrics.items()):
        arrow = "\u2191" if any(word in key for word in _BETTER_WHEN_HIGHER) else ""
        task = task_name if index == 0 else ""
        sign = "\u00b1" if isinstance(value, Real) else ""
        row = (task, "1", "none", "", _name(key), arrow, _shown(value), sign)
        rows.append((*row, *uncertainty(value)))
    return table_of(rows)


def metrics_list(task_name: str, metrics: Mapping[str, Any]) -> str:
    """Return one line per metric, for narrow terminals; what is not known is left out.

    >>> print(metrics_list("sums", {"eval/percent_correct": 0.5, "eval/model": "tiny"}), end="")
    sums
      percent correct  0.5000
      model            tiny
    """
    width = max((len(_name(key)) for key in metrics), default=0)
    lines = [task_name]
    for key, value in metrics.items():
        stderr, interval, n = (
            {"n/a": "", "": ""}.get(text, before + text)
            for before, text in zip(
                (" \u00b1 ", "  95 % ", "  n "), uncertainty(value), strict=True
            )
        )
        lines.append(f"  {_name(key):<{width}}  {_shown(value)}{stderr}{interval}{n}")
    return "\n".join(lines) + "\n"


def _name(key: str) -> str:
    return key.removeprefix("eval/").replace("_", " ")


def _shown(value: Any) -> str:
    return f"{float(value):.4f}" if isinstance(value, Real) else str(value)


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
