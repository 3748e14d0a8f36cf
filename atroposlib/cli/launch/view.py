"""What `atropos up` prints: every part's log with its name before each line, and on a terminal a table below it."""

from __future__ import annotations

import asyncio
from itertools import cycle
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atroposlib.cli.launch.status import HubView, describe_queue, read_hub
from atroposlib.cli.launch.step_metrics import describe_step, sparkline, step_of
from atroposlib.cli.launch.supervisor import Launcher
from atroposlib.client import HubClient
from atroposlib.errors import HubError
from atroposlib.utils.json_lines import LineTail

REFRESH_S = 0.25
READ_HUB_S = 2.0
COLOURS = (
    "cyan",
    "green",
    "yellow",
    "magenta",
    "blue",
    "bright_red",
    "bright_cyan",
    "bright_green",
)
STATE_STYLES = {
    "running": "green",
    "ready": "green",
    "restarting": "red",
    "starting": "yellow",
    "ended": "dim",
}
MAX_ROWS = 20
"""Parts shown in the table; those that are not ready come first."""


class RunView:
    """Prints the run until the block ends."""

    def __init__(self, console: Console, *, log_dir: Path, names: list[str]) -> None:
        self._console = console
        self._width = max(map(len, names))
        self._colours = dict(zip(names, cycle(COLOURS), strict=False))
        self._logs = {name: LineTail(log_dir / f"{name}.log", skip_existing=True) for name in names}
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._seen: HubView | None = None
        self._rewards: list[float] = []
        self._last_step = ""

    def say(self, name: str, text: str) -> None:
        """Print a line of the launcher about a part."""
        self._print(name, Text(text, style="bold"))

    async def show(self, launcher: Launcher, *, metrics: LineTail) -> None:
        """Print new lines and refresh the table, until cancelled."""
        while True:
            self.print_logs()
            for step in filter(None, map(step_of, metrics.read())):
                self._rewards.append(step["reward_mean"])
                self._last_step = describe_step(step)
            if self._live.is_started:
                self._live.update(self._page(launcher), refresh=True)
            await asyncio.sleep(REFRESH_S)

    async def read_hub(self, hub: HubClient) -> None:
        """Read the hub again and again, until cancelled."""
        while True:
            try:
                self._seen = await read_hub(hub)
            except HubError:
                self._seen = None  # its row shows that it is not ready
            await asyncio.sleep(READ_HUB_S)

    def print_logs(self) -> None:
        """Print what the parts have written since the last call."""
        for name, log in self._logs.items():
            for line in log.read():
                if line and not line.startswith("--- "):  # the line before each start
                    self._print(name, Text.from_ansi(line))

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.print_logs()
        if self._live.is_started:
            self._live.stop()

    def _print(self, name: str, text: Text) -> None:
        prefix = Text(f"{name:{self._width}} | ", style=self._colours.get(name, ""))
        self._console.print(prefix + text, soft_wrap=True, highlight=False)

    def _page(self, launcher: Launcher) -> Group:
        table = Table("part", "state", "pid", "restarts", box=None, pad_edge=False)
        parts = sorted(
            launcher.programs.values(), key=lambda each: each.state in ("running", "ready")
        )
        for each in parts[:MAX_ROWS]:
            table.add_row(
                Text(each.name, style=self._colours.get(each.name, "")),
                Text(each.state, style=STATE_STYLES.get(each.state, "")),
                str(each.process.pid or "-"),
                str(each.num_restarts),
            )
        lines = [f"... {len(parts) - MAX_ROWS} more"] if len(parts) > MAX_ROWS else []
        if self._seen is not None:
            lines.append(describe_queue(self._seen))
            if self._seen.explanation.batch == "none":
                lines.append(f"no batch: {self._seen.explanation.reason}")
        if self._rewards:
            width = max(10, self._console.width - 8)
            lines.append(f"last step: {self._last_step}")
            lines.append(f"reward {sparkline(self._rewards, width=width)}")
        return Group(Text("-" * self._console.width, style="dim"), table, Text("\n".join(lines)))
