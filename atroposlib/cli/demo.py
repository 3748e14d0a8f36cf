"""`atropos-demo`: the whole loop on one machine in a few minutes, with nothing downloaded.

Makes a tiny model, warms it up with supervised steps, then runs hub, inference engine, environment and
trainer as separate processes over HTTP, shows the learning live, and leaves a directory with the
learning curve, rollouts, logs and `summary.json`. The parts are the real ones and start as a user
would start them; `config.yaml` in the directory records every command line.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import yaml
from pydantic import BaseModel, Field
from rich.console import Console

import atroposlib
from atroposlib.cli._demo.evaluation import Accuracy, measure
from atroposlib.cli._demo.parts import Part, Parts, free_port, terminate_like_interrupt
from atroposlib.cli._demo.progress import Display, JsonLines, StepMetrics
from atroposlib.cli._demo.report import draw_learning_curve, write_rollouts_page
from atroposlib.cli._demo.tiny_model import MAX_POSITIONS
from atroposlib.config import parse_flags
from atroposlib.errors import AtroposError, ConfigError, MissingDependency, cli_boundary
from atroposlib.utils.letter_reversal import Split, distinct_prompts

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8
SEQUENCES_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
TRAINER_RECIPE = {
    "batch_size": SEQUENCES_PER_STEP,
    "gradient_accumulation_steps": 1,
    "seq_len": 32,
    "lr": 1.5e-4,
    "warmup_steps": 10,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "clip_eps": 0.2,
    "loss_mean": "token",
    "scale_advantages": True,
    "kl_coef": 0.0,
}
"""Found by trying: at twice the learning rate without a warm-up the model forgets the task."""

NUM_HELDOUT_PROMPTS = 500
MODEL_NAME = "demo"
_STARTUP_TIMEOUT_S = {"local": 180.0, "vllm": 600.0}
_NEEDED_MODULES = ("torch", "transformers", "safetensors", "matplotlib")


class DemoConfig(BaseModel):
    """Flags of the demo."""

    seed: int = Field(default=0, description="Seed of the weights, the rows and the sampling")
    steps: int = Field(default=150, ge=1, description="Optimizer steps of reinforcement learning")
    out: Path = Field(
        default=Path("runs/demo"),
        description="Directory to leave the results in; an earlier run there is moved aside",
    )
    engine: Literal["local", "vllm"] = Field(
        default="local", description="Inference engine: atropos-engine, or vLLM"
    )
    vllm_python: str | None = Field(
        default=None,
        description="Interpreter of the virtual environment that has vLLM; with --engine vllm",
    )
    wandb: bool = Field(default=False, description="Log to Weights & Biases as well")
    max_minutes: float | None = Field(
        default=30.0, gt=0, description="Stop training after this long and measure; None: no limit"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where everything of one run lies."""

    root: Path

    @property
    def logs(self) -> Path:
        """One log file per part."""
        return self.root / "logs"

    @property
    def model(self) -> Path:
        """The model after the warm-up."""
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.root / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Every group the environment accepted, one JSON line each."""
        return self.root / "rollouts.jsonl"

    @property
    def metrics(self) -> Path:
        """The trainer's metrics, one JSON line per step."""
        return self.root / "metrics.jsonl"

    @property
    def warm_up_progress(self) -> Path:
        """Validation accuracy during the warm-up, one JSON line per check."""
        return self.root / "warm_up.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured."""

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


def run_demo(config: DemoConfig, files: RunFiles, display: Display) -> None:
    """Run everything and write the results into the claimed directory."""
    started_at = time.monotonic()
    with Parts(log_dir=files.logs, env=_environment_variables()) as parts:
        outcome = _warm_up_and_train(config, files, display, parts)
    # All parts are reaped by now, so their CPU time is counted.
    summary = {
        "heldout_sampled_before": outcome.before.sampled,
        "heldout_sampled_after": outcome.after.sampled,
        "heldout_greedy_before": outcome.before.greedy,
        "heldout_greedy_after": outcome.after.greedy,
        "max_logprob_gap": _largest_gap(outcome.steps),
        "steps": len(outcome.steps),
        "groups": sum(step["num_groups"] for step in outcome.steps),
        "cpu_seconds": round(_cpu_seconds(), 1),
        "wall_seconds": round(time.monotonic() - started_at, 1),
        "seed": config.seed,
        "engine": config.engine,
        "stopped_by": outcome.stopped_by,
    }
    (files.root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draw_learning_curve(
        files.root / "learning_curve.png",
        outcome.steps,
        before=outcome.before,
        after=outcome.after,
    )
    write_rollouts_page(files.root / "rollouts.html", files.rollouts)
    gap = summary["max_logprob_gap"]
    display.say(
        f"held-out accuracy, sampled: {outcome.before.sampled:.3f} -> {outcome.after.sampled:.3f}, "
        f"greedy: {outcome.before.greedy:.3f} -> {outcome.after.greedy:.3f}\n"
        f"largest logprob gap between engine and trainer: "
        f"{'not measured' if gap is None else format(gap, '.1e')}; "
        f"{summary['cpu_seconds']:.0f} s of CPU time, {summary['wall_seconds']:.0f} s in all\n"
        f"see {files.root}/: learning_curve.png, rollouts.html, summary.json, config.yaml, logs/"
    )


def _warm_up_and_train(
    config: DemoConfig, files: RunFiles, display: Display, parts: Parts
) -> Outcome:
    hub_port, engine_port = free_port(), free_port()
    hub_url, engine_url = f"http://127.0.0.1:{hub_port}", f"http://127.0.0.1:{engine_port}"
    commands = {
        "warm up": _warm_up_command(config, files),
        "hub": _python("atroposlib.cli.run_api", host="127.0.0.1", port=hub_port, memory=True),
        "engine": _engine_command(config, files, port=engine_port),
        "trainer": _trainer_command(config, files, hub_url=hub_url, engine_url=engine_url),
        "environment": _environment_command(config, files, hub_url=hub_url, engine_url=engine_url),
    }
    _record_config(config, commands, files)

    hub = parts.start("hub", commands["hub"])
    display.say("warming up: supervised steps until a quarter of the sampled answers are right")
    _warm_up(parts, commands["warm up"], files, display)
    engine = parts.start("engine", commands["engine"], env=_engine_variables(config))
    with httpx.Client(timeout=5.0) as http:
        for part, url in ((hub, f"{hub_url}/healthz"), (engine, f"{engine_url}/health")):
            parts.wait_until(
                lambda url=url: _answers(http, url),  # type: ignore[misc]
                what=f"a healthy {part.name}",
                timeout_s=_STARTUP_TIMEOUT_S[config.engine],
            )

    prompts = distinct_prompts(Split.HELDOUT, count=NUM_HELDOUT_PROMPTS, seed=0)
    before = measure(engine_url, MODEL_NAME, prompts)
    display.say(f"held-out accuracy: sampled {before.sampled:.3f}, greedy {before.greedy:.3f}")

    trainer = parts.start("trainer", commands["trainer"])
    environment = parts.start("environment", commands["environment"])
    steps, stopped_by = _train(config, files, display, parts, trainer)
    parts.stop(environment)
    after = measure(engine_url, MODEL_NAME, prompts)
    return Outcome(before=before, after=after, steps=steps, stopped_by=stopped_by)


def _warm_up(parts: Parts, command: list[str], files: RunFiles, display: Display) -> None:
    checks = JsonLines(files.warm_up_progress)

    def show_checks() -> None:
        for check in checks.read():
            display.say(f"  step {check['step']:>3}  validation accuracy {check['accuracy']:.3f}")

    parts.wait(parts.start("warm up", command), meanwhile=show_checks)


def _train(
    config: DemoConfig, files: RunFiles, display: Display, parts: Parts, trainer: Part
) -> tuple[list[StepMetrics], Literal["steps", "max_minutes"]]:
    """Follow the trainer to its end, or to the time limit; return its metrics and which it was."""
    lines = JsonLines(files.metrics)
    steps: list[StepMetrics] = []
    deadline = time.monotonic() + (config.max_minutes or float("inf")) * 60

    def show_steps() -> None:
        for metrics in lines.read():
            steps.append(metrics)
            display.show_step(metrics)
        if time.monotonic() > deadline:
            raise _OutOfTime

    with display:
        try:
            parts.wait(trainer, meanwhile=show_steps)
        except _OutOfTime:
            parts.stop(trainer)
            display.say(f"stopped after {config.max_minutes:g} minutes")
            return steps, "max_minutes"
    if len(steps) != config.steps:
        raise AtroposError(f"the trainer reported {len(steps)} steps, not {config.steps}")
    return steps, "steps"


class _OutOfTime(Exception):
    """The time limit is reached."""


# ---------------------------------------------------------------------------------------------------
# Command lines


def _python(module: str, **flags: object) -> list[str]:
    return [sys.executable, "-m", module, *_flags(flags)]


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _warm_up_command(config: DemoConfig, files: RunFiles) -> list[str]:
    return _python(
        "atroposlib.cli._demo.warm_up",
        out=files.model,
        progress=files.warm_up_progress,
        seed=config.seed,
    )


def _engine_command(config: DemoConfig, files: RunFiles, *, port: int) -> list[str]:
    common = {"model": files.model, "host": "127.0.0.1", "port": port, "dtype": "float32"}
    if config.engine == "local":
        return _python(
            "atroposlib.engine.server",
            **common,
            device="cpu",
            threads=1,
            max_num_seqs=SEQUENCES_PER_STEP,
            served_model_name=MODEL_NAME,
            seed=config.seed,
        )
    command = [str(config.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    flags = {**common, "served-model-name": MODEL_NAME, "max-model-len": 64, "seed": config.seed}
    return [*command, *_flags(flags), "--enforce-eager"]


def _engine_variables(config: DemoConfig) -> dict[str, str]:
    """vLLM serves the routes that replace weights only in its development mode."""
    if config.engine == "local":
        return {}
    return {
        "PYTHONPATH": "",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def _trainer_command(
    config: DemoConfig, files: RunFiles, *, hub_url: str, engine_url: str
) -> list[str]:
    wandb = {"use_wandb": True, "wandb_project": "atropos-demo"} if config.wandb else {}
    return _python(
        "example_trainer.grpo",
        model_name=files.model,
        hub_url=hub_url,
        bridge="reload",
        engine_url=engine_url,
        device="cpu",
        dtype="float32",
        num_steps=config.steps,
        seed=config.seed,
        save_path=files.checkpoints,
        checkpoint_interval=0,
        metrics_path=files.metrics,
        **TRAINER_RECIPE,
        **wandb,
    )


def _environment_command(
    config: DemoConfig, files: RunFiles, *, hub_url: str, engine_url: str
) -> list[str]:
    flags = {
        "env.rollout_server_url": hub_url,
        "env.tokenizer_name": files.model,
        "env.group_size": GROUP_SIZE,
        "env.max_num_workers": PROMPTS_PER_STEP,
        "env.max_batches_offpolicy": 1,
        "env.max_token_length": MAX_POSITIONS,
        # One more than there will be: the environment is stopped after the trainer, not before.
        "env.total_steps": config.steps + 1,
        "env.steps_per_eval": 0,
        "env.seed": config.seed,
        "env.use_wandb": config.wandb,
        "env.data_path_to_save_groups": files.rollouts,
        "openai.base_url": f"{engine_url}/v1",
        "openai.model_name": MODEL_NAME,
        "openai.server_type": "vllm",
    }
    return [sys.executable, str(_environment_file()), "serve", *_flags(flags)]


def _environment_file() -> Path:
    """Return the environment's file: in the checkout, or the copy in an installed package."""
    name = "letter_reversal_server.py"
    package = Path(atroposlib.__file__).parent
    candidates = [package.parent / "environments" / name, package / "cli" / "_demo" / name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"the demo's environment is missing: neither {candidates[0]} nor {candidates[1]} exists; "
        "run the demo from a checkout of the repository"
    )


def _environment_variables() -> dict[str, str]:
    """One thread per process: more of them than cores spin on each other and cost minutes."""
    source = str(Path(atroposlib.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


# ---------------------------------------------------------------------------------------------------
# Small things


def _check_prerequisites(config: DemoConfig) -> None:
    """Refuse at once what would otherwise fail after minutes."""
    _environment_file()
    needed = [*_NEEDED_MODULES, *(["wandb"] if config.wandb else [])]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        extra = "demo,wandb" if config.wandb else "demo"
        raise MissingDependency(
            f"the demo needs {', '.join(missing)}; run: pip install 'atroposlib[{extra}]'"
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
def _claim(out: Path, display: Display) -> Iterator[RunFiles]:
    """Give `out` to this run alone: an earlier run is moved aside, a running one is left alone.

    Raises ConfigError when another demo is writing there or when it holds something else.
    """
    out = out.absolute()
    lock_path = out.with_name(f".{out.name}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--out {out}: another demo is running there") from error
        if out.exists():
            if not out.is_dir() or (any(out.iterdir()) and not (out / "config.yaml").is_file()):
                raise ConfigError(f"--out {out} exists and is not a run of the demo; name another")
            aside = _free_name(out)
            out.rename(aside)
            display.say(f"an earlier run was moved to {aside}")
        files = RunFiles(root=out)
        files.logs.mkdir(parents=True)
        yield files


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def _record_config(config: DemoConfig, commands: dict[str, list[str]], files: RunFiles) -> None:
    record = {"demo": config.model_dump(mode="json"), "commands": commands}
    (files.root / "config.yaml").write_text(
        yaml.safe_dump(record, sort_keys=False, width=1000), encoding="utf-8"
    )


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _largest_gap(steps: Sequence[StepMetrics]) -> float | None:
    gaps = [step["logprob_gap_max"] for step in steps if step["logprob_gap_max"] is not None]
    return max(gaps, default=None)


def _cpu_seconds() -> float:
    """User and system time of this process and of all processes it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    raise SystemExit(main())
