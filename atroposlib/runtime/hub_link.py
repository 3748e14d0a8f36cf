"""A serving environment's control calls to its hub: registration, status, disconnection.

Owns their retries and their rate: calls pass a `Pace` (on average at most four per second) and are retried until the
hub answers. Queue sizes come from the hub's answers to sent groups and from one long poll. An original hub answers
polls at once, so it is polled four times per second; an environment with nothing in flight makes at most
`max_batches_offpolicy` batches between two polls. The outbox sends the groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from atroposlib.client import EnvRegistration, EnvStatus, HubClient, UnknownEnvironment
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import ConfigError, EnvError, HubError, HubUnavailable
from atroposlib.runtime.metrics import start_wandb
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.pace import Pace
from atroposlib.runtime.timings import Timings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HubLink:
    """One environment's registration at one hub. `on_news` is called after each status update."""

    def __init__(
        self,
        env: EnvHooks,
        hub: HubClient,
        outbox: Outbox,
        timings: Timings,
        *,
        on_news: Callable[[], None],
        losses: Callable[[], Mapping[str, int]],
        over_age: Callable[[], Mapping[str, int]],
    ) -> None:
        self._env = env
        self._hub = hub
        self._outbox = outbox
        self._timings = timings
        self._on_news = on_news
        self._losses = losses
        """What came to nothing so far, by reason."""
        self._over_age = over_age
        """Items in flight beyond the staleness bound, by what they wait for."""
        self._pace = Pace(burst=timings.control_burst, refill_s=timings.control_refill_s)
        self._backoff = timings.backoff()
        self._uid = uuid.uuid4().hex
        """Identifies this process, so that the hub recognises its later registrations."""
        self._registering = asyncio.Lock()  # the driver and the outbox may both notice a lost id
        self._follows_total_steps = env.config.total_steps == -1
        """Whether `total_steps` is taken from the trainer at each registration."""
        self._num_polls = 0
        self._status_at = 0.0
        """When `status` arrived, `time.monotonic`."""
        self._stored_at_status = 0
        self.hub_unavailable = False
        """Whether the hub failed to answer the last control call."""
        self.status: EnvStatus | None = None
        """The newest status; None until the first one after a registration."""
        # The status with the hub's answer to groups counts all that are stored.
        outbox.on_status = lambda status: self._set_status(status, stored=outbox.num_stored)

    @property
    def num_uncounted(self) -> int:
        """Groups that are finished but not counted in the queue sizes of `status`."""
        return self._outbox.num_held + self._outbox.num_stored - self._stored_at_status

    def trainer_waits_s(self) -> float | None:
        """Return how long the trainer has waited for a batch; None if it has one, or the hub does not say."""
        waited_s = None if self.status is None else self.status.trainer_waits_s
        return None if waited_s is None else waited_s + time.monotonic() - self._status_at

    @property
    def is_done(self) -> bool:
        """Whether the trainer has taken its last step."""
        return self.status is not None and self.status.current_step >= self._env.config.total_steps

    # Registration

    async def register(self) -> bool:
        """Register until the hub gives an id; return whether the trainer has started another experiment."""
        env = self._env
        is_first = True
        while (answer := await env._register_env())["status"] != "success":
            if is_first:
                logger.info("waiting for the trainer to start")
                is_first = False
            await asyncio.sleep(self._timings.register_s)
        registration = EnvRegistration.model_validate(answer)
        env.env_id = registration.env_id
        self.status = None
        env.wandb_prepend = registration.wandb_name
        env.checkpoint_dir = registration.checkpoint_dir
        env.checkpoint_interval = registration.checkpoint_interval
        env.curr_step = registration.starting_step
        if self._follows_total_steps:
            if registration.num_steps == -1:
                raise ConfigError("total_steps: -1, but the trainer has no number of steps either")
            env.config.total_steps = registration.num_steps
        logger.info("registered as %r (id %d)", registration.wandb_name, registration.env_id)
        is_another = self._outbox.experiment not in (None, registration.experiment)
        self._outbox.experiment = registration.experiment
        return is_another

    async def ask_for_id(self) -> dict[str, Any]:
        """Return the hub's answer to one registration request."""
        env, config = self._env, self._env.config

        def ask() -> Any:
            return self._hub.register_env(
                desired_name=env.registered_name,
                max_token_length=config.max_token_length,
                weight=config.inference_weight,
                group_size=config.group_size,
                min_batch_allocation=config.min_batch_allocation,
                env_uid=self._uid,
            )

        registration = await self._call(ask)
        if registration is None:
            return {"status": "wait for trainer to start"}
        answer: dict[str, Any] = registration.model_dump()
        return answer

    async def register_again(self, old_id: int) -> None:
        """Register again, unless `old_id` was already replaced."""
        async with self._registering:
            if self._env.env_id == old_id:
                await self._env.register_env()
                await self.learn_batch()

    async def learn_batch(self) -> None:
        """Call `get_server_info`, then check that a group fits in a batch."""
        config = self._env.config
        await self._env.get_server_info()
        if 0 < config.batch_size < config.group_size:
            raise ConfigError(
                f"group_size: {config.group_size} sequences do not fit the trainer's batch of "
                f"{config.batch_size}; lower group_size or raise the trainer's batch_size"
            )

    async def read_info(self) -> None:
        """Read the batch size and the token limit from the hub, if it knows them."""
        env = self._env
        info = await self._call(self._hub.info)
        if info.batch_size != -1:
            env.config.batch_size = info.batch_size
        if info.max_token_len != -1:
            env.max_token_len = info.max_token_len

    async def start_wandb(self) -> None:
        """Wait for the trainer's wandb project, then start the run."""
        if not self._env.config.use_wandb:
            return
        info = await self._call(self._hub.wandb_info)
        while info.project is None:
            await asyncio.sleep(self._timings.register_s)
            info = await self._call(self._hub.wandb_info)
        start_wandb(self._env, project=info.project, group=info.group)

    async def disconnect(self) -> None:
        """Disconnect from the hub; a failure is logged, not raised."""
        if self._env.env_id is None:
            return
        try:
            async with asyncio.timeout(self._timings.disconnect_s):
                await self._hub.disconnect_env(self._env.env_id, env_uid=self._uid)
        except (HubError, TimeoutError) as error:
            logger.warning("could not disconnect from the hub: %s", error)

    # Status

    async def watch(self) -> None:
        """Keep one status request open at the hub, until cancelled."""
        env = self._env
        while True:
            num_polls = self._num_polls
            await env.get_status()
            if self._num_polls == num_polls:  # an override that does not call the default
                try:
                    status = EnvStatus.model_validate(env.status_dict)
                except ValidationError as error:
                    faults = ", ".join(f"{f['loc'][0]}: {f['msg']}" for f in error.errors())
                    raise EnvError(f"get_status left an unusable status_dict: {faults}") from error
                self._set_status(status, stored=self._stored_at_status)
                await self._pace.wait()

    async def poll_status(self) -> None:
        """Wait for the hub's next status and store it in `status_dict`."""
        self._num_polls += 1
        await self._call(self._poll)

    async def _poll(self) -> None:
        """Poll the status once; register again if this environment is unknown to the hub."""
        env_id, known, stored = self._env.env_id or 0, self.status, self._outbox.num_stored
        now, items = time.time(), self._env.running_items.values()
        try:
            status = await self._hub.status_env(
                env_id,
                wait_s=self._poll_wait_s(),
                seen_step=None if known is None else known.current_step,
                seen_policy=None if known is None else known.policy_version,
                env_uid=self._uid,
                experiment=self._outbox.experiment,
                items_in_flight=len(items),
                oldest_item_s=max(
                    (max(0.0, now - item["start_time"]) for item in items), default=None
                ),
                over_age=self._over_age(),
                losses=self._losses(),
                groups_kept=self._outbox.num_accepted,
            )
        except UnknownEnvironment:
            logger.warning("the hub does not know this environment any more; registering again")
            await self.register_again(env_id)
            return
        if env_id == self._env.env_id:
            self._take_poll(status, known, stored)

    def _poll_wait_s(self) -> float:
        """Return how long the hub may hold a poll: not after an outage, and not much longer than a step.

        If a step takes twice its usual time, the trainer probably waits for a batch, and only a new status says so.
        """
        if self.status is None or self.hub_unavailable:
            return 0.0
        step_s = self.status.trainer_step_s
        longest_s = self._timings.poll_wait_s
        return longest_s if step_s is None else min(longest_s, max(1.0, 2.0 * step_s))

    def _take_poll(self, status: EnvStatus, known: EnvStatus | None, stored: int) -> None:
        """Store the status of a poll sent when `known` was the newest and `stored` groups were stored.

        Groups stored during the poll may or may not be in it. They are counted as missing, which starts too few items
        rather than too many, unless the hub's answer to them has updated the status meanwhile.
        """
        latest = self.status
        if latest is None or latest is known:
            self._set_status(status, stored=stored)
        elif status.current_step > latest.current_step:
            self._set_status(status, stored=self._outbox.num_stored)
        elif known is not None and status.policy_version != known.policy_version:
            newer = latest.model_copy(update={"policy_version": status.policy_version})
            self._set_status(newer, stored=self._stored_at_status)

    def _set_status(self, status: EnvStatus, *, stored: int) -> None:
        """Store a status; `stored`: how many of the groups that the hub has stored it counts."""
        self._stored_at_status = stored
        self.status, self._env.status_dict = status, status.model_dump()
        self._status_at = time.monotonic()
        self._on_news()

    async def _call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Retry a control call until the hub answers; owns its retries and their rate."""
        while True:
            await self._pace.wait()
            try:
                result = await request()
            except HubUnavailable as error:
                if not self.hub_unavailable:
                    self.hub_unavailable = True
                    logger.warning("the hub is unavailable; starting no new work: %s", error)
                await asyncio.sleep(self._backoff.next(asked_s=error.retry_after_s))
                continue
            if self.hub_unavailable:
                self.hub_unavailable = False
                logger.info("the hub answers again")
            self._backoff.reset()
            return result
