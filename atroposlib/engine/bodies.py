"""The bodies of requests: parse and validate them.

A body is validated before anything is generated: a wrong type, an unknown parameter, or an unsupported value raises
`ApiError` (400) with the parameter's name. Only `user` and `request_id` are ignored; they have no effect. Defaults are
vLLM's without a `generation_config.json`. No HTTP and no engine here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

import msgspec

from atroposlib.engine.sampling import GREEDY_BELOW, SamplingParams
from atroposlib.engine.sequences import Tokenizer
from atroposlib.http_bodies import ApiError, decode_json
from atroposlib.utils.wording import nearest

MAX_COMPLETIONS = 4096
"""Limit of `n` times the number of prompts of one request. Far above any group size, and low enough that a request
cannot exhaust memory: the engine holds a kilobyte for each queued completion."""

MAX_LOGPROBS = 20
"""vLLM's default `--max-logprobs`."""

_DEFAULT_COMPLETION_TOKENS = 16
"""vLLM's and OpenAI's `max_tokens` of `/v1/completions`."""

T = TypeVar("T", bound=msgspec.Struct)


class _SamplingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both routes."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    request_id: str | None = None

    # vLLM's parameters that are not implemented, with the values that have no effect and are accepted.
    echo: Annotated[Any, (None, False)] = None
    stream: Annotated[Any, (None, False)] = None
    stream_options: Annotated[Any, (None,)] = None
    suffix: Annotated[Any, (None, "")] = None
    best_of: Annotated[Any, (None,)] = None
    presence_penalty: Annotated[Any, (None, 0)] = None
    frequency_penalty: Annotated[Any, (None, 0)] = None
    repetition_penalty: Annotated[Any, (None, 1)] = None
    logit_bias: Annotated[Any, (None, {})] = None
    allowed_token_ids: Annotated[Any, (None,)] = None
    bad_words: Annotated[Any, (None, [])] = None
    prompt_logprobs: Annotated[Any, (None,)] = None
    truncate_prompt_tokens: Annotated[Any, (None,)] = None
    use_beam_search: Annotated[Any, (None, False)] = None
    length_penalty: Annotated[Any, (None, 1)] = None
    response_format: Annotated[Any, (None, {"type": "text"})] = None
    structured_outputs: Annotated[Any, (None,)] = None
    tools: Annotated[Any, (None, [])] = None
    tool_choice: Annotated[Any, (None, "none", "auto")] = None
    parallel_tool_calls: Annotated[Any, (None, True, False)] = None
    priority: Annotated[Any, (None, 0)] = None
    spaces_between_special_tokens: Annotated[Any, (None, True)] = None


_ACCEPTED = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(_SamplingBody, include_extras=True).items()
    if get_origin(annotation) is Annotated
}
"""Parameters that are not implemented -> their accepted values."""


class CompletionBody(_SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`; `prompt` is one prompt or several, as text or as token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class ChatBody(_SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/tokenize`: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class RpcBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/collective_rpc`."""

    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


class CheckerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/weight_checker`."""

    action: str


class VersionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/update_weight_version`: vLLM 0.32 reads `new_version`, its other routes use `weight_version`.

    A client for several vLLM versions sends both.
    """

    weight_version: str | int | None = None
    new_version: str | int | None = None


class EngineLimits(NamedTuple):
    context_len: int
    """Tokens of a prompt and its completion together."""
    vocab_size: int


def parse_body(raw: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`; raises ApiError with the parameter's name for a wrong type or an unknown name."""
    try:
        body = decode_json(raw, kind)
    except msgspec.ValidationError as e:
        raise _explain(str(e), kind) from e
    if isinstance(body, _SamplingBody):
        for name, accepted in _ACCEPTED.items():
            value = getattr(body, name)
            if value not in accepted:
                raise ApiError(
                    f"{name}={_short(value)} is not implemented by this engine; omit {name}",
                    param=name,
                )
    return body


def read_prompts(body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
    prompt = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt, add_special_tokens=special)]
    kinds = {type(entry) for entry in prompt}
    if len(kinds) != 1:
        problem = "is empty" if not kinds else "mixes text, token ids and lists of token ids"
        raise ApiError(f"prompt {problem}", param="prompt")
    if kinds == {int}:
        return [[entry for entry in prompt if isinstance(entry, int)]]
    return [
        tokenizer.encode(entry, add_special_tokens=special) if isinstance(entry, str) else entry
        for entry in prompt
        if not isinstance(entry, int)
    ]


def check_prompt(prompt_ids: Sequence[int], limits: EngineLimits) -> None:
    """Refuse a prompt that is empty, has an id out of vocabulary, or leaves no room for one token."""
    if not prompt_ids:
        raise ApiError("the prompt has no tokens", param="prompt")
    check_ids(prompt_ids, limits, param="prompt")
    if len(prompt_ids) >= limits.context_len:
        raise ApiError(
            f"this model's maximum context length is {limits.context_len} tokens and the prompt has "
            f"{len(prompt_ids)}; shorten it to at most {limits.context_len - 1}",
            param="prompt",
        )


def check_ids(token_ids: Sequence[int], limits: EngineLimits, *, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < limits.vocab_size)
        raise ApiError(
            f"token id {wrong} of {param} is out of vocabulary [0, {limits.vocab_size})",
            param=param,
        )


def sampling_params(
    body: CompletionBody | ChatBody, prompt_len: int, limits: EngineLimits, *, num_prompts: int = 1
) -> SamplingParams:
    """Validate the parameters of one request for its longest prompt; return them with vLLM's defaults."""
    room = limits.context_len - prompt_len
    if isinstance(body, ChatBody):
        max_tokens = _pick(body.max_completion_tokens, _pick(body.max_tokens, room))
        logprobs = _chat_logprobs(body)
    else:
        max_tokens = _pick(body.max_tokens, min(_DEFAULT_COMPLETION_TOKENS, room))
        logprobs = body.logprobs
    stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    params = SamplingParams(
        max_tokens=max_tokens,
        n=_pick(body.n, 1),
        temperature=_pick(body.temperature, 1.0),
        top_p=_pick(body.top_p, 1.0),
        # A count beyond the vocabulary, of any size, keeps every token.
        top_k=0 if body.top_k in (None, -1) else min(body.top_k, limits.vocab_size),
        min_p=_pick(body.min_p, 0.0),
        seed=body.seed,
        min_tokens=_pick(body.min_tokens, 0),
        ignore_eos=bool(body.ignore_eos),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
    )
    _check_values(params, limits, num_prompts)
    if max_tokens > room:
        raise ApiError(
            f"max_tokens={max_tokens} is too large: this model's maximum context length is "
            f"{limits.context_len} tokens and the prompt has {prompt_len}; ask for at most {room}",
            param="max_tokens",
        )
    return params


def _check_values(p: SamplingParams, limits: EngineLimits, num_prompts: int) -> None:
    def require(claim: bool, param: str, rule: str) -> None:
        if not claim:
            value = getattr(p, param)
            got = list(value) if isinstance(value, tuple) else value
            raise ApiError(f"{param} must be {rule}, got {_short(got)}", param=param)

    if num_prompts > MAX_COMPLETIONS:
        raise ApiError(
            f"prompt must be at most {MAX_COMPLETIONS} prompts, got {num_prompts}", param="prompt"
        )
    most = MAX_COMPLETIONS // num_prompts
    require(p.n >= 1, "n", "at least 1")
    require(p.n <= most, "n", f"at most {most}, for {num_prompts} prompts")
    require(p.max_tokens >= 1, "max_tokens", "at least 1")
    is_finite = math.isfinite(p.temperature) and p.temperature >= 0
    require(is_finite, "temperature", "a finite number >= 0")
    require(0 < p.top_p <= 1, "top_p", "in (0, 1]")
    require(p.top_k >= 0, "top_k", "-1 or 0 (all tokens) or at least 1")
    require(0 <= p.min_p <= 1, "min_p", "in [0, 1]")
    is_within = 0 <= p.min_tokens <= p.max_tokens
    require(is_within, "min_tokens", f"between 0 and max_tokens={p.max_tokens}")
    is_listed = p.logprobs is None or 0 <= p.logprobs <= MAX_LOGPROBS
    require(is_listed, "logprobs", f"between 0 and {MAX_LOGPROBS}")
    require(all(p.stop), "stop", "strings that are not empty")
    are_known = all(0 <= token < limits.vocab_size for token in p.stop_token_ids)
    require(are_known, "stop_token_ids", f"token ids in [0, {limits.vocab_size})")
    greedy = "1 when sampling is greedy (temperature 0): all completions would be the same"
    require(p.n == 1 or p.temperature >= GREEDY_BELOW, "n", greedy)


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    return _pick(body.top_logprobs, 0) if body.logprobs else None


def _explain(problem: str, kind: type[msgspec.Struct]) -> ApiError:
    """Convert msgspec's message to an ApiError with the parameter and, for an unknown one, the nearest name."""
    unknown = re.search(r"unknown field `([^`]*)`", problem)
    if unknown:
        hint = nearest(unknown[1], kind.__struct_fields__)
        return ApiError(f"unknown parameter {unknown[1]!r}; {hint}", param=unknown[1])
    field = re.search(r"`\$\.(\w+)|missing required field `([^`]*)`", problem)
    param = (field[1] or field[2]) if field else None
    return ApiError(f"{param}: {problem}" if param else problem, param=param)


V = TypeVar("V")


def _pick(value: V | None, default: V) -> V:
    return default if value is None else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
