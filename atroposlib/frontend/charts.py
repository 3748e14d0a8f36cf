"""The curves of a run from the trainer's metrics, for the viewer's page and for `atropos-grpo plot`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atroposlib.frontend.page import Chart, Curve

StepMetrics: TypeAlias = Mapping[str, Any]
"""One line of the trainer's metrics file."""

OUTLIER_WINDOW = 21
"""Values around one, itself included, whose median it is compared with."""
OUTLIER_DISTANCE = 6.0
"""In standard deviations; at the customary 3.5, a run of thousands of steps marks dozens of ordinary ones."""


class Panel(NamedTuple):
    title: str
    names: Sequence[str]
    is_log: bool = False


SKIPPED = ("zero_advantage", "untrained", "too_long", "too_old")
PANELS = (
    Panel("reward", ["reward_mean"]),
    Panel("length [trained tokens]", ["tokens_per_sequence"]),
    Panel("staleness [steps]", ["staleness_mean", "staleness_max"]),
    Panel("logprob gap to the engine [nats]", ["logprob_gap_max", "logprob_gap_mean"], is_log=True),
    Panel("sequences kept and skipped", ["kept", *SKIPPED]),
    Panel("loss", ["loss"]),
    Panel("gradient norm", ["grad_norm"], is_log=True),
    Panel("clipped share, entropy", ["clip_fraction", "entropy_mean"]),
    Panel("time of a step [s]", ["batch_wait_s", "train_s", "publish_s", "save_s"]),
)


def charts_of(*runs: Sequence[StepMetrics]) -> list[Chart]:
    """Return the panels that have something to show; each chart has the curves of all runs."""
    rows = [_rows(steps) for steps in runs]
    charts = []
    for panel in PANELS:
        curves = [
            Curve(run, name, steps, values, outliers(np.log(values) if panel.is_log else values))
            for run, of_run in enumerate(rows)
            for name, steps, values in _curves(panel, of_run)
        ]
        if curves:
            charts.append(Chart(panel.title, panel.is_log, curves))
    return charts


def outliers(values: Sequence[float] | NDArray[np.float64]) -> list[int]:
    """Return the places of the values that are far from the median of those around them.

    The distances are measured by their median, or by their mean if most are 0: the modified z-score of Iglewicz and
    Hoaglin, "How to Detect and Handle Outliers" (1993).

    >>> outliers([1.0, 1.1, 0.9, 1.0, 9.0, 1.1, 1.0, 0.9])
    [4]
    """
    padded = np.pad(np.asarray(values, float), OUTLIER_WINDOW // 2, "reflect", reflect_type="odd")
    around = np.lib.stride_tricks.sliding_window_view(padded, OUTLIER_WINDOW)
    distances = np.abs(values - np.median(around, axis=1))
    deviation = 1.4826 * np.median(distances) or 1.2533 * np.mean(distances)
    places: list[int] = np.flatnonzero(distances > OUTLIER_DISTANCE * deviation).tolist()
    return places


def _rows(steps: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Return the numbers of the lines of steps; a user's trainer may write others between them."""
    numbers = [
        {k: v for k, v in step.items() if isinstance(v, int | float) and not abs(v) > 1e300}
        for step in steps
    ]
    return [_with_shares(step) for step in numbers if "step" in step]


def _with_shares(step: StepMetrics) -> StepMetrics:
    """Add what two panels show: sequences by what became of them, and trained tokens per kept sequence."""
    if not step.get("num_sequences"):
        return step
    skipped = {name: step.get(f"num_skipped_{name}") or 0 for name in SKIPPED}
    kept = step["num_sequences"] - sum(skipped.values())
    tokens = step.get("num_trained_tokens") if kept else None
    return {**step, **skipped, "kept": kept, "tokens_per_sequence": tokens and tokens / kept}


def _curves(
    panel: Panel, steps: Sequence[StepMetrics]
) -> Iterator[tuple[str, list[int], list[float]]]:
    """Yield the name, the steps and the values of each curve of a panel that has something to show."""
    for name in panel.names:
        points = sorted((s["step"], s[name]) for s in steps if s.get(name) is not None)
        if panel.is_log:
            points = [(step, value) for step, value in points if value > 0]
        if points and (name not in panel.names[2:] or any(value for _, value in points)):
            at, values = zip(*points, strict=True)
            yield name, list(at), list(values)
