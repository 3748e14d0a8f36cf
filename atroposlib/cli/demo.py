"""`atropos-demo`: the complete training loop on one machine in about a minute, without downloads.

Builds a tiny model, warms it up with supervised steps, then runs hub, inference engine, environment and trainer as
separate processes over HTTP, shows the progress, and writes a directory with the learning curve, rollouts, logs and
`summary.json`. The processes are the same as in real use; `config.yaml` in the directory records every command line.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console

from atroposlib.cli._demo.commands import (
    MODEL_NAME,
    DemoConfig,
    DemoFiles,
    engine_command,
    engine_variables,
    environment_command,
    environment_variables,
    python,
    started_early,
    trainer_command,
    warm_up_command,
)
from atroposlib.cli._demo.evaluation import Accuracy, measure
from atroposlib.cli._demo.progress import Display
from atroposlib.cli._demo.report import compare_modes, draw_learning_curve, mode_figures
from atroposlib.cli.launch.step_metrics import StepMetrics
from atroposlib.cli.launch.supervisor import (
    POLL_INTERVAL_S,
    Launcher,
    Program,
    Running,
    free_port,
    launched,
    locked,
    terminate_like_interrupt,
)
from atroposlib.config import parse_flags
from atroposlib.errors import (
    AtroposError,
    ConfigError,
    MissingDependency,
    cli_boundary,
    install_command,
)
from atroposlib.frontend.run_files import find_run_files, write_run_page
from atroposlib.utils.json_lines import LineTail
from atroposlib.utils.letter_reversal import Split, distinct_prompts

NUM_HELDOUT_PROMPTS = 500
_STARTUP_TIMEOUT_S = 600.0
"""For the engine, which is started before the warm-up ends."""
_NEEDED_MODULES = ("torch", "transformers", "safetensors", "matplotlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    before: Accuracy
    after: Accuracy
    steps: list[StepMetrics]
    stopped_by: Literal["steps", "max_minutes"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; exit code 0, or the error of the part that failed."""
    return cli_boundary(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    config = parse_flags(
        DemoConfig,
        argv,
        prog="atropos-demo",
        description="Watch a tiny model learn to reverse letters: hub, engine, environment and "
        "trainer on this machine.",
    )
    _check_prerequisites(config)
    display = Display(Console(), num_steps=config.steps)
    with terminate_like_interrupt(), _claim(config.out, display) as files:
        run_demo(config, files, display)


def run_demo(config: DemoConfig, files: DemoFiles, display: Display) -> None:
    """Run everything and write the results into the claimed directory."""
    started_at = time.monotonic()
    outcome = asyncio.run(_warm_up_and_train(config, files, display))
    costs = {
        "cpu_seconds": round(_cpu_seconds(), 1),  # all parts have been reaped, so theirs is counted
        "wall_seconds": round(time.monotonic() - started_at, 1),
    }
    summary = write_summary(config, files, outcome, costs=costs)
    before, after, gap = outcome.before, outcome.after, summary["max_logprob_gap"]
    display.say(
        f"held-out accuracy, sampled: {before.sampled:.3f} -> {after.sampled:.3f}, "
        f"greedy: {before.greedy:.3f} -> {after.greedy:.3f}\n"
        "largest logprob gap between engine and trainer: "
        f"{'not measured' if gap is None else format(gap, '.1e')}; "
        f"{costs['cpu_seconds']:.0f} s of CPU time, {costs['wall_seconds']:.0f} s in all\n"
        f"{compare_modes(files.root, summary)}"
    )
    draw(files, outcome)
    display.say(
        f"see {files.root}/: learning_curve.png, rollouts.html, summary.json,\nconfig.yaml, logs/"
    )


def write_summary(
    config: DemoConfig, files: DemoFiles, outcome: Outcome, *, costs: Mapping[str, float]
) -> dict[str, Any]:
    """Write `summary.json` and return it."""
    steps = outcome.steps
    gaps = [step["logprob_gap_max"] for step in steps if step["logprob_gap_max"] is not None]
    summary = {
        "heldout_sampled_before": outcome.before.sampled,
        "heldout_sampled_after": outcome.after.sampled,
        "heldout_greedy_before": outcome.before.greedy,
        "heldout_greedy_after": outcome.after.greedy,
        "max_logprob_gap": max(gaps, default=None),
        "steps": len(steps),
        "groups": sum(step["num_groups"] for step in steps),
        **costs,
        "seed": config.seed,
        "engine": config.engine,
        "asynchronous": config.asynchronous,
        **mode_figures(steps),
        "stopped_by": outcome.stopped_by,
    }
    files.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def draw(files: DemoFiles, outcome: Outcome) -> None:
    """Write the learning curve and the viewer's page."""
    curve = files.root / "learning_curve.png"
    draw_learning_curve(curve, outcome.steps, before=outcome.before, after=outcome.after)
    write_run_page(
        find_run_files(files.root),
        files.root / "rollouts.html",
        title="Rollouts of the demo",
        about="The task: reverse the letters, then stop. Reward 1 for exactly that, else 0",
    )


async def _warm_up_and_train(config: DemoConfig, files: DemoFiles, display: Display) -> Outcome:
    hub_port, engine_port = free_port(), free_port()
    hub_url, engine_url = f"http://127.0.0.1:{hub_port}", f"http://127.0.0.1:{engine_port}"
    urls = {"hub_url": hub_url, "engine_url": engine_url}
    warm_up = Program(name="warm up", argv=warm_up_command(config, files), ready="exit")
    hub = Program(
        name="hub",
        argv=python("atroposlib.cli.run_api", host="127.0.0.1", port=hub_port, memory=True),
        url=hub_url,
        ready="/healthz",
        timeout_s=_STARTUP_TIMEOUT_S,
    )
    engine = Program(
        name="engine",
        argv=engine_command(config, files, port=engine_port),
        url=engine_url,
        ready="/health",
        timeout_s=_STARTUP_TIMEOUT_S,
        env=engine_variables(config),
    )
    trainer = Program(name="trainer", argv=trainer_command(config, files, **urls))
    environment = Program(name="environment", argv=environment_command(config, files, **urls))
    parts = (warm_up, hub, engine, trainer, environment)
    commands = {part.name: list(part.argv) for part in parts}
    record = {"demo": config.model_dump(mode="json"), "commands": commands}
    text = yaml.safe_dump(record, sort_keys=False, width=1000)
    (files.root / "config.yaml").write_text(text, encoding="utf-8")
    early = [_early(part, files) for part in (engine, trainer, environment)]
    async with launched(log_dir=files.logs, env=environment_variables()) as launcher:
        launcher.start(hub)
        display.say(
            "warming up: supervised steps until a quarter of the sampled answers are correct"
        )
        warming = launcher.start(warm_up)
        sampling, training, rollouts = (launcher.start(part) for part in early)
        await _warm_up(warming, files, display)
        await sampling.is_ready.wait()

        prompts = distinct_prompts(Split.HELDOUT, count=NUM_HELDOUT_PROMPTS, seed=0)
        before = await asyncio.to_thread(measure, engine_url, MODEL_NAME, prompts)
        display.say(f"held-out accuracy: sampled {before.sampled:.3f}, greedy {before.greedy:.3f}")
        files.measured.touch()  # the environment begins, so that no step comes before

        steps, stopped_by = await _train(config, files, display, launcher, training)
        launcher.stop(rollouts)
        after = await asyncio.to_thread(measure, engine_url, MODEL_NAME, prompts)
    return Outcome(before=before, after=after, steps=steps, stopped_by=stopped_by)


def _early(part: Program, files: DemoFiles) -> Program:
    """Return the part with a command that imports its modules first and then waits for what it needs."""
    if part.argv[0] != sys.executable:  # vLLM has an interpreter of its own
        return replace(part, needs=["warm up"])
    after, imports = files.model, ["transformers.models.qwen2.modeling_qwen2"]
    if part.name == "environment":
        after, imports = files.measured, ["transformers.models.auto.tokenization_auto"]
    elif part.name == "trainer":
        imports += ["example_trainer.training"]
    return replace(part, argv=started_early(list(part.argv), files, after=after, imports=imports))


async def _warm_up(warm_up: Running, files: DemoFiles, display: Display) -> None:
    checks = LineTail(files.warm_up_progress)

    def show_checks() -> None:
        for check in map(json.loads, checks.read()):
            display.say(f"  step {check['step']:>3}  validation accuracy {check['accuracy']:.3f}")

    await _follow(warm_up, show=show_checks, timeout_s=None)


async def _train(
    config: DemoConfig, files: DemoFiles, display: Display, launcher: Launcher, trainer: Running
) -> tuple[list[StepMetrics], Literal["steps", "max_minutes"]]:
    """Follow the trainer until it ends or the time limit; return its metrics and which of the two came first."""
    lines = LineTail(files.metrics)
    steps: list[StepMetrics] = []

    def show_steps() -> None:
        for metrics in map(json.loads, lines.read()):
            steps.append(metrics)
            display.show_step(metrics)

    timeout_s = None if config.max_minutes is None else config.max_minutes * 60
    with display:
        if not await _follow(trainer, show=show_steps, timeout_s=timeout_s):
            launcher.stop(trainer)
            display.say(f"stopped after {config.max_minutes:g} minutes")
            return steps, "max_minutes"
    if len(steps) != config.steps:
        raise AtroposError(f"the trainer reported {len(steps)} steps, not {config.steps}")
    return steps, "steps"


async def _follow(running: Running, *, show: Callable[[], None], timeout_s: float | None) -> bool:
    """Call `show` until the program has ended, and once more; False if it still runs after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not running.has_ended.is_set():
                show()
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        return False
    show()
    return True


def _check_prerequisites(config: DemoConfig) -> None:
    """Raise for missing modules and wrong flags that would otherwise fail after minutes."""
    needed = [*_NEEDED_MODULES, *(["wandb"] if config.wandb else [])]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        extra = "demo,wandb" if config.wandb else "demo"
        raise MissingDependency(
            f"the demo needs {', '.join(missing)}; run: {install_command(extra)}"
        )
    if config.engine == "vllm" and config.vllm_python is None:
        raise ConfigError(
            "--engine vllm needs --vllm_python, the interpreter of the environment that has vLLM"
        )
    if config.vllm_python is not None and shutil.which(config.vllm_python) is None:
        raise ConfigError(f"--vllm_python {config.vllm_python}: there is no such program")
    if config.engine == "local" and config.vllm_python is not None:
        raise ConfigError("--vllm_python is for --engine vllm; add that or omit this")


@contextmanager
def _claim(out: Path, display: Display) -> Iterator[DemoFiles]:
    """Lock `out` for this run and rename an earlier run there.

    Raises ConfigError if another demo is running there or the directory holds other files.
    """
    out = out.absolute()
    with locked(out, flag=f"--out {out}"):
        if out.exists():
            if not out.is_dir() or (any(out.iterdir()) and not (out / "config.yaml").is_file()):
                raise ConfigError(f"--out {out} exists and is not a run of the demo; name another")
            names = (out.with_name(f"{out.name}-{number}") for number in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            out.rename(aside)
            display.say(f"an earlier run was moved to {aside}")
        files = DemoFiles(out)
        files.logs.mkdir(parents=True)
        yield files


def _cpu_seconds() -> float:
    """Return the user and system time of this process and of all reaped child processes."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    raise SystemExit(main())
