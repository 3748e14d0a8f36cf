"""Source of batches: the hub for the first process, the first process for all others.

`Leader` registers at the hub, leases and acknowledges batches, and publishes policy versions; it alone polls `/batch`,
and retries while the hub is unavailable. `Follower` has the same methods and receives the leader's batches. Called by
`training.py` only.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from atroposlib.client import (
    LeasedBatch,
    LeaseExpired,
    TrainerClient,
    TrainerNotRegistered,
    TrainerRegistration,
)
from atroposlib.errors import GroupError, HubError, HubRejected, HubUnavailable
from atroposlib.patience import Backoff
from atroposlib.scored_data import ScoredGroup, Strictness
from atroposlib.utils.wording import without_users
from atroposlib.wire import join_packed, pack_group, split_packed, unpack_group
from example_trainer.config import TrainerConfig
from example_trainer.parallel import World
from example_trainer.records import MetricsLog

T = TypeVar("T")

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 5.0
"""Long-poll time of one request for a batch."""
MAX_BACKOFF_S = 5.0
RETRY_S = 5.0
"""How long the client itself retries a control call; between such calls the run can stop."""
FIRST_WAIT_S = 120.0
"""Limit for the first registration, while the hub may still be starting. Later waits have no limit."""
MAX_UNTRAINABLE = 16
"""The run ends after so many untrainable groups in a row, if no batch follows: there may be no others."""


class Follower:
    """The feed of every process but the first, and the base of `Leader`; every process makes the same calls."""

    num_lost_leases = 0
    """Batches whose lease expired before they were acknowledged."""
    experiment: str | None = None
    """The hub's id of this training, saved in checkpoints; None in every process but the first."""
    is_on_policy = False
    """Whether only tokens of the announced policy version are trained; False in every process but the first."""
    oldest_version: int | None = None
    """Tokens that an older policy sampled are too old for the groups returned last; None: none are."""

    def __init__(self, world: World, *, is_stopping: Callable[[], bool]) -> None:
        self._world = world
        self._is_stopping = is_stopping

    def begin(self, *, step: int) -> None:
        """Register the run at `step`; the engines must serve that step's weights."""

    def next_groups(self, step: int) -> list[ScoredGroup] | None:
        """Wait without limit for the groups of the next step; return None if the run must stop.

        A signal to any process stops all of them here. While they wait for a batch, one to another process than the
        first counts only after the next step.
        """
        data = None if self._must_stop() else self._world.broadcast(None)
        if data is None:
            return None
        envelope = split_packed(data)
        self.oldest_version = envelope.meta["oldest_version"]
        return [unpack_group(blob, strictness=Strictness.MEANING) for blob in envelope.blobs]

    def _must_stop(self) -> bool:
        """Whether any process was asked to stop; every process must call this."""
        return bool(self._world.max(torch.tensor(self._is_stopping(), dtype=torch.float32)))

    def training(self) -> AbstractContextManager[None]:
        """Renew the batch's lease while its step is computed."""
        return nullcontext()

    def refuse(self, positions: Sequence[int], reason: str) -> None:
        """Give the batch back untrained; the groups at `positions` are set aside, for `reason`."""

    def acknowledge(self, *, step: int) -> None:
        """Report that the weights of `step` contain the batch."""

    def announce(self, version: int | None = None) -> None:
        """Report the policy version that the engines serve; None: the last one again. Any thread may call it."""

    def checkpointed(self, step: int, path: Path) -> None:
        """Report a checkpoint that contains all training up to `step`; any thread may call it."""

    def queue_size(self) -> int | None:
        """Return the number of groups queued at the hub; None if unknown."""
        return None


class Leader(Follower):
    """The feed of the first process."""

    def __init__(
        self,
        hub: TrainerClient,
        config: TrainerConfig,
        log: MetricsLog,
        world: World,
        *,
        experiment: str | None,
        require_trainable: Callable[[ScoredGroup], None],
        on_refused: Callable[[ScoredGroup, str], None],
        is_stopping: Callable[[], bool],
        on_no_batch: Callable[[], None],
    ) -> None:
        super().__init__(world, is_stopping=is_stopping)
        self._hub = hub
        self._config = config
        self._log = log
        self._require_trainable = require_trainable
        """Raises GroupError for a group that this model cannot be trained on; the hub then sets it aside."""
        self._on_refused = on_refused
        """Called with each group that the hub sets aside, and the reason in one word."""
        self._num_untrainable = 0
        """Untrainable groups since the last trainable one."""
        self._last_fault: GroupError | None = None
        self._on_no_batch = on_no_batch
        """Called every few seconds while no batch comes; an exception from it ends the run."""
        self._is_resumed = config.resume or config.resume_from is not None
        # A checkpoint of an earlier version has no id: it resumes the hub's current experiment.
        self.experiment = experiment or (None if self._is_resumed else secrets.token_hex(16))
        self._published = 0
        self._max_staleness: int | None = None
        self._reporting = threading.Lock()
        """Held by calls of other threads and by a registration: none may be sent under the epoch that it replaces, and
        the version that it repeats must not arrive after a later one."""
        self._leased: LeasedBatch | None = None

    def begin(self, *, step: int) -> None:
        self._patiently("it lacks this run", lambda: self._register(step=step), for_s=FIRST_WAIT_S)
        self.announce(step)

    def announce(self, version: int | None = None) -> None:
        with self._reporting:
            self._published = served = self._published if version is None else version
            self._patiently("it does not know the policy", lambda: self._hub.publish_policy(served))

    def next_groups(self, step: int) -> list[ScoredGroup] | None:
        self._leased = None
        if self._must_stop():
            return None
        while self._leased is None and not self._is_stopping():
            # Read before the request: stricter than the hub only while the hub does not know the newest version yet.
            published = self._published
            self._leased = self._lease(step)
            if self._leased is None:
                if self._last_fault is not None and self._num_untrainable >= MAX_UNTRAINABLE:
                    raise self._last_fault
                self._on_no_batch()
        if self._leased is None or self._is_stopping():
            if self._leased is not None:
                try:
                    self._hub.release(self._leased)
                except HubError as error:
                    logger.warning("the batch of a step not taken was not given back: %s", error)
            self._world.broadcast(None)
            return None
        groups = list(self._leased.groups)
        bound = self._max_staleness
        self.oldest_version = None if bound is None else published - bound
        if self._world.size > 1:
            meta = {"oldest_version": self.oldest_version}
            self._world.broadcast(join_packed([pack_group(group) for group in groups], meta))
        return groups

    @contextmanager
    def training(self) -> Iterator[None]:
        assert self._leased is not None
        with self._hub.holding(self._leased):
            yield

    def refuse(self, positions: Sequence[int], reason: str) -> None:
        batch = self._leased
        assert batch is not None
        names = ", ".join(str(batch.groups[i].group_id) for i in positions) or "no group alone"
        logger.error("a batch is given back; %s: %s", reason, names)
        for i in positions:
            self._on_refused(batch.groups[i], "not_finite")

        def give_back() -> None:
            if positions:
                self._hub.reject(batch, positions, reason=reason)
            else:
                self._hub.release(batch)

        try:
            self._patiently("it does not know that a batch is given back", give_back)
        except LeaseExpired as error:
            logger.warning("the lease of the batch had ended: %s", error)
        except HubRejected as error:
            _require_unknown(error)

    def acknowledge(self, *, step: int) -> None:
        """Wait while the hub is unavailable; count an expired lease, and warn of it or of an unknown batch."""
        batch = self._leased
        assert batch is not None
        try:
            self._patiently(
                f"it has not heard that the batch of step {step} was trained and will hand it out again",
                lambda: self._hub.ack(batch, step=step),
            )
        except LeaseExpired as error:
            self.num_lost_leases += 1
            logger.warning(
                "step %d: the lease had ended before the step did, so the hub may hand these groups out again and they "
                "may be trained twice; give a longer --lease_s if steps take that long (%s)",
                *(step, error),
            )
        except HubRejected as error:
            _require_unknown(error)

    def checkpointed(self, step: int, path: Path) -> None:
        with self._reporting:
            self._patiently(
                "it does not know the checkpoint", lambda: self._hub.checkpoint(step, path)
            )

    def queue_size(self) -> int | None:
        try:
            return self._hub.status().queue_size
        except HubUnavailable:
            return None  # the next request for a batch waits and logs it

    def _patiently(
        self, otherwise: str, call: Callable[[], T], *, for_s: float = math.inf
    ) -> T | None:
        """Repeat a call while the hub is unavailable; raise HubUnavailable after `for_s` seconds.

        If the run must stop meanwhile, warn and return None, so that it can still save.
        """
        began = time.monotonic()
        backoff = Backoff(first_s=0.2, cap_s=MAX_BACKOFF_S)
        while True:
            try:
                result = call()
            except HubUnavailable as error:
                if self._is_stopping():
                    logger.warning(
                        "stopping while the hub is unavailable: %s (%s)", otherwise, error
                    )
                    return None
                if time.monotonic() - began > for_s:
                    raise
                if backoff.num_failed == 0:
                    logger.warning("the hub is unavailable, waiting for it: %s", error)
                time.sleep(backoff.next())
                continue
            if backoff.num_failed > 0:
                logger.info("the hub answers again")
            return result

    def _register(self, *, step: int) -> None:
        """Register the run at `step`; again, if the hub has lost it."""
        logger.info("registering at %s", without_users(self._config.hub_url))
        # With a step to resume from, the hub ends the leases of an earlier trainer.
        resume_step = step if self._is_resumed else None
        config = self._config
        run = TrainerRegistration(
            wandb_group=self._log.wandb_group,
            wandb_project=self._log.wandb_project,
            batch_size=config.sequences_per_step,
            max_token_len=config.seq_len,
            checkpoint_dir=str(config.save_path),
            save_checkpoint_interval=config.checkpoint_interval or config.num_steps,
            starting_step=step,
            num_steps=config.num_steps,
        )
        reply = self._hub.register(run, experiment=self.experiment, resume_step=resume_step)
        self.experiment = reply.experiment or self.experiment
        self._max_staleness = reply.max_staleness
        self.is_on_policy = reply.max_staleness == 0
        self._is_resumed = True  # registering again at a hub that lost the run is a resume
        if reply.set_aside is not None:
            logger.warning(
                "the hub has set its earlier experiment aside as %r; resume it with --resume from its checkpoint",
                reply.set_aside,
            )
        if reply.replayed or reply.forgotten_steps:
            logger.warning(
                "%d groups that were trained on after step %d come again, and %d steps are no longer held",
                *(reply.replayed or 0, step, reply.forgotten_steps or 0),
            )
        if reply.unknown_steps:
            logger.warning(
                "the hub has no record of the last %d steps before step %d, as if a backup was restored: groups that"
                " they were trained on may come again",
                reply.unknown_steps,
                step,
            )

    def _check(self, group: ScoredGroup) -> None:
        try:
            self._require_trainable(group)
        except GroupError as fault:
            self._num_untrainable += 1
            self._last_fault = fault
            self._on_refused(group, "untrainable")
            raise
        self._num_untrainable = 0

    def _lease(self, step: int) -> LeasedBatch | None:
        """Request a batch; None if there is none yet, the run was registered again, or it must stop."""
        wait_s, ttl_s = BATCH_WAIT_S, self._config.lease_s
        try:
            return self._patiently(
                "no batch is taken",
                lambda: self._hub.lease_batch(wait_s, ttl_s=ttl_s, check=self._check),
            )
        except TrainerNotRegistered:
            logger.warning("this run is unknown to the hub; registering again at step %d", step)
            with self._reporting:
                self._patiently("it lacks this run", lambda: self._register(step=step))
            self.announce()
            return None


def _require_unknown(error: HubRejected) -> None:
    """Raise the hub's answer to a call about a batch unless it is that it knows no such batch: it has lost the run."""
    if error.status != 404:
        raise error
    logger.warning("the hub no longer knows its batch (%s)", error)
