"""The demo's results: the learning curve, and a comparison with the other mode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atroposlib.cli._demo.evaluation import Accuracy
from atroposlib.cli.launch.step_metrics import StepMetrics
from atroposlib.frontend.charts import SMOOTHING_STEPS, smooth

MODE_FIGURES = {
    "seconds_per_step": "s per step",
    "trainer_waits": "of the time the trainer waits for a batch",
    "staleness_mean": "steps is the mean age of its groups",
}
"""Keys of `summary.json` in which synchronous and asynchronous runs differ, and their captions."""


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
    """Return the values of `MODE_FIGURES`; None where nothing was measured."""
    wall_s = sum(step["wall_s"] for step in steps)
    ages = [step["staleness_mean"] for step in steps if step["staleness_mean"] is not None]
    return {
        "seconds_per_step": round(wall_s / len(steps), 2) if steps else None,
        "trainer_waits": round(sum(step["batch_wait_s"] for step in steps) / wall_s, 3)
        if wall_s
        else None,
        "staleness_mean": round(sum(ages) / len(ages), 2) if ages else None,
    }


def compare_modes(root: Path, summary: dict[str, Any]) -> str:
    """Return a line for this run, and one for the latest of the other mode among its neighbours, if there is one."""
    others = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(
            root.parent.glob(f"{root.name}*/summary.json"), key=lambda path: path.stat().st_mtime
        )
    ]
    shown = [
        each for each in others if each.get("asynchronous") not in (None, summary["asynchronous"])
    ]
    return "\n".join(
        f"{'asynchronous' if each['asynchronous'] else 'synchronous'}: held-out accuracy, sampled, "
        f"{each['heldout_sampled_after']:.3f}; "
        + "; ".join(f"{each[key]} {caption}" for key, caption in MODE_FIGURES.items())
        for each in (*shown[-1:], summary)
    )
