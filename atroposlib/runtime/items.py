"""Items in flight: starting them as capacity allows, running them as owned tasks, and handling their failures.

A failure is counted by type and the item is retried up to `max_item_attempts`; `max_consecutive_failures` of one type
without a success in between end the run with that error. An unavailable engine is not the item's failure: items wait,
and one at a time probes the engine. `process.py` uses `Work` and `Outcomes` without the rest.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from atroposlib.client import EnvStatus
from atroposlib.envs.collecting import collect_timed, next_item
from atroposlib.envs.env_config import BaseEnvConfig, EvalHandlingEnum, max_workers, workers_are_set
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import EngineError, EngineUnavailable, EnvError, Suspicion, cause_of
from atroposlib.inference.servers.sampling_notes import SamplingNotes
from atroposlib.runtime.capacity import Demand, History, Load, max_age_s, num_to_start, num_wanted
from atroposlib.runtime.exits import as_failures
from atroposlib.runtime.hub_link import HubLink
from atroposlib.runtime.losses import is_logged, listed, sample
from atroposlib.runtime.outbox import Outbox, sampling_for
from atroposlib.runtime.timings import Timings
from atroposlib.utils.tracing import item_span

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Work:
    """An item and how often it has failed."""

    item: Any
    item_id: int | None = None
    """Its number in the order of `get_next_item`, in `process`; None for an item from the backlog."""
    item_json: Any = None
    """The item before the environment could change it, in `process`."""
    num_failures: int = 0
    is_settled: bool = False
    """Whether the current attempt has been counted."""
    began_after: int = 0
    """`Outcomes.num_failed` when the current attempt began."""
    began_at: float = 0.0
    """When the current attempt began, `time.monotonic`."""
    notes: SamplingNotes | None = None
    """Of the current attempt, in `serve`."""


class Outcomes:
    """Counts the outcome of every item and decides when failures end the run.

    Concurrent attempts often fail together from one brief cause, such as a judge that restarts. They alone do not end
    the run, whatever their number: an attempt that began after the first of them must fail as well.
    """

    def __init__(self, config: BaseEnvConfig) -> None:
        self._max_consecutive = config.max_consecutive_failures
        self._max_attempts = config.max_item_attempts
        self._consecutive: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        """By type: `num_failed` when its current series of failures began."""
        self._last_logged = ""
        self.num_started = 0
        """Items, not attempts."""
        self.num_with_groups = 0
        self.num_without_groups = 0
        """Items whose worker returned no group: the author skipped them."""
        self.num_put_back = 0
        """Attempts that do not count against the item: no engine, or cancelled for another experiment."""
        self.by_type: Counter[str] = Counter()
        """Every failed attempt."""
        self.given_up: Counter[str] = Counter()
        """Items dropped after their last attempt."""

    @property
    def num_unfinished(self) -> int:
        """Items in flight or waiting for another attempt."""
        ended = self.num_with_groups + self.num_without_groups + self.given_up.total()
        return self.num_started - ended

    def log_failure(self, what: str, error: BaseException) -> None:
        """Log a failure before `failed` counts it: the first of its type with its traceback, others in one line.

        An engine's answer needs no traceback; text that repeats the last failure's is counted only.
        """
        failure = f"{what} failed: {type(error).__name__}: {error}"
        is_first = self.by_type[type(error).__name__] == 0
        if failure == self._last_logged and not is_first:
            logger.debug("%s", failure)
            return
        self._last_logged = failure
        needs_traceback = is_first and not isinstance(error, EngineError)
        logger.error("%s", failure, exc_info=error if needs_traceback else None)

    def succeeded(self, work: Work, *, gave_groups: bool) -> None:
        """Count a finished item."""
        self._consecutive.clear()
        if gave_groups:
            self.num_with_groups += 1
            return
        self.num_without_groups += 1
        if is_logged(self.num_without_groups):
            shown = sample("the environment returned none", work.item)
            logger.info("item ended (no group, %d so far): %s", self.num_without_groups, shown)

    @property
    def num_failed(self) -> int:
        """Failed attempts."""
        return self.by_type.total()

    def failed(self, error: BaseException, *, began_after: int) -> None:
        """Count a failed attempt; raise EnvError when its type has failed too often in a row.

        `began_after` is `num_failed` when the attempt began.
        """
        kind = type(error).__name__
        self.by_type[kind] += 1
        self._consecutive[kind] += 1
        if self._consecutive[kind] == 1:
            self._since[kind] = self.num_failed
        is_lasting = self._max_consecutive == 1 or began_after >= self._since[kind]
        if is_lasting and self._consecutive[kind] >= self._max_consecutive:
            raise EnvError(
                f"{self._consecutive[kind]} items in a row failed with {kind}: {error}"
            ) from error

    def may_retry(self, work: Work, error: BaseException) -> bool:
        """Count a failed attempt against its item; if it was the last one, give the item up and return False."""
        work.num_failures += 1
        if work.num_failures < self._max_attempts:
            return True
        kind = type(error).__name__
        self.given_up[kind] += 1
        if is_logged(self.given_up[kind]):
            shown = sample(f"after {work.num_failures} attempts", work.item)
            logger.error("item given up (%s, %d so far): %s", kind, self.given_up[kind], shown)
        return False

    def summary(self) -> str:
        """Return one line that counts every started item exactly once."""
        return (
            f"{self.num_started} items started: {self.num_with_groups} gave groups, "
            f"{self.num_without_groups} gave none, {self.given_up.total()} given up "
            f"({listed(self.given_up)}), {self.num_unfinished} unfinished; "
            f"failed attempts: {listed(self.by_type)}; "
            f"put back: {self.num_put_back}"
        )


class EngineOutage:
    """Whether the engine is unavailable, and when one item may try it again."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._backoff = timings.backoff()
        self._retry_at: float | None = None
        self._reminded_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last attempt found no engine."""
        return self._retry_at is not None

    def may_try(self) -> bool:
        """Whether it is time for the next attempt."""
        return time.monotonic() >= (self._retry_at or 0.0)

    def begin(self, error: BaseException) -> None:
        """Record an attempt that found no engine; log the start of an outage, then a reminder at intervals."""
        now = time.monotonic()
        is_news = self._retry_at is None
        if is_news or now - self._reminded_at >= self._timings.engine_reminder_s:
            self._reminded_at = now
            logger.warning("the engine is unavailable; items wait until it answers: %s", error)
        if is_news or now >= (self._retry_at or 0.0):
            self._retry_at = now + self._backoff.next()

    def end(self) -> None:
        """Record that the engine answered."""
        if self._retry_at is not None:
            self._retry_at = None
            self._backoff.reset()
            logger.info("the engine answers again")


class StartTask(Protocol):
    """Starts a task that the run cancels when it ends."""

    def __call__(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]: ...


class Items:
    """The items of one serving environment: those in flight and those to retry.

    `env.running_items` and `env.workers` mirror them for the author. `on_change` is called when an item ends,
    `on_fatal` with the error that ends the run.
    """

    def __init__(
        self,
        env: EnvHooks,
        link: HubLink,
        outbox: Outbox,
        timings: Timings,
        *,
        start_task: StartTask,
        on_change: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._env = env
        self._link = link
        self._outbox = outbox
        self._timings = timings
        self._start_task = start_task
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._retries: deque[Work] = deque()
        self._work: dict[str, Work] = {}
        """The item and failure count behind each key of `running_items`."""
        self._engine = EngineOutage(timings)
        self._idle_since: float | None = None
        self._num_idle_reminders = 0
        self.outcomes = Outcomes(env.config)
        self._history = History()
        self.num_wanted = 0
        """Items that should be in flight, when it was last decided."""

    def waits_for(self) -> str | None:
        """Return what keeps items from starting or from ending; None while items are in flight as they should be."""
        if self._link.hub_unavailable or self._outbox.hub_unavailable:
            return "the hub"
        if self._engine.is_on:
            return "the engine"
        if self._env.running_items:
            return None
        if self._link.status is None:
            return "the trainer to start"
        if self._is_stopped_by_evaluation():
            return "the evaluation (eval_handling)"
        if not self._allowed():
            return "the trainer, which has enough groups"
        return "the next item"

    def over_age(self) -> dict[str, int]:
        """Return how many items in flight are over age (`capacity.py`), by what they wait for.

        Requests of agents behind the proxy are not seen here: such an item counts as waiting for its own code.
        """
        status = self._link.status
        step_s = None if status is None else status.trainer_step_s
        bound_s, now = max_age_s(self._env.config.max_batches_offpolicy, step_s), time.monotonic()
        return Counter(
            "an engine" if work.notes and work.notes.num_asking else "its own code"
            for work in self._work.values()
            if now - work.began_at > bound_s
        )

    # Starting

    def _allowed(self) -> int:
        """Return how many items to start now."""
        env, config, status = self._env, self._env.config, self._link.status
        if status is None or self._link.hub_unavailable or self._outbox.hub_unavailable:
            return 0
        workers = max_workers(config, num_servers=len(env.server.servers))
        demand = self._demand(status)
        if demand is not None:
            workers = max(workers, self._num_served())
        env.max_num_workers = workers
        if self._is_stopped_by_evaluation():
            return 0
        if self._is_evaluating() and config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN:
            workers = max(1, int(workers * config.eval_limit_ratio))
        load = Load(
            max_workers=workers,
            running=len(env.running_items),
            held=self._link.num_uncounted,
            group_size=config.group_size,
            batch_size=config.batch_size,
            max_batches_offpolicy=config.max_batches_offpolicy,
            queue_size=status.queue_size,
            self_queue_size=status.self_queue_size,
            unallocated_fraction=status.unallocated_fraction,
            min_batch_allocation=config.min_batch_allocation,
            wanted_share=status.wanted_share,
            demand=demand,
        )
        self.num_wanted, allowed = num_wanted(load), num_to_start(load)
        if not self._engine.is_on:
            return allowed
        return min(1, allowed) if self._engine.may_try() and not env.running_items else 0

    def _is_evaluating(self) -> bool:
        runner = self._env.eval_runner
        return runner is not None and not runner.done()

    def _is_stopped_by_evaluation(self) -> bool:
        handling = self._env.config.eval_handling
        return self._is_evaluating() and handling is EvalHandlingEnum.STOP_TRAIN

    def _num_served(self) -> int:
        """Return how many items the servers can serve at once: no more than now while requests wait for a slot."""
        slots = [server.sem for server in self._env.server.servers]
        if slots and all(sem.in_use >= sem.capacity for sem in slots):
            return len(self._env.running_items)
        return sum(sem.max_val for sem in slots) // self._env.config.group_size

    def _demand(self, status: EnvStatus) -> Demand | None:
        """Return what the trainer takes and items yield; None if the author set the workers, or not enough is known."""
        if status.trainer_step_s is None or workers_are_set(self._env.config):
            return None
        now, config = time.monotonic(), self._env.config
        return self._history.demand(
            step_s=status.trainer_step_s,
            ages_s=[now - work.began_at for work in self._work.values()],
            missing_sequences=config.batch_size - status.queue_size * config.group_size,
            trainer_waits_s=self._link.trainer_waits_s(),
        )

    async def start(self) -> None:
        """Start as many items as `capacity` allows."""
        num_started = self._allowed()
        for started in range(num_started):
            work = await self._next_work()
            if work is None:
                num_started = started
                break
            key = str(uuid.uuid4())
            # A copy for each attempt, as the task of the one before may not have ended.
            work = self._work[key] = replace(work, is_settled=False, began_at=time.monotonic())
            task = self._start_task(self._work_on(key, work), name=f"item-{key[:8]}")
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
        """Return the oldest item to retry, else one from the author's backlog, else a new one."""
        if self._retries:
            return self._retries.popleft()
        if self._env.backlog:
            return self._begin(self._env.backlog.pop(0))
        try:
            with as_failures():
                item = await next_item(self._env)
        except Exception as error:  # noqa: BLE001 - the author's code; counted, and it may end the run
            self.outcomes.log_failure("get_next_item", error)
            self.outcomes.failed(error, began_after=self.outcomes.num_failed)
            return None
        if item is None:
            self.remind_idle("get_next_item() returns None")
            return None
        self.not_idle()
        return self._begin(item)

    def _begin(self, item: Any) -> Work:
        self.outcomes.num_started += 1
        return Work(item=item)

    def not_idle(self) -> None:
        """Record that the author's code produced an item or a group."""
        self._idle_since = None

    def remind_idle(self, reason: str) -> None:
        """Log at intervals that the author's code produces nothing; nothing else shows why the run stalls."""
        now = time.monotonic()
        if self._idle_since is None or self._env.running_items:
            self._idle_since, self._num_idle_reminders = now, 0
            return
        waited_s = now - self._idle_since
        if waited_s >= self._timings.no_item_reminder_s * (self._num_idle_reminders + 1):
            self._num_idle_reminders += 1
            status = self._link.status
            logger.warning(
                "nothing to do for %.0f s: %s (step %d, policy version %s)",
                waited_s,
                reason,
                self._env.curr_step,
                None if status is None else status.policy_version,
            )

    # Running

    async def _work_on(self, key: str, work: Work) -> None:
        """Run one item through the environment's `handle_env`; an error in an override counts as the item's failure."""
        work.began_after = self.outcomes.num_failed
        try:
            with as_failures():
                groups = await self._env.handle_env(key)
        except Exception as raised:  # noqa: BLE001 - boundary: one item
            if work.is_settled:  # its groups are queued: a retry would send them twice
                self.outcomes.log_failure("handle_env after the item's end", cause_of(raised))
            else:
                self._failed(work, cause_of(raised))
            return
        if not work.is_settled:  # an override that does not call the default
            self._succeeded(work, gave_groups=bool(groups))

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        """Remove an item, including one cancelled before it began."""
        self._work.pop(key, None)
        self._env.running_items.pop(key, None)
        self._env.workers.discard(task)
        self._on_change()

    async def run_item(self, key: str) -> Any:
        """Collect, postprocess and send one item's groups; a failure is counted and the item retried."""
        env = self._env
        entry = env.running_items.get(key)
        if entry is None:
            logger.warning("item %s is not running", key)
            return None
        work = self._work.get(key) or Work(item=entry["item"])
        work.notes = self._outbox.notes_of(work.item)
        try:
            with (
                as_failures(),
                self._outbox.item(work.notes),
                sampling_for(self._outbox.experiment),
                item_span({"atropos.environment": env.registered_name, "atropos.item": key}),
            ):
                groups, backlog = await collect_timed(env, work.item)
                if groups:
                    await env.handle_send_to_api(groups, work.item)
                    env.last_completed_item = groups
            env.backlog.extend(
                backlog
            )  # after sending: a failure retries the item and returns its backlog again
        except Exception as raised:  # noqa: BLE001 - boundary: one item
            self._failed(work, cause_of(raised))
            return None
        finally:
            env.running_items.pop(key, None)
            self._on_change()
        self._succeeded(work, gave_groups=bool(groups))
        return groups

    def _succeeded(self, work: Work, *, gave_groups: bool) -> None:
        work.is_settled = True
        self._history.add(time.monotonic() - work.began_at, num_accepted=self._outbox.num_accepted)
        self.outcomes.succeeded(work, gave_groups=gave_groups)
        self._engine.end()

    def _failed(self, work: Work, error: BaseException) -> None:
        work.is_settled = True
        if isinstance(error, EngineUnavailable) or (
            # Its time ran out while it waited for an engine.
            isinstance(error, TimeoutError) and not self._has_healthy_engine()
        ):
            self._retries.append(work)
            self.outcomes.num_put_back += 1
            self._engine.begin(error)
            return
        if isinstance(error, Suspicion):
            self._on_fatal(error)
            return
        self.outcomes.log_failure("item", error)
        if self.outcomes.may_retry(work, error):
            self._retries.append(work)
        try:
            self.outcomes.failed(error, began_after=work.began_after)
        except Exception as fatal:  # noqa: BLE001 - raised again by the run
            self._on_fatal(fatal)

    def _has_healthy_engine(self) -> bool:
        return any(server.server_healthy for server in self._env.server.servers)

    # Stopping

    async def sample_again(self) -> None:
        """Cancel the items in flight and queue them again: the trainer has started another experiment."""
        in_flight = dict(self._work)
        workers = [*self._env.workers]
        logger.warning(
            "the trainer has started another experiment; sampling %d items in flight again; the hub will refuse the"
            " groups of the earlier one",
            len(in_flight),
        )
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        unsettled = [work for work in in_flight.values() if not work.is_settled]
        self.outcomes.num_put_back += len(unsettled)
        self._retries.extend(unsettled)

    async def drain(self, skip_wait: asyncio.Event) -> None:
        """Wait for items in flight; move unfinished ones and those to retry to `backlog`, and log their number.

        Ends early when `skip_wait` is set or no engine is available.
        """
        items = set(self._env.workers)
        if items:
            logger.info("%d items may finish within %.0f s", len(items), self._timings.drain_s)
        deadline = time.monotonic() + self._timings.drain_s
        while items and not skip_wait.is_set() and self._may_have_engine():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            # Checks `skip_wait` and the engines once per tick.
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
