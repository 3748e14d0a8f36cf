"""The demo's progress output: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from atroposlib.cli.launch.step_metrics import StepMetrics, describe_step, sparkline

_PLAIN_LINES = 30
"""Approximate number of step lines printed without a terminal."""


class Display:
    """Prints the phases and the state of training after each step."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._rewards: list[float] = []
        self._progress = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._bar = self._progress.add_task("step", total=num_steps, start=False)
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        """Begin the training phase."""
        if self._console.is_terminal:
            self._progress.start_task(self._bar)
            self._live.update(self._view(Text("waiting for the first batch")))
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def show_step(self, metrics: StepMetrics) -> None:
        self._rewards.append(metrics["reward_mean"])
        line = describe_step(metrics)
        step = len(self._rewards)
        if self._live.is_started:
            self._progress.update(self._bar, completed=step)
            self._live.update(self._view(Text(line)))
        elif step % max(1, self._num_steps // _PLAIN_LINES) == 0 or step in (1, self._num_steps):
            self.say(f"step {step:>4}/{self._num_steps}  {line}")

    def _view(self, line: Text) -> Group:
        width = max(10, self._console.width - 8)
        return Group(self._progress, line, Text(f"reward {sparkline(self._rewards, width=width)}"))
