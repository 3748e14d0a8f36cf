"""The bodies of chat and text completions, as written by the two engines, the proxy, and sessions for their callers.

The shapes are OpenAI's, the values of what JSON lacks are vLLM's. `inference/servers/vllm.py` reads such bodies.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

NO_LOGPROB = -9999.0
"""vLLM's value for NaN, for minus infinity and for a sampled token without a logprob: JSON has none of them."""

Tokens = Iterable[tuple[str, float]]
"""The text and the logprob of consecutive tokens, or of several tokens at one position."""


def completion_body(
    choices: Sequence[dict[str, Any]],
    *,
    model: str,
    num_tokens: tuple[int, int] | None = None,
    id: str | None = None,
    created: int | None = None,
) -> dict[str, Any]:
    """Return the body of a chat or text completion with numbered choices, each with a "message" or a "text".

    `num_tokens` are those of the prompt and of all choices; None if unknown. `id` is without the prefix of the kind,
    by default a new one; `created` is in Unix seconds, by default now.
    """
    is_chat = any("message" in choice for choice in choices)
    keys = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + (id or uuid.uuid4().hex),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()) if created is None else created,
        "model": model,
        "choices": [{"index": i, "logprobs": None, **choice} for i, choice in enumerate(choices)],
        "usage": num_tokens and dict(zip(keys, (*num_tokens, sum(num_tokens)), strict=True)),
    }


def model_card(name: str, *, owner: str, context_len: int | None = None) -> dict[str, Any]:
    """Return an entry of `/v1/models`."""
    card: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": owner}
    if context_len is not None:
        card |= {"root": name, "parent": None, "max_model_len": context_len}
    return card


def text_logprobs(sampled: Tokens, tops: Iterable[Tokens] | None = None) -> dict[str, Any]:
    """Return the `logprobs` of a text choice. `tops` are the likeliest tokens at each position, if known."""
    tokens = [(text, max(logprob, NO_LOGPROB)) for text, logprob in sampled]
    top_logprobs = [{text: logprob} for text, logprob in tokens]
    if tops is not None:
        for row, top in zip(top_logprobs, tops, strict=True):
            for text, logprob in top:
                row.setdefault(text, max(logprob, NO_LOGPROB))
    texts = [text for text, _ in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": top_logprobs,
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
    }


def chat_logprobs(sampled: Tokens, tops: Iterable[Tokens] | None = None) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice. `tops` are the likeliest tokens at each position, if known."""
    content = [{**_entry(*token), "top_logprobs": []} for token in sampled]
    if tops is not None:
        for entry, top in zip(content, tops, strict=True):
            entry["top_logprobs"] = [_entry(*token) for token in top]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, NO_LOGPROB), "bytes": list(text.encode())}
