"""What a run leaves to be read: one JSON line per step, Weights & Biases if asked for."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atroposlib.errors import ConfigError, require
from example_trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

_WANDB_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "train_s": "train/step_time",
    "publish_s": "train/sync_time",
    "batch_wait_s": "train/data_fetch_time",
    "clip_fraction": "grpo/clipped_fraction",
    "logprob_gap_mean": "alignment/diff_abs_mean",
    "logprob_gap_max": "alignment/diff_max",
}
"""Names of the original's charts; a metric without one is logged as `train/<name>`."""


class MetricsLog:
    """Appends one JSON object per step to a file, complete at every moment; a context manager."""

    def __init__(self, config: TrainerConfig) -> None:
        self.path: Path = config.metrics_path or config.save_path / "metrics.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--metrics_path {self.path}: {error.strerror}") from error
        self.wandb_project, self.wandb_group = "", ""
        self._run: Any = None
        if config.use_wandb and not config.wandb_project:
            logger.warning("wandb is off: --use_wandb needs --wandb_project")
        elif config.use_wandb:
            self.wandb_project = config.wandb_project or ""
            self.wandb_group = config.wandb_group or secrets.token_hex(4)
            self._run = require("wandb", extra="wandb").init(
                project=self.wandb_project,
                group=self.wandb_group,
                config=config.model_dump(mode="json", exclude={"hub_token"}),
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's metrics; None and non-finite numbers are written as null."""
        clean = {name: _finite(value) for name, value in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._run is not None:
            named = {
                _WANDB_NAMES.get(k, f"train/{k}"): v for k, v in clean.items() if v is not None
            }
            self._run.log(named, step=clean["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._run is not None:
            self._run.finish(exit_code=0 if exc_type is None else 1)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
