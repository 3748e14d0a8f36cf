"""Requests and their completions in progress: tokens, stop strings, weight versions. No model here.

Used by `scheduler.py`, whose thread alone changes a sequence; `rendering.py` reads completions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from atroposlib.engine.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a completion ended: OpenAI's values, and vLLM's "abort"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(NamedTuple):
    """`num_tokens` consecutive tokens were sampled under `weight_version`."""

    weight_version: str
    num_tokens: int


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer used by the engine."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sequence; `logprobs` has one raw logprob per token of `token_ids`."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None for the end-of-sequence token, length and abort."""
    ended_by_token: bool
    """Whether the last token is a stop token, which is not part of the text."""
    text: str | None
    """The text if a stop string ended it; None otherwise (the caller decodes `token_ids`)."""
    weight_versions: list[VersionSpan]
    """Spans in sampling order; their `num_tokens` sum to the number of tokens."""


class _StopText:
    """Text of a growing sequence, and the first stop string in it.

    Decodes only a short tail: the tokens since the text was last complete (a token may hold part of a character), and
    those decoded just before them as context.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._overlap = max(map(len, params.stop)) - 1
        self._done_ids: list[int] = []
        self._new_ids: list[int] = []
        self.text = ""

    def feed(self, token_id: int, decoder: Tokenizer, *, may_stop: bool) -> str | None:
        """Add a token; return the stop string it completed, with `text` cut there."""
        self._new_ids.append(token_id)
        skip = self._params.skip_special_tokens
        # Decode with and without the new tokens: some tokenizers drop a leading space at the start.
        before = decoder.decode(self._done_ids, skip_special_tokens=skip)
        after = decoder.decode(self._done_ids + self._new_ids, skip_special_tokens=skip)
        if after.endswith("\ufffd") and len(self._new_ids) < 8:
            return None
        search_from = max(0, len(self.text) - self._overlap)
        self.text += after[len(before) :]
        self._done_ids, self._new_ids = self._new_ids, []
        found = [
            (position, stop)
            for stop in self._params.stop
            if (position := self.text.find(stop, search_from)) >= 0
        ]
        if not found or not may_stop:
            return None
        position, stop = min(found)
        end = position + (len(stop) if self._params.include_stop_str_in_output else 0)
        self.text = self.text[:end]
        return stop


class EngineRequest:
    """One prompt with its sampling parameters; `future` resolves to `params.n` completions in order."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.future: Future[list[Completion]] = Future()
        # Running from the start, so that a cancellation by asyncio cannot race with the engine setting the result.
        self.future.set_running_or_notify_cancel()
        self.num_open = params.n
        self._completions: list[Completion | None] = [None] * params.n

    def complete(self, index: int, completion: Completion) -> None:
        """Store completion `index`; the last one resolves the future."""
        self._completions[index] = completion
        self.num_open -= 1
        if self.num_open == 0 and not self.future.done():
            self.future.set_result([c for c in self._completions if c is not None])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One completion in progress."""

    request: EngineRequest
    index: int
    stops: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first token sampled under it)"""
    generator: random.Random | None = field(init=False)
    stop_text: _StopText | None = field(init=False)
    finished: bool = False

    def __post_init__(self) -> None:
        params = self.request.params
        self.generator = None if params.seed is None else random.Random(params.seed + self.index)
        self.stop_text = _StopText(params) if params.stop else None

    def hits_stop_string(self, token: int, decoder: Tokenizer) -> bool:
        """Return whether `token` completed a stop string; if so, finish the sequence."""
        if self.stop_text is None:
            return False
        may_stop = len(self.token_ids) > self.request.params.min_tokens
        stop = self.stop_text.feed(token, decoder, may_stop=may_stop)
        if stop is None:
            return False
        self.finish(FinishReason.STOP, stop_reason=stop, text=self.stop_text.text)
        return True

    def finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        ended_by_token: bool = False,
        text: str | None = None,
    ) -> None:
        """Store the completion in the request."""
        self.finished = True
        num_top = self.request.params.logprobs or 0
        completion = Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            # The batch's largest k was recorded for every row.
            top_logprobs=[top[:num_top] for top in self.top] if num_top else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            ended_by_token=ended_by_token,
            text=text,
            weight_versions=self._spans(),
        )
        self.request.complete(self.index, completion)

    def _spans(self) -> list[VersionSpan]:
        ends = [*(first for _, first in self.versions[1:]), len(self.token_ids)]
        spans = [
            VersionSpan(version, end - first)
            for (version, first), end in zip(self.versions, ends, strict=False)  # none if unsampled
        ]
        return [span for span in spans if span.num_tokens]
