"""What servers of token ids share: the tokenizer, prompts as ids, and checks of lengths.

Nothing is padded, cut or guessed: a mismatch raises `EngineProtocolError` with its position. Independent of the
engines' formats, whose typed decoding checks the values of single tokens.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from typing import Any

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.api_server import WeightSpan
from atroposlib.utils.tokenizers import load_tokenizer

_LOADING = threading.Lock()
"""Held while a tokenizer is loaded: the first requests of an environment are concurrent."""


class WithTokenizer:
    """A server that loads its model's tokenizer once, on first use."""

    config: APIServerConfig

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer named by `tokenizer_name`, else by `model_name`; slow, not for the event loop."""
        with _LOADING:
            loaded = vars(self).get("tokenizer")
            if loaded is None:
                loaded = vars(self)["tokenizer"] = load_tokenizer(
                    self.config.tokenizer_source, flag="tokenizer_name"
                )
            return loaded

    async def _take_prompt(self, body: dict[str, Any]) -> list[int]:
        """Remove the prompt (`input_ids`, else the text `prompt`) from a body and return it as token ids."""
        text, token_ids = body.pop("prompt", None), body.pop("input_ids", None)
        body.pop("messages", None)
        if type(token_ids) is list and set(map(type, token_ids)) <= {int}:
            return token_ids
        if token_ids is not None:
            return [int(token) for token in token_ids]
        if text is None:
            raise ValueError("a request for tokens or logprobs needs input_ids or prompt")
        return await asyncio.to_thread(lambda: encode_prompt(self.tokenizer, text))


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a prompt with its special tokens; a BOS that the text already contains is not doubled."""
    token_ids = [int(token) for token in tokenizer.encode(text)]
    bos = tokenizer.bos_token_id
    return token_ids[1:] if bos is not None and token_ids[:2] == [bos, bos] else token_ids


def check_count(found: Sequence[Any], *, n: int, what: str, where: str) -> None:
    """Raise unless there is one entry per requested completion."""
    if len(found) != n:
        raise EngineProtocolError(f"{where} answered {len(found)} {what}, expected n = {n}")


def check_sampled(token_ids: list[int], logprobs: list[float], *, where: str) -> None:
    """Raise unless every token has one logprob and no id is negative."""
    if len(logprobs) != len(token_ids):
        raise EngineProtocolError(
            f"{where}: {len(logprobs)} logprobs for {len(token_ids)} token ids"
        )
    if token_ids and min(token_ids) < 0:
        raise EngineProtocolError(f"{where}: token id {min(token_ids)} is negative")


def check_spans(spans: Sequence[WeightSpan], *, num_tokens: int, where: str) -> list[WeightSpan]:
    """Return the spans that hold tokens; together they must cover every sampled token."""
    kept = [span for span in spans if span.num_tokens]
    total = sum(span.num_tokens for span in kept)
    if total != num_tokens or any(span.num_tokens < 0 for span in kept):
        raise EngineProtocolError(f"{where}: weight versions cover {total} tokens of {num_tokens}")
    return kept
