"""Evaluations: result files in the original's format, pass@k, and evaluations without an environment.

`evaluate_log` is the only code that writes metrics; `BaseEnv.evaluate_log` fills in its defaults and calls it.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from atroposlib.config import parse_flags
from atroposlib.envs.eval_run import (
    METRICS_FILE,
    SAMPLES_FILE,
    EvalRun,
    evaluate_items,
    keep_earlier,
    lines_of,
    plain,
)
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.estimates import Estimate, estimate_mean, with_estimates
from atroposlib.utils.files import replace_file

logger = logging.getLogger(__name__)


USUAL_K = (5, 10, 100)
"""Numbers of answers for which code benchmarks report pass@k."""


def pass_at_k(m: int, c: int, k: int) -> float:
    """Return the unbiased pass@k of `c` correct among `m` samples (arXiv:2107.03374, equation 1).

    >>> round(pass_at_k(4, 1, 2), 3)
    0.5
    """
    if m - c < k:
        return 1.0
    return 1.0 - math.comb(m - c, k) / math.comb(m, k)


def score_metrics(
    scores: Sequence[Sequence[float | None]], *, success_score: float, num_samples: int
) -> dict[str, float]:
    """Return pass@k of the scores of every row, and the mean of those that are not None.

    k is 1, `num_samples` and those of `USUAL_K` between them.

    None, an answer without a score, is not solved. If there are any, `percent_correct_judged` leaves them out.

    >>> found = score_metrics([[1.0], [None], [0.0]], success_score=1.0, num_samples=1)
    >>> round(found["eval/percent_correct"], 2), found["eval/percent_correct_judged"], found["eval/reward_failures"]
    (0.33, 0.5, 1.0)
    >>> found = score_metrics([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], success_score=1.0, num_samples=6)
    >>> [round(found[f"eval/pass@{k}"], 2) for k in (1, 5, 6)]
    [0.17, 0.83, 1.0]
    """
    judged = [[score for score in row if score is not None] for row in scores]
    flat = [score for row in judged for score in row]
    num_unscored = sum(map(len, scores)) - len(flat)
    metrics = {"eval/reward_failures": float(num_unscored)}
    if flat:
        rows = [index for index, row in enumerate(judged) for _ in row]
        metrics["eval/mean_score"] = estimate_mean(flat, clusters=rows)

    def pass_rates(rows: Sequence[Sequence[float | None]], k: int) -> list[float]:
        solved = [
            sum(score is not None and score >= success_score for score in row) for row in rows
        ]
        return [
            pass_at_k(len(row), num_solved, k)
            for row, num_solved in zip(rows, solved, strict=True)
            if len(row) >= k
        ]

    for k in sorted({1, num_samples, *(k for k in USUAL_K if k < num_samples)}):
        if rates := pass_rates(scores, k):
            metrics[f"eval/pass@{k}"] = estimate_mean(rates)
    if "eval/pass@1" in metrics:
        metrics["eval/percent_correct"] = metrics["eval/pass@1"]
    if num_unscored and flat:
        metrics["eval/percent_correct_judged"] = estimate_mean(pass_rates(judged, 1))
    return metrics


def evaluate_log(
    metrics: dict[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: dict[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics.json` and, with samples, `samples.jsonl` into `eval_dir`; None only warns.

    Times are seconds since the epoch. These files always hold the latest results: earlier ones are renamed to
    `metrics_1.json`, `samples_1.jsonl` and so on, oldest first. A metric that is an `Estimate`, or the mean of a value
    in the samples (see `with_estimates`), has its standard error, 95 % interval and n in the table and under
    `estimates` in `metrics.json`. `verbose` prints the table.
    """
    if eval_dir is None:
        logger.warning("data_dir_to_save_evals is not set: the evaluation is not written to disk")
        return
    task = task_name or "eval"
    end = time.time() if end_time is None else end_time
    start = end if start_time is None else start_time
    measured = with_estimates(metrics, samples or [])
    document: dict[str, Any] = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(end - start),
            "generation_parameters": generation_parameters or {},
        },
        "results": {f"atropos|{task}|0": metrics, "all": metrics},
    }
    estimates = {name: v.as_dict() for name, v in measured.items() if isinstance(v, Estimate)}
    if estimates:
        document["estimates"] = estimates
    texts = {METRICS_FILE: json.dumps(document, indent=2, default=plain) + "\n"}
    if samples:
        texts = {SAMPLES_FILE: lines_of(samples), **texts}  # metrics last: they end the evaluation
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if (
        folder / METRICS_FILE
    ).exists():  # samples without metrics are of the evaluation in progress
        keep_earlier(folder, (METRICS_FILE, SAMPLES_FILE))
    for name, text in texts.items():
        replace_file(folder / name, text)
    if verbose:
        display_metrics_table(task, measured, start, end)


class EvalBase(ABC):
    """An evaluation without an environment: runs every item and averages the metrics.

    Keyword arguments become attributes. Read here: `temperature` (0.0), `top_p` (1.0), `max_tokens` (-1: the
    server's limit), `eval_dir` and `verbose` (False) for `evaluate_log`.
    """

    eval_run: EvalRun | None = None
    """Directory of `eval_runner`, where samples are written as they come."""

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """Return the items; called once, at construction."""

    @abstractmethod
    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        """Return the metrics of one item and its sample for `samples.jsonl`."""

    def get_generation_params(self) -> dict[str, Any]:
        """Return the sampling parameters of `chat_completion`; `max_tokens` -1 is not sent."""
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n_samples, self.pass_at_n),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": getattr(self, "max_tokens", -1),
        }

    async def chat_completion(
        self, server: ServerManager, messages: Sequence[Mapping[str, Any]]
    ) -> Any:
        """Request a completion with the generation parameters, as evaluation traffic."""
        parameters = self.get_generation_params()
        if parameters.get("max_tokens") == -1:
            del parameters["max_tokens"]
        return await server.chat_completion(messages=list(messages), split="eval", **parameters)

    @property
    def task_name(self) -> str:
        """`<Class>@<n>`, followed by `:<samples>` if that differs."""
        name = f"{type(self).__name__}@{self.pass_at_n}"
        is_short = self.pass_at_n == self.pass_at_n_samples
        return name if is_short else f"{name}:{self.pass_at_n_samples}"

    async def __call__(self, server_manager: ServerManager) -> dict[str, float]:
        """Run all items concurrently (within the servers' limits); log and return the averages.

        An exception of one item ends the evaluation. ValueError without items.
        """
        if not self.data:
            raise ValueError(f"{type(self).__name__}.setup_data returned no items")
        start_time = time.time()

        async def measure(item: Any) -> dict[str, Any]:
            metrics, sample = await self.run_item(server_manager, item)
            keys = sample if isinstance(sample, Mapping) else {"sample": sample}
            return {**keys, "metrics": metrics}

        samples = await evaluate_items(
            self.data, measure, run=self.eval_run, max_workers=len(self.data)
        )
        metrics = average_metrics([sample["metrics"] for sample in samples])
        logger.info("%s: %s", self.task_name, metrics)
        evaluate_log(
            metrics,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=self.task_name,
            model_name=server_manager.servers[0].config.model_name,
            start_time=start_time,
            end_time=time.time(),
            generation_parameters=self.get_generation_params(),
            samples=samples,
            verbose=getattr(self, "verbose", False),
        )
        return metrics


def average_metrics(per_item: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average every metric of the first item over the items that have it; log how many lack it.

    >>> average_metrics([{"right": 1.0}, {"right": 0.0}])
    {'right': 0.5}
    """
    averages: dict[str, float] = {}
    for key in per_item[0]:
        values = [item[key] for item in per_item if key in item]
        if len(values) < len(per_item):
            missing = len(per_item) - len(values)
            logger.warning("%d of %d items have no metric %r", missing, len(per_item), key)
        averages[key] = estimate_mean(values)
    return averages


class EvalFlags(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    server_url: str = "http://localhost:8000"
    """URL of the server, with `/v1` if the server needs it."""
    model_name: str
    """Model name in every request."""
    eval_dir: str | None = None
    """Directory of the results; default: the evaluation's `eval_dir`, else a new one in `evals/`."""
    resume: str | None = None
    """Directory of an interrupted evaluation to continue."""


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Run one evaluation from the command line, print its table and save it as `evaluate` does.

    Flags: `--server-url`, `--model-name`, `--eval-dir`, `--resume`.
    """
    name = type(eval_env).__name__
    flags = parse_flags(EvalFlags, None, prog=name)
    settings = {
        "env": {"task": eval_env.task_name, **eval_env.get_generation_params()},
        "openai": [{"model_name": flags.model_name, "base_url": flags.server_url}],
    }
    given = flags.resume or flags.eval_dir or getattr(eval_env, "eval_dir", None)
    run = EvalRun(
        given,
        name=name,
        config=yaml.safe_dump(json.loads(json.dumps(settings, default=plain)), sort_keys=False),
        is_resumed=flags.resume is not None,
    )
    server = APIServerConfig(
        base_url=flags.server_url, model_name=flags.model_name, api_key="dummy", health_check=False
    )
    manager = ServerManager([server])
    try:
        with run:
            vars(eval_env).update(eval_run=run, eval_dir=str(run.folder), verbose=True)
            metrics = await eval_env(manager)
    finally:
        await manager.close()
    sys.stdout.write(f"results: {run.folder}\n")
    return metrics
