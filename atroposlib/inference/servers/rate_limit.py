"""Requests and tokens per minute at one server, as hosted APIs count them.

Requests are spaced evenly, so no minute has more than the limit, whenever it begins. A request's tokens are estimated
when it is sent, from the mean completion so far or else its limit, and corrected by the usage in its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from atroposlib.inference.servers.admission import AsyncSemWithAdaptiveWeight

CHARS_PER_TOKEN = 4
"""Of English text with common tokenizers."""
DEFAULT_MAX_TOKENS = 1000
"""Assumed length of a completion without a limit."""


class Spacing:
    """One limit: when the next amount may be sent. Times are in seconds and arguments."""

    def __init__(self, per_minute: float) -> None:
        self._seconds_each = 60.0 / per_minute
        self._free_at = 0.0

    def wait_s(self, now: float) -> float:
        """Return the time until something may be sent."""
        return max(0.0, self._free_at - now)

    def take(self, amount: float, now: float) -> None:
        """Use `amount`; a negative amount returns what was not used.

        >>> spacing = Spacing(60)
        >>> spacing.take(2, now=100)
        >>> spacing.wait_s(100.5)
        1.5
        """
        begin = max(self._free_at, now) if amount > 0 else self._free_at
        self._free_at = begin + amount * self._seconds_each


class RateLimiter:
    """The limits of one server."""

    def __init__(
        self, *, requests_per_minute: float | None, tokens_per_minute: float | None
    ) -> None:
        self._requests = Spacing(requests_per_minute) if requests_per_minute else None
        self._tokens = Spacing(tokens_per_minute) if tokens_per_minute else None
        # First come, first served; its holder waits. Unlike asyncio's locks, it is not bound to an event loop.
        self._turn = AsyncSemWithAdaptiveWeight(1)
        self._corrected = asyncio.Event()
        self._num_completions = self._num_sampled = 0

    async def wait(self, body: Mapping[str, Any]) -> int:
        """Return the estimated tokens of a request once it may be sent; 0 without a limit of tokens."""
        limits = [limit for limit in (self._requests, self._tokens) if limit is not None]
        if not limits:
            return 0
        async with self._turn:
            while (wait_s := max(limit.wait_s(time.monotonic()) for limit in limits)) > 0:
                self._corrected = asyncio.Event()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._corrected.wait()
            now = time.monotonic()
            if self._requests is not None:
                self._requests.take(1, now)
            if self._tokens is None:
                return 0
            estimated = self._estimate(body)
            self._tokens.take(estimated, now)
            return estimated

    def correct(self, answer: Any, body: Mapping[str, Any], *, estimated: int) -> None:
        """Replace an estimate by the usage that the answer reports, if it does."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if self._tokens is None or not isinstance(usage, dict):
            return
        num_prompt, num_sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(num_prompt, int) and isinstance(num_sampled, int):
            self._num_completions += int(body.get("n") or 1)
            self._num_sampled += num_sampled
            self._tokens.take(num_prompt + num_sampled - estimated, time.monotonic())
            self._corrected.set()

    def _estimate(self, body: Mapping[str, Any]) -> int:
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or DEFAULT_MAX_TOKENS
        each = self._num_sampled / self._num_completions if self._num_completions else int(limit)
        return estimate_prompt(body) + round(each * int(body.get("n") or 1))


def estimate_prompt(body: Mapping[str, Any]) -> int:
    """Return the tokens of a prompt: token ids counted, text and messages by their length.

    >>> estimate_prompt({"messages": [{"role": "user", "content": "Two words"}, {"role": "user", "content": None}]})
    2
    """
    prompt = body.get("prompt") or ""
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return len(prompt)
    texts = [message.get("content") or "" for message in body.get("messages") or ()]
    return sum(len(str(text)) for text in (prompt, *texts)) // CHARS_PER_TOKEN
