"""Tables as the benchmarks print them: Markdown, each row at once."""

from __future__ import annotations

import math


class Table:
    """The rows of one question."""

    def __init__(self, title: str, *columns: str) -> None:
        print(f"\n### {title}\n")
        print("| " + " | ".join(columns) + " |")
        print("|" + "---|" * len(columns), flush=True)

    def row(self, *values: object) -> None:
        print("| " + " | ".join(shown(value) for value in values) + " |", flush=True)


def shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
