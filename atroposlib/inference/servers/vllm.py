"""vLLM, or any engine that speaks its routes: completions with token ids and the logprob of each sampled token.

Routes in order of preference: `/inference/v1/generate` if the server lists it (it reports the weight version of each
token), stock `/v1/completions` with `return_token_ids`, the original's `/generate`. A route that was found not to work
is not tried again. Chats with images use `/v1/chat/completions`.

Only the needed fields of an answer are decoded, into typed structs, which checks them at C speed: `/v1/completions`
runs no Python code per token. Nothing is padded or cut to fit: lengths that disagree raise `EngineProtocolError`.
Decoding raises `msgspec.DecodeError`, with the path of the fault, for wrong types, null and numbers out of the range of
a float, so every decoded logprob is finite. Large answers are decoded off the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from atroposlib.errors import EngineProtocolError, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.admission import HEALTH_TIMEOUT_S
from atroposlib.inference.servers.api_server import (
    TokenCompletions,
    WeightSpan,
    hearing,
)
from atroposlib.inference.servers.http_peer import EngineHttpRejected, decoded_or_none, excerpt
from atroposlib.inference.servers.openai_routes import (
    OTHER_LIMIT_NAMES,
    CallKeywords,
    OpenAIRoutesServer,
    part_of,
    read_request,
)
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.token_ids import (
    NEUTRAL_SAMPLING,
    THREAD_FROM_TOKENS,
    VLLM_SAMPLING,
    SampledCompletion,
    StreamedAnswer,
    TokenServer,
    check_count,
    checked_completion,
    gather,
    gather_top,
    most_likely,
    take_num_top,
)
from atroposlib.utils.answer_bodies import NO_LOGPROB
from atroposlib.utils.number_list import array_of
from atroposlib.utils.off_loop import off_loop

__all__ = ["NEUTRAL_SAMPLING", "VLLMServer"]

logger = logging.getLogger(__name__)

TOKENS_ROUTE = "/inference/v1/generate"
"""Token ids in and out, with policy versions: vLLM 0.32 and later, started with `--enable-scale-out`."""
ORIGINAL_ROUTE = "/generate"
FORBIDDEN = 403
"""vLLM's status for routes that it was not started with."""


DEFAULT_MAX_TOKENS = 16
"""Limit of `/v1/completions` without `max_tokens`; `/inference/v1/generate` would continue to the model's limit."""

MAX_TOKENS_PER_ANSWER = 32768
"""Larger answers are split into several requests: decoding 8 x 32768 tokens (19 MB) holds the GIL for 27 ms. vLLM
turns `n` completions into `n` internal requests anyway."""

SAMPLING_FIELDS = frozenset(
    {
        *NEUTRAL_SAMPLING,
        *VLLM_SAMPLING,
        "include_stop_str_in_output",
        "logprobs",
        "max_tokens",
        "n",
        "skip_special_tokens",
        "spaces_between_special_tokens",
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


class _Description(msgspec.Struct):
    """The fields of an OpenAPI document that are read."""

    paths: dict[str, msgspec.Raw]


_description = msgspec.json.Decoder(_Description)


class VLLMServer(TokenServer, OpenAIRoutesServer):
    """An engine with vLLM's routes."""

    engine_name = "vLLM"
    example_url = "http://localhost:9001/v1"
    version_paths: tuple[str, ...] = ("/weight_info",)

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config, reasoning_config)
        self._listed: frozenset[str] | None = None
        """Paths in the server's `/openapi.json`, empty if it has none; None: not asked yet."""
        self._listing = asyncio.Lock()  # one listing for the first, concurrent requests
        self._uses_tokens_route = True
        """False once the route proved missing or refused a request."""
        self._uses_generate = False
        """Whether the server was found to have only the original's /generate route."""

    # Sampling.

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        if "messages" in request.body and not request.body.keys() & {"input_ids", "prompt"}:
            return await self._sample_at_chat(request)
        prompt_tokens = await self._take_prompt(request.body)
        body = {**NEUTRAL_SAMPLING, **rename_max_tokens(request.body)}
        body.setdefault("logprobs", 0)
        self._limit_tokens(
            body, "max_tokens", num_prompt=len(prompt_tokens), default=DEFAULT_MAX_TOKENS
        )
        if self._uses_tokens_route:
            self._uses_tokens_route = await self._offers(TOKENS_ROUTE, unless_known=False)
        if self._uses_tokens_route and fits_tokens_route(body):
            form = functools.partial(tokens_request, prompt_tokens)
            sample = functools.partial(
                self._sample, TOKENS_ROUTE, body, request, prompt_tokens, form=form
            )
            try:
                # A stream does not say which weights sampled which token.
                return await (sample() if hearing.get() is None else self._with_version(sample))
            except EngineHttpRejected as e:
                if e.status != FORBIDDEN and not e.lacks_route:
                    raise
                logger.info("%s: not using %s (%s)", self._label, TOKENS_ROUTE, e)
                self._uses_tokens_route = False
        if not self._uses_generate:
            asked = {**body, "prompt": prompt_tokens, "return_token_ids": True}
            try:
                return await self._with_version(
                    lambda: self._sample("/v1/completions", asked, request, prompt_tokens)
                )
            except (EngineHttpRejected, NoTokenIds) as e:
                if isinstance(e, EngineHttpRejected) and not e.lacks_route:
                    raise
                if not await self._offers(ORIGINAL_ROUTE, unless_known=True):
                    raise
                logger.info("%s: using %s (%s)", self._label, ORIGINAL_ROUTE, e)
                self._uses_generate = True
        return await self._sample_at_generate(prompt_tokens, request)

    async def _sample_at_chat(self, request: CallKeywords) -> TokenCompletions:
        """Sample answers to messages, which may contain images; the engine reports the ids of the prompt."""
        body = {**NEUTRAL_SAMPLING, **rename_max_tokens(request.body)}
        body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        return await self._with_version(
            lambda: self._sample("/v1/chat/completions", body, request, None)
        )

    async def _sample(
        self,
        path: str,
        body: dict[str, Any],
        request: CallKeywords,
        prompt_tokens: list[int] | None,
        *,
        form: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body,
    ) -> TokenCompletions:
        """Return `n` completions; `form` makes a request's body of the keywords in `body`.

        `prompt_tokens` is None for a chat, whose answer has them.
        """
        where = self._peer.root + path
        read = functools.partial(read_choices, where=where, prompt_tokens=prompt_tokens)
        choices = await self._sample_parts(
            path,
            request,
            lambda part, _: form(part_of(body, part)),
            read,
            None if prompt_tokens is None else functools.partial(StreamedChoices, where=where),
            n=int(body.get("n", 1)),
            at_most=completions_per_request(body),
        )
        num_tokens = sum(len(choice.token_ids or ()) for choice in choices)
        work = functools.partial(gather_choices, choices, where=where, prompt_tokens=prompt_tokens)
        return await off_loop(work) if num_tokens >= THREAD_FROM_TOKENS else work()

    async def _with_version(
        self, sample: Callable[[], Awaitable[TokenCompletions]]
    ) -> TokenCompletions:
        """Sample, and note the policy version unless it changed meanwhile.

        vLLM 0.32 reports no versions at OpenAI's routes. If the one before differs from the one after, which weights
        sampled which token is unknown, and no version is recorded.
        """
        version = await self._ask_weight_version()
        answer = await sample()
        if any(spans is not None for spans in answer.weight_versions):
            self.version_paths = ()
        elif version is not None and version == await self._ask_weight_version():
            answer.weight_versions = [
                [WeightSpan(version, len(tokens))] for tokens in answer.output_tokens
            ]
        return answer

    async def _sample_at_generate(
        self, prompt_tokens: list[int], request: CallKeywords
    ) -> TokenCompletions:
        body = {**rename_max_tokens(request.body), "prompt": {"prompt_token_ids": prompt_tokens}}
        body.pop("model", None)
        body.setdefault("logprobs", 0)
        read = functools.partial(read_generated, where=self._peer.root + ORIGINAL_ROUTE)
        sampled = await self._send(ORIGINAL_ROUTE, body, request, read)
        check_count(sampled, n=int(body.get("n", 1)), what="choices", where=self._label)
        return gather(prompt_tokens, sampled)

    # Capabilities of the server.

    async def _prompt_ids(self, text: str) -> list[int] | None:
        body = {"model": self.config.model_name, "prompt": text, "max_tokens": 1}
        asked = {**body, "return_token_ids": True}
        return await self._ask("/v1/completions", asked, read_prompt_ids)

    async def _offers(self, path: str, *, unless_known: bool) -> bool:
        """Whether the server lists a route; `unless_known` if it has no list."""
        async with self._listing:
            if self._listed is None:
                self._listed = await self._list_routes()
        return path in self._listed if self._listed else unless_known

    async def _list_routes(self) -> frozenset[str]:
        status, body = await self._peer.get("/openapi.json", timeout_s=HEALTH_TIMEOUT_S)
        if status >= 500:  # not permanent
            raise EngineUnavailable(
                f"GET {self._peer.root}/openapi.json answered {status}: {excerpt(body)}",
                status=status,
            )
        described = decoded_or_none(_description, body) if status == 200 else None
        return frozenset(described.paths if described else ())

    # Prompt logprobs.

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt_tokens = await self._take_prompt(request.body)
        body = rename_max_tokens(request.body)
        num_top = max(0, take_num_top(body))
        body |= {"n": 1, "temperature": 0.0, "top_p": 1.0, "prompt_logprobs": num_top}
        body.setdefault("max_tokens", 1)
        read = functools.partial(
            read_prompt_logprobs, prompt_tokens=prompt_tokens, num_top=num_top, label=self._label
        )
        if not self._uses_generate:
            try:
                asked = {**body, "prompt": prompt_tokens}
                return await self._send("/v1/completions", asked, request, read)
            except EngineHttpRejected as e:
                if not e.lacks_route:
                    raise
                if not await self._offers(ORIGINAL_ROUTE, unless_known=True):
                    raise
                self._uses_generate = True
        body.pop("model", None)
        # The original's server takes 0 for "none".
        body |= {"prompt": {"prompt_token_ids": prompt_tokens}, "prompt_logprobs": max(1, num_top)}
        return await self._send(ORIGINAL_ROUTE, body, request, read)


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
