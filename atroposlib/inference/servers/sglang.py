"""SGLang: token ids and logprobs from its native `/generate`, chat and text from its OpenAI routes.

Prompts are sent as `input_ids`; ids and logprobs are read from `meta_info`. Lengths that disagree raise
`EngineProtocolError`, nothing is padded or cut. Policy versions are read from `meta_info` if the engine
reports them. Only text prompts need the tokenizer.

Streams are those of SGLang 0.5: an event has all tokens so far, with `--incremental-streaming-output` the tokens since
the one before. What it reports at the end is what it would have reported unstreamed.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.servers.api_server import TokenCompletions, WeightSpan
from atroposlib.inference.servers.http_peer import EngineHttpRejected, error_of, excerpt
from atroposlib.inference.servers.openai_routes import (
    CallKeywords,
    OpenAIRoutesServer,
    RequestPart,
    part_of,
    read_request,
)
from atroposlib.inference.servers.token_ids import (
    NEUTRAL_SAMPLING,
    SampledCompletion,
    StreamedAnswer,
    TokenServer,
    checked_completion,
    gather,
    gather_top,
    most_likely,
    take_num_top,
)

EVERY_TOKEN = -1
"""SGLang's `top_k` for the whole vocabulary; it refuses vLLM's 0."""

DEFAULT_MAX_TOKENS = 128
"""SGLang's limit if the request has none."""

MAX_TOKENS_PER_ANSWER = 65536
"""Larger answers are requested in parts: decoding 8 x 32768 tokens (13 MB) holds the GIL for 40 ms."""

MAX_EVENTS = 512
"""Of one streamed completion. Each event repeats all tokens so far: with one per token, an answer of 32768 tokens would
be 13 GB; so it is 0.2 GB."""

SAMPLING_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""OpenAI's and vLLM's names -> SGLang's."""

REQUEST_FIELDS = frozenset(
    {
        "custom_labels",
        "custom_logit_processor",
        "data_parallel_rank",
        "extra_key",
        "image_data",
        "logprob_start_len",
        "lora_path",
        "priority",
        "return_hidden_states",
        "return_routed_experts",
        "rid",
        "routed_dp_rank",
        "session_params",
        "token_ids_logprob",
        "top_logprobs_num",
        "video_data",
    }
)
"""Keywords that belong beside `sampling_params`, not in it (SGLang's GenerateReqInput)."""

_NOT_SENT = frozenset({"model", "messages", "logprobs", "top_logprobs"})
"""Keywords of a call that `/generate` has no field for: it serves one model and always returns logprobs."""


class _Pair(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, token id, text]`; the text is skipped."""

    logprob: float
    token: int


class _PromptPair(msgspec.Struct, array_like=True, gc=False):
    logprob: float | None
    token: int


class _FinishReason(msgspec.Struct, gc=False):
    type: str
    status_code: int | None = None
    """Of a request that the engine gave up. Unstreamed, it is the HTTP status."""


class _SglangSpan(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct, gc=False):
    output_token_logprobs: list[_Pair]
    output_token_logprobs_length: int | None = None
    """Tokens so far, also where the list holds the last of them only."""
    finish_reason: str | _FinishReason | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[_SglangSpan] | None = None
    input_token_logprobs: list[_PromptPair] = []
    input_top_logprobs: list[list[_Pair] | None] | None = None


class _Result(msgspec.Struct, gc=False):
    meta_info: _Meta


class _Event(msgspec.Struct, gc=False):
    meta_info: _Meta | None = None
    index: int = 0
    error: Any = None
    """What is answered 400 to an unstreamed request."""


_results = msgspec.json.Decoder(_Result | list[_Result])
_events = msgspec.json.Decoder(_Event)


class SGLangServer(TokenServer, OpenAIRoutesServer):
    """An SGLang engine.

    It is probed before the first request and while it is down. For `/health`, recent servers sample one token, except
    with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0; for `/health_generate` they always do.
    """

    engine_name = "SGLang"
    example_url = "http://localhost:30000/v1"
    reads_model_name = False
    version_paths = ("/model_info", "/get_weight_version")
    """Of newer and older servers."""

    _asks_version = True
    """Whether to ask for the version before sampling: false after answers with spans or without a version."""

    # Sampling.

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt_tokens = await self._take_prompt(request.body)
        body = generate_body(prompt_tokens, request.body)
        self._limit_tokens(
            body["sampling_params"],
            "max_new_tokens",
            num_prompt=len(prompt_tokens),
            default=DEFAULT_MAX_TOKENS,
        )
        version_before = await self._ask_weight_version() if self._asks_version else None
        metas = await self._generate(body, request)
        answer = gather(prompt_tokens, read_sampled(metas, where=f"{self._label}/generate"))
        self._asks_version = all(m.weight_versions is None and m.weight_version for m in metas)
        if self._asks_version and self.version_paths:
            # If the version changed during a request, which one sampled which token is unknown.
            answer.weight_versions = [
                spans if all(s.weight_version == version_before for s in spans or ()) else None
                for spans in answer.weight_versions
            ]
        return answer

    async def _generate(self, body: dict[str, Any], request: CallKeywords) -> list[_Meta]:
        """Return `n` completions; large answers are requested in parts."""
        sampling = body["sampling_params"]
        limit = int(sampling.get("max_new_tokens", DEFAULT_MAX_TOKENS))
        interval = {"stream_interval": -(-limit // MAX_EVENTS)}

        def form(part: RequestPart, streams: bool) -> dict[str, Any]:
            params = part_of(sampling, part, seed_name="sampling_seed")
            return {**body, "sampling_params": {**interval, **params} if streams else params}

        return await self._sample_parts(
            "/generate",
            request,
            form,
            read_results,
            functools.partial(StreamedResults, where=f"POST {self._peer.root}/generate"),
            n=int(sampling.get("n", 1)),
            at_most=max(1, MAX_TOKENS_PER_ANSWER // max(1, limit)),
        )

    async def _prompt_ids(self, text: str) -> list[int] | None:
        asked = {
            "text": text,
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        metas = await self._ask("/generate", asked, read_results)
        return [pair.token for pair in metas[0].input_token_logprobs] or None if metas else None

    # Prompt logprobs.

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        given = request.body
        prompt_tokens = await self._take_prompt(given)
        num_top = take_num_top(given)
        if num_top < 0:
            raise ValueError(f"get_logprobs: top_k = {num_top}, expected 0 or more")
        given |= {"n": 1, "temperature": 0.0, "top_p": 1.0}
        body = generate_body(prompt_tokens, given)
        body["sampling_params"].setdefault("max_new_tokens", 1)
        body |= {"logprob_start_len": 0, "top_logprobs_num": num_top}
        (meta,) = await self._generate(body, request)
        where = f"{self._label}/generate"
        return prompt_logprobs_of(meta, prompt_tokens=prompt_tokens, num_top=num_top, where=where)


def generate_body(prompt_tokens: list[int], keywords: dict[str, Any]) -> dict[str, Any]:
    """Build the body of `/generate` from a call's keywords."""
    sampling: dict[str, Any] = {**NEUTRAL_SAMPLING}
    fields: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in REQUEST_FIELDS:
            fields[name] = value
        elif name not in _NOT_SENT:
            sampling[SAMPLING_NAMES.get(name, name)] = value
    if sampling["top_k"] == 0:
        sampling["top_k"] = EVERY_TOKEN
    return {
        "input_ids": prompt_tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_text_in_logprobs": False,
        **fields,
    }


def read_results(answer: bytes) -> list[_Meta]:
    """Decode an answer of `/generate`, an object or a list of them; a null logprob is a `ValidationError`."""
    results = _results.decode(answer)
    return [each.meta_info for each in (results if isinstance(results, list) else [results])]


class StreamedResults(StreamedAnswer[_Meta]):
    """Completions that arrive in events, as the latest event reports each."""

    def add(self, event: bytes) -> None:
        piece = _events.decode(event)
        meta = piece.meta_info
        if piece.error is not None or meta is None:
            raise EngineHttpRejected(f"{self._where} answered 400: {excerpt(event)}", status=400)
        reason = meta.finish_reason
        status = reason.status_code if isinstance(reason, _FinishReason) else None
        if status is not None and status >= 400:
            raise error_of(status, event, where=self._where)
        before = self._found.get(piece.index)
        known = [] if before is None else before.output_token_logprobs
        listed = meta.output_token_logprobs
        total = meta.output_token_logprobs_length
        first = 0 if total is None else total - len(listed)
        if not 0 <= first <= len(known):
            raise EngineProtocolError(
                f"{self._where}: an event begins at token {first}, expected {len(known)} at most"
            )
        added = listed[len(known) - first :]
        meta.output_token_logprobs = known + added
        self._found[piece.index] = meta
        self._hear(piece.index, [pair.token for pair in added])


def read_sampled(metas: list[_Meta], *, where: str) -> list[SampledCompletion]:
    """Return the completions in an answer, with their policy versions."""
    sampled = []
    for i, meta in enumerate(metas):
        here = f"{where}: result {i}"
        tokens = [pair.token for pair in meta.output_token_logprobs]
        logprobs = [pair.logprob for pair in meta.output_token_logprobs]
        if meta.completion_tokens not in (None, len(tokens)):
            raise EngineProtocolError(
                f"{here}: logprobs for {len(tokens)} tokens, completion_tokens says"
                f" {meta.completion_tokens}"
            )
        reason = meta.finish_reason
        reason = reason.type if isinstance(reason, _FinishReason) else reason
        spans = None
        if meta.weight_versions is not None:
            spans = [WeightSpan(str(s.version), s.end - s.start) for s in meta.weight_versions]
        elif meta.weight_version is not None:  # of older servers: at the end of the request
            spans = [WeightSpan(str(meta.weight_version), len(tokens))]
        sampled.append(checked_completion(tokens, logprobs, reason, spans, where=here))
    return sampled


def prompt_logprobs_of(
    meta: _Meta, *, prompt_tokens: list[int], num_top: int, where: str
) -> dict[str, Any]:
    """Return the logprobs at every position of the prompt; the first position has none.

    `num_top` 0 gives the prompt's own token at each position, otherwise the `num_top` most likely ones.
    """
    own = meta.input_token_logprobs
    if [pair.token for pair in own] != prompt_tokens:
        raise EngineProtocolError(
            f"{where}: prompt logprobs for {len(own)} tokens that are not the {len(prompt_tokens)} sent"
        )
    positions: list[list[_PromptPair]] | list[list[_Pair] | None] = [[pair] for pair in own]
    if num_top:
        positions = meta.input_top_logprobs or []
        if len(positions) != len(prompt_tokens):
            raise EngineProtocolError(
                f"{where}: top logprobs at {len(positions)} positions, expected {len(prompt_tokens)}"
            )
    found = []
    for i, position in enumerate(positions):
        # The first token of a prompt has no logprob.
        pairs = [(p.token, p.logprob) for p in position or () if i and p.logprob is not None]
        found.append(most_likely(pairs, num_top, where=f"{where}: position {i}") if i else [])
    return gather_top(prompt_tokens, found)
