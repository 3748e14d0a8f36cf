"""Completions with different first tokens: draw distinct first tokens, then complete each."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import EngineProtocolError

NUM_FIRST_TOKENS = 20
"""Requested number of first tokens; the most that common servers return."""


async def generate_with_diverse_first_tokens(
    self: Any,
    messages: Sequence[Mapping[str, Any]],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """Return `n` completions (each with `prefill` and its first token) that begin with different tokens.

    Intended as a method of an environment: `self` has `tokenizer` and `server`. First tokens are drawn without
    replacement from the server's top 20 by their probability at `temperature`; if there are fewer than `n`, all are
    used and the drawing starts again. Raises `EngineProtocolError` if the server returns no logprobs.
    """
    prompt = self.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    prompt += prefill
    first = await self.server.completion(
        prompt=prompt, n=1, max_tokens=1, temperature=temperature, logprobs=NUM_FIRST_TOKENS
    )
    starts = draw_first_tokens(_top_logprobs(first), n=n, temperature=temperature)

    async def complete(start: str) -> str:
        answer = await self.server.completion(
            prompt=prompt + start,
            n=1,
            max_tokens=max(1, max_tokens - 1),
            temperature=temperature,
            top_p=0.3,
            extra_body={"min_p": 0.5, "repetition_penalty": 1.05},
        )
        return f"{prefill}{start}{answer.choices[0].text}"

    return list(await asyncio.gather(*(complete(start) for start in starts)))


def draw_first_tokens(
    logprobs: Mapping[str, float],
    *,
    n: int,
    temperature: float = 1.0,
    rng: random.Random | None = None,
) -> list[str]:
    """Draw `n` tokens without replacement, starting again when all have been drawn.

    Sorting by logprob / temperature plus Gumbel noise draws without replacement (arXiv:1903.06059, section 2.3); at
    temperature 0 the most probable come first.
    """
    rng = rng or random.Random()

    def gumbel() -> float:
        return -math.log(-math.log(max(rng.random(), 1e-300)) or 1e-300)

    drawn: list[str] = []
    while len(drawn) < n:
        keys = {
            token: value / temperature + gumbel() if temperature > 0 else value
            for token, value in logprobs.items()
        }
        drawn += sorted(keys, key=lambda token: -keys[token])
    return drawn[:n]


def _top_logprobs(answer: Any) -> dict[str, float]:
    """Return logprobs by token of the first position, from an object of the openai package or a dict."""
    found = answer.choices[0].logprobs
    is_dict = isinstance(found, Mapping)
    positions = found.get("top_logprobs") if is_dict else getattr(found, "top_logprobs", None)
    if not positions or not positions[0]:
        raise EngineProtocolError(
            "the server returned no top_logprobs for the first token; diverse sampling needs them"
        )
    return dict(positions[0])
