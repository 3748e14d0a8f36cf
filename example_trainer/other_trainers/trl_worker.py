"""Feed TRL's `AsyncGRPOTrainer` (TRL 1.16) from the hub: its `rollout_worker`, and a command for `accelerate launch`.

The trainer takes single samples from a queue, up to one micro-batch ahead of training; with several processes the first
has the queue and sends the others their shares. A batch is therefore acknowledged at the second weight synchronisation
after its last sample was taken, and released if training ends earlier: a few groups may be trained twice, none is lost.
TRL's model version is the hub's policy version.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from transformers import HfArgumentParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from atroposlib.client import LeasedBatch, Sample, TrainerClient, TrainerRegistration, samples
from atroposlib.errors import ConfigError, GroupError, HubError, HubUnavailable
from atroposlib.scored_data import UNKNOWN_VERSION

logger = logging.getLogger(__name__)

_WAIT_S = 5.0
"""Maximum duration of a call for a batch; `stop` waits for that call."""


@dataclass(slots=True, kw_only=True, eq=False)
class _LeasedSamples:
    """A leased batch whose samples are handed to the trainer."""

    batch: LeasedBatch
    lease: ExitStack
    """Renews the lease until it is closed."""
    last: int
    """Number of its last sample, counted from 1 over all batches."""
    num_synchronisations: int = 0
    """Since its last sample was taken."""


class HubRolloutWorker:
    """TRL's `RolloutWorkerProtocol`: the hub's batches as samples.

    The caller closes `hub` after the training. Environments must sample at least one batch ahead of the trainer: TRL
    takes the next micro-batch before it trains on one, and would deadlock with environments that wait for its weights.
    """

    def __init__(self, hub: TrainerClient, run: TrainerRegistration) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=run.batch_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._hub = hub
        self._run = run
        self._version = 0
        self._is_over = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, name="hub", daemon=True)
        self._group_numbers = itertools.count()
        self._num_put = 0
        self._held: list[_LeasedSamples] = []
        self._held_lock = threading.Lock()
        """Guards `_held`: the producer thread adds batches, the trainer's thread removes them."""

    def start(self) -> None:
        self._hub.register(self._run)
        self._hub.publish_policy(self._version)
        self._thread.start()

    def stop(self) -> None:
        """Stop leasing and release every batch that is not acknowledged."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._held_lock:
            for held in self._held:
                held.lease.close()
                try:
                    self._hub.release(held.batch)
                except HubError as e:
                    logger.warning("batch %s is not given back: %s", held.batch.batch_id, e)
            self._held.clear()

    def update_model_version(self, model_version: int) -> None:
        """Acknowledge trained batches and report the engine's policy version to the hub."""
        self._version = model_version
        if self._thread.ident is None:
            return  # the first weights are synchronised before `start`
        self._acknowledge()
        self._hub.publish_policy(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise if leasing has failed; slow environments are not a failure (see the hub's `/explain`)."""
        if self._fault is not None:
            raise RuntimeError("the hub's batches ended") from self._fault

    def _acknowledge(self) -> None:
        with self._held_lock:
            num_taken = self._num_put - self.rollout_buffer.qsize()
            taken = [held for held in self._held if held.last <= num_taken]
            for held in taken:
                held.num_synchronisations += 1
            trained = [held for held in taken if held.num_synchronisations > 1]
            self._held = [held for held in self._held if held not in trained]
        for held in trained:
            held.lease.close()
            try:
                self._hub.ack(held.batch)
            except HubError as e:
                logger.warning("batch %s may be trained twice: %s", held.batch.batch_id, e)

    def _produce(self) -> None:
        try:
            while not self._is_over.is_set():
                try:
                    batch = self._hub.lease_batch(wait_s=_WAIT_S)
                except HubUnavailable as e:
                    logger.warning("no batch yet: %s", e)
                    self._is_over.wait(1.0)
                    continue
                if batch is not None:
                    self._hand_over(batch)
        except Exception as e:  # noqa: BLE001 - the thread's boundary; `check_health` raises it in the trainer
            self._fault = e

    def _hand_over(self, batch: LeasedBatch) -> None:
        lease = ExitStack()
        lease.enter_context(self._hub.holding(batch))
        records = samples(batch)
        with self._held_lock:
            last = self._num_put + len(records)
            self._held.append(_LeasedSamples(batch=batch, lease=lease, last=last))
        numbers = [next(self._group_numbers) for _ in batch.groups]
        bound = self._run.max_staleness
        oldest = 0 if bound is None else self._version - bound
        for record in records:
            number = numbers[record.group]
            rollout = to_rollout(record, number=number, version=self._version, oldest=oldest)
            while not self._is_over.is_set():
                try:
                    self.rollout_buffer.put(rollout, timeout=0.2)
                except queue.Full:
                    continue
                self._num_put += 1
                break


def to_rollout(sample: Sample, *, number: int, version: int, oldest: int = 0) -> RolloutSample:
    """Convert a sequence to TRL's form; `number` is its group's id, `version` the default policy version.

    Tokens of versions before `oldest` are left out, or TRL would drop the whole sequence for them.
    Raises GroupError for what TRL does not support: advantages that differ between tokens, supervised sequences.
    """
    versions = sample.token_versions
    usable = sample.completion_mask & ((versions >= oldest) | (versions == UNKNOWN_VERSION))
    known = versions[usable & (versions != UNKNOWN_VERSION)]
    advantages = sample.advantages[sample.completion_mask]
    sampled = np.where(sample.completion_mask, sample.sampled_logprobs, 0)
    if sample.is_supervised:
        raise GroupError("overrides: TRL has no likelihood loss, which `sft` asks for")
    if len(advantages) and advantages.min() != advantages.max():
        raise GroupError("advantages: TRL has one per sequence, and those of the tokens differ")
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=sample.input_ids.astype(np.int64),
        completion_mask=usable.astype(np.int64),
        old_log_probs=sampled.astype(np.float32),
        advantage=float(advantages[0]) if len(advantages) else 0.0,
        model_version=int(known.min()) if len(known) else version,
        group_id=number,
        metrics={"reward": sample.score},
    )


@dataclass(kw_only=True)
class HubConfig(AsyncGRPOConfig):
    """The command's flags: TRL's and those of the hub."""

    model_name: str
    hub_url: str = "http://127.0.0.1:8000"
    max_token_len: int = field(default=4096, metadata={"help": "Longest sequence of a group."})


def train(config: HubConfig, weights: WeightTransferProtocol | None = None) -> AsyncGRPOTrainer:
    """Train in this process, one of `accelerate launch`'s, and save the model; `weights`: instead of vLLM's NCCL."""
    if config.max_steps < 1:
        raise ConfigError("max_steps: a number is required; the hub's batches have no epochs")
    run = TrainerRegistration(
        batch_size=config.train_batch_size * config.gradient_accumulation_steps * config.world_size,
        max_token_len=config.max_token_len,
        checkpoint_dir=config.output_dir,
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=config.max_steps,
        max_staleness=config.max_staleness,
    )
    with TrainerClient(config.hub_url) as hub:
        trainer = AsyncGRPOTrainer(
            config.model_name,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            rollout_worker=HubRolloutWorker(hub, run),
            weight_transfer=weights,
        )
        trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(*HfArgumentParser(HubConfig).parse_args_into_dataclasses())
