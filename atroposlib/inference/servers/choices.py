"""Get `n` completions from several requests: split, run, merge."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from atroposlib.inference.servers.sampling_notes import member_context

T = TypeVar("T")


class RequestPart(NamedTuple):
    """Some of a call's completions, to be requested together."""

    size: int
    offset: int


def split_n(n: int, *, at_most: int) -> list[RequestPart]:
    """Cut `n` completions into requests.

    >>> [part.size for part in split_n(10, at_most=4)]
    [4, 4, 2]
    """
    return [RequestPart(min(at_most, n - offset), offset) for offset in range(0, n, at_most)]


def part_of(body: dict[str, Any], part: RequestPart, *, seed_name: str = "seed") -> dict[str, Any]:
    """Return the body that asks for a part of the completions of `body`; equal seeds would give equal ones.

    >>> part_of({"seed": 5, "n": 3}, RequestPart(size=1, offset=2))
    {'seed': 7, 'n': 1}
    """
    changes: dict[str, Any] = {}
    if part.size != body.get("n", 1):
        changes["n"] = part.size
    if body.get(seed_name) is not None:
        changes[seed_name] = body[seed_name] + part.offset
    return {**body, **changes}


async def run_together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order; the first failure cancels the rest and is raised."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(call, context=member_context(i)) for i, call in enumerate(calls)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def wait_for_first(
    calls: Iterable[Coroutine[Any, Any, Any]], *, timeout_s: float | None = None
) -> None:
    """Run calls concurrently until the first ends; cancel the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def merge_bodies(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge (chat) completion bodies: all choices, renumbered, and the sum of the token counts.

    The prompt is counted once per request, as it was billed.
    """
    if len(parts) == 1:
        return parts[0]
    choices = [choice for part in parts for choice in part["choices"]]
    merged = {
        **parts[0],
        "choices": [{**choice, "index": i} for i, choice in enumerate(choices)],
    }
    usages = [part["usage"] for part in parts if part.get("usage")]
    if len(usages) == len(parts):
        merged["usage"] = {
            key: sum(usage.get(key) or 0 for usage in usages)
            for key in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
    return merged
