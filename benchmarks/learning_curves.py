"""Does a tiny model learn on real environments? Reward on fresh and score on held-out items, three seeds each.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/learning_curves.py --out runs/curves

A run starts the hub, the local engine, the environment and the trainer as processes, as a user does, and takes a few
minutes on one core. Finished runs in `--out` are kept; delete the folder of one to repeat it. `--picture PATH.svg`
draws all of them and writes PATH.json: environments/learning_curves.svg is made this way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atroposlib.cli._demo.commands import (
    GROUP_SIZE,
    SEQUENCES_PER_STEP,
    TRAINER_RECIPE,
    environment_variables,
    python,
)
from atroposlib.cli.launch.supervisor import free_port, terminate_like_interrupt
from atroposlib.cli.plot_run import SMOOTHING_STEPS, smooth
from atroposlib.utils.json_lines import read_lines
from atroposlib.utils.owned_process import OwnedProcess
from benchmarks._tiny_tasks import (
    MAX_POSITIONS,
    TASKS,
    Task,
    demonstrate,
    make_starting_policy,
    write_rows,
)
from example_trainer.vllm_process import EngineProcess

MODEL_NAME = "tiny"
NUM_SEEDS = 3
POLL_INTERVAL_S = 0.2
COLORS = ("#c96f1a", "#2a85c9", "#3a9a5c", "#a05fc0", "#c9506a")
"""Readable on white and on black, as is the grey of the text."""
GREY = "#808890"
NUM_COLUMNS = 3


def run(task: Task, *, name: str, seed: int, num_steps: int, out: Path) -> dict[str, Any]:
    """Train one seed on one task, write `result.json` and return it."""
    flags = write_rows(task, out / "rows")
    played = asyncio.run(demonstrate(task, flags, seed=seed, num=task.num_demonstrations))
    make_starting_policy(played, out / "model", seed=seed)
    hub_url, engine_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    own = {
        f"env.{key}": json.dumps(value) if isinstance(value, dict) else value
        for key, value in flags.items()
    }
    environment = {
        "env.tokenizer_name": out / "model",
        "env.seed": seed,
        "env.use_wandb": False,
        "openai.base_url": f"{engine_url}/v1",
        "openai.model_name": MODEL_NAME,
        "openai.server_type": "vllm",
        **own,
    }
    collecting = {
        "env.rollout_server_url": hub_url,
        "env.group_size": GROUP_SIZE,
        "env.total_steps": num_steps + 1,
        "env.steps_per_eval": 0,
        "env.max_num_workers": task.prompts_per_step,
        "env.max_batches_offpolicy": 1,
        # The mean reward is that of all fresh items only if no group is left out.
        "env.ensure_scores_are_not_same": False,
    }
    recipe = {**TRAINER_RECIPE, "seq_len": MAX_POSITIONS, "lr": task.learning_rate}
    recipe["batch_size"] = GROUP_SIZE * task.prompts_per_step * task.sequences_per_rollout
    with ExitStack() as stack:

        def start(name: str, program: list[str], url: str = "", route: str = "") -> OwnedProcess:
            log_path, env = out / "logs" / f"{name}.log", environment_variables()
            if url:
                server = EngineProcess(
                    program, what=name, url=url, health_route=route, log_path=log_path, env=env
                )
                return stack.enter_context(server)
            process = OwnedProcess(program, name=name, log_path=log_path, env=env)
            return stack.enter_context(process)

        def wait(process: OwnedProcess) -> None:
            while (status := process.poll()) is None:
                time.sleep(POLL_INTERVAL_S)
            assert status == 0, f"{process.name} failed; see {process.log_path}"

        def heldout(label: str) -> float:
            folder = out / label
            program = python(task.module, **environment, **{"env.data_dir_to_save_evals": folder})
            program.insert(3, "evaluate")
            wait(start(label, program))
            lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
            return statistics.mean(json.loads(line)["score"] for line in lines)

        engine = python(
            "atroposlib.engine",
            model=out / "model",
            port=engine_url.rpartition(":")[2],
            dtype="float32",
            device="cpu",
            threads=1,
            max_num_seqs=SEQUENCES_PER_STEP,
            served_model_name=MODEL_NAME,
            seed=seed,
        )
        start("engine", engine, engine_url, "/health")
        before = heldout("before")
        hub = python("atroposlib.cli.run_api", port=hub_url.rpartition(":")[2], memory=True)
        start("hub", hub, hub_url, "/healthz")
        trainer = python(
            "example_trainer.grpo",
            model_name=out / "model",
            hub_url=hub_url,
            engine_url=engine_url,
            bridge="reload",
            device="cpu",
            dtype="float32",
            num_steps=num_steps,
            seed=seed,
            save_path=out / "checkpoints",
            checkpoint_interval=0,
            metrics_path=out / "metrics.jsonl",
            **recipe,
        )
        training = start("trainer", trainer)
        serve = python(task.module, **environment, **collecting)
        serve.insert(3, "serve")
        serving = start("environment", serve)
        wait(training)
        serving.stop()
        after = heldout("after")
    result = {
        "task": name,
        "seed": seed,
        "random_player": statistics.mean(each.score for each in played),
        "heldout_before": before,
        "heldout_after": after,
        "rewards": [round(step["reward_mean"], 4) for step in read_lines(out / "metrics.jsonl")],
    }
    (out / "result.json").write_text(f"{json.dumps(result)}\n", encoding="utf-8")
    return result


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per task, and write the figures next to it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [name for name in TASKS if any(each["task"] == name for each in results)]
    style = {"svg.hashsalt": "atropos", "svg.fonttype": "none", "text.color": GREY}
    style |= {f"{part}.color": GREY for part in ("xtick", "ytick")}
    style |= {"axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY}
    with rc_context(style):
        num_rows = -(-len(names) // NUM_COLUMNS)
        figure = Figure(figsize=(4 * NUM_COLUMNS, 3.6 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flat
        for unused in panels[len(names) :]:
            unused.set_axis_off()
        for name, axes, color in zip(names, panels, COLORS, strict=False):
            draw_task(axes, name, [each for each in results if each["task"] == name], color)
        figure.savefig(path, transparent=True, metadata={"Date": None})
    lines = ",\n".join(json.dumps(each) for each in results)
    path.with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def draw_task(axes: Any, name: str, results: list[dict[str, Any]], color: str) -> None:
    """Draw the mean of the seeds, the band between the lowest and the highest, and the baseline."""
    smoothed = [smooth(each["rewards"], window=SMOOTHING_STEPS) for each in results]
    steps = range(1, min(map(len, smoothed)) + 1)
    columns = list(zip(*(curve[: len(steps)] for curve in smoothed), strict=True))
    axes.fill_between(
        steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.25, lw=0
    )
    axes.plot(steps, list(map(statistics.mean, columns)), color=color, label="reward, fresh items")
    for at, key in ((0, "heldout_before"), (len(steps), "heldout_after")):
        scores = [each[key] for each in results]
        axes.plot([at] * len(scores), scores, "o", color=color, mfc="none", clip_on=False)
    axes.plot([], [], "o", color=color, mfc="none", label="score, held-out items")
    baseline = statistics.mean(each["random_player"] for each in results)
    axes.axhline(baseline, color=GREY, ls="--", label="random player")
    if (reference := TASKS[name].reference) is not None:
        label, value = reference
        axes.axhline(value, color=GREY, ls=":", label=label)
    seeds = "1 seed" if len(results) == 1 else f"{len(results)} seeds"
    axes.set_title(f"{TASKS[name].title}, {seeds}", fontsize=10)
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False, labelcolor=GREY)


def main() -> int:
    """Run what is missing, print a table, and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(NUM_SEEDS)))
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.tasks:
        for seed in options.seeds:
            folder = options.out / f"{name}-{seed}"
            stored = folder / "result.json"
            if stored.is_file():
                result = json.loads(stored.read_text(encoding="utf-8"))
            else:
                steps = options.steps or TASKS[name].num_steps
                with terminate_like_interrupt():
                    result = run(TASKS[name], name=name, seed=seed, num_steps=steps, out=folder)
            results.append(result)
            last = statistics.mean(result["rewards"][-SMOOTHING_STEPS:])
            print(
                f"{name} seed {seed}: random player {result['random_player']:.3f}, held-out "
                f"{result['heldout_before']:.3f} -> {result['heldout_after']:.3f}, "
                f"reward of the last {SMOOTHING_STEPS} of {len(result['rewards'])} steps {last:.3f}",
                flush=True,
            )
    if options.picture is not None:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
