"""The demo's results: the learning curve and a page of rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from atroposlib.cli._demo.evaluation import Accuracy
from atroposlib.cli._demo.progress import StepMetrics
from atroposlib.utils.letter_reversal import answer_to

_SMOOTHING_STEPS = 10
_GROUPS_SHOWN = 6
"""Number of first groups shown, and of last groups."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rollouts of the demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.4; }}
body {{ max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 0 0 1.5rem; width: 100%; }}
caption {{ text-align: left; padding: .3rem 0; font-weight: 600; }}
th, td {{ text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #8884; }}
code {{ font-size: 1.05em; }}
.right {{ background: #2da44e33; }} .wrong {{ background: #cf222e22; }}
.sections {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 2rem; }}
</style></head><body>
<h1>Rollouts of the demo</h1>
<p>The task: reverse the letters, then stop. Reward 1 for exactly that, else 0.</p>
<div class="sections">{sections}</div>
</body></html>
"""


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
    axes.plot(
        numbers,
        smooth(rewards, window=_SMOOTHING_STEPS),
        color="tab:blue",
        label=f"mean of {_SMOOTHING_STEPS} steps",
    )
    ends = [
        0,
        len(rewards),
    ]  # held-out accuracy is measured at the ends only: points, no line between them
    axes.plot(ends, [before.sampled, after.sampled], "o", color="tab:orange", label="held-out, T=1")
    axes.plot(ends, [before.greedy, after.greedy], "s", color="tab:green", label="held-out, greedy")
    axes.set(xlabel="optimizer step", ylabel="fraction exactly right", ylim=(0, 1))
    axes.set_title("Reversing five letters: reward and held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Return the mean of each value and up to `window - 1` before it.

    >>> smooth([0.0, 1.0, 1.0], window=2)
    [0.0, 0.5, 1.0]
    """
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def write_rollouts_page(path: Path, rollouts: Path) -> None:
    """Write an HTML page of the first and the last groups of a JSONL file of groups."""
    groups = read_ends(rollouts, num_groups=_GROUPS_SHOWN)
    early, late = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    sections = _section("Early", early) + _section("Late", late)
    path.write_text(_PAGE.format(sections=sections), encoding="utf-8")


def read_ends(rollouts: Path, *, num_groups: int) -> list[dict[str, Any]]:
    """Return the first and the last `num_groups` groups, or all of a short file.

    Only complete lines are read: the environment may have been stopped while writing one.
    """
    whole = rollouts.read_text(encoding="utf-8").split("\n")[:-1]
    if len(whole) > 2 * num_groups:
        whole = whole[:num_groups] + whole[-num_groups:]
    return [json.loads(line) for line in whole]


def _section(title: str, groups: Sequence[dict[str, Any]]) -> str:
    return f"<section><h2>{title}</h2>{''.join(map(_table, groups))}</section>"


def _table(group: dict[str, Any]) -> str:
    prompt = group["messages"][0][0]["content"]
    rows = "".join(
        f'<tr class="{"right" if score > 0 else "wrong"}"><td><code>'
        f"{escape(conversation[-1]['content'])}</code></td><td>{score:g}</td></tr>"
        for conversation, score in zip(group["messages"], group["scores"], strict=True)
    )
    return (
        f"<table><caption><code>{escape(prompt)}</code> expects "
        f"<code>{escape(answer_to(prompt))}</code></caption>"
        f"<tr><th>completion</th><th>reward</th></tr>{rows}</table>"
    )
