"""What the first page of an evaluation shows: its metrics with intervals, and what became of every answer.

`view_groups.py` and `cli/compare_evals.py` add `verdicts` to a view group: which answer was right, and what was read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.utils.estimates import Estimate, estimate_mean

_HEADLINES = ("percent_correct", "accuracy", "acc", "correct", "pass@1", "mean_score", "score")
"""Metrics, without `eval/`, of which the first that an evaluation has is its result."""
TEXT_CHARS = 160
"""Of each text in a row of the table; the group has the whole."""


class Metric(NamedTuple):
    name: str
    value: float | None
    low: float | None = None
    """Ends of the 95 % interval; None if it is unknown."""
    high: float | None = None
    n: int | None = None
    before: float | None = None
    """Of a comparison: the two means whose difference is `value`."""
    after: float | None = None

    @classmethod
    def of(cls, name: str, value: Estimate, **means: float) -> Metric:
        return cls(name, float(value), value.low, value.high, value.n, **means)


def stored_metrics(path: Path) -> list[Metric]:
    """Return the metrics in a `metrics.json`, the result first; [] if there is none or it is no such file."""
    try:
        document = json.loads(path.read_bytes())
        values, estimates = document["results"]["all"], document.get("estimates", {})
        known = [name for name, value in values.items() if isinstance(value, Real)]
        found = [Metric(name, values[name], **_interval(estimates.get(name))) for name in known]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return sorted(found, key=_rank)


def _interval(estimate: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (estimate or {}).get(key) for key in ("low", "high", "n")}


def _rank(metric: Metric) -> int:
    name = metric.name.removeprefix("eval/")
    return _HEADLINES.index(name) if name in _HEADLINES else len(_HEADLINES)


class Evaluation:
    """The metrics, and the verdicts of the view groups that pass through `noting`."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = list(metrics)
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("row", "seq", "kind", "target", "read", "tokens", "why")
        }

    def noting(self, groups: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the view groups, each with its place in the page noted."""
        for row, group in enumerate(groups):
            for verdict in group.get("verdicts", ()):
                for name, values in self._columns.items():
                    value = row if name == "row" else verdict.get(name)
                    values.append(value[:TEXT_CHARS] if isinstance(value, str) else value)
            yield group

    def content(self) -> dict[str, Any] | None:
        """Return the metrics and the table's columns; None without a verdict."""
        if not self._columns["row"]:
            return None
        return {"metrics": [m._asdict() for m in self._with_accuracy()], "rows": self._columns}

    def _with_accuracy(self) -> list[Metric]:
        """Return the metrics; without a result among them, the share of right answers is the first."""
        kinds = zip(self._columns["kind"], self._columns["row"], strict=True)
        judged = [(kind == "right", row) for kind, row in kinds if kind in ("right", "wrong")]
        if not judged:
            return self._metrics
        right, rows = zip(*judged, strict=True)
        share = Metric.of("accuracy", estimate_mean(right, clusters=rows))
        first = self._metrics[0] if self._metrics else None
        if first is None or _rank(first) == len(_HEADLINES):
            return [share, *self._metrics]
        is_share = math.isclose(first.value or 0.0, share.value or 0.0, abs_tol=1e-9)
        if first.low is None and is_share:
            return [share._replace(name=first.name), *self._metrics[1:]]
        return self._metrics
