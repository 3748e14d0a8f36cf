"""THE loop, in reading order: wait for a batch, take a step, hand the weights over, record it.

A policy version is the number of steps behind its weights; version 0 is the initial model. One batch is leased per
step, so that nothing waits here and goes stale, and acknowledged once the weights contain it: a batch whose trainer
died is trained by the next one. Left out so far: resuming, several processes, LoRA.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atroposlib.client import (
    LeasedBatch,
    LeaseExpired,
    TrainerClient,
    TrainerNotRegistered,
    TrainerRegistration,
)
from atroposlib.errors import AtroposError, HubRejected, HubUnavailable
from example_trainer.bridges import make_bridge
from example_trainer.config import TrainerConfig
from example_trainer.data import UNKNOWN_VERSION, Batch, DataOptions, MicroBatch, make_batch
from example_trainer.gap import GapReport, LogprobGap
from example_trainer.loss import LossShare, policy_loss
from example_trainer.model import Policy, load_policy
from example_trainer.objective import Objective
from example_trainer.records import MetricsLog
from example_trainer.weights import WeightsDirectory

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 5.0
"""How long the hub may hold one request for a batch."""
MAX_BACKOFF_S = 5.0


def train(config: TrainerConfig) -> None:
    """Train for `config.num_steps` steps and leave the model in `<save_path>/final_model`.

    Raises ConfigError for a model, device or path that cannot be used, EngineError when weights cannot be handed over
    or engine and trainer disagree, GroupError for groups that cannot be trained on, HubError when the hub refuses.
    """
    set_up_torch(config)
    policy = load_policy(config)
    reference = load_policy(config) if config.kl_coef else None
    optimizer = make_optimizer(policy, config)
    with ExitStack() as stack:
        log = stack.enter_context(MetricsLog(config))
        weights = stack.enter_context(WeightsDirectory(config, policy))
        bridge = stack.enter_context(closing(make_bridge(config, initial_model=weights.save(0))))
        hub = stack.enter_context(TrainerClient(config.hub_url, token=config.hub_token))
        options = data_options(config)
        gap = LogprobGap(policy, weights, options, limit=config.max_logprob_gap)
        bridge.start()
        run = Run(hub, config, log)
        run.register(step=0, published=0)
        for step in range(config.num_steps):
            clock = Clock()
            with clock.phase("batch_wait_s"):
                leased = run.next_batch(step)
            version = step + 1
            with clock.phase("train_s"):
                with hub.holding(leased):
                    batch = make_batch(leased.groups, options)
                    result = take_step(policy, optimizer, batch, config, step, gap, reference)
                run.acknowledge(leased, step=version)
            with clock.phase("publish_s"):
                if is_publish_due(version, config):
                    bridge.publish(weights.save(version), version)
                    run.announce(version)
                if config.checkpoint_interval and version % config.checkpoint_interval == 0:
                    policy.save(config.save_path / f"step_{version}")
                    hub.checkpoint(version, config.save_path / f"step_{version}")
            record = describe_batch(batch, step) | describe_result(result, batch)
            record |= {"num_lost_leases": run.num_lost_leases} | clock.read()
            record |= {"step": version, "queue_size": hub.status().queue_size}
            log.write(record)
            logger.info(progress_line(record, config.num_steps))
        policy.save(config.save_path / "final_model")
        hub.checkpoint(config.num_steps, config.save_path / "final_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step computed; None where the batch held nothing to train."""

    lr: float
    loss: float | None
    grad_norm: float | None
    sums: dict[str, float]
    """The sums of `LossShare`, over the whole batch."""
    gap: GapReport


def take_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: TrainerConfig,
    step: int,
    gap: LogprobGap,
    reference: Policy | None = None,
) -> StepResult:
    """Accumulate the gradient over the micro-batches, compare logprobs, then update the weights.

    A batch with nothing to train leaves weights and optimizer as they are.
    """
    lr = config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))
    for settings in optimizer.param_groups:
        settings["lr"] = lr
    gap.compare_older(batch, step)
    objective = objective_of(config)
    totals = torch.zeros(len(LossShare._fields), dtype=torch.float64, device=policy.device)
    for cpu_micro_batch in batch.micro_batches:
        micro_batch = cpu_micro_batch.to(policy.device)
        own = policy.logprobs(micro_batch)
        gap.observe(micro_batch, own.logprobs_N, step)
        share = policy_loss(
            objective,
            micro_batch.positions,
            own.logprobs_N,
            entropy_N=own.entropy_N,
            ref_logprobs_N=reference_logprobs(reference, micro_batch),
            teacher_logprobs_own_NK=own.teacher_NK,
        )
        share.loss.backward()
        totals += torch.stack([value.detach() for value in share])
    report = gap.settle(step)
    grad_norm = update_weights(policy, optimizer, config, step) if batch.micro_batches else None
    sums = dict(zip(LossShare._fields, totals.tolist(), strict=True))
    return StepResult(
        lr=lr,
        loss=sums["loss"] if batch.micro_batches else None,
        grad_norm=grad_norm,
        sums=sums,
        gap=report,
    )


def reference_logprobs(reference: Policy | None, micro_batch: MicroBatch) -> Tensor | None:
    """Return the reference's logprobs: those that the environment gave, else those of the frozen copy."""
    if reference is None or micro_batch.positions.ref_logprobs_N is not None:
        return micro_batch.positions.ref_logprobs_N
    with torch.no_grad():
        return reference.logprobs(micro_batch).logprobs_N


def update_weights(
    policy: Policy, optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int
) -> float:
    """Clip the gradient, apply it, clear it; return its norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm)
    if not torch.isfinite(norm):
        raise AtroposError(
            f"step {step + 1}: the gradient is not finite, so the weights were left as they are; "
            "check the learning rate and the advantages that the environments send"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


class Run:
    """This trainer's run at the hub: registration, batches, announcements; patient while the hub is away."""

    def __init__(self, hub: TrainerClient, config: TrainerConfig, log: MetricsLog) -> None:
        self._hub = hub
        self._config = config
        self._log = log
        self._published = 0
        self.num_lost_leases = 0
        """Batches that were not ours any more when they had been trained."""

    def register(self, *, step: int, published: int) -> None:
        """Begin the run at `step`, or begin it again at a hub that has forgotten it."""
        config = self._config
        logger.info("registering at %s", config.hub_url)
        reply = self._hub.register(
            TrainerRegistration(
                wandb_group=self._log.wandb_group,
                wandb_project=self._log.wandb_project,
                batch_size=config.sequences_per_step,
                max_token_len=config.seq_len,
                checkpoint_dir=str(config.save_path),
                save_checkpoint_interval=config.checkpoint_interval or config.num_steps,
                starting_step=step,
                num_steps=config.num_steps,
            ),
            resume_step=step,  # leases of an earlier trainer end here
        )
        if reply.replayed or reply.forgotten_steps:
            logger.warning(
                "the hub holds an earlier run: %d groups that were trained on after step %d come again, and %d steps"
                " are no longer held; run-api --fresh begins anew",
                reply.replayed or 0,
                step,
                reply.forgotten_steps or 0,
            )
        self.announce(published)

    def announce(self, version: int) -> None:
        """Tell the hub which policy version the engines serve."""
        self._published = version
        self._hub.publish_policy(version)

    def next_batch(self, step: int) -> LeasedBatch:
        """Lease the next batch, however long it takes; the one poller of `/batch`, and the owner of its retries."""
        backoff_s = 0.2
        while True:
            try:
                batch = self._hub.lease_batch(wait_s=BATCH_WAIT_S, ttl_s=self._config.lease_s)
            except TrainerNotRegistered:
                logger.warning("the hub has forgotten this run; registering again at step %d", step)
                self.register(step=step, published=self._published)
                continue
            except HubUnavailable as error:
                if backoff_s == 0.2:
                    logger.warning("the hub is away, waiting for it: %s", error)
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            if backoff_s > 0.2:
                logger.info("the hub is back")
                backoff_s = 0.2
            if batch is not None:
                return batch

    def acknowledge(self, batch: LeasedBatch, *, step: int) -> None:
        """Tell the hub that the weights contain the batch as `step`; waits for a hub that restarts."""
        try:
            self._hub.ack(batch, step=step)
        except LeaseExpired as error:
            self.num_lost_leases += 1
            logger.warning(
                "step %d: the lease had ended before the step did, so the hub may hand these groups out again and they "
                "may be trained twice; give a longer --lease_s if steps take that long (%s)",
                step,
                error,
            )
        except HubRejected as error:
            if error.status != 404:
                raise
            logger.warning(
                "step %d: the hub has forgotten the batch it was made of (%s)", step, error
            )


class Clock:
    """Times of one step, in seconds."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._phases[name] = time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Return each phase, the whole step (`wall_s`) and this process's CPU time in it (`cpu_s`)."""
        totals = {
            "wall_s": time.perf_counter() - self._started,
            "cpu_s": time.process_time() - self._cpu_started,
        }
        return {name: round(value, 6) for name, value in (self._phases | totals).items()}


def describe_batch(batch: Batch, version: int) -> dict[str, Any]:
    """Return the metrics of the data; staleness is counted in steps, over sequences of known version."""
    staleness = version - batch.versions[batch.versions != UNKNOWN_VERSION]
    known = bool(len(staleness))
    return {
        "reward_mean": float(batch.scores.mean()),
        "reward_std": float(batch.scores.std()),
        "num_groups": batch.num_groups,
        "num_sequences": batch.num_sequences,
        "num_trained_tokens": batch.num_trained_tokens,
        "num_skipped_zero_advantage": batch.num_skipped_zero_advantage,
        "num_skipped_untrained": batch.num_skipped_untrained,
        "num_skipped_too_long": batch.num_skipped_too_long,
        "staleness_mean": float(staleness.mean()) if known else None,
        "staleness_max": int(staleness.max()) if known else None,
    }


def describe_result(result: StepResult, batch: Batch) -> dict[str, Any]:
    """Return the metrics of the step, means over trained positions; `kl_mean` is to the reference, None without one."""
    sums = result.sums
    num_trained, num_policy = max(1, batch.num_trained_tokens), max(1.0, sums["num_policy"])
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "ratio_mean": sums["ratio_sum"] / num_policy if sums["num_policy"] else None,
        "clip_fraction": sums["num_clipped"] / num_policy,
        "rejected_fraction": sums["num_rejected"] / num_policy,
        "entropy_mean": sums["entropy_sum"] / num_trained if batch.micro_batches else None,
        "kl_mean": sums["kl_sum"] / num_trained if sums["kl_sum"] else None,
        "sampled_kl_mean": sums["sampled_kl_sum"] / num_policy if sums["num_policy"] else None,
        "distill_loss": sums["distill_sum"] / num_trained if sums["distill_sum"] else None,
        "logprob_gap_max": result.gap.maximum,
        "logprob_gap_mean": result.gap.mean,
    }


def progress_line(record: dict[str, Any], num_steps: int) -> str:
    def show(name: str) -> str:
        value = record[name]
        return "-" if value is None else f"{value:.3g}"

    return (
        f"step {record['step']}/{num_steps} reward {record['reward_mean']:.3f} loss {show('loss')} "
        f"grad norm {show('grad_norm')} staleness {show('staleness_mean')} "
        f"logprob gap {show('logprob_gap_max')} in {record['wall_s']:.2f} s"
    )


def is_publish_due(version: int, config: TrainerConfig) -> bool:
    """True every `steps_per_publish` steps, and after the last one for engines that live on."""
    if version == config.num_steps:
        return config.bridge != "restart"
    return version % config.steps_per_publish == 0


def make_optimizer(policy: Policy, config: TrainerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        policy.model.parameters(),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def data_options(config: TrainerConfig) -> DataOptions:
    return DataOptions(
        baseline=config.baseline,
        scale_advantages=config.scale_advantages,
        loss_mean=config.loss_mean,
        loss_constant=config.loss_constant or config.seq_len,
        overlong_max=config.overlong_max,
        overlong_buffer=config.overlong_buffer,
        seq_len=config.seq_len,
        max_sequences=config.batch_size,
        max_tokens=config.max_microbatch_tokens,
        layout="packed" if config.packs_sequences else "padded",
        pad_to_multiple_of=config.pad_to_multiple_of,
        keep_zero_advantage=config.kl_coef > 0 or config.distill_coef > 0,
        processed_logprobs=config.logprobs_mode == "processed",
    )


def objective_of(config: TrainerConfig) -> Objective:
    return Objective(
        surrogate=config.surrogate,
        ratio_level=config.ratio_level,
        clip_low=config.clip_eps,
        clip_high=config.clip_eps if config.clip_eps_high is None else config.clip_eps_high,
        correction=config.correction,
        correction_level=config.correction_level,
        correction_cap=config.correction_cap,
        correction_floor=config.correction_floor,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        distill_coef=config.distill_coef,
        distill_loss=config.distill_loss,
    )


def set_up_torch(config: TrainerConfig) -> None:
    """Seed everything and limit CPU threads."""
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
