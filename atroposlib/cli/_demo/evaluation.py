"""Accuracy of an engine's current weights, measured over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.utils.letter_reversal import MAX_ANSWER_TOKENS, is_correct

_MAX_CONCURRENT_REQUESTS = 256
_TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Fraction of prompts answered exactly, 0 to 1."""

    sampled: float
    """At temperature 1, one answer per prompt."""
    greedy: float


def measure(engine_url: str, model_name: str, prompts: Sequence[str]) -> Accuracy:
    """Answer every prompt twice, sampled and greedily; raises `EngineError` if a request fails."""
    return asyncio.run(_measure(engine_url, model_name, prompts))


async def _measure(url: str, model_name: str, prompts: Sequence[str]) -> Accuracy:
    connector = aiohttp.TCPConnector(limit=_MAX_CONCURRENT_REQUESTS)
    async with aiohttp.ClientSession(url, connector=connector, timeout=_TIMEOUT) as session:

        async def accuracy(temperature: float) -> float:
            body = {"model": model_name, "temperature": temperature}
            # A failed request is raised as it is, and closing the session ends the others.
            answered = await asyncio.gather(*(_is_answered(session, body, p) for p in prompts))
            return sum(answered) / len(prompts)

        return Accuracy(sampled=await accuracy(1.0), greedy=await accuracy(0.0))


async def _is_answered(session: aiohttp.ClientSession, body: dict[str, Any], prompt: str) -> bool:
    body = {**body, "max_tokens": MAX_ANSWER_TOKENS, "prompt": prompt}
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status >= 400:
                detail = (await response.text())[:500]
                raise EngineRejected(f"the engine answered {response.status} to {body}: {detail}")
            reply = await response.json()
    except aiohttp.ClientError as error:
        raise EngineUnavailable(f"the engine did not answer: {error}") from error
    try:
        choice = reply["choices"][0]
        return is_correct(prompt, choice["text"], finished=choice["finish_reason"] == "stop")
    except (KeyError, IndexError, TypeError) as error:
        raise EngineProtocolError(f"not a completion: {str(reply)[:500]}") from error
