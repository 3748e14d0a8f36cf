"""The curves of a run from the trainer's metrics, for the viewer's page and `atropos-grpo plot`. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from atroposlib.errors import require
from atroposlib.frontend.page import Chart

StepMetrics: TypeAlias = Mapping[str, Any]
"""One line of the trainer's metrics file."""

SMOOTHING_STEPS = 10
_INK = "#010203"
"""Colour of text and axes; in an SVG it becomes the text colour of the page around it."""


class Panel(NamedTuple):
    title: str
    names: Sequence[str]
    is_log: bool = False


PANELS = (
    Panel("reward", ["reward_mean"]),
    Panel("length [trained tokens]", ["tokens_per_sequence"]),
    Panel("staleness [steps]", ["staleness_mean", "staleness_max"]),
    Panel("logprob gap to the engine [nats]", ["logprob_gap_max", "logprob_gap_mean"], is_log=True),
    Panel("sequences kept and skipped", ["kept", "zero_advantage", "untrained", "too_long"]),
    Panel("loss", ["loss"]),
    Panel("gradient norm", ["grad_norm"], is_log=True),
    Panel("clipped share, entropy", ["clip_fraction", "entropy_mean"]),
    Panel("time of a step [s]", ["batch_wait_s", "train_s", "publish_s", "save_s"]),
)


def charts_of(steps: Sequence[StepMetrics]) -> list[Chart]:
    """Draw the panels that have something to show; MissingDependency without matplotlib."""
    rows = _rows(steps)
    figures = require("matplotlib.figure", extra="view")
    charts = []
    for panel in PANELS:
        figure = figures.Figure(figsize=(4.6, 2.6), layout="constrained")
        figure.patch.set_alpha(0)
        if _draw(figure.subplots(), panel, rows, ink=_INK):
            charts.append(Chart(panel.title, _svg(figure)))
    return charts


def draw_run(steps: Sequence[StepMetrics], *, title: str) -> Any:
    """Return a matplotlib figure with all panels."""
    rows = _rows(steps)
    figure = require("matplotlib.figure", extra="view").Figure(
        figsize=(12, 9), layout="constrained"
    )
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        axes.set_title(panel.title, fontsize=10)
        if not _draw(axes, panel, rows, ink="black"):
            axes.text(0.5, 0.5, "nothing to draw", ha="center", transform=axes.transAxes)
    return figure


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Return the mean of each value and up to `window - 1` before it.

    >>> smooth([0.0, 1.0, 1.0], window=2)
    [0.0, 0.5, 1.0]
    """
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


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
    skipped = {
        name: step.get(f"num_skipped_{name}") or 0
        for name in ("zero_advantage", "untrained", "too_long")
    }
    kept = step["num_sequences"] - sum(skipped.values())
    tokens = step.get("num_trained_tokens") if kept else None
    return {**step, **skipped, "kept": kept, "tokens_per_sequence": tokens and tokens / kept}


def _draw(axes: Any, panel: Panel, steps: Sequence[StepMetrics], *, ink: str) -> bool:
    """Draw a panel; return whether there was anything to draw."""
    axes.set_facecolor("none")
    axes.set_xlabel("optimizer step", fontsize=8, color=ink)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=ink, which="both", labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.grid(alpha=0.3)
    drawn = []
    for index, name in enumerate(panel.names):
        points = [(s["step"], s[name]) for s in steps if s.get(name) is not None]
        if panel.is_log:
            points = [(step, value) for step, value in points if value > 0]
        if not points or (name in panel.names[2:] and not any(value for _, value in points)):
            continue
        at, values = zip(*points, strict=True)
        colour = f"C{index}"
        axes.plot(at, values, color=colour, alpha=0.3, marker="." if len(at) == 1 else None)
        axes.plot(at, smooth(values, window=SMOOTHING_STEPS), color=colour, label=name)
        drawn.append(name)
    if panel.is_log and drawn:
        axes.set_yscale("log")
        axes.tick_params(colors=ink, which="both", labelsize=8)
    if len(drawn) > 1:
        axes.legend(fontsize=7, framealpha=0, labelcolor=ink)
    return bool(drawn)


def _svg(figure: Any) -> str:
    """Return the picture with text as text and without a header, a date or a background."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace(_INK, "currentColor").strip()
