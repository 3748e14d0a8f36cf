"""The training loop, in reading order: wait for a batch, take a step, publish the weights, log the metrics.

Files are written in the background, at most one checkpoint and one publication at a time; the loop waits for the copy
that they are written from. An error of that work ends the run before the next step.

A policy version is the number of steps that made its weights; version 0 is the initial model. One batch is leased per
step, so that none becomes stale here, and acknowledged once the weights contain it: if the trainer dies, the hub hands
the batch out again. A run resumed from a checkpoint gets the batches after it again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from atroposlib.client import TrainerClient
from atroposlib.errors import AtroposError
from atroposlib.scored_data import ScoredGroup
from atroposlib.utils.model_choice import torch_device
from atroposlib.utils.tracing import record_step
from example_trainer.background import Background
from example_trainer.bridges import EngineWatch, WeightBridge, make_bridge
from example_trainer.checkpointing import Checkpoints, Start
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch, require_trainable
from example_trainer.feed import RETRY_S, Follower, Leader
from example_trainer.gap import LogprobGap
from example_trainer.memory import sizes_of, what_does_not_fit
from example_trainer.model import Policy, load_policy, reference_of, refresh
from example_trainer.optim import make_optimizer
from example_trainer.parallel import processes
from example_trainer.records import (
    Clock,
    MetricsLog,
    describe_batch,
    faults_of,
    finite,
    gpu_memory,
    progress_line,
)
from example_trainer.step import (
    NotFinite,
    data_options,
    describe_result,
    groups_at_fault,
    take_step,
)
from example_trainer.trained_groups import TrainedGroups
from example_trainer.vllm_process import shares_gpu
from example_trainer.weights import WeightsDirectory

logger = logging.getLogger(__name__)

MAX_REFUSED = 3
"""The run ends after so many batches in a row whose gradient is not finite."""


def train(config: TrainerConfig) -> None:
    """Train up to step `config.num_steps` and save the model in `<save_path>/final_model` (adapters: `final_adapter`).

    On SIGTERM or Ctrl-C, finish and save the current step and return; a second signal exits at once, except under
    torchrun. Raises ConfigError for an unusable model, device or path, EngineError if weights cannot be published or
    engine and trainer disagree, GroupError if no group can be trained on, HubError if the hub rejects a call.
    """
    set_up_torch(config)
    with ExitStack() as stack:
        enter = stack.enter_context
        world = enter(processes(torch_device(config.device)))
        policy = load_policy(config, world)
        warn_of_memory(policy, config)
        reference = reference_of(policy, config) if config.kl_coef else None
        optimizer = make_optimizer(policy, config)
        apart = world.for_another_thread()
        refreshed = reference if config.reference_refresh else None
        directory, keep = config.save_path, config.keep_last
        saved = Checkpoints(save_path=directory, world=apart, keep_last=keep, reference=refreshed)
        start, metrics, experiment = resume(config, saved, policy, optimizer)
        saved.begin(start, is_resumed=config.resume)
        log = enter(MetricsLog(config, start=start, last=metrics, is_main=world.is_main))
        trained_groups = enter(TrainedGroups(config, world, start=start))
        weights = enter(WeightsDirectory(config, policy))
        stopping = threading.Event()
        bridge = enter(closing(make_bridge(config, weights, is_stopping=stopping.is_set)))
        torch.cuda.empty_cache()  # an engine on the same GPU needs it to start
        bridge.start(policy, start)
        enter(stop_on_signals(stopping))
        feed = Follower(world, is_stopping=stopping.is_set)
        publications, checkpoints = Background(), Background()
        if world.is_main:
            watch = EngineWatch(bridge, patience_s=config.engine_retry_s)
            hub = TrainerClient(config.hub_url, token=config.hub_token, retry_for_s=RETRY_S)
            feed = Leader(
                enter(hub),
                config,
                log,
                world,
                experiment=experiment,
                require_trainable=partial(
                    require_trainable, vocab_size=policy.model.get_input_embeddings().num_embeddings
                ),
                is_stopping=stopping.is_set,
                on_refused=trained_groups.refuse,
                on_no_batch=lambda: look_after(watch, publications, checkpoints),
            )
        enter(publications)
        enter(checkpoints)
        feed.begin(step=start)
        options = data_options(config, policy)
        gap = LogprobGap(policy, limit=config.max_logprob_gap)
        version = saved_version = start
        known_faults: set[str] = set()
        for step in range(start, config.num_steps):
            clock = Clock()
            publications.check()
            checkpoints.check()
            num_refused = 0
            while True:
                with clock.phase("batch_wait_s"):
                    groups = feed.next_groups(step)
                if groups is None:
                    break
                began_at = time.time()
                with clock.phase("train_s"), feed.training():
                    oldest = feed.oldest_version
                    batch = make_batch(groups, options, oldest_version=oldest)
                    trace = trained_groups.begin(groups, batch, step=step + 1)
                    try:
                        result = take_step(
                            policy, optimizer, batch, config, step, gap, reference, trace
                        )
                    except NotFinite:
                        at_fault = groups_at_fault(policy, groups, config, reference, oldest)
                    else:
                        trained_groups.write(
                            trace, groups, batch, result.peak.group_shares, step=step + 1
                        )
                        break
                num_refused += 1
                refuse(feed, at_fault, groups, step=step + 1, num_refused=num_refused)
            if groups is None:
                break
            version = step + 1
            with clock.phase("train_s"):
                feed.acknowledge(step=version)
                if refreshed is not None and version % config.reference_refresh == 0:
                    refresh(refreshed, policy)
            if world.is_main:
                record_step([g.group_id for g in groups], step=version, began_at=began_at)
            with clock.phase("publish_s"):
                if is_publish_due(version, config):
                    publish(bridge, policy, version, feed, publications)
            record = describe_batch(batch, step) | describe_result(result, batch) | clock.read()
            peak = None if result.peak.group is None else groups[result.peak.group]
            for fault in set(faults_of(record, config, peak)) - known_faults:
                known_faults.add(fault)
                if world.is_main:
                    logger.warning("step %d: %s", version, fault)
            record |= gpu_memory(policy.device) | {
                "step": version,
                "num_lost_leases": feed.num_lost_leases,
                "queue_size": feed.queue_size(),
                "tokens_per_s": batch.num_tokens / record["train_s"],
                "publication_s": publications.ended_s(),
                "checkpoint_s": checkpoints.ended_s(),
                "save_s": None,
            }
            with clock.phase("save_s"):
                if config.checkpoint_interval and version % config.checkpoint_interval == 0:
                    save_checkpoint(saved, checkpoints, policy, optimizer, version, feed, record)
                    saved_version = version
            record |= clock.read()
            log.write(record)
            if world.is_main:
                logger.info(progress_line(record, config.num_steps))
        is_finished = version >= config.num_steps
        if version != saved_version and (config.checkpoint_interval or not is_finished):
            save_checkpoint(saved, checkpoints, policy, optimizer, version, feed)
            saved_version = version
        publications.wait()
        checkpoints.wait()
        if not is_finished:
            logger.info("stopped after step %d; --resume continues from there", version)
            return
        final = config.save_path / ("final_adapter" if config.lora else "final_model")
        policy.save(final)
        if version != saved_version:
            feed.checkpointed(version, final)


def refuse(
    feed: Follower,
    at_fault: Sequence[int],
    groups: Sequence[ScoredGroup],
    *,
    step: int,
    num_refused: int,
) -> None:
    """Give a batch whose gradient is not finite back without the groups at fault.

    Raises AtroposError if all of several groups are, since then the model is, and after MAX_REFUSED batches in a row.
    """
    are_all = len(at_fault) == len(groups) > 1
    feed.refuse([] if are_all else at_fault, "the gradient of this group is not finite")
    if are_all or num_refused == MAX_REFUSED:
        raise AtroposError(
            f"step {step}: the gradient of {'every group' if are_all else f'{MAX_REFUSED} batches in a row'} is not "
            "finite, so the weights were left as they are; check the learning rate, the checkpoint and the advantages "
            "that the environments send"
        )


def publish(
    bridge: WeightBridge, policy: Policy, version: int, feed: Follower, background: Background
) -> None:
    """Publish the weights and report the version that is served, in the background if the bridge can.

    Wait if the next batch must be sampled from them.
    """
    torch.cuda.empty_cache()  # and to load weights
    background.wait()  # one copy of the weights at a time
    serve = bridge.begin(policy, version)
    background.start(lambda: feed.announce(serve()))
    if feed.is_on_policy:
        background.wait()


def save_checkpoint(
    saved: Checkpoints,
    background: Background,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    version: int,
    feed: Follower,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint, report it to the hub, which may then drop its batches, and only then remove older ones."""
    background.wait()  # one copy of the state at a time
    last = None if metrics is None else finite(metrics)
    write = saved.take(policy, optimizer, version, last, feed.experiment)

    def finish() -> None:
        feed.checkpointed(version, write())
        saved.remove_old()

    background.start(finish)


def look_after(watch: EngineWatch, publications: Background, checkpoints: Background) -> None:
    """Raise the error of background work, or of engines that stay away; called while no batch comes."""
    publications.check()
    checkpoints.check()
    if not publications.is_busy:  # it retries by itself
        watch.look()


def resume(
    config: TrainerConfig, saved: Checkpoints, policy: Policy, optimizer: torch.optim.Optimizer
) -> Start:
    """Load the configured checkpoint; without one, start at step 0."""
    directory = config.resume_from
    if directory is None and config.resume:
        newest = saved.world.broadcast(str((saved.steps() or [0])[-1]).encode())
        step = int(newest or b"0")
        directory = saved.directory(step) if step else None
    if directory is None:
        return Start(0)
    start = saved.load(directory, policy, optimizer)
    logger.info("resuming from %s", directory)
    return start


@contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` on the first signal; unwind at once on the second, except under torchrun.

    A signal to all processes of a torchrun job arrives twice, from its sender and from torchrun, and torchrun kills
    processes that do not end in time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ

    def note(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            if is_under_torchrun:
                return
            for each in numbers:
                signal.signal(each, signal.SIG_IGN)  # a third must not interrupt the unwinding
            raise SystemExit(128 + number)
        stopping.set()
        limit = "; torchrun kills this process after its --shutdown-timeout, 30 s unless given"
        logger.info("asked to stop: finishing the step%s", limit if is_under_torchrun else "")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def warn_of_memory(policy: Policy, config: TrainerConfig) -> None:
    """Warn before the first step if it will probably not fit on the GPU."""
    if policy.device.type != "cuda" or not policy.world.is_main:
        return
    is_shared = shares_gpu(config, num_gpus=torch.cuda.device_count())
    num_bytes = torch.cuda.get_device_properties(policy.device).total_memory
    line = what_does_not_fit(sizes_of(policy, config, shares_gpu=is_shared), num_bytes)
    if line is not None:
        logger.warning("%s", line)


def is_publish_due(version: int, config: TrainerConfig) -> bool:
    """Whether to publish: every `steps_per_publish` steps, and after the last to engines that outlive the trainer."""
    if version == config.num_steps:
        return config.bridge != "restart"
    return version % config.steps_per_publish == 0


def set_up_torch(config: TrainerConfig) -> None:
    torch.manual_seed(config.seed)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
