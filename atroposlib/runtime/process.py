"""Write groups to a JSONL file and an HTML page, without a hub.

Items run concurrently; lines are written in the order of the items. Only written groups count. A row holds the number
of its item in the order of `get_next_item`, so that a later run can append what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from atroposlib.envs.collecting import collect_timed, next_item
from atroposlib.envs.env_config import ProcessOptions, max_workers
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import (
    ConfigError,
    EngineUnavailable,
    EnvError,
    MissingDependency,
    Suspicion,
    cause_of,
)
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.inference.servers.sampling_notes import ItemRecord
from atroposlib.inference.servers.usage import Usage
from atroposlib.runtime.closing import closed_at_end
from atroposlib.runtime.group_log import GroupLog
from atroposlib.runtime.group_rows import fingerprint, item_json, totals
from atroposlib.runtime.items import Outcomes, Work
from atroposlib.runtime.losses import listed
from atroposlib.runtime.metrics import require_wandb, start_wandb
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.progress import RunStatus, sign_of_life
from atroposlib.runtime.signals import cancelled_by_sigterm
from atroposlib.runtime.timings import Timings
from atroposlib.utils.tracing import item_span

logger = logging.getLogger(__name__)


async def process(
    env: EnvHooks, options: ProcessOptions | None = None, *, timings: Timings | None = None
) -> GroupLog:
    """Write `total_steps` groups to `data_path_to_save_groups`; fewer if the items run out. Returns the closed file.

    Raises ConfigError without a path or a positive number of groups, for `epochs` without rows and for a file that
    cannot be appended to; EnvError when items fail or give no group too often in a row, or run out after
    failures. Groups written before an error stay in the file.
    """
    config = env.config
    options = options or ProcessOptions()
    if not config.data_path_to_save_groups:
        raise ConfigError("data_path_to_save_groups: process needs a file to write to")
    if config.total_steps < 1 and options.epochs is None:
        raise ConfigError(
            f"total_steps: got {config.total_steps}; process needs the number of groups to make"
        )
    if options.epochs is not None and env.num_epoch_items() is None:
        raise ConfigError(
            f"--epochs: {env.registered_name} has no list of rows (it is no DatasetEnv); give --env.total_steps"
        )
    if config.use_wandb:
        require_wandb()
    async with closed_at_end(env):
        await env.setup()
        open_log = GroupLog.append_to if options.append else GroupLog.open
        log = open_log(config.data_path_to_save_groups)
        config.data_path_to_save_groups = str(log.path)
        env.jsonl_writer = log
        outbox = Outbox(env, log=log)
        env.group_sink = outbox
        run = _FileRun(env, log, outbox, epochs=options.epochs)
        try:
            if config.use_wandb:
                start_wandb(env, project=None, group=None)
            async with sign_of_life(env, run.status, timings=timings):
                await run.fill()
        finally:
            log.close()
            for line in usage_lines(run.usage):
                logger.info("%s", line)
    return log


async def process_and_render(env: EnvHooks, options: ProcessOptions | None = None) -> None:
    """Write the groups, then an HTML page next to them, also when the run fails or is interrupted."""
    with cancelled_by_sigterm():
        try:
            await process(env, options)
        finally:
            log = env.jsonl_writer
            if isinstance(log, GroupLog) and log.num_groups:
                tokenizer = env.tokenizer if env.server.gives_token_ids else None
                await asyncio.to_thread(generate_html, log.path, tokenizer=tokenizer)


def usage_lines(usage: Mapping[tuple[str, str], Usage]) -> list[str]:
    """Return one line for each server and model.

    >>> usage_lines({("https://api.openai.com/v1", "gpt-4o"): Usage(2, 1200, 300, 0.006)})
    ['gpt-4o at https://api.openai.com/v1: 2 requests, 1,200 prompt and 300 completion tokens, about $0.0060']
    """
    return [
        f"{model} at {url or 'the OpenAI API'}: {used.num_requests:,} requests, {used.prompt_tokens:,} prompt and"
        f" {used.completion_tokens:,} completion tokens"
        + ("" if used.cost_usd is None else f", about ${used.cost_usd:.4f}")
        for (url, model), used in sorted(usage.items())
    ]


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One attempt at an item."""

    work: Work
    record: ItemRecord
    may_write: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the groups of all earlier items are written."""
    task: asyncio.Task[Any] = field(init=False)


class _FileRun:
    """The items of one run, from `get_next_item` to the file."""

    def __init__(self, env: EnvHooks, log: GroupLog, outbox: Outbox, *, epochs: int | None) -> None:
        self._env = env
        self._log = log
        self._outbox = outbox
        self.usage: dict[tuple[str, str], Usage] = {}
        """By (base_url, model), failed items included."""
        self._outcomes = Outcomes(env.config)
        self._retries: deque[Work] = deque()
        self._running: deque[_Attempt] = deque()
        self._num_given = 0
        """Items that `get_next_item` returned."""
        self._num_rows: int | None = None
        """Limit of `_num_given`; None: the number of groups ends the run."""
        self._num_found = log.num_groups
        """Groups of an earlier run."""
        self._last_found = max(log.items, default=-1)
        """The last item of an earlier run."""
        if epochs is not None:
            num_items = env.num_epoch_items()
            assert num_items is not None
            self._num_rows = epochs * num_items

    @property
    def _wanted(self) -> int:
        """Groups that the file should have in the end."""
        return self._env.config.total_steps if self._num_rows is None else self._num_rows

    def _num_missing(self) -> int:
        """Groups that may still be started; the rows alone limit `--epochs`, as a row may give no group or several."""
        return self._wanted - self._log.num_groups if self._num_rows is None else sys.maxsize

    def status(self) -> RunStatus:
        """Return where the run is; groups of an earlier run are not counted."""
        return RunStatus(
            num_made=self._log.num_groups - self._num_found,
            wanted=self._wanted - self._num_found,
            mean_score=self._outbox.mean_score,
            num_equal_scores=self._outbox.num_equal_scores * (self._env.config.group_size > 1),
            dropped=self._outbox.dropped,
            samples=self._outbox.samples,
            lost=self._env.lost_answers(),
            suspicious=self._env.suspicions(),
            failed=self._outcomes.by_type,
            num_without_groups=self._outcomes.num_without_groups,
            tokens=self._outbox.tokens,
            num_tokens_not_sampled=self._outbox.num_tokens_not_sampled,
            num_in_flight=self._outcomes.num_unfinished,
        )

    async def fill(self) -> None:
        """Run items ahead of the writer and write their groups in order, until enough are written."""
        if self._num_found:
            logger.info(
                "%s has %d groups; adding the missing ones", self._log.path, self._num_found
            )
        try:
            await self._fill()
        finally:
            for attempt in self._running:
                attempt.task.cancel()
            tasks = (attempt.task for attempt in self._running)
            await asyncio.gather(*tasks, return_exceptions=True)
            for attempt in self._running:
                self._add_usage(attempt.record)
            if self._outcomes.num_with_groups < self._outcomes.num_started:
                logger.info("%s", self._outcomes.summary())

    async def _fill(self) -> None:
        env = self._env
        width = max_workers(env.config, num_servers=len(env.server.servers))
        num_empty = 0
        has_more = True
        while self._num_missing() > 0:
            while has_more and len(self._running) < min(width, self._num_missing()):
                has_more = await self._start_next()
            if not self._running:
                self._end_of_items()
                return
            attempt = self._running.popleft()
            num_written = self._log.num_groups
            attempt.may_write.set()
            try:
                groups, backlog = await attempt.task
            except Exception as raised:  # noqa: BLE001 - boundary: one item
                has_more = self._count_and_retry(attempt.work, cause_of(raised)) or has_more
                continue
            finally:
                self._add_usage(attempt.record)
            env.backlog.extend(backlog)
            has_more = has_more or bool(backlog)
            self._outcomes.succeeded(attempt.work, gave_groups=bool(groups))
            if groups:
                groups = self._log.num_groups > num_written
                await env.wandb_log()
            if groups or not self._was_left_out(attempt.work):
                num_empty = 0 if groups else num_empty + 1
            if num_empty >= env.config.max_consecutive_failures:
                raise EnvError(
                    f"{num_empty} items in a row gave no group:\n{self.status().causes()}"
                )

    def _end_of_items(self) -> None:
        """Raise EnvError if items that were given up are why there are no groups, or not as many as asked for."""
        what = f"no more items: {self._log.num_groups} of {self._wanted} groups"
        is_complete = self._num_rows is not None and self._log.num_groups > self._num_found
        if self._outcomes.given_up and not is_complete:
            raise EnvError(f"{what}; items given up: {listed(self._outcomes.given_up)}")
        if self._num_rows is None:
            logger.warning("%s", what)

    async def _start_next(self) -> bool:
        """Start an attempt at the next item; return False if there is none."""
        work = await self._next_work()
        if work is None:
            return False
        self._outcomes.num_started += work.num_failures == 0
        attempt = _Attempt(work=work, record=ItemRecord(work.item_id, work.item_json))
        attempt.task = asyncio.create_task(_work_on(self._env, attempt, self._outbox))
        self._running.append(attempt)
        return True

    async def _next_work(self) -> Work | None:
        """Return the oldest item to retry, else one from the author's backlog, else the next one not in the file."""
        if self._retries:
            return self._retries.popleft()
        if self._env.backlog:
            item = self._env.backlog.pop(0)
            return Work(item=item, item_json=item_json(item))
        while self._num_rows is None or self._num_given < self._num_rows:
            item = await next_item(self._env)
            if item is None:
                return None
            number = self._num_given
            self._num_given += 1
            json = item_json(item)
            found = self._log.items.pop(number, None)
            if found is None:
                return Work(item=item, item_id=number, item_json=json)
            if found != fingerprint(bytes(json)):
                raise ConfigError(
                    f"--append: item {number} differs from the one in {self._log.path}: get_next_item gives other"
                    " items than in the earlier run, for example because of another seed. Write to another file"
                )
        return None

    def _was_left_out(self, work: Work) -> bool:
        """Whether an earlier run passed this item; many of those in a row may fail again and do not end the run."""
        return work.item_id is not None and work.item_id < self._last_found

    def _count_and_retry(self, work: Work, error: BaseException) -> bool:
        """Count a failure; queue the item again and return True if it has attempts left.

        An engine that stayed unavailable for `health_wait_s` or answers 404, a missing package and a Suspicion end the
        run.
        """
        if isinstance(error, EngineUnavailable | MissingDependency | Suspicion) or (
            isinstance(error, EngineHttpRejected) and error.status == HTTPStatus.NOT_FOUND
        ):
            raise error
        outcomes = self._outcomes
        outcomes.log_failure("item", error)
        if self._was_left_out(work):
            outcomes.by_type[type(error).__name__] += 1
        else:
            outcomes.failed(error, began_after=outcomes.num_failed)
        if not outcomes.may_retry(work, error):
            return False
        self._retries.append(work)
        return True

    def _add_usage(self, record: ItemRecord) -> None:
        for key, used in totals(record.calls).items():
            self.usage[key] = self.usage.get(key, Usage()).plus(used)


async def _work_on(env: EnvHooks, attempt: _Attempt, outbox: Outbox) -> tuple[Any, list[Any]]:
    """Collect the groups of an item, record its requests, and write the groups when it is their turn."""
    item, record = attempt.work.item, attempt.record
    attributes = {"atropos.environment": env.registered_name, "atropos.item": record.item_id}
    with outbox.item(record), item_span(attributes):
        groups, backlog = await collect_timed(env, item)
        await attempt.may_write.wait()
        if groups:
            await env.handle_send_to_api(
                groups, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
            )
    return groups, backlog
