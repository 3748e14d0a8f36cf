"""Run an environment's `evaluate` once, without a hub, and save the results in a directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from atroposlib.envs.eval_run import (
    METRICS_FILE,
    PAGE_FILE,
    SAMPLES_FILE,
    EvalRun,
    stored_samples,
)
from atroposlib.envs.hooks import EnvHooks
from atroposlib.frontend.run_files import find_run_files, write_run_page
from atroposlib.runtime.closing import closed_at_end
from atroposlib.runtime.masking import without_secrets
from atroposlib.runtime.metrics import require_wandb, start_wandb
from atroposlib.runtime.progress import RunStatus, sign_of_life
from atroposlib.runtime.signals import cancelled_by_sigterm
from atroposlib.runtime.timings import Timings

logger = logging.getLogger(__name__)


def eval_run_of(
    env: EnvHooks,
    *,
    config: str | None = None,
    resume: str | None = None,
    rescore: str | None = None,
) -> EvalRun:
    """Return the run in the directory `resume`, else `data_dir_to_save_evals`, else a new one in `evals/`.

    `config` is the configuration as YAML; None: that of the environment, without its servers. `rescore` is the
    directory of an evaluation whose answers are scored again.
    """
    if config is None:
        settings = env.config.model_dump(mode="json", fallback=str)
        config = yaml.safe_dump(without_secrets({"env": settings}), sort_keys=False)
    return EvalRun(
        resume or env.config.data_dir_to_save_evals,
        name=env.registered_name,
        config=config,
        is_resumed=resume is not None,
        rescored=None if rescore is None else stored_samples(Path(rescore)),
    )


async def evaluate(env: EnvHooks, *, timings: Timings | None = None) -> Path:
    """Call `setup`, then `evaluate` (or `rescore`); return the directory of the results. Raises whatever they raise.

    Samples that were written before an error or SIGTERM stay.
    """
    if env.config.use_wandb:
        require_wandb()
    run = env.eval_run = env.eval_run or eval_run_of(env)
    with cancelled_by_sigterm():
        async with closed_at_end(env):
            await _evaluate(env, run, timings)
    return run.folder


async def _evaluate(env: EnvHooks, run: EvalRun, timings: Timings | None) -> None:
    """Evaluate into the directory of `run`, then write the page of its samples."""
    await env.setup()
    with run:
        env.config.data_dir_to_save_evals = str(run.folder)
        if env.config.use_wandb:
            start_wandb(env, project=None, group=None)
        logger.info("evaluating; results go to %s", run.folder)
        async with sign_of_life(env, lambda: _status(run), timings=timings):
            result = await (env.evaluate() if run.rescored is None else env.rescore(run.rescored))
        if not (run.folder / METRICS_FILE).exists():
            await _log_other_metrics(env, result)
    samples = run.folder / SAMPLES_FILE
    if samples.exists():
        files = find_run_files(samples)
        title = run.folder.resolve().name
        await asyncio.to_thread(write_run_page, files, run.folder / PAGE_FILE, title=title)


def _status(run: EvalRun) -> RunStatus:
    return RunStatus(num_made=run.num_done, wanted=run.num_items or None, unit="items")


async def _log_other_metrics(env: EnvHooks, result: Any) -> None:
    """Log the metrics of an `evaluate` that does not call `evaluate_log`: those it returns or gives to wandb."""
    logged: dict[str, Any] = {}
    wandb_run = env.wandb_run
    env.wandb_run = SimpleNamespace(log=lambda metrics, **_: logged.update(metrics))
    try:
        await env.wandb_log()
    except Exception:  # boundary: the author's hook, which evaluate does not need
        logger.warning("wandb_log raised; its metrics are not in the results", exc_info=True)
    finally:
        env.wandb_run = wandb_run
    metrics = {key: v for key, v in logged.items() if "eval" in key and "server/" not in key}
    if isinstance(result, Mapping):
        metrics |= {key: value for key, value in result.items() if isinstance(value, Real)}
    if not metrics:
        logger.warning("evaluate() gave no metrics: end it with await self.evaluate_log({...})")
        return
    if wandb_run is not None:
        wandb_run.log(metrics)
    await env.evaluate_log(metrics)
