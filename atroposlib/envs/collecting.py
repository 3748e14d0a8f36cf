"""Call the author's code: `get_next_item`, one item with a deadline, and `close`; shared by runtime and checker."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import EnvError
from atroposlib.inference.servers.sampling_notes import ItemRecord, recorded


async def next_item(env: EnvHooks) -> Any:
    """Return the next item, None if there is none now; EnvError in place of StopIteration."""
    try:
        return await env.get_next_item()
    except RuntimeError as error:  # which a coroutine raises in place of StopIteration
        if not isinstance(error.__cause__, StopIteration):
            raise
        raise EnvError(
            "get_next_item() raised StopIteration; return None at the end: next(items, None)"
        ) from error


async def collect(env: EnvHooks, item: Any) -> tuple[Any, list[Any]]:
    """Run the author's code on one item within `worker_timeout`; `cleanup` is always called afterwards.

    Returns the postprocessed groups (or a falsy value) and the items to ask later.
    Raises whatever the author's code raised; TimeoutError past the deadline.
    """
    timeout_s = env.config.worker_timeout if env.config.worker_timeout > 0 else None
    try:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                groups, backlog = await env.collect_trajectories(item)
                if groups:
                    groups = await env.postprocess_histories(groups)
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(
                    f"the item took more than {timeout_s} s (worker_timeout)"
                ) from error
            raise
        return groups, list(backlog or [])
    finally:
        await env.cleanup()


async def collect_timed(env: EnvHooks, item: Any) -> tuple[Any, list[Any]]:
    """Call `collect` and record its duration and outcome; groups of None count as failed."""
    began = time.monotonic()
    record = recorded() or ItemRecord()
    record.began_at = time.time()
    succeeded = False
    try:
        result = await collect(env, item)
        succeeded = result[0] is not None
        return result
    finally:
        record.duration_s = duration_s = time.monotonic() - began
        env.task_duration.append(duration_s)
        (env.succeeded_task_duration if succeeded else env.failed_task_duration).append(duration_s)
        env.task_successful.append(int(succeeded))


async def close(env: EnvHooks) -> None:
    """Call the author's `close`, plain or async, then close the connections to all servers."""
    try:
        closing = env.close()
        if inspect.isawaitable(closing):
            await closing
    finally:
        await close_connections(env)


async def close_connections(env: EnvHooks) -> None:
    """Close the connections to the policy's servers and to the extra ones."""
    for manager in (env.server, *env.extra_managers.values()):
        await manager.close()
