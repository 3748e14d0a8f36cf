"""Evaluation results on disk, in the original's file shapes."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def pass_at_k(m: int, c: int, k: int) -> float:
    """Return the unbiased pass@k of `c` correct among `m` samples (arXiv:2107.03374, equation 1).

    >>> round(pass_at_k(4, 1, 2), 3)
    0.5
    """
    if m - c < k:
        return 1.0
    return 1.0 - math.comb(m - c, k) / math.comb(m, k)


def evaluate_log(
    metrics: dict[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: dict[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics.json` and, with samples, `samples.jsonl` into `eval_dir`; without it only warn.

    Times are seconds since the epoch. `verbose` also logs one line per metric.
    """
    if eval_dir is None:
        logger.warning("data_dir_to_save_evals is not set: the evaluation is not written to disk")
        return
    task = f"atropos|{task_name or 'eval'}|0"
    now = time.time()
    elapsed_s = (now if end_time is None else end_time) - (
        now if start_time is None else start_time
    )
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(elapsed_s),
            "generation_parameters": generation_parameters or {},
        },
        "results": {task: metrics, "all": metrics},
    }
    (folder / "metrics.json").write_text(json.dumps(document, indent=2, default=str) + "\n")
    if samples:
        lines = [json.dumps(sample, default=str) for sample in samples]
        (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    if verbose:
        for key, value in metrics.items():
            shown = f"{value:.4f}" if isinstance(value, int | float) else str(value)
            logger.info("%s: %s = %s", task, key.removeprefix("eval/").replace("_", " "), shown)
