"""The demo's results: the learning curve, and a comparison with the other mode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atroposlib.cli._demo.evaluation import Accuracy
from atroposlib.cli.launch.step_metrics import StepMetrics
from atroposlib.cli.plot_run import SMOOTHING_STEPS, smooth
from atroposlib.utils.display import table_of

MODE_FIGURES = {
    "heldout_sampled_after": "Held-out accuracy",
    "seconds_per_step": "Seconds per step",
    "trainer_waits": "Trainer waits, share",
    "staleness_mean": "Group age, steps",
}
"""Keys of `summary.json` in which synchronous and asynchronous runs are compared, and their titles."""


def draw_learning_curve(
    path: Path, steps: Sequence[StepMetrics], *, before: Accuracy, after: Accuracy
) -> None:
    """Plot the mean reward of every step, smoothed, and held-out accuracy before and after."""
    from matplotlib.figure import Figure

    rewards = [step["reward_mean"] for step in steps]
    numbers = range(1, len(rewards) + 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(numbers, rewards, color="tab:blue", alpha=0.3, label="reward of a step")
    smoothed = smooth(rewards, window=SMOOTHING_STEPS)
    axes.plot(numbers, smoothed, color="tab:blue", label=f"mean of {SMOOTHING_STEPS} steps")
    ends = [0, len(rewards)]  # where held-out accuracy is measured: points, no line between them
    axes.plot(ends, [before.sampled, after.sampled], "o", color="tab:orange", label="held-out, T=1")
    axes.plot(ends, [before.greedy, after.greedy], "s", color="tab:green", label="held-out, greedy")
    axes.set(xlabel="optimizer step", ylabel="fraction exactly right", ylim=(0, 1))
    axes.set_title("Reversing five letters: reward and held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def mode_figures(steps: Sequence[StepMetrics]) -> dict[str, float | None]:
    """Return duration, waiting and staleness of a run's steps; None where nothing was measured."""
    wall_s = sum(step["wall_s"] for step in steps)
    waited_s = sum(step["batch_wait_s"] for step in steps)
    ages = [step["staleness_mean"] for step in steps if step["staleness_mean"] is not None]
    return {
        "seconds_per_step": round(wall_s / len(steps), 2) if steps else None,
        "trainer_waits": round(waited_s / wall_s, 3) if wall_s else None,
        "staleness_mean": round(sum(ages) / len(ages), 2) if ages else None,
    }


def compare_modes(root: Path, summary: dict[str, Any]) -> str:
    """Return a table of this run, and of the latest of the other mode among its neighbours, if there is one."""
    paths = root.parent.glob(f"{root.name}*/summary.json")
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in by_age]
    mode = summary["asynchronous"]
    others = [each for each in found if each.get("asynchronous") not in (None, mode)]
    columns: list[Sequence[str]] = [("", *MODE_FIGURES.values())]
    for each in (*others[-1:], summary):
        values = [each[key] for key in MODE_FIGURES]
        name = "asynchronous" if each["asynchronous"] else "synchronous"
        columns.append((name, *("-" if value is None else f"{value:.3g}" for value in values)))
    return table_of(list(zip(*columns, strict=True))).rstrip()
