"""`atropos-grpo plot RUN`: the curves of a run as one picture, from its metrics file.

Works during the run as well. `atropos-grpo` starts this as a process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, cli_boundary
from atroposlib.frontend.charts import draw_run
from atroposlib.frontend.run_files import find_run_files
from atroposlib.utils.json_lines import read_lines


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


if __name__ == "__main__":
    sys.exit(main())
