"""Requests and answers of vLLM's routes: pure functions between keywords, JSON bodies and token lists.

Only the needed fields of an answer are decoded, into typed structs, which checks them at C speed: `/v1/completions`
runs no Python code per token. Nothing is padded or cut to fit: lengths that disagree raise `EngineProtocolError`.
Called by `vllm.py`; large answers are decoded off the event loop.

Decoding raises `msgspec.DecodeError`, with the path of the fault, for wrong types, null and numbers out of the range of
a float, so every decoded logprob is finite.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.servers.api_server import TokenCompletions, WeightSpan
from atroposlib.inference.servers.openai_routes import OTHER_LIMIT_NAMES
from atroposlib.inference.servers.streaming import StreamedAnswer
from atroposlib.inference.servers.token_ids import (
    NEUTRAL_SAMPLING,
    SampledCompletion,
    checked_completion,
    gather,
    gather_top,
    most_likely,
)
from atroposlib.utils.answer_bodies import NO_LOGPROB
from atroposlib.utils.number_list import array_of

DEFAULT_MAX_TOKENS = 16
"""Limit of `/v1/completions` without `max_tokens`; `/inference/v1/generate` would continue to the model's limit."""

MAX_TOKENS_PER_ANSWER = 32768
"""Larger answers are split into several requests: decoding 8 x 32768 tokens (19 MB) holds the GIL for 27 ms. vLLM
turns `n` completions into `n` internal requests anyway."""

SAMPLING_FIELDS = frozenset(
    {
        *NEUTRAL_SAMPLING,
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_tokens",
        "n",
        "presence_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
    }
)
"""Keywords that mean the same in `/v1/completions` and in `sampling_params` of `/inference/v1/generate` (vLLM 0.32)."""
REQUEST_FIELDS = frozenset({"cache_salt", "model", "priority", "request_id"})
"""Keywords that both routes read outside the sampling parameters."""


class NoTokenIds(EngineProtocolError):
    """The server answered /v1/completions without token ids: it does not support `return_token_ids`."""


class _VllmSpan(msgspec.Struct, gc=False):
    """The local engine's `weight_version` and `num_tokens`, or vLLM's `version`, `start` and `end`."""

    weight_version: str | int | None = None
    num_tokens: int | None = None
    version: str | int | None = None
    start: int = 0
    end: int | None = None

    def read(self) -> WeightSpan:
        version = self.version if self.weight_version is None else self.weight_version
        count = self.num_tokens
        if count is None and self.end is not None:
            count = self.end - self.start
        if version is None or count is None:
            raise EngineProtocolError(f"a span of weight_versions has no version or end: {self}")
        return WeightSpan(str(version), count)


class _TopLogprob(msgspec.Struct, gc=False):
    logprob: float


_Position = dict[int, float | _TopLogprob]
"""Logprobs by token id at one position."""


class _SampledToken(msgspec.Struct, gc=False, kw_only=True):
    token_id: int | None = None
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float] | None = None
    """Of `/v1/completions`."""
    content: list[_SampledToken] | None = None
    """Of the other routes."""


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: Any = None
    weight_versions: list[_VllmSpan] | None = None


class _Choices(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Generated(msgspec.Struct, gc=False):
    logprobs: list[list[list[dict[int, float]]]]
    finish_reasons: list[Any]


class _PromptChoice(msgspec.Struct, gc=False):
    prompt_logprobs: list[_Position | None] | None = None


class _PromptLogprobs(msgspec.Struct, gc=False):
    """`/v1/completions` has them in the choice; `/generate` at the top level, sometimes in a nested list."""

    choices: list[_PromptChoice] = []
    prompt_logprobs: list[_Position | list[_Position | None] | None] | None = None


_choices = msgspec.json.Decoder(_Choices)
_generated = msgspec.json.Decoder(_Generated)
_prompt_logprobs = msgspec.json.Decoder(_PromptLogprobs)


# Requests.


def rename_max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """Rename the token limit to its name on the completion routes."""
    for name in OTHER_LIMIT_NAMES:
        if name in body:
            body = {**body, "max_tokens": body[name]}
            del body[name]
    return body


def completions_per_request(body: dict[str, Any]) -> int:
    """Return how many completions to request at once, so that the answer is small enough to decode.

    >>> completions_per_request({"n": 3, "max_tokens": 16000})
    2
    """
    if body.get("use_beam_search"):
        return int(body.get("n", 1))
    return max(1, MAX_TOKENS_PER_ANSWER // max(1, int(body.get("max_tokens", DEFAULT_MAX_TOKENS))))


def fits_tokens_route(body: dict[str, Any]) -> bool:
    """Whether `/inference/v1/generate` supports all keywords of a body."""
    return body.keys() <= SAMPLING_FIELDS | REQUEST_FIELDS


def tokens_request(prompt_tokens: list[int], body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of `/inference/v1/generate` for keywords that it supports."""
    sampling = {name: value for name, value in body.items() if name in SAMPLING_FIELDS}
    sampling.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    rest = {name: value for name, value in body.items() if name in REQUEST_FIELDS}
    return {**rest, "token_ids": prompt_tokens, "sampling_params": sampling}


# Answers.


def read_choices(
    answer: bytes, *, where: str, prompt_tokens: list[int] | None = None
) -> list[_Choice]:
    """Decode an answer of `/v1/completions`, `/v1/chat/completions` or the tokens route.

    `prompt_tokens` were sent; None for a chat, whose answer must hold them: every image is as many placeholder ids as
    the model has positions for it. Raises `NoTokenIds` if the server does not support `return_token_ids`.
    """
    body = _choices.decode(answer)
    for i, choice in enumerate(body.choices):
        prompt = choice.prompt_token_ids or body.prompt_token_ids or prompt_tokens
        if choice.token_ids is None or prompt is None:
            raise NoTokenIds(
                f"{where}: choices[{i}] has no token ids; the server must support return_token_ids (vLLM >= 0.10.2)"
            )
        choice.prompt_token_ids = prompt
    return body.choices


class StreamedChoices(StreamedAnswer[_Choice]):
    """Completions that arrive in events, each with the tokens since the one before."""

    def add(self, event: bytes) -> None:
        for piece in _choices.decode(event).choices:
            found = self._found.setdefault(
                piece.index, _Choice(token_ids=[], logprobs=_Logprobs([]))
            )
            found.finish_reason = piece.finish_reason or found.finish_reason
            found.weight_versions = piece.weight_versions or found.weight_versions
            found.prompt_token_ids = piece.prompt_token_ids or found.prompt_token_ids
            logprobs = piece.logprobs or _Logprobs()
            values = logprobs.token_logprobs or [t.logprob for t in logprobs.content or ()]
            if values and not piece.token_ids:
                raise NoTokenIds(f"{self._where}: events have no token ids")
            assert found.token_ids is not None
            assert found.logprobs is not None
            assert found.logprobs.token_logprobs is not None
            found.token_ids += piece.token_ids or ()
            found.logprobs.token_logprobs += values
            self._hear(piece.index, piece.token_ids or [])


def gather_choices(
    choices: list[_Choice], *, where: str, prompt_tokens: list[int] | None = None
) -> TokenCompletions:
    """Return the completions of one prompt; `prompt_tokens` as for `read_choices`."""
    sampled = []
    for i, choice in enumerate(choices):
        here = f"{where}: choices[{i}]"
        assert choice.token_ids is not None
        prompt_tokens = prompt_tokens or choice.prompt_token_ids or []
        prompt = choice.prompt_token_ids or prompt_tokens
        if prompt != prompt_tokens:
            raise EngineProtocolError(
                f"{here} was sampled after {len(prompt)} prompt tokens that are not the {len(prompt_tokens)} sent"
            )
        logprobs = choice.logprobs or _Logprobs()
        values = logprobs.token_logprobs
        if logprobs.content is not None:
            values = [token.logprob for token in logprobs.content]
            ids = [token.token_id for token in logprobs.content]
            if any(token is not None for token in ids) and ids != choice.token_ids:
                raise EngineProtocolError(
                    f"{here}: {len(ids)} logprobs are not those of the {len(choice.token_ids)} token_ids"
                )
        if values is None:
            raise EngineProtocolError(f"{here} has no logprobs")
        sampled.append(
            _checked(
                choice.token_ids, values, choice.finish_reason, choice.weight_versions, where=here
            )
        )
    return gather(prompt_tokens or [], sampled)


def read_prompt_ids(answer: bytes) -> list[int] | None:
    """Return the ids of a text prompt, if the answer of `/v1/completions` reports them."""
    choices = _choices.decode(answer).choices
    return choices[0].prompt_token_ids if choices else None


def read_generated(answer: bytes, *, where: str) -> list[SampledCompletion]:
    """Read the original's `/generate` body: per sequence, per token, a list holding one `{"<id>": logprob}`."""
    generated = _generated.decode(answer)
    sequences, reasons = generated.logprobs, generated.finish_reasons
    if len(reasons) != len(sequences):
        raise EngineProtocolError(
            f"{where} answered {len(reasons)} finish reasons for {len(sequences)} sequences"
        )
    found = []
    for i, (sequence, reason) in enumerate(zip(sequences, reasons, strict=True)):
        try:
            pairs = [next(iter(token[0].items())) for token in sequence]
        except (IndexError, StopIteration) as e:
            raise EngineProtocolError(f"{where}: a token of logprobs[{i}] has no logprob") from e
        tokens, values = [token for token, _ in pairs], [value for _, value in pairs]
        found.append(_checked(tokens, values, reason, None, where=f"{where}: logprobs[{i}]"))
    return found


def _checked(
    tokens: list[int],
    logprobs: list[float],
    finish_reason: Any,
    spans: list[_VllmSpan] | None,
    *,
    where: str,
) -> SampledCompletion:
    read = None if spans is None else [span.read() for span in spans]
    found = checked_completion(tokens, logprobs, finish_reason, read, where=where)
    if array_of(found.logprobs).min(initial=0.0) <= NO_LOGPROB:
        position = next(i for i, value in enumerate(logprobs) if value <= NO_LOGPROB)
        raise EngineProtocolError(
            f"{where}: logprob {logprobs[position]} at token {position} stands for NaN or for a token that cannot"
            " have been sampled; look at the engine's weights"
        )
    return found


def read_prompt_logprobs(
    answer: bytes, *, prompt_tokens: list[int], num_top: int, label: str
) -> dict[str, Any]:
    """Read the `num_top` most likely tokens at every position of a prompt; 0: the prompt's own token alone.

    The first position has none. Accepts `id -> logprob` and `id -> {"logprob": ...}`.
    """
    body = _prompt_logprobs.decode(answer)
    positions: list[Any] | None = body.prompt_logprobs
    if body.choices:
        positions = body.choices[0].prompt_logprobs
    if positions is not None and len(positions) == 1 and isinstance(positions[0], list):
        positions = positions[0]
    if positions is None or len(positions) != len(prompt_tokens):
        given = "nothing" if positions is None else f"{len(positions)} positions"
        raise EngineProtocolError(
            f"{label}: prompt_logprobs must have {len(prompt_tokens)} positions, got {given}"
        )
    found: list[list[tuple[int, float]]] = []
    for index, (own, position) in enumerate(zip(prompt_tokens, positions, strict=True)):
        if isinstance(position, list):
            position = {token: value for part in position for token, value in (part or {}).items()}
        where = f"{label}: prompt_logprobs[{index}]"
        if index and not position:
            raise EngineProtocolError(f"{where} is empty")
        found.append(_most_likely(position, own, num_top, where=where) if position else [])
    return gather_top(prompt_tokens, found)


def _most_likely(
    position: _Position, own: int, num_top: int, *, where: str
) -> list[tuple[int, float]]:
    entries = {
        token: value.logprob if isinstance(value, _TopLogprob) else value
        for token, value in position.items()
    }
    if num_top == 0:
        if own not in entries:
            raise EngineProtocolError(f"{where} has no logprob of the prompt's token {own}")
        return [(own, entries[own])]
    # vLLM adds the prompt's own token to the k most likely ones.
    return most_likely(list(entries.items()), num_top, where=where)
