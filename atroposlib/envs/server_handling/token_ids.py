"""Prompts as token ids, and proof that what an engine says it sampled can be trained on.

Owns the rule that nothing is padded, cut or guessed: a list of another length, a null or a NaN raises
`EngineProtocolError` with the place and the position. Called by the servers that return token ids; it knows no
engine's format.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from atroposlib.envs.server_handling.api_server import WeightSpan
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import load_tokenizer
from atroposlib.errors import EngineProtocolError

_LOADING = threading.Lock()
"""Held while a tokenizer is loaded: the first requests of an environment all come at once."""


class WithTokenizer:
    """A server that loads its model's tokenizer, once, when something first needs it; slow, not for the event loop."""

    config: APIServerConfig

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer named by `tokenizer_name`, else by `model_name`."""
        with _LOADING:
            loaded = vars(self).get("tokenizer")
            if loaded is None:
                loaded = vars(self)["tokenizer"] = load_tokenizer(self.config.tokenizer_source)
            return loaded


def check_token_ids(values: Any, *, where: str) -> list[int]:
    """Return `values` as token ids, or raise naming the first that is none."""
    if not isinstance(values, list):
        raise EngineProtocolError(f"{where}: {values!r:.200}, expected a list of token ids")
    if set(map(type, values)) <= {int}:
        return values
    bad = next(i for i, value in enumerate(values) if type(value) is not int)
    raise EngineProtocolError(f"{where}: {values[bad]!r:.80} at token {bad}, expected a token id")


def check_logprobs(values: Any, *, num_tokens: int, where: str) -> list[float]:
    """Return one finite logprob per token, or raise naming the first that is none."""
    if not isinstance(values, list):
        raise EngineProtocolError(f"{where}: {values!r:.200}, expected a list of logprobs")
    if len(values) != num_tokens:
        raise EngineProtocolError(f"{where}: {len(values)} logprobs for {num_tokens} token ids")
    if set(map(type, values)) <= {int, float} and bool(np.isfinite(np.array(values, float)).all()):
        return [float(value) for value in values]
    bad = next(
        i
        for i, value in enumerate(values)
        if type(value) not in (int, float) or not math.isfinite(value)
    )
    raise EngineProtocolError(
        f"{where}: logprob {values[bad]!r:.80} at token {bad}, expected a number"
    )


def check_count(found: Sequence[Any], *, n: int, what: str, where: str) -> None:
    """Raise unless there is one entry per completion asked for."""
    if len(found) != n:
        raise EngineProtocolError(f"{where} answered {len(found)} {what}, expected n = {n}")


def check_spans(spans: Sequence[WeightSpan], *, num_tokens: int, where: str) -> list[WeightSpan]:
    """Return the spans that hold tokens; together they must cover every sampled token."""
    kept = [span for span in spans if span.num_tokens]
    total = sum(span.num_tokens for span in kept)
    if total != num_tokens or any(span.num_tokens < 0 for span in kept):
        raise EngineProtocolError(f"{where}: weight versions cover {total} tokens of {num_tokens}")
    return kept


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a prompt with its special tokens; a BOS that the text already spells out is not doubled."""
    token_ids = [int(token) for token in tokenizer.encode(text)]
    bos = tokenizer.bos_token_id
    return token_ids[1:] if bos is not None and token_ids[:2] == [bos, bos] else token_ids
