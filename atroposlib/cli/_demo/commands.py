"""The demo's settings, its files, and the command line of each of its processes.

`demo.py` starts them; `config.yaml` in the demo's directory records them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

import atroposlib
from atroposlib.cli._demo.tiny_model import MAX_POSITIONS

PROMPTS_PER_STEP = 16
GROUP_SIZE = 8
SEQUENCES_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
TRAINER_RECIPE = {
    "batch_size": SEQUENCES_PER_STEP,
    "gradient_accumulation_steps": 1,
    "seq_len": 32,
    "lr": 2.5e-4,
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
"""Found by experiment: without a warm-up the model forgets the task."""

MODEL_NAME = "demo"


class DemoConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    seed: int = 0
    """Seed of the weights, the rows and the sampling."""
    steps: int = Field(default=84, ge=1)
    """Optimizer steps of reinforcement learning."""
    out: Path = Path("runs/demo")
    """Directory of the results; an earlier run there is renamed."""
    engine: Literal["local", "vllm"] = "local"
    """Inference engine: atropos-engine, or vLLM."""
    vllm_python: str | None = None
    """Interpreter of the virtual environment that has vLLM; with --engine vllm."""
    wandb: bool = False
    """Log to Weights & Biases as well."""
    asynchronous: bool = Field(default=True, validation_alias=AliasChoices("asynchronous", "async"))
    """Sample while the trainer steps, as environments do by default; false: only with the newest weights."""
    max_minutes: float | None = Field(default=30.0, gt=0)
    """Stop training after this time and evaluate; None: no limit."""


class DemoFiles:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"  # one per part
        self.measured = self.logs / "measured"  # there once the accuracy before training is known
        self.model = root / "model"  # after the warm-up
        self.checkpoints = root / "checkpoints"  # of the trainer
        self.summary = root / "summary.json"
        self.rollouts = root / "rollouts.jsonl"  # a line for each accepted group
        self.metrics = root / "metrics.jsonl"  # a line for each step of the trainer
        self.warm_up_progress = root / "warm_up.jsonl"  # a line for each accuracy in the warm-up


def python(module: str, **flags: object) -> list[str]:
    """Return the command that runs a module with this interpreter and flags."""
    return [sys.executable, "-m", module, *_flags(flags)]


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def started_early(
    argv: list[str], files: DemoFiles, *, after: Path, imports: Sequence[str]
) -> list[str]:
    """Return the command that imports modules, waits for the path `after` and then becomes `argv`, `python -m ...`."""
    starter = [sys.executable, "-m", "atroposlib.cli._demo.started_early"]
    return [*starter, str(files.logs / "imports.lock"), str(after), ",".join(imports), *argv[2:]]


def warm_up_command(config: DemoConfig, files: DemoFiles) -> list[str]:
    return python(
        "atroposlib.cli._demo.warm_up",
        out=files.model,
        progress=files.warm_up_progress,
        seed=config.seed,
    )


def engine_command(config: DemoConfig, files: DemoFiles, *, port: int) -> list[str]:
    common = {"model": files.model, "host": "127.0.0.1", "port": port, "dtype": "float32"}
    if config.engine == "local":
        return python(
            "atroposlib.engine",
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


def engine_variables(config: DemoConfig) -> dict[str, str]:
    """Return the engine's environment variables; vLLM's weight routes need its development mode."""
    if config.engine == "local":
        return {}
    return {
        "PYTHONPATH": "",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def trainer_command(
    config: DemoConfig, files: DemoFiles, *, hub_url: str, engine_url: str
) -> list[str]:
    wandb = {"use_wandb": True, "wandb_project": "atropos-demo"} if config.wandb else {}
    return python(
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


def environment_command(
    config: DemoConfig, files: DemoFiles, *, hub_url: str, engine_url: str
) -> list[str]:
    flags = {
        "env.rollout_server_url": hub_url,
        "env.tokenizer_name": files.model,
        "env.group_size": GROUP_SIZE,
        "env.max_token_length": MAX_POSITIONS,
        # One more than the trainer takes, so that the environment does not end before it.
        "env.total_steps": config.steps + 1,
        "env.steps_per_eval": 0,
        "env.seed": config.seed,
        "env.use_wandb": config.wandb,
        "env.data_path_to_save_groups": files.rollouts,
        "openai.base_url": f"{engine_url}/v1",
        "openai.model_name": MODEL_NAME,
        "openai.server_type": "vllm",
    }
    if config.asynchronous:
        flags |= {"env.strictly_on_policy": False}
    else:
        flags |= {"env.max_num_workers": PROMPTS_PER_STEP, "env.max_batches_offpolicy": 1}
    module = "atroposlib.environments.letter_reversal_server"
    return [sys.executable, "-m", module, "serve", *_flags(flags)]


def environment_variables() -> dict[str, str]:
    """Return the processes' environment variables; one thread each, since more threads than cores cost minutes."""
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
