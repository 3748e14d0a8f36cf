"""Serve an environment to a hub: register, keep items in flight, send groups, until the trainer is done.

Who waits for whom: the driver (one task) follows the trainer's steps and starts items; each item is an owned task with
a deadline; the outbox (one task) sends; the watcher (one task) asks the hub for its status. All live in one
`TaskGroup`, so none can outlive the run. Hub and engine may go away and come back at any time: groups are held, work
already running goes on, nothing new is started, one log line says so at each change. The environment's hooks are
called through the instance; `_Server` is the `Runtime` behind their defaults. Groups that cannot be delivered at the
end go to a file (`spool.py`), which the next run of the same name sends first.

What the hub has queued is learned from its answers to our own groups and from one long poll; control calls pass a
`Pace`, on average one per second at most. An original hub answers polls at once and is thus polled once per second.
Where steps take less than a second, an environment that has nothing in flight hears of them once per second: it then
makes at most `max_batches_offpolicy` batches in that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from atroposlib.client import EnvRegistration, EnvStatus, HubClient, UnknownEnvironment
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import close, collect_timed
from atroposlib.envs.env_config import EvalHandlingEnum, max_workers
from atroposlib.errors import (
    ConfigError,
    EngineUnavailable,
    EnvError,
    HubError,
    HubUnavailable,
    cause_of,
)
from atroposlib.inference.servers.sampling_notes import noting_sampling
from atroposlib.patience import Backoff
from atroposlib.runtime import spool
from atroposlib.runtime.capacity import Load, num_to_start
from atroposlib.runtime.exits import as_failures, contained
from atroposlib.runtime.items import Outcomes, Work
from atroposlib.runtime.metrics import finish_wandb, require_wandb, start_wandb
from atroposlib.runtime.outbox import (
    GroupLog,
    Outbox,
    sampling_for,
)
from atroposlib.runtime.pace import Pace

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Intervals of the serve loop, in seconds; tests shorten them."""

    tick_s: float = 0.1
    """Between two looks at what only the author's code knows: whether there is an item again, or an engine."""
    poll_wait_s: float = 10.0
    """How long the hub may hold a status request while nothing changes."""
    control_refill_s: float = 1.0
    """On average one control call to the hub in this time ..."""
    control_burst: int = 3
    """... and this many at once after a pause."""
    register_s: float = 1.0
    """Between two registrations while the trainer has not started."""
    backoff_first_s: float = 0.5
    backoff_cap_s: float = 4.0
    """A hub or an engine that is back is noticed within this time."""
    engine_reminder_s: float = 60.0
    """Between two log lines while the engine stays away."""
    no_item_reminder_s: float = 30.0
    """Between two log lines while the author's code makes nothing though it could, and nothing is in flight."""
    drain_s: float = 10.0
    """How long items in flight may go on after a signal; a second signal ends it."""
    flush_s: float = 30.0
    """How long groups may still be delivered after the end."""
    spool_after_s: float = 2.0
    """Groups not delivered this long after the end are also on disk, in case somebody loses patience with us."""
    disconnect_s: float = 5.0

    def backoff(self) -> Backoff:
        return Backoff(first_s=self.backoff_first_s, cap_s=self.backoff_cap_s)


async def serve(
    env: BaseEnv, *, timings: Timings | None = None, stop: asyncio.Event | None = None
) -> Outbox:
    """Serve `env` until the trainer's step reaches `total_steps`, or `stop` is set, or SIGTERM or SIGINT arrives.

    Returns the outbox with its counts. Raises EnvError when items keep failing, ConfigError when the hub's batch
    cannot hold a group, HubUnavailable when groups had to be left in a file, and whatever `setup` raises.
    """
    return await _Server(env, timings or Timings(), stop or asyncio.Event()).run()


class _Server:
    def __init__(self, env: BaseEnv, timings: Timings, stop: asyncio.Event) -> None:
        self._env = env
        self._timings = timings
        self._stop = stop
        self._hurry = asyncio.Event()
        """A second signal: wait for nothing more."""
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._retries: deque[Work] = deque()
        self._work: dict[str, Work] = {}
        """What each of `running_items` is, with its failures so far."""
        self._outcomes = Outcomes(max_consecutive=env.config.max_consecutive_failures)
        self._status: EnvStatus | None = None
        """The newest; None until the hub has told one for the present registration."""
        self._num_polls = 0
        self._stored_at_status = 0
        """Groups of ours that `_status` counts."""
        self._pace = Pace(burst=timings.control_burst, refill_s=timings.control_refill_s)
        self._uid = uuid.uuid4().hex
        """Tells the hub that a registration is this process again."""
        self._is_hub_away = False
        self._hub_backoff = timings.backoff()
        self._engine_backoff = timings.backoff()
        self._engine_retry_at: float | None = None
        self._engine_reminded_at = 0.0
        self._idle_since: float | None = None
        self._num_idle_reminders = 0
        self._starts_own_work = is_overridden(env.add_train_workers, BaseEnv.add_train_workers)
        """The author's code decides what is made when, for example by sending groups from `env_step_checks`."""
        self._num_accepted_before = 0
        self._step_before: int | None = None
        """The step that `curr_step` really stands for, while the first step is shown as new."""
        self._registering = asyncio.Lock()  # the driver and the outbox may both notice a lost id
        self._owner = spool.Owner(
            hub_url=env.config.rollout_server_url.rstrip("/"), environment=env.registered_name
        )
        self._spool_folder = spool.spool_folder(env.config.data_path_to_save_groups)
        self._claimed: list[spool.Spooled] = []
        path = env.config.data_path_to_save_groups
        self._log = GroupLog.open(path) if path else None
        if self._log is not None:
            env.config.data_path_to_save_groups = str(self._log.path)
        self._outbox = Outbox(
            env, environment=env.registered_name, log=self._log, backoff=timings.backoff()
        )
        self._outbox.on_status = self._told_by_answer
        if is_overridden(env._send_scored_data_to_api, BaseEnv._send_scored_data_to_api):
            self._outbox.author_sends = env._send_scored_data_to_api
        self._follows_total_steps = env.config.total_steps == -1
        """The trainer says how many steps there are, each one anew."""
        env.group_sink = self._outbox
        env.runtime = self
        env.jsonl_writer = self._log

    async def run(self) -> Outbox:
        if self._env.config.use_wandb:
            require_wandb(self._env)  # say so now, not after the model has been waited for
        try:
            with _signals(self._stop, self._hurry), contained():
                async with HubClient(self._env.config.rollout_server_url) as self._hub:
                    await self._run_connected()
        finally:
            spool.close_all(self._claimed)
            await close(self._env)
            finish_wandb(self._env)
            if self._log is not None:
                self._log.close()
            logger.info("%s", self._outbox.summary())
            logger.info("%s", self._outcomes.summary())
        if self._error is not None:
            raise self._error
        return self._outbox

    async def _run_connected(self) -> None:
        sender = asyncio.create_task(self._guard(self._send()), name="outbox")
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                driver = self._own(self._guard(self._drive()), name="driver")
                await self._stop.wait()
                driver.cancel()
                if self._error is None and not self._is_done():
                    await self._drain()
                for task in list(self._tasks):
                    task.cancel()
            await self._deliver_rest()
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await self._disconnect()

    async def _drain(self) -> None:
        """Let items in flight finish; those that do not, or were to be tried again, go to `backlog` and into the log.

        Without an engine none of them can, as when everything is stopped at once.
        """
        items = set(self._env.workers)
        if items:
            logger.info("%d items may finish within %.0f s", len(items), self._timings.drain_s)
        deadline = time.monotonic() + self._timings.drain_s
        while items and not self._hurry.is_set() and self._may_have_engine():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            # Signals and engines are looked at once per tick.
            done, _ = await asyncio.wait(
                items,
                timeout=min(left_s, self._timings.tick_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            items -= done
        unfinished = [entry["item"] for entry in self._env.running_items.values()]
        unfinished += [work.item for work in self._retries]
        if unfinished:
            self._env.backlog[:0] = unfinished
            logger.warning("%d items were not finished", len(unfinished))

    def _may_have_engine(self) -> bool:
        servers = self._env.server.servers
        return any(server.server_healthy or not server.is_known for server in servers)

    async def _deliver_rest(self) -> None:
        """Deliver what is held, or leave it in a file; a file left behind is an error of the run."""
        outbox, name = self._outbox, self._owner.environment
        patience_s = self._timings.flush_s if self._error is None else 1.0
        first_s = min(patience_s, self._timings.spool_after_s)
        if not await self._flush(first_s):
            return
        path = spool.new_path(self._spool_folder, self._owner)
        await self._spool(path)
        if not await self._flush(patience_s - first_s):
            path.unlink(missing_ok=True)
            return
        what = f"{outbox.num_held} groups could not be delivered to {self._owner.hub_url}"
        error: HubUnavailable | EnvError
        if await self._spool(path):
            error = HubUnavailable(
                f"{what}; they are in {path}, and the next serve of {name!r} sends them first"
            )
        else:
            error = EnvError(f"{what} and are lost: {path} cannot be written")
        logger.error("%s", error)
        self._error = self._error or error

    async def _flush(self, patience_s: float) -> int:
        """Wait until nothing is held, the time is over or a second signal came; return the number still held."""
        flush = asyncio.create_task(self._outbox.flush(patience_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({flush, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (flush, hurry):
            task.cancel()
        await asyncio.gather(flush, hurry, return_exceptions=True)
        return self._outbox.num_held

    async def _spool(self, path: Path) -> bool:
        """Write every held group to `path`; files of earlier runs, whose rest is among them, are removed then."""
        try:
            await asyncio.to_thread(
                spool.write,
                path,
                self._outbox.held,
                owner=self._owner,
                experiment=self._outbox.experiment,
                step=self._env.curr_step,
            )
        except OSError as error:
            logger.error("%s cannot be written: %s", path, error)
            return False
        self._delete_claimed()
        return True

    def _delete_claimed(self) -> None:
        for file in self._claimed:
            file.delete()
        self._claimed.clear()

    def _send_spooled(self) -> None:
        """Queue the groups that an earlier run of this name left behind."""
        if self._claimed or self._outbox.num_accepted:
            return  # registered again; this run's own groups are in the outbox
        self._claimed = spool.claim(
            self._spool_folder,
            owner=self._owner,
            experiment=self._outbox.experiment,
            step=self._env.curr_step,
        )
        groups = [group for file in self._claimed for group in file.groups]
        if groups:
            names = ", ".join(str(file.path) for file in self._claimed)
            logger.info("sending %d groups that an earlier run left in %s", len(groups), names)
            self._outbox.restore(groups, self._delete_claimed)

    def _own(self, work: Any, *, name: str) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Awaitable[None]) -> None:
        """Await `work`; its error ends the run and is raised by `run`."""
        try:
            with as_failures():
                await work
        except Exception as error:  # noqa: BLE001 - kept and raised again by run()
            if self._error is None:
                self._error = error
        finally:
            self._stop.set()

    async def _send(self) -> None:
        await self._outbox.run(
            self._hub, env_id=lambda: self._env.env_id or 0, reregister=self._register_again
        )

    async def _drive(self) -> None:
        """Connect, then follow the steps and start items until the trainer is done."""
        env = self._env
        await env.setup()
        await env.setup_wandb()
        await env.register_env()
        await self._learn_batch()
        self._send_spooled()  # not in a thread: a cancel would lose the claims; nothing else runs yet
        self._show_first_step_as_new()
        self._own(self._guard(self._watch()), name="watcher")
        followed: EnvStatus | None = None
        while True:
            began = time.monotonic()
            if self._status is not None:  # as in the original, not before there is a status_dict
                if self._status is not followed:
                    followed = self._status
                    await env.server.update_weight(followed.env_weight)
                await env.env_step_checks()
            if self._is_done():
                logger.info("step %d of %d: done", env.curr_step, env.config.total_steps)
                return
            if self._status is not None:
                await env.add_train_workers()
            if self._starts_own_work:
                self._look_for_own_work()
            env.mainloop_timings.append(time.monotonic() - began)
            env.last_loop_time = time.time()
            await self._sleep_until_woken()

    async def _sleep_until_woken(self) -> None:
        """Wait until an item ends, the hub's status changes or the next tick is due."""
        try:
            async with asyncio.timeout(self._timings.tick_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _is_done(self) -> bool:
        return (
            self._status is not None and self._status.current_step >= self._env.config.total_steps
        )

    # The hub

    async def _call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a control call until the hub answers; the owner of its retries, and of their pace."""
        while True:
            await self._pace.turn()
            try:
                result = await request()
            except HubUnavailable as error:
                if not self._is_hub_away:
                    self._is_hub_away = True
                    logger.warning("the hub is away; starting no new work: %s", error)
                await asyncio.sleep(self._hub_backoff.next(asked_s=error.retry_after_s))
                continue
            if self._is_hub_away:
                self._is_hub_away = False
                logger.info("the hub answers again")
            self._hub_backoff.reset()
            return result

    async def start_wandb(self) -> None:
        """Wait for the trainer's project, then open the run."""
        if not self._env.config.use_wandb:
            return
        info = await self._call(self._hub.wandb_info)
        while info.project is None:
            await asyncio.sleep(self._timings.register_s)
            info = await self._call(self._hub.wandb_info)
        start_wandb(self._env, project=info.project, group=info.group)

    async def register(self) -> None:
        """Ask for an id until the hub gives one, and restore the checkpoint of its step."""
        env, config = self._env, self._env.config
        is_first = True
        while (answer := await env._register_env())["status"] != "success":
            if is_first:
                logger.info("waiting for the trainer to start")
                is_first = False
            await asyncio.sleep(self._timings.register_s)
        registration = EnvRegistration.model_validate(answer)
        env.env_id = registration.env_id
        self._status = None
        env.wandb_prepend = registration.wandb_name
        env.checkpoint_dir = registration.checkpoint_dir
        env.checkpoint_interval = registration.checkpoint_interval
        env.curr_step = registration.starting_step
        if self._follows_total_steps:
            if registration.num_steps == -1:
                raise ConfigError("total_steps: -1, but the trainer has no number of steps either")
            config.total_steps = registration.num_steps
        logger.info("registered as %r (id %d)", registration.wandb_name, registration.env_id)
        is_another = self._outbox.experiment not in (None, registration.experiment)
        self._outbox.experiment = registration.experiment
        if is_another:
            await self._begin_anew()
        if env.curr_step > 0 and not self._outbox.num_accepted:
            env.load_checkpoint()
        if is_another:
            self._show_first_step_as_new()

    async def _begin_anew(self) -> None:
        """Another experiment has begun: what is being sampled is for the earlier one, so sample it again."""
        under_way = dict(self._work)
        workers = [self._env.running_items[key]["worker"] for key in under_way]
        logger.warning(
            "the trainer has begun another experiment; %d items under way are sampled again, and the hub refuses the"
            " groups of the earlier one",
            len(under_way),
        )
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        unsettled = [work for work in under_way.values() if not work.is_settled]
        self._outcomes.num_put_back += len(unsettled)
        self._retries.extend(unsettled)

    async def ask_for_id(self) -> dict[str, Any]:
        """Return the hub's answer to one registration."""
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

    async def _register_again(self, old_id: int) -> None:
        async with self._registering:
            if self._env.env_id == old_id:
                await self._env.register_env()
                await self._learn_batch()

    async def _learn_batch(self) -> None:
        """Let the environment read the hub's figures, then check that a group fits a batch."""
        config = self._env.config
        await self._env.get_server_info()
        if 0 < config.batch_size < config.group_size:
            raise ConfigError(
                f"group_size: {config.group_size} sequences do not fit the trainer's batch of "
                f"{config.batch_size}; lower group_size or raise the trainer's batch_size"
            )

    async def read_info(self) -> None:
        """Take the batch size and the token limit from the hub, where it knows them."""
        env = self._env
        info = await self._call(self._hub.info)
        if info.batch_size != -1:
            env.config.batch_size = info.batch_size
        if info.max_token_len != -1:
            env.max_token_len = info.max_token_len

    async def _watch(self) -> None:
        """Keep one status request open at the hub."""
        env = self._env
        while True:
            num_polls = self._num_polls
            await env.get_status()
            if self._num_polls == num_polls:  # an override that asks in its own way
                self._take_over(env.status_dict)
                await self._pace.turn()

    def _take_over(self, status_dict: dict[str, Any]) -> None:
        try:
            self._set_status(EnvStatus.model_validate(status_dict))
        except ValidationError as error:
            faults = ", ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
            raise EnvError(f"get_status left an unusable status_dict: {faults}") from error

    async def poll_status(self) -> None:
        """Wait for news from the hub and keep them in `status_dict`."""
        self._num_polls += 1
        await self._call(self._poll)

    async def _poll(self) -> None:
        """Ask for news once; register again when the hub has forgotten this environment."""
        env_id, known, stored = self._env.env_id or 0, self._status, self._outbox.num_stored
        try:
            status = await self._hub.status_env(
                env_id,
                # One that was away is not asked for news but whether it is back.
                wait_s=0.0 if known is None or self._is_hub_away else self._timings.poll_wait_s,
                seen_step=None if known is None else known.current_step,
                seen_policy=None if known is None else known.policy_version,
                env_uid=self._uid,
                experiment=self._outbox.experiment,
            )
        except UnknownEnvironment:
            logger.warning("the hub does not know this environment any more; registering again")
            await self._register_again(env_id)
            return
        if env_id == self._env.env_id:
            self._told_by_poll(status, known, stored)

    def _told_by_answer(self, status: EnvStatus) -> None:
        """Take the status that came with the answer to groups; it counts every group stored so far."""
        self._stored_at_status = self._outbox.num_stored
        self._set_status(status)

    def _set_status(self, status: EnvStatus) -> None:
        self._status, self._env.status_dict = status, status.model_dump()
        self._wake.set()

    def _told_by_poll(self, status: EnvStatus, known: EnvStatus | None, stored: int) -> None:
        """Take the status of a request made when `known` was the newest and `stored` groups were stored.

        Groups stored since then may or may not be in it: they are counted once more, which errs on the side of too few
        items, unless the hub's answer to them has told more meanwhile.
        """
        latest = self._status
        if latest is None or latest is known:
            self._stored_at_status = stored
            self._set_status(status)
        elif status.current_step > latest.current_step:
            self._stored_at_status = self._outbox.num_stored
            self._set_status(status)
        elif known is not None and status.policy_version != known.policy_version:
            newer = {"policy_version": status.policy_version}
            self._set_status(latest.model_copy(update=newer))

    async def _disconnect(self) -> None:
        if self._env.env_id is None:
            return
        try:
            async with asyncio.timeout(self._timings.disconnect_s):
                await self._hub.disconnect_env(self._env.env_id, env_uid=self._uid)
        except (HubError, TimeoutError) as error:
            logger.warning("could not tell the hub that this environment leaves: %s", error)

    # Steps of the trainer

    async def check_step(self) -> None:
        """Evaluate, save and log where the trainer's step passed a boundary; then take the step over."""
        env = self._env
        before = env.curr_step if self._step_before is None else self._step_before
        self._step_before = None
        step = env.curr_step = int(env.status_dict.get("current_step", before))
        if step == before:
            return
        every = env.config.steps_per_eval
        if every > 0 and step // every > before // every:
            if env.eval_runner is None or env.eval_runner.done():
                env.eval_runner = self._own(self._evaluate(step), name=f"eval-{step}")
            else:
                logger.warning("step %d: the last evaluation is still running; skipped", step)
        interval = env.checkpoint_interval
        if interval > 0 and step // interval > before // interval:
            try:
                with as_failures():
                    env.save_checkpoint(step // interval * interval)
            except Exception:
                logger.exception("save_checkpoint failed at step %d; the run goes on", step)
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            try:
                with as_failures():
                    await env.wandb_log({})
            except Exception:
                logger.exception("wandb_log failed at step %d; the run goes on", step)

    def _show_first_step_as_new(self) -> None:
        """Let an environment that sends groups only when the step changes begin at once.

        Where it is the only one, the trainer can take no step before it has sent some.
        """
        checks = self._env.env_step_checks
        if self._starts_own_work and is_overridden(checks, BaseEnv.env_step_checks):
            self._step_before = self._env.curr_step
            self._env.curr_step -= 1

    async def _evaluate(self, step: int) -> None:
        try:
            with as_failures():
                await self._env.evaluate()
        except Exception:
            logger.exception("evaluate failed at step %d; training goes on", step)

    # Items

    def _allowed(self) -> int:
        """Return how many items to start now."""
        env, config, status = self._env, self._env.config, self._status
        if status is None or self._is_hub_away or self._outbox.is_away:
            return 0
        workers = max_workers(
            configured=config.max_num_workers,
            per_node=config.max_num_workers_per_node,
            num_servers=len(env.server.servers),
        )
        env.max_num_workers = workers
        if env.eval_runner is not None and not env.eval_runner.done():
            if config.eval_handling is EvalHandlingEnum.STOP_TRAIN:
                return 0
            if config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN:
                workers = max(1, int(workers * config.eval_limit_ratio))
        allowed = num_to_start(
            Load(
                max_workers=workers,
                running=len(env.running_items),
                held=self._outbox.num_held + self._outbox.num_stored - self._stored_at_status,
                group_size=config.group_size,
                batch_size=config.batch_size,
                max_batches_offpolicy=config.max_batches_offpolicy,
                queue_size=status.queue_size,
                self_queue_size=status.self_queue_size,
                unallocated_fraction=status.unallocated_fraction,
                min_batch_allocation=config.min_batch_allocation,
            )
        )
        if self._engine_retry_at is None:
            return allowed
        is_due = time.monotonic() >= self._engine_retry_at and not env.running_items
        return min(1, allowed) if is_due else 0  # one item tries whether the engine is back

    async def start_items(self) -> None:
        """Start what `capacity` allows: items to retry, then the backlog, then fresh ones."""
        num_started = self._allowed()
        for started in range(num_started):
            work = await self._next_work()
            if work is None:
                num_started = started
                break
            key = str(uuid.uuid4())
            self._work[key] = work
            task = self._own(self._work_on(key, work), name=f"item-{key[:8]}")
            self._env.running_items[key] = {
                "item": work.item,
                "worker": task,
                "start_time": time.time(),
            }
            self._env.workers.add(task)
            task.add_done_callback(functools.partial(self._ended, key))
        if num_started:
            self._env.workers_added_list.append(num_started)

    async def _next_work(self) -> Work | None:
        """Return the oldest item to retry, then the author's backlog, then a fresh one."""
        if self._retries:
            return self._retries.popleft()
        if self._env.backlog:
            return self._begin(self._env.backlog.pop(0))
        try:
            with as_failures():
                item = await self._env.get_next_item()
        except Exception as error:  # noqa: BLE001 - the author's code; counted, and it may end the run
            self._outcomes.log_failure("get_next_item", error)
            self._outcomes.failed(error, began_after=self._outcomes.num_failed)
            return None
        if item is None:
            self._remind_idle("get_next_item() returns None")
            return None
        self._idle_since = None
        return self._begin(item)

    def _look_for_own_work(self) -> None:
        """Notice whether the author's own hooks made anything."""
        if self._outbox.num_accepted == self._num_accepted_before:
            self._remind_idle("add_train_workers() starts no item, env_step_checks() sends nothing")
        else:
            self._num_accepted_before, self._idle_since = self._outbox.num_accepted, None

    def _remind_idle(self, reason: str) -> None:
        """Say from time to time that the author's code makes nothing; nothing else shows why the run stands still."""
        now = time.monotonic()
        if self._idle_since is None or self._env.running_items:
            self._idle_since, self._num_idle_reminders = now, 0
            return
        waited_s = now - self._idle_since
        if waited_s >= self._timings.no_item_reminder_s * (self._num_idle_reminders + 1):
            self._num_idle_reminders += 1
            version = None if self._status is None else self._status.policy_version
            logger.warning(
                "nothing to do for %.0f s: %s (step %d, policy version %s)",
                waited_s,
                reason,
                self._env.curr_step,
                version,
            )

    def _begin(self, item: Any) -> Work:
        self._outcomes.num_begun += 1
        return Work(item=item)

    async def _work_on(self, key: str, work: Work) -> None:
        """Run one item through the environment's `handle_env`; a failure of an override is the item's."""
        work.is_settled = False
        work.began_after = self._outcomes.num_failed
        try:
            with as_failures():
                groups = await self._env.handle_env(key)
        except Exception as raised:  # noqa: BLE001 - boundary: one item
            if work.is_settled:  # its groups are handed over: asking again would give them twice
                self._outcomes.log_failure("handle_env after the item's end", cause_of(raised))
            else:
                self._item_failed(work, cause_of(raised))
            return
        if not work.is_settled:  # an override that does not call the default
            self._item_succeeded(work, gave_groups=bool(groups))

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        """Forget an item, also one that was cancelled before it began."""
        self._work.pop(key, None)
        self._env.running_items.pop(key, None)
        self._env.workers.discard(task)
        self._wake.set()

    async def run_item(self, key: str) -> Any:
        """Collect, postprocess and hand over; a failure is counted and the item tried again."""
        env = self._env
        entry = env.running_items.get(key)
        if entry is None:
            logger.warning("item %s is not running", key)
            return None
        work = self._work.get(key) or Work(item=entry["item"])
        try:
            with as_failures(), noting_sampling(), sampling_for(self._outbox.experiment):
                groups, backlog = await collect_timed(env, work.item)
                if groups:
                    await env.handle_send_to_api(groups, work.item)
                    env.last_completed_item = groups
            env.backlog.extend(backlog)  # not before: a group that is refused is asked for again
        except Exception as raised:  # noqa: BLE001 - boundary: one item
            self._item_failed(work, cause_of(raised))
            return None
        finally:
            env.running_items.pop(key, None)
            self._wake.set()
        self._item_succeeded(work, gave_groups=bool(groups))
        return groups

    def _item_succeeded(self, work: Work, *, gave_groups: bool) -> None:
        work.is_settled = True
        self._outcomes.succeeded(gave_groups=gave_groups)
        self._engine_answered()

    def _item_failed(self, work: Work, error: BaseException) -> None:
        work.is_settled = True
        if isinstance(error, EngineUnavailable) or (
            # It spent its time waiting for an engine: no fault of the item.
            isinstance(error, TimeoutError) and not self._has_healthy_engine()
        ):
            self._retries.append(work)
            self._outcomes.num_put_back += 1
            self._engine_away(error)
            return
        self._outcomes.log_failure("item", error)
        work.num_failures += 1
        if work.num_failures < self._env.config.max_item_attempts:
            self._retries.append(work)
        else:
            self._outcomes.given_up[type(error).__name__] += 1
            logger.error(
                "item given up after %d attempts: %s", work.num_failures, type(error).__name__
            )
        try:
            self._outcomes.failed(error, began_after=work.began_after)
        except Exception as fatal:  # noqa: BLE001 - kept and raised again by run()
            self._error = self._error or fatal
            self._stop.set()

    def _has_healthy_engine(self) -> bool:
        return any(server.server_healthy for server in self._env.server.servers)

    def _engine_away(self, error: BaseException) -> None:
        now = time.monotonic()
        is_news = self._engine_retry_at is None
        if is_news or now - self._engine_reminded_at >= self._timings.engine_reminder_s:
            self._engine_reminded_at = now
            logger.warning("the engine is away; items wait until it answers: %s", error)
        if is_news or now >= (self._engine_retry_at or 0.0):
            self._engine_retry_at = now + self._engine_backoff.next()

    def _engine_answered(self) -> None:
        if self._engine_retry_at is not None:
            self._engine_retry_at = None
            self._engine_backoff.reset()
            logger.info("the engine answers again")


def is_overridden(method: Any, default: Any) -> bool:
    """Say whether a bound method (or what was put in its place) is not the base class's `default`."""
    return getattr(method, "__func__", method) is not default


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Any:
    """Let SIGTERM and SIGINT set `stop`, and `hurry` the second time; without signal handlers (threads), do nothing."""
    loop = asyncio.get_running_loop()
    installed = []

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, signalled)
            installed.append(number)
        except (NotImplementedError, RuntimeError, ValueError):
            logger.debug("no handler for signal %d outside the main thread", number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
