"""vLLM, or any engine that speaks its routes: completions with token ids and the logprob of each sampled token.

Stock vLLM's `/v1/completions` is used: prompt as token ids, `logprobs: 0` (sampled tokens only) and
`return_token_ids`. A server that cannot do that but offers the original's `/generate` is asked there instead.
Nothing is padded or cut to fit: lengths that disagree raise `EngineProtocolError`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from typing import Any

import msgspec

from atroposlib.envs.server_handling.api_server import (
    HEALTH_TIMEOUT_S,
    TokenCompletions,
    WeightSpan,
)
from atroposlib.envs.server_handling.http import EngineHttpRejected, strip_v1
from atroposlib.envs.server_handling.openai_routes import (
    OpenAIRoutesServer,
    Request,
    read_request,
)
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import ConfigError, EngineProtocolError

logger = logging.getLogger(__name__)

NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent unless the caller says otherwise. vLLM fills what is missing from the model's generation_config.json
(Qwen's cuts to the top 20 tokens, for example): samples would come from another distribution than the one
whose logprobs are reported."""


def load_tokenizer(name: str) -> Any:
    """Load a Hugging Face tokenizer by name or path; slow, call it off the event loop."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"no tokenizer could be loaded from {name!r}: {e}. Set tokenizer_name to a model name or a directory"
        ) from e


class VLLMServer(OpenAIRoutesServer):
    """An engine with vLLM's routes; `base_url` may end in `/v1` or not."""

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        if not config.base_url:
            raise ConfigError(
                "server_type 'vllm' needs base_url, for example http://localhost:9001/v1"
            )
        root = strip_v1(config.base_url)
        super().__init__(config, reasoning_config, root=root, prefix="/v1", api_key=config.api_key)
        self._uses_generate = False
        """The server was found to have only the original's /generate route."""
        self._warned_about_max_tokens = False
        self._asks_weight_info = True
        """Its completions carry no versions, and /weight_info may still tell the one they are sampled under."""

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, loaded at first use; only text prompts need it."""
        return load_tokenizer(self.config.tokenizer_source)

    async def _find_fault(self) -> str | None:
        return await self._ask("/health", accept_4xx=False)

    # Sampling.

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt_tokens = await self._take_prompt(request.body)
        body = rename_max_tokens(request.body)
        if "max_tokens" not in body and not self._warned_about_max_tokens:
            self._warned_about_max_tokens = True
            logger.warning("No max_tokens given: vLLM stops after 16 tokens then")
        if not self._uses_generate:
            try:
                return await self._sample_at_completions(prompt_tokens, body, request)
            except (EngineHttpRejected, _NoTokenIds) as e:
                if isinstance(e, EngineHttpRejected) and e.status not in (404, 405):
                    raise
                if not await self._offers_generate():
                    raise
                logger.info("%s: using /generate (%s)", self._label, e)
                self._uses_generate = True
        return await self._sample_at_generate(prompt_tokens, body, request)

    async def _take_prompt(self, body: dict[str, Any]) -> list[int]:
        """Remove the prompt from a body and return it as token ids, with at most one BOS."""
        text = body.pop("prompt", None)
        token_ids = body.pop("input_ids", None)
        body.pop("messages", None)
        if token_ids is None:
            if text is None:
                raise ValueError("tokens_and_logprobs_completion needs input_ids or prompt")
            tokenizer = await asyncio.to_thread(lambda: self.tokenizer)
            token_ids = tokenizer.encode(text)
            bos = tokenizer.bos_token_id
            if bos is not None and token_ids[:2] == [bos, bos]:
                token_ids = token_ids[1:]
        return [int(token) for token in token_ids]

    async def _sample_at_completions(
        self, prompt_tokens: list[int], body: dict[str, Any], request: Request
    ) -> TokenCompletions:
        body = {**NEUTRAL_SAMPLING, **body, "prompt": prompt_tokens, "return_token_ids": True}
        body.setdefault("logprobs", 0)
        version = await self._ask_weight_version()
        answer = await self._complete("/completions", body, request)
        sampled = parse_completions(answer, prompt_tokens=prompt_tokens, label=self._label)
        if any(spans is not None for spans in sampled.weight_versions):
            self._asks_weight_info = False
        elif version is not None and version == await self._ask_weight_version():
            sampled.weight_versions = [
                [WeightSpan(version, len(tokens))] for tokens in sampled.output_tokens
            ]
        return sampled

    async def _ask_weight_version(self) -> str | None:
        """Return the version that the server holds now; None where it keeps none.

        vLLM 0.32 reports no versions on `/v1/completions`, so it is asked before and after. Where the two differ, which
        weights sampled which token cannot be known, and no version is claimed.
        """
        if not self._asks_weight_info:
            return None
        status, body = await self._peer.get("/weight_info", timeout_s=HEALTH_TIMEOUT_S)
        if status in (404, 405):  # not in development mode, or another server
            self._asks_weight_info = False
        if status != 200:
            return None
        try:
            return str(msgspec.json.decode(body)["weight_version"])
        except (msgspec.DecodeError, KeyError, TypeError) as e:
            raise EngineProtocolError(
                f"{self._label}: unreadable answer of /weight_info: {body[:200]!r}"
            ) from e

    async def _sample_at_generate(
        self, prompt_tokens: list[int], body: dict[str, Any], request: Request
    ) -> TokenCompletions:
        body = {key: value for key, value in body.items() if key != "model"}
        body["prompt"] = {"prompt_token_ids": prompt_tokens}
        body.setdefault("logprobs", 0)
        answer = await self._peer.post_json(
            "/generate",
            body,
            timeout_s=request.timeout_s,
            headers=request.headers,
            query=request.query,
        )
        return parse_generate(answer, prompt_tokens=prompt_tokens, label=self._label)

    async def _offers_generate(self) -> bool:
        status, body = await self._peer.get("/openapi.json", timeout_s=HEALTH_TIMEOUT_S)
        if status != 200:
            return True  # no description to read: trying is the only way to find out
        try:
            return "/generate" in msgspec.json.decode(body).get("paths", {})
        except (msgspec.DecodeError, AttributeError):
            return False

    # Prompt logprobs.

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt_tokens = await self._take_prompt(request.body)
        body = rename_max_tokens(request.body)
        num_top = max(1, int(body.pop("top_k", None) or body.pop("top_logprobs", None) or 1))
        body.pop("top_logprobs", None)
        body |= {"n": 1, "temperature": 0.0, "top_p": 1.0, "prompt_logprobs": num_top}
        body.setdefault("max_tokens", 1)
        if not self._uses_generate:
            try:
                answer = await self._post(
                    "/completions", {**body, "prompt": prompt_tokens}, request
                )
                positions = answer["choices"][0].get("prompt_logprobs")
                return parse_prompt_logprobs(
                    positions, prompt_tokens=prompt_tokens, num_top=num_top, label=self._label
                )
            except EngineHttpRejected as e:
                if e.status not in (404, 405) or not await self._offers_generate():
                    raise
                self._uses_generate = True
        body.pop("model", None)
        body["prompt"] = {"prompt_token_ids": prompt_tokens}
        answer = await self._peer.post_json("/generate", body, timeout_s=request.timeout_s)
        positions = answer.get("prompt_logprobs") if isinstance(answer, dict) else None
        if isinstance(positions, list) and len(positions) == 1 and isinstance(positions[0], list):
            positions = positions[0]
        return parse_prompt_logprobs(
            positions, prompt_tokens=prompt_tokens, num_top=num_top, label=self._label
        )


class _NoTokenIds(EngineProtocolError):
    """The server answered /v1/completions without token ids: it does not know `return_token_ids`."""


def rename_max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """Give the token limit its name on the completion routes."""
    for name in ("max_new_tokens", "max_completion_tokens"):
        if name in body:
            body = {**body, "max_tokens": body[name]}
            del body[name]
    return body


def parse_completions(
    answer: dict[str, Any], *, prompt_tokens: list[int], label: str
) -> TokenCompletions:
    """Read token ids and sampled-token logprobs out of a `/v1/completions` body."""
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    spans: list[list[WeightSpan] | None] = []
    for i, choice in enumerate(answer["choices"]):
        where = f"{label}/completions: choices[{i}]"
        token_ids = choice.get("token_ids")
        if token_ids is None:
            raise _NoTokenIds(
                f"{where} has no token_ids; the server must support return_token_ids (vLLM >= 0.10.2)"
            )
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if values is None:
            raise EngineProtocolError(f"{where} has no logprobs.token_logprobs")
        echoed = choice.get("prompt_token_ids") or prompt_tokens
        if echoed != prompt_tokens:
            raise EngineProtocolError(
                f"{where} was sampled after {len(echoed)} prompt tokens that are not the {len(prompt_tokens)} sent"
            )
        tokens.append(token_ids)
        logprobs.append(_checked(values, num_tokens=len(token_ids), where=where))
        spans.append(_read_spans(choice.get("weight_versions"), len(token_ids), where=where))
    finish_reasons = [choice.get("finish_reason") for choice in answer["choices"]]
    return TokenCompletions(prompt_tokens, tokens, logprobs, finish_reasons, weight_versions=spans)


def parse_generate(answer: Any, *, prompt_tokens: list[int], label: str) -> TokenCompletions:
    """Read the original's `/generate` body: per sequence, per token, a list holding one `{"<id>": logprob}`."""
    where = f"{label}/generate"
    try:
        sequences = answer["logprobs"]
        finish_reasons = answer["finish_reasons"]
        pairs = [[next(iter(token[0].items())) for token in sequence] for sequence in sequences]
        tokens = [[int(token_id) for token_id, _ in sequence] for sequence in pairs]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, StopIteration) as e:
        raise EngineProtocolError(
            f"{where} answered something else than logprobs and finish_reasons: {str(answer)[:400]}"
        ) from e
    if len(finish_reasons) != len(tokens):
        raise EngineProtocolError(
            f"{where} answered {len(finish_reasons)} finish reasons for {len(tokens)} sequences"
        )
    logprobs = [
        _checked([value for _, value in sequence], num_tokens=len(sequence), where=where)
        for sequence in pairs
    ]
    return TokenCompletions(prompt_tokens, tokens, logprobs, finish_reasons)


def _checked(values: list[Any], *, num_tokens: int, where: str) -> list[float]:
    if len(values) != num_tokens:
        raise EngineProtocolError(f"{where}: {len(values)} logprobs for {num_tokens} token ids")
    for position, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise EngineProtocolError(
                f"{where}: logprob {value!r} at token {position}, expected a number"
            )
    return values


def _read_spans(spans: Any, num_tokens: int, *, where: str) -> list[WeightSpan] | None:
    if spans is None:
        return None
    try:
        parsed = [WeightSpan(str(s["weight_version"]), int(s["num_tokens"])) for s in spans]
    except (KeyError, TypeError, ValueError) as e:
        raise EngineProtocolError(f"{where}: unreadable weight_versions {spans!r:.200}") from e
    if (total := sum(span.num_tokens for span in parsed)) != num_tokens:
        raise EngineProtocolError(f"{where}: weight_versions cover {total} tokens of {num_tokens}")
    return parsed


def parse_prompt_logprobs(
    positions: Any, *, prompt_tokens: list[int], num_top: int, label: str
) -> dict[str, Any]:
    """Read vLLM's prompt logprobs: per position a map `id -> logprob` or `id -> {"logprob": ...}`, maps, or null."""
    if not isinstance(positions, list) or len(positions) != len(prompt_tokens):
        raise EngineProtocolError(
            f"{label}: prompt_logprobs must have {len(prompt_tokens)} positions, got {str(positions)[:200]}"
        )
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    for position in positions:
        entries: dict[str, Any] = {}
        for part in position if isinstance(position, list) else [position or {}]:
            entries |= part
        pairs = [
            (int(token_id), float(v["logprob"] if isinstance(v, dict) else v))
            for token_id, v in entries.items()
        ]
        # vLLM adds the prompt's own token to the k most likely ones.
        pairs = sorted(pairs, key=lambda pair: -pair[1])[:num_top]
        top_ids.append([token_id for token_id, _ in pairs])
        top_logprobs.append([value for _, value in pairs])
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_topk_token_ids": top_ids,
        "prompt_topk_logprobs": top_logprobs,
    }
