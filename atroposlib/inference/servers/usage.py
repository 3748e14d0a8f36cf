"""Tokens and cost of answers.

`PRICES` is a small table of list prices for estimates; `APIServerConfig.prompt_price` and `completion_price` override
it. A model that is not listed has no cost.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from atroposlib.inference.config import ServerBaseline
from atroposlib.inference.servers.api_server import token_counts


class Price(NamedTuple):
    """US dollars per million tokens."""

    prompt: float
    completion: float


PRICES = {
    "gpt-4o": Price(2.5, 10.0),
    "gpt-4o-mini": Price(0.15, 0.6),
    "gpt-4.1": Price(2.0, 8.0),
    "gpt-4.1-mini": Price(0.4, 1.6),
    "gpt-4.1-nano": Price(0.1, 0.4),
    "gpt-5": Price(1.25, 10.0),
    "gpt-5-mini": Price(0.25, 2.0),
    "gpt-5-nano": Price(0.05, 0.4),
    "o3": Price(2.0, 8.0),
    "o4-mini": Price(1.1, 4.4),
    "claude-sonnet-4": Price(3.0, 15.0),
    "claude-opus-4": Price(15.0, 75.0),
    "gemini-2.5-flash": Price(0.3, 2.5),
    "gemini-2.5-pro": Price(1.25, 10.0),
}
"""By model, without discounts for cached or batched requests; the providers' price lists of September 2025."""

_DATE = re.compile(r"-(\d{8}|\d{4}-\d\d-\d\d)$")


class Usage(NamedTuple):
    """Sums over answered requests."""

    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    """None if the price is unknown."""

    def plus(self, other: Usage) -> Usage:
        """Return the sum of two usages of one model."""
        known = [cost for cost in (self.cost_usd, other.cost_usd) if cost is not None]
        return Usage(
            self.num_requests + other.num_requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            sum(known) if known else None,
        )


def usage_of(answer: Any, config: ServerBaseline) -> Usage:
    """Return the usage of one answer; tokens are 0 if the server does not report them, all is 0 if it was cached."""
    if getattr(answer, "is_cached", False):
        return Usage(cost_usd=0.0)
    num_prompt, num_sampled, _ = token_counts(answer)
    price = price_of(config)
    cost = price and (price.prompt * num_prompt + price.completion * num_sampled) / 1e6
    return Usage(1, num_prompt, num_sampled, cost)


def price_of(config: ServerBaseline) -> Price | None:
    """Return the configured price, else the listed one; the name may have a vendor before it and a date after it.

    >>> from atroposlib.inference.config import APIServerConfig
    >>> price_of(APIServerConfig(model_name="openai/gpt-4o-mini-2024-07-18"))
    Price(prompt=0.15, completion=0.6)
    >>> price_of(APIServerConfig(model_name="Qwen/Qwen3-4B")) is None
    True
    """
    prompt = getattr(config, "prompt_price", None)
    completion = getattr(config, "completion_price", None)
    if prompt is not None or completion is not None:
        return Price(prompt or 0.0, completion or 0.0)
    return PRICES.get(_DATE.sub("", config.model_name.rpartition("/")[2]))
