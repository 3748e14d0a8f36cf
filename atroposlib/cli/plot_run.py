"""`atropos-grpo plot RUN`: the curves of a run as one picture, from its metrics file.

Works during the run as well. `atropos-grpo` starts this as a process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary, require
from atroposlib.frontend.charts import PANELS, StepMetrics, charts_of
from atroposlib.frontend.page import Chart
from atroposlib.frontend.run_files import find_run_files
from atroposlib.utils.json_lines import read_lines

SMOOTHING_STEPS = 10


class PlotConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    run: Path
    """A run's directory, or its metrics file."""
    out: Path | None = None
    """None: learning_curve.png next to the metrics."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the run, print the picture's path and return the exit code."""
    return cli_boundary(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    config = parse_flags(
        PlotConfig,
        argv,
        prog="atropos-grpo plot",
        description="Draw the curves of a run as PNG.",
        positional=["run"],
    )
    print(plot(config))


def plot(config: PlotConfig) -> Path:
    """Draw the run and return the picture's path; ConfigError if there are no metrics."""
    found = find_run_files(config.run).metrics
    if not found:
        raise ConfigError(f"{config.run}: no metrics of a trainer's step yet")
    source = found[0]
    steps = list(read_lines(source))
    figure = draw_run(steps, title=f"{source.resolve().parent.name}: {len(steps)} steps")
    target = config.out or source.with_name("learning_curve.png")
    figure.savefig(target, dpi=110)
    return target


def draw_run(steps: Sequence[StepMetrics], *, title: str) -> Any:
    """Return a matplotlib figure with all panels."""
    figure = require("matplotlib.figure", extra="view").Figure(
        figsize=(12, 9), layout="constrained"
    )
    figure.suptitle(title)
    charts = {chart.title: chart for chart in charts_of(steps)}
    for axes, panel in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        axes.set_title(panel.title, fontsize=10)
        if panel.title in charts:
            _draw(axes, charts[panel.title])
        else:
            axes.text(0.5, 0.5, "nothing to draw", ha="center", transform=axes.transAxes)
    return figure


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    for curve in chart.curves:
        marker = "." if len(curve.steps) == 1 else None
        [line] = axes.plot(curve.steps, curve.values, alpha=0.3, marker=marker)
        smoothed = smooth(curve.values, window=SMOOTHING_STEPS)
        axes.plot(curve.steps, smoothed, color=line.get_color(), label=curve.name)
    if chart.is_log:
        axes.set_yscale("log")
    axes.tick_params(which="both", labelsize=8)
    if len(chart.curves) > 1:
        axes.legend(fontsize=7)


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Return the mean of each value and up to `window - 1` before it.

    >>> smooth([0.0, 1.0, 1.0], window=2)
    [0.0, 0.5, 1.0]
    """
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


if __name__ == "__main__":
    sys.exit(main())
