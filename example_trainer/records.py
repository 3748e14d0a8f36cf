"""Metrics of a run: one JSON line per step, and Weights & Biases if configured."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self, get_args

import msgspec
import torch

from atroposlib.errors import ConfigError, require
from atroposlib.scored_data import UNKNOWN_VERSION, ScoredGroup
from example_trainer.config import TrainerConfig
from example_trainer.data import Batch, SkipReason

logger = logging.getLogger(__name__)

_WANDB_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "raised_logprob_mean": "train/pos_logp",
    "lowered_logprob_mean": "train/neg_logp",
    "train_s": "train/step_time",
    "publish_s": "train/sync_time",
    "batch_wait_s": "train/data_fetch_time",
    "ratio_mean": "grpo/mean_ratio",
    "clip_fraction": "grpo/clipped_fraction",
    "logprob_mean": "logprobs/training_mean",
    "logprob_std": "logprobs/training_std",
    "sampled_logprob_mean": "logprobs/inference_mean",
    "sampled_logprob_std": "logprobs/inference_std",
    "sampled_kl_mean": "alignment/diff_mean",
    "logprob_gap_mean": "alignment/diff_abs_mean",
    "logprob_gap_max": "alignment/diff_max",
}
"""The original's chart names; other metrics are logged as `train/<name>`."""


class MetricsLog:
    """Appends one JSON object per step to a file and flushes it; a context manager."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        start: int = 0,
        last: Mapping[str, Any] | None = None,
        is_main: bool = True,
    ) -> None:
        """Open the file and keep only the lines of the first `start` steps; only the first process writes.

        `last`: metrics of step `start`, written if its line is missing because the run ended after its checkpoint.
        """
        self.path: Path = config.metrics_path or config.save_path / "metrics.jsonl"
        self.wandb_project, self.wandb_group = "", ""
        self._run: Any = None
        self._file: BinaryIO | None = None
        if not is_main:
            return
        self._file, last_step = open_after(self.path, start, flag="metrics_path")
        if last is not None and last_step < start:
            self._append(last)
        if config.use_wandb and not config.wandb_project:
            logger.warning("wandb is off: --use_wandb needs --wandb_project")
        elif config.use_wandb:
            self.wandb_project = config.wandb_project or ""
            self._run = self._open_chart(config, goes_on=start > 0)

    def _open_chart(self, config: TrainerConfig, *, goes_on: bool) -> Any:
        """Start a wandb run, or resume the one whose id an earlier process of this run saved."""
        note = config.save_path / "wandb.json"
        before = {}
        if goes_on and note.is_file():
            before = json.loads(note.read_text(encoding="utf-8"))
        self.wandb_group = config.wandb_group or before.get("group") or secrets.token_hex(4)
        chart = require("wandb", extra="wandb").init(
            project=self.wandb_project,
            group=self.wandb_group,
            id=before.get("id"),
            resume="allow" if before else None,
            config=config.model_dump(mode="json", exclude={"hub_token", "engine_api_key"}),
        )
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"id": chart.id, "group": self.wandb_group}), encoding="utf-8")
        return chart

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's metrics; None and non-finite numbers are written as null."""
        if self._file is None:
            return
        clean = self._append(record)
        if self._run is not None:
            data = {_WANDB_NAMES.get(k, f"train/{k}"): v for k, v in clean.items() if v is not None}
            self._run.log(data, step=clean["step"])

    def _append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        assert self._file is not None
        clean = finite(record)
        self._file.write(json.dumps(clean).encode() + b"\n")
        self._file.flush()
        return clean

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._run is not None:
            self._run.finish(exit_code=0 if exc_type is None else 1)


class Clock:
    """Durations within one step, in seconds."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Return each phase, the whole step (`wall_s`) and this process's CPU time in it (`cpu_s`)."""
        totals = {
            "wall_s": time.perf_counter() - self._started,
            "cpu_s": time.process_time() - self._cpu_started,
        }
        return {name: round(value, 6) for name, value in (self._phases | totals).items()}


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Return torch's memory on a GPU in GiB: allocated, reserved and peak; {} on the CPU."""
    if device.type != "cuda":
        return {}
    return {
        "gpu_memory_gb": torch.cuda.memory_allocated(device) / 2**30,
        "gpu_memory_reserved_gb": torch.cuda.memory_reserved(device) / 2**30,
        "gpu_memory_peak_gb": torch.cuda.max_memory_allocated(device) / 2**30,
    }


def describe_batch(batch: Batch, version: int) -> dict[str, Any]:
    """Return the metrics of a batch; staleness is in steps, over trained positions of known version."""
    staleness = version - batch.versions[batch.versions != UNKNOWN_VERSION]
    skipped = {f"num_skipped_{why}": batch.num_skipped(why) for why in get_args(SkipReason)}
    # Of the others no trained position is not too old.
    for why in ("zero_advantage", "too_long"):
        skipped[f"num_skipped_tokens_{why}"] = batch.num_skipped_tokens.get(why, 0)
    return skipped | {
        "reward_mean": float(batch.scores.mean()),
        "reward_std": float(batch.scores.std()),
        "num_groups": batch.num_groups,
        "num_sequences": batch.num_sequences,
        "num_trained_tokens": batch.num_trained_tokens,
        "num_too_old_tokens": sum(batch.num_too_old),
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
        "staleness_max": int(staleness.max()) if len(staleness) else None,
    }


LARGE_SHARE = 0.5
"""Share of one token in a step's gradient above which it outweighs all others together."""


def faults_of(
    record: Mapping[str, Any], config: TrainerConfig, group: ScoredGroup | None
) -> Iterator[str]:
    """Yield a sentence for each thing in the step's metrics that spoils what the model learns.

    `group` has the token with the largest share. Of one or two tokens, one has half by itself: that is no fault.
    """
    share = record["token_share_max"] or 0.0
    if group is not None and share > max(LARGE_SHARE, 2 / record["num_trained_tokens"]):
        yield (
            f"one token of group {group.group_id} of environment {group.env_id} is {share:.0%} of the step's gradient "
            f"(largest ratio of trainer to sampler: {record['ratio_max'] or 1:.3g}); look at its advantages and "
            "sampled logprobs; --dual_clip and --correction tis limit its weight"
        )
    if config.surrogate == "reinforce" and record["staleness_max"]:
        yield (
            "groups of an older policy are trained with --surrogate reinforce, which has no clip: tokens that the "
            "policy has moved away from are pushed without limit; use --surrogate clip or cispo"
        )


def progress_line(record: dict[str, Any], num_steps: int) -> str:
    def show(name: str) -> str:
        value = record[name]
        return "-" if value is None else f"{value:.3g}"

    num_old = record["num_too_old_tokens"]
    too_old = f" ({num_old:,} tokens too old)" if num_old else ""
    return (
        f"step {record['step']}/{num_steps} reward {record['reward_mean']:.3f} loss {show('loss')} "
        f"grad norm {show('grad_norm')} staleness {show('staleness_mean')}{too_old} "
        f"logprob gap {show('logprob_gap_max')} {record['tokens_per_s']:.0f} tokens/s "
        f"in {record['wall_s']:.2f} s (wait {record['batch_wait_s']:.2f}, train {record['train_s']:.2f}, "
        f"publish {record['publish_s']:.2f}, save {record['save_s']:.2f})"
    )


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with None for NaN and infinities."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


class _RecordedStep(msgspec.Struct):
    step: int


def open_after(path: Path, step: int, *, flag: str) -> tuple[BinaryIO, int]:
    """Remove the lines after `step` and a last line that was cut off; return the file and its last step, 0 for none.

    Raises ConfigError for a line without a step, and for a file that cannot be written; it names the flag.
    """
    decoder = msgspec.json.Decoder(_RecordedStep)
    num_bytes = last_step = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            for line in file if step else ():
                if not line.endswith(b"\n") or (found := decoder.decode(line).step) > step:
                    break
                num_bytes, last_step = num_bytes + len(line), found
            file.truncate(num_bytes)  # not written anew, so that a crash loses no kept line
        return path.open("ab"), last_step
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} was not written by this trainer: {line!r:.100}") from error
    except OSError as error:
        raise ConfigError(f"--{flag} {path}: {error.strerror}") from error
