"""THE loop, in reading order: wait for a batch, take a step, hand the weights over, record it.

A policy version is the number of steps behind its weights; version 0 is the initial model. One batch is leased per
step, so that nothing waits here and goes stale, and acknowledged once the weights contain it: a batch whose trainer
died is trained by the next one. A run that goes on from a checkpoint is sent again what was trained after it.
"""

from __future__ import annotations

import logging
import math
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atroposlib.client import TrainerClient
from atroposlib.errors import AtroposError
from example_trainer.bridges import EngineWatch, make_bridge
from example_trainer.checkpointing import Checkpoints
from example_trainer.config import TrainerConfig
from example_trainer.data import Batch, DataOptions, MicroBatch, make_batch
from example_trainer.feed import RETRY_S, Feed, Follower, Leader
from example_trainer.gap import GapReport, LogprobGap
from example_trainer.loss import LogprobSums, LossShare, logprob_sums, policy_loss
from example_trainer.model import Policy, choose_device, load_policy, reference_of
from example_trainer.objective import Objective
from example_trainer.optim import make_optimizer, set_learning_rate
from example_trainer.parallel import World, processes, sync_gradients, whole
from example_trainer.records import (
    Clock,
    MetricsLog,
    describe_batch,
    finite,
    gpu_memory,
    progress_line,
)
from example_trainer.weights import WeightsDirectory

logger = logging.getLogger(__name__)


def train(config: TrainerConfig) -> None:
    """Train until `config.num_steps` steps are behind the model and leave it in `<save_path>/final_model`.

    SIGTERM or Ctrl-C: the step under way is finished and saved, and the function returns; a second signal ends at once.
    Raises ConfigError for a model, device or path that cannot be used, EngineError when weights cannot be handed over
    or engine and trainer disagree, GroupError for groups that cannot be trained on, HubError when the hub refuses.
    """
    set_up_torch(config)
    with ExitStack() as stack:
        world = stack.enter_context(processes(choose_device(config)))
        policy = load_policy(config, world)
        reference = reference_of(policy, config) if config.kl_coef else None
        optimizer = make_optimizer(policy, config)
        saved = Checkpoints(save_path=config.save_path, world=world, keep_last=config.keep_last)
        start, metrics = resume(config, saved, policy, optimizer)
        saved.begin(start)
        log = stack.enter_context(
            MetricsLog(config, start=start, last=metrics, is_main=world.is_main)
        )
        weights = stack.enter_context(WeightsDirectory(config, policy))
        bridge = stack.enter_context(closing(make_bridge(config, weights)))
        bridge.start(policy, start)
        is_stopping = stack.enter_context(stop_on_signals())
        engines = EngineWatch(bridge, patience_s=config.engine_retry_s)
        feed = stack.enter_context(make_feed(config, log, world, is_stopping, engines))
        feed.begin(step=start)
        options = data_options(config)
        gap = LogprobGap(policy, weights, options, limit=config.max_logprob_gap)
        version = saved_version = start
        for step in range(start, config.num_steps):
            clock = Clock()
            with clock.phase("batch_wait_s"):
                groups = feed.next_groups(step)
            if groups is None:
                break
            version = step + 1
            with clock.phase("train_s"):
                with feed.training():
                    batch = make_batch(groups, options)
                    result = take_step(policy, optimizer, batch, config, step, gap, reference)
                feed.acknowledge(step=version)
            with clock.phase("publish_s"):
                if is_publish_due(version, config):
                    feed.announce(bridge.publish(policy, version))
            record = describe_batch(batch, step) | describe_result(result, batch)
            record |= {"num_lost_leases": feed.num_lost_leases} | clock.read()
            record |= {"step": version, "queue_size": feed.queue_size()} | gpu_memory(policy.device)
            record |= {"tokens_per_s": batch.num_tokens / record["train_s"], "save_s": None}
            with clock.phase("save_s"):
                if config.checkpoint_interval and version % config.checkpoint_interval == 0:
                    save_checkpoint(saved, policy, optimizer, version, feed, metrics=record)
                    saved_version = version
            record |= clock.read()
            log.write(record)
            if world.is_main:
                logger.info(progress_line(record, config.num_steps))
        is_finished = version >= config.num_steps
        if version != saved_version and (config.checkpoint_interval or not is_finished):
            save_checkpoint(saved, policy, optimizer, version, feed)
            saved_version = version
        if not is_finished:
            logger.info("stopped after step %d; --resume goes on from there", version)
            return
        final = config.save_path / ("final_adapter" if config.lora else "final_model")
        policy.save(final)
        if version != saved_version:
            feed.checkpointed(version, final)


def save_checkpoint(
    saved: Checkpoints,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    version: int,
    feed: Feed,
    *,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Save, tell the hub that it may forget what is in the checkpoint, and only then remove older ones."""
    path = saved.save(policy, optimizer, version, None if metrics is None else finite(metrics))
    feed.checkpointed(version, path)
    saved.remove_old()


class Start(NamedTuple):
    """Where a run begins."""

    step: int
    metrics: dict[str, Any] | None
    """Of the last step before, as far as its checkpoint holds them."""


def resume(
    config: TrainerConfig, saved: Checkpoints, policy: Policy, optimizer: torch.optim.Optimizer
) -> Start:
    """Load the checkpoint that the configuration asks for; step 0 without one."""
    directory = config.resume_from
    if directory is None and config.resume:
        newest = saved.world.broadcast(str((saved.steps() or [0])[-1]).encode())
        step = int(newest or b"0")
        directory = saved.directory(step) if step else None
    if directory is None:
        return Start(0, None)
    step = saved.load(directory, policy, optimizer)
    logger.info("going on from %s", directory)
    return Start(step, saved.metrics(directory))


@contextmanager
def make_feed(
    config: TrainerConfig,
    log: MetricsLog,
    world: World,
    is_stopping: Callable[[], bool],
    engines: EngineWatch,
) -> Iterator[Feed]:
    if not world.is_main:
        yield Follower(world)
        return
    with TrainerClient(config.hub_url, token=config.hub_token, retry_for_s=RETRY_S) as hub:
        yield Leader(hub, config, log, world, is_stopping=is_stopping, on_no_batch=engines.look)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a question: was this process asked to stop? The first signal is noted, the second unwinds at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # signals belong to the main thread
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            for each in numbers:
                signal.signal(each, signal.SIG_IGN)  # a third must not cut the unwinding short
            raise SystemExit(128 + number)
        asked.set()
        logger.info("asked to stop: finishing the step under way")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield asked.is_set
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step computed; None where the batch held nothing to train."""

    lr: float
    loss: float | None
    grad_norm: float | None
    sums: dict[str, float]
    """Those of `LossShare` and `LogprobSums`, over the whole batch."""
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
    lr = set_learning_rate(optimizer, config, step)
    gap.compare_older(batch, step)
    objective = objective_of(config)
    frozen = reference if batch.lacks_reference else None
    names = LossShare._fields + LogprobSums._fields
    totals = torch.zeros(len(names), dtype=torch.float64, device=policy.device)
    micro_batches = policy.world.share(batch.micro_batches)
    for index, cpu_micro_batch in enumerate(micro_batches):
        micro_batch = cpu_micro_batch.to(policy.device)
        sync_gradients(policy.module, now=index == len(micro_batches) - 1)
        own = policy.logprobs(micro_batch)
        if not micro_batch.is_filler:
            gap.observe(micro_batch, own.logprobs_N, step)
        share = policy_loss(
            objective,
            micro_batch.positions,
            own.logprobs_N,
            entropy_N=own.entropy_N,
            ref_logprobs_N=reference_logprobs(frozen, micro_batch),
            teacher_logprobs_own_NK=own.teacher_NK,
        )
        (share.loss * policy.world.size).backward()  # FSDP takes the mean over the processes
        if not micro_batch.is_filler:
            sums_of_logprobs = logprob_sums(micro_batch.positions, own.logprobs_N)
            totals += torch.stack([value.detach() for value in (*share, *sums_of_logprobs)])
    report = gap.settle(step)
    grad_norm = update_weights(policy, optimizer, config, step) if batch.micro_batches else None
    totals = policy.world.sum(totals)
    sums = dict(zip(names, totals.tolist(), strict=True))
    return StepResult(
        lr=lr,
        loss=sums["loss"] if batch.micro_batches else None,
        grad_norm=grad_norm,
        sums=sums,
        gap=report,
    )


def reference_logprobs(reference: Policy | None, micro_batch: MicroBatch) -> Tensor | None:
    """Return the reference's logprobs: those that the environment gave, else those of the frozen copy.

    The copy is asked for every micro-batch or for none: where it is split over processes, all must take part.
    """
    given_N = micro_batch.positions.ref_logprobs_N
    if reference is None:
        return given_N
    with torch.no_grad():
        own_N = reference.logprobs(micro_batch).logprobs_N
    return own_N if given_N is None else torch.where(given_N.isnan(), own_N, given_N)


def update_weights(
    policy: Policy, optimizer: torch.optim.Optimizer, config: TrainerConfig, step: int
) -> float:
    """Clip the gradient, apply it, clear it; return its norm before clipping."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    norm = whole(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
    if not torch.isfinite(norm):
        raise AtroposError(
            f"step {step + 1}: the gradient is not finite, so the weights were left as they are; "
            "check the learning rate and the advantages that the environments send"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def describe_result(result: StepResult, batch: Batch) -> dict[str, Any]:
    """Return the metrics of the step, means over trained positions; None where nothing went into one.

    `kl_mean` is to the reference. `raised` and `lowered` are positions with an advantage above and below 0.
    """
    sums = result.sums

    def mean(total: str, count: str = "num_policy") -> float | None:
        return sums[total] / sums[count] if sums[count] else None

    def deviation(total: str, squares: str) -> float | None:
        average, square = mean(total), mean(squares)
        if average is None or square is None:
            return None
        return math.sqrt(max(square - average * average, 0.0))

    num_trained = max(1, batch.num_trained_tokens)
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "ratio_mean": mean("ratio_sum"),
        "clip_fraction": mean("num_clipped"),
        "rejected_fraction": mean("num_rejected"),
        "entropy_mean": sums["entropy_sum"] / num_trained if batch.micro_batches else None,
        "kl_mean": sums["kl_sum"] / num_trained if sums["kl_sum"] else None,
        "sampled_kl_mean": mean("sampled_kl_sum"),
        "distill_loss": sums["distill_sum"] / num_trained if sums["distill_sum"] else None,
        "logprob_mean": mean("own_sum"),
        "logprob_std": deviation("own_sum", "own_square_sum"),
        "sampled_logprob_mean": mean("sampled_sum"),
        "sampled_logprob_std": deviation("sampled_sum", "sampled_square_sum"),
        "raised_logprob_mean": mean("raised_own_sum", "num_raised"),
        "lowered_logprob_mean": mean("lowered_own_sum", "num_lowered"),
        "logprob_gap_max": result.gap.maximum,
        "logprob_gap_mean": result.gap.mean,
    }


def is_publish_due(version: int, config: TrainerConfig) -> bool:
    """True every `steps_per_publish` steps, and after the last one for engines that live on."""
    if version == config.num_steps:
        return config.bridge != "restart"
    return version % config.steps_per_publish == 0


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
