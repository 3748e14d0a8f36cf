"""`atropos-grpo plot RUN`: the curves of a run as one picture, from its metrics file.

Works during the run as well. `atropos-grpo` starts this as a process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary, require

SMOOTHING_STEPS = 10


class PlotConfig(BaseModel):
    """Arguments of `atropos-grpo plot`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    run: Path
    """A run's save_path, or its metrics file."""
    out: Path | None = None
    """None: learning_curve.png next to the metrics."""


class Panel(NamedTuple):
    """One of the six charts."""

    title: str
    names: Sequence[str]
    is_log: bool = False


PANELS = (
    Panel("reward", ["reward_mean"]),
    Panel("loss", ["loss"]),
    Panel("gradient norm", ["grad_norm"], is_log=True),
    Panel("clipped share, entropy", ["clip_fraction", "entropy_mean"]),
    Panel("logprob gap to the engine [nats]", ["logprob_gap_max", "logprob_gap_mean"], is_log=True),
    Panel("time of a step [s]", ["batch_wait_s", "train_s", "publish_s", "save_s"]),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the run, print the picture's path and return the exit code."""
    return cli_boundary(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    config = parse_flags(
        PlotConfig,
        argv,
        prog="atropos-grpo plot",
        description="Draw the curves of a run as PNG.",
        positional="run",
    )
    print(plot(config))


def plot(config: PlotConfig) -> Path:
    """Draw the run and return the picture's path; ConfigError if there are no metrics."""
    source = config.run / "metrics.jsonl" if config.run.is_dir() else config.run
    steps = read_steps(source)
    figures = require("matplotlib.figure", extra="view")
    figure = figures.Figure(figsize=(12, 6.5), layout="constrained")
    figure.suptitle(f"{source.parent.name}: {len(steps)} steps")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw(axes, panel, steps)
    target = config.out or source.with_name("learning_curve.png")
    figure.savefig(target, dpi=110)
    return target


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file."""
    try:
        text = path.read_text(encoding="utf-8")
        steps = [json.loads(line) for line in text.split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as metrics of a run: {error}") from error
    if not steps:
        raise ConfigError(f"{path} has no steps yet")
    return steps


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Return the mean of each value and up to `window - 1` before it.

    >>> smooth([0.0, 1.0, 1.0], window=2)
    [0.0, 0.5, 1.0]
    """
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


def _draw(axes: Any, panel: Panel, steps: Sequence[dict[str, Any]]) -> None:
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.grid(alpha=0.3)
    drawn = []
    for index, name in enumerate(panel.names):
        points = [(s["step"], s[name]) for s in steps if s.get(name) is not None]
        if panel.is_log:
            points = [(step, value) for step, value in points if value > 0]
        if not points:
            continue
        at, values = zip(*points, strict=True)
        colour = f"C{index}"
        axes.plot(at, values, color=colour, alpha=0.3, marker="." if len(at) == 1 else None)
        axes.plot(at, smooth(values, window=SMOOTHING_STEPS), color=colour, label=name)
        drawn.append(name)
    if not drawn:
        axes.text(0.5, 0.5, "nothing to draw", ha="center", transform=axes.transAxes)
        return
    if panel.is_log:
        axes.set_yscale("log")
    if len(drawn) > 1:
        axes.legend(fontsize=7)


if __name__ == "__main__":
    sys.exit(main())
