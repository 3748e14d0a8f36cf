"""Serve an environment to a hub: register, keep items in flight and send groups until the trainer is done.

Tasks: the driver follows the trainer's steps and starts items; each item is an owned task with a deadline; the outbox
sends; the watcher polls the hub's status. `run` cancels and awaits them all. While the hub or the engine is
unavailable, groups are held, items in flight continue, no new ones start, and each change is logged once. The
environment's hooks are called through the instance; `_HubRun` is the `Runtime` behind their defaults.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

from atroposlib.client import EnvStatus, HubClient
from atroposlib.envs.hooks import EnvHooks
from atroposlib.runtime.closing import closed_at_end
from atroposlib.runtime.exits import as_failures, contained
from atroposlib.runtime.group_log import GroupLog
from atroposlib.runtime.hub_link import HubLink
from atroposlib.runtime.items import Items
from atroposlib.runtime.metrics import require_wandb
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.progress import RunStatus, sign_of_life, with_servers
from atroposlib.runtime.signals import on_signals
from atroposlib.runtime.spool import Spool
from atroposlib.runtime.timings import Timings

logger = logging.getLogger(__name__)


async def serve(
    env: EnvHooks, *, timings: Timings | None = None, stop: asyncio.Event | None = None
) -> Outbox:
    """Serve `env` until the trainer's step reaches `total_steps`, `stop` is set, or SIGTERM or SIGINT arrives.

    Returns the outbox with its counts. Raises EnvError when items keep failing or undelivered groups are lost,
    ConfigError when the hub's batch cannot hold a group, HubUnavailable when undelivered groups were left in a file,
    HubRejected when the hub refuses the token, and the errors of `setup`.
    """
    if env.config.use_wandb:
        require_wandb()  # fail before `setup` loads anything
    async with HubClient(env.config.rollout_server_url) as hub:
        return await _HubRun(env, hub, timings or Timings(), stop or asyncio.Event()).run()


class _HubRun:
    """One run: its tasks, their shutdown, and the trainer's steps."""

    def __init__(
        self, env: EnvHooks, hub: HubClient, timings: Timings, stop: asyncio.Event
    ) -> None:
        self._env = env
        self._hub = hub
        self._timings = timings
        self._stop = stop
        self._skip_wait = asyncio.Event()
        """Set by the second signal: stop waiting."""
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starts_own_work = is_overridden(env.add_train_workers, EnvHooks.add_train_workers)
        """Whether the author's code starts the work, for example by sending groups from `env_step_checks`."""
        self._num_accepted_before = 0
        self._step_before: int | None = None
        """The real step while `curr_step` is lowered by `_show_first_step_as_new`; None otherwise."""
        path = env.config.data_path_to_save_groups
        self._log = GroupLog.open(path) if path else None
        if self._log is not None:
            env.config.data_path_to_save_groups = str(self._log.path)
        self._outbox = Outbox(env, log=self._log, backoff=timings.backoff())
        if is_overridden(env._send_scored_data_to_api, EnvHooks._send_scored_data_to_api):
            self._outbox.author_sends = env._send_scored_data_to_api
        self._spool = Spool(env, self._outbox)
        self._link = HubLink(
            env,
            hub,
            self._outbox,
            timings,
            on_news=self._wake.set,
            losses=lambda: with_servers(self._status(), env.server).losses(),
            over_age=lambda: self._items.over_age(),
        )
        self._items = Items(
            env,
            self._link,
            self._outbox,
            timings,
            start_task=self._own,
            on_change=self._wake.set,
            on_fatal=self._fail,
        )
        env.group_sink = self._outbox
        env.runtime = self
        env.jsonl_writer = self._log
        # The defaults of the environment's hooks.
        self.start_wandb = self._link.start_wandb
        self.ask_for_id = self._link.ask_for_id
        self.read_info = self._link.read_info
        self.poll_status = self._link.poll_status
        self.start_items = self._items.start
        self.run_item = self._items.run_item

    async def run(self) -> Outbox:
        try:
            async with closed_at_end(self._env):
                with on_signals(self._signalled, signal.SIGTERM, signal.SIGINT), contained():
                    async with sign_of_life(self._env, self._status, timings=self._timings):
                        await self._run()
        finally:
            self._spool.close()
            if self._log is not None:
                self._log.close()
            logger.info("%s", self._outbox.summary())
            logger.info("%s", self._items.outcomes.summary())
        if self._error is not None:
            raise self._error
        return self._outbox

    def _signalled(self) -> None:
        """End the run; at the second signal, without waiting."""
        (self._skip_wait if self._stop.is_set() else self._stop).set()

    async def _run(self) -> None:
        sending = self._outbox.run(self._hub, reregister=self._link.register_again)
        sender = asyncio.create_task(self._guard(sending), name="outbox")
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                driver = self._own(self._guard(self._drive()), name="driver")
                await self._stop.wait()
                driver.cancel()
                if self._error is None and not self._link.is_done:
                    await self._items.drain(self._skip_wait)
                for task in list(self._tasks):
                    task.cancel()
            patience_s = self._timings.flush_s if self._error is None else 1.0
            first_s = min(patience_s, self._timings.spool_after_s)
            error = await self._spool.deliver_rest(
                first_s=first_s, rest_s=patience_s - first_s, skip_wait=self._skip_wait
            )
            self._error = self._error or error
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await self._link.disconnect()

    def _own(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fail(self, error: BaseException) -> None:
        """End the run; the first error is raised by `run`."""
        self._error = self._error or error
        self._stop.set()

    async def _guard(self, work: Awaitable[None]) -> None:
        """Await `work`; the run ends when it returns or raises."""
        try:
            with as_failures():
                await work
        except Exception as error:  # noqa: BLE001 - kept and raised again by run()
            self._fail(error)
        finally:
            self._stop.set()

    def _status(self) -> RunStatus:
        env, outbox, items, hub = self._env, self._outbox, self._items, self._link.status
        return RunStatus(
            num_made=outbox.num_accepted,
            num_sent=outbox.num_stored,
            step=None if hub is None else hub.current_step,
            total_steps=env.config.total_steps,
            mean_score=outbox.mean_score,
            dropped=outbox.dropped,
            samples=outbox.samples,
            lost=env.lost_answers(),
            suspicious=env.suspicions(),
            failed=items.outcomes.by_type,
            num_without_groups=items.outcomes.num_without_groups,
            num_tokens_trained=outbox.num_tokens_trained,
            tokens=outbox.tokens,
            num_tokens_not_sampled=outbox.num_tokens_not_sampled,
            num_in_flight=len(env.running_items),
            num_wanted_in_flight=items.num_wanted,
            over_age=items.over_age(),
            num_ready=None if hub is None else hub.self_queue_size + self._link.num_uncounted,
            trainer_wait_share=None if hub is None else hub.trainer_wait_share,
            staleness=None if hub is None else hub.staleness,
            waits_for=items.waits_for(),
        )

    async def _drive(self) -> None:
        """Connect, then follow the steps and start items until the trainer is done."""
        env, link = self._env, self._link
        await env.setup()
        await env.setup_wandb()
        await env.register_env()
        await link.learn_batch()
        self._spool.send_earlier()  # not in a thread: a cancellation would lose the claims
        self._show_first_step_as_new()
        self._own(self._guard(link.watch()), name="watcher")
        followed: EnvStatus | None = None
        while True:
            began = time.monotonic()
            if link.status is not None:  # as in the original, only once there is a status_dict
                if link.status is not followed:
                    followed = link.status
                    await env.server.update_weight(followed.env_weight)
                await env.env_step_checks()
            if link.is_done:
                logger.info("step %d of %d: done", env.curr_step, env.config.total_steps)
                return
            if link.status is not None:
                await env.add_train_workers()
            if self._starts_own_work:
                self._check_own_work()
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

    def _check_own_work(self) -> None:
        """Check whether the author's own hooks produced any group."""
        if self._outbox.num_accepted == self._num_accepted_before:
            self._items.remind_idle(
                "add_train_workers() starts no item, env_step_checks() sends nothing"
            )
        else:
            self._num_accepted_before = self._outbox.num_accepted
            self._items.not_idle()

    async def register(self) -> None:
        """Register until the hub gives an id; before the first group, restore the checkpoint."""
        env = self._env
        is_another = await self._link.register()
        if is_another:
            await self._items.sample_again()
        if env.curr_step > 0 and not self._outbox.num_accepted:
            env.load_checkpoint()
        if is_another:
            self._show_first_step_as_new()

    # Steps of the trainer

    async def check_step(self) -> None:
        """Update `curr_step`; evaluate, save and log if the step passed a boundary."""
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
                logger.exception("save_checkpoint failed at step %d; the run continues", step)
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            try:
                with as_failures():
                    await env.wandb_log(self._status().metrics())
            except Exception:
                logger.exception("wandb_log failed at step %d; the run continues", step)

    def _show_first_step_as_new(self) -> None:
        """Lower `curr_step` by one so that an environment that sends groups only on a new step starts at once.

        If it is the only environment, the trainer takes no step before it has sent groups.
        """
        checks = self._env.env_step_checks
        if self._starts_own_work and is_overridden(checks, EnvHooks.env_step_checks):
            self._step_before = self._env.curr_step
            self._env.curr_step -= 1

    async def _evaluate(self, step: int) -> None:
        try:
            with as_failures():
                await self._env.evaluate()
        except Exception:
            logger.exception("evaluate failed at step %d; training continues", step)


def is_overridden(method: Any, default: Any) -> bool:
    """Whether a bound method (or its replacement) is not the base class's `default`."""
    return getattr(method, "__func__", method) is not default
