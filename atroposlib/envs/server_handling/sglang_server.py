"""SGLang: token ids and logprobs from its native `/generate`, chat and text from its OpenAI routes.

Prompts go out as `input_ids`; ids and logprobs come back in `meta_info`. Lengths that disagree raise
`EngineProtocolError`, nothing is padded or cut. Policy versions are read from `meta_info` where the engine
reports them. Only text prompts need the tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from atroposlib.envs.server_handling.api_server import TokenCompletions, WeightSpan
from atroposlib.envs.server_handling.choices import run_together
from atroposlib.envs.server_handling.http import strip_v1
from atroposlib.envs.server_handling.openai_routes import (
    OpenAIRoutesServer,
    Request,
    read_request,
)
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.token_ids import (
    WithTokenizer,
    check_count,
    check_logprobs,
    check_spans,
    check_token_ids,
    encode_prompt,
)
from atroposlib.errors import ConfigError, EngineProtocolError

logger = logging.getLogger(__name__)

EVERY_TOKEN = -1
"""SGLang's `top_k` for the whole vocabulary; it refuses vLLM's 0."""

NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": EVERY_TOKEN,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent unless the caller says otherwise. The server fills in what is missing from its own defaults, which may come from
the model: samples would be from another distribution than the one whose logprobs are reported."""

SAMPLING_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""OpenAI's and vLLM's names of what SGLang calls otherwise."""

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

_ALWAYS_ASKED = frozenset({"model", "messages", "logprobs", "top_logprobs"})
"""Keywords of a call that `/generate` has no field for: it serves one model and always returns logprobs."""


class SGLangServer(WithTokenizer, OpenAIRoutesServer):
    """An SGLang engine; `base_url` may end in `/v1` or not."""

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        if not config.base_url:
            raise ConfigError(
                "server_type 'sglang' needs base_url, for example http://localhost:30000/v1"
            )
        root = strip_v1(config.base_url)
        super().__init__(config, reasoning_config, root=root, prefix="/v1", api_key=config.api_key)
        self._warned_about_max_tokens = False

    async def _find_fault(self) -> str | None:
        return await self._ask("/health", accept_4xx=False)

    async def _take_prompt(self, body: dict[str, Any]) -> list[int]:
        """Remove the prompt from a body and return it as token ids."""
        text = body.pop("prompt", None)
        token_ids = body.pop("input_ids", None)
        if token_ids is not None:
            return [int(token) for token in token_ids]
        if text is None:
            raise ValueError("an SGLang request needs input_ids or prompt")
        return await asyncio.to_thread(lambda: encode_prompt(self.tokenizer, text))

    # Sampling.

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt_tokens = await self._take_prompt(request.body)
        body = generate_body(prompt_tokens, request.body)
        if "max_new_tokens" not in body["sampling_params"] and not self._warned_about_max_tokens:
            self._warned_about_max_tokens = True
            logger.warning("No max_tokens given: SGLang stops after 128 tokens then")
        results = await self._generate(body, request)
        return parse_generate(results, prompt_tokens=prompt_tokens, label=self._label)

    async def _generate(self, body: dict[str, Any], request: Request) -> list[dict[str, Any]]:
        """Return `n` results, also from servers that ignore `n`."""
        n = int(body["sampling_params"].get("n", 1))
        results = [] if n > 1 and self._n_is_ignored else await self._post_generate(body, request)
        if n > 1 and len(results) == 1 and not self._n_is_ignored:
            logger.warning(
                "%s ignores n (asked for %d, got 1); sending n requests from now on."
                " Set n_kwarg_is_ignored to start that way",
                self._label,
                n,
            )
            self._n_is_ignored = True
        if n > 1 and self._n_is_ignored:
            single = {**body, "sampling_params": {**body["sampling_params"], "n": 1}}
            num_missing = n - len(results)
            calls = [self._post_generate(single, request) for _ in range(num_missing)]
            results += [result for part in await run_together(calls) for result in part]
        check_count(results, n=n, what="completions", where=f"{self._label}/generate")
        return results

    async def _post_generate(self, body: dict[str, Any], request: Request) -> list[dict[str, Any]]:
        answer = await self._peer.post_json(
            "/generate",
            body,
            timeout_s=request.timeout_s,
            headers=request.headers,
            query=request.query,
        )
        results = answer if isinstance(answer, list) else [answer]
        for result in results:
            if not isinstance(result, dict) or not isinstance(result.get("meta_info"), dict):
                raise EngineProtocolError(
                    f"{self._label}/generate answered without meta_info: {str(result)[:400]}"
                )
        return results

    # Prompt logprobs.

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        given = request.body
        prompt_tokens = await self._take_prompt(given)
        top_k, top_logprobs = given.pop("top_k", None), given.pop("top_logprobs", None)
        num_top = int(next((k for k in (top_k, top_logprobs) if k is not None), 1))
        if num_top < 0:
            raise ValueError(f"get_logprobs: top_k = {num_top}, expected 0 or more")
        given |= {"n": 1, "temperature": 0.0, "top_p": 1.0}
        body = generate_body(prompt_tokens, given)
        body["sampling_params"].setdefault("max_new_tokens", 1)
        body |= {"logprob_start_len": 0, "top_logprobs_num": num_top}
        results = await self._generate(body, request)
        return parse_prompt_logprobs(
            results[0]["meta_info"],
            prompt_tokens=prompt_tokens,
            num_top=num_top,
            where=f"{self._label}/generate",
        )


def generate_body(prompt_tokens: list[int], keywords: dict[str, Any]) -> dict[str, Any]:
    """Build the body of `/generate` from a call's keywords."""
    sampling: dict[str, Any] = {**NEUTRAL_SAMPLING}
    fields: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in REQUEST_FIELDS:
            fields[name] = value
        elif name not in _ALWAYS_ASKED:
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


def parse_generate(
    results: list[dict[str, Any]], *, prompt_tokens: list[int], label: str
) -> TokenCompletions:
    """Read token ids, their logprobs, finish reasons and policy versions out of `/generate` results."""
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    finish_reasons: list[str | None] = []
    spans: list[list[WeightSpan] | None] = []
    for i, result in enumerate(results):
        meta = result["meta_info"]
        where = f"{label}/generate: result {i}"
        values, token_ids = _columns(meta.get("output_token_logprobs"), where=where)
        token_ids = check_token_ids(token_ids, where=where)
        num_said = meta.get("completion_tokens", len(token_ids))
        if num_said != len(token_ids):
            raise EngineProtocolError(
                f"{where}: logprobs for {len(token_ids)} tokens, completion_tokens says {num_said}"
            )
        tokens.append(token_ids)
        logprobs.append(check_logprobs(values, num_tokens=len(token_ids), where=where))
        finish_reasons.append(_finish_reason(meta, where=where))
        spans.append(_weight_spans(meta, num_tokens=len(token_ids), where=where))
    return TokenCompletions(prompt_tokens, tokens, logprobs, finish_reasons, weight_versions=spans)


def _columns(entries: Any, *, where: str) -> tuple[list[Any], list[Any]]:
    """Split `[[logprob, token id, text or null], ...]` into logprobs and ids."""
    try:
        return [entry[0] for entry in entries], [entry[1] for entry in entries]
    except (TypeError, IndexError, KeyError) as e:
        raise EngineProtocolError(
            f"{where}: token logprobs {str(entries)[:200]}, expected [[logprob, token id, text], ...]"
        ) from e


def _finish_reason(meta: dict[str, Any], *, where: str) -> str | None:
    reason = meta.get("finish_reason")
    if isinstance(reason, dict):
        reason = reason.get("type")
    if reason is not None and not isinstance(reason, str):
        raise EngineProtocolError(f"{where}: finish_reason {meta['finish_reason']!r:.200}")
    return reason


def _weight_spans(meta: dict[str, Any], *, num_tokens: int, where: str) -> list[WeightSpan] | None:
    """Read `weight_versions` (`[{"version", "start", "end"}]`), else the one `weight_version` of older servers.

    The one version is that at the end of the request; older servers let requests finish before weights change.
    """
    versions = meta.get("weight_versions")
    if versions is None:
        if meta.get("weight_version") is None:
            return None
        versions = [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]
    try:
        spans = [WeightSpan(str(v["version"]), int(v["end"]) - int(v["start"])) for v in versions]
    except (KeyError, TypeError, ValueError) as e:
        raise EngineProtocolError(f"{where}: unreadable weight_versions {versions!r:.200}") from e
    return check_spans(spans, num_tokens=num_tokens, where=where)


def parse_prompt_logprobs(
    meta: dict[str, Any], *, prompt_tokens: list[int], num_top: int, where: str
) -> dict[str, Any]:
    """Read the logprobs at every position of the prompt; the first position has none.

    `num_top` 0 gives the prompt's own token at each position, otherwise the `num_top` most likely ones.
    """
    where = f"{where}: prompt logprobs"
    own_values, own_ids = _columns(meta.get("input_token_logprobs"), where=where)
    if own_ids != prompt_tokens:
        raise EngineProtocolError(
            f"{where} are for {len(own_ids)} tokens that are not the {len(prompt_tokens)} sent"
        )
    positions: list[Any]
    if num_top:
        positions = meta.get("input_top_logprobs") or []
        if len(positions) != len(prompt_tokens):
            raise EngineProtocolError(
                f"{where}: {len(positions)} positions for {len(prompt_tokens)} prompt tokens"
            )
    else:
        positions = [[pair] for pair in zip(own_values, own_ids, strict=True)]
    top_ids: list[list[int]] = [[]]
    top_logprobs: list[list[float]] = [[]]
    for i, position in enumerate(positions[1:], start=1):
        here = f"{where}, position {i}"
        values, ids = _columns(position, where=here)
        order = sorted(
            range(len(ids)),
            key=check_logprobs(values, num_tokens=len(ids), where=here).__getitem__,
            reverse=True,
        )[: num_top or 1]
        top_ids.append(check_token_ids([ids[j] for j in order], where=here))
        top_logprobs.append([float(values[j]) for j in order])
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_topk_token_ids": top_ids[: len(prompt_tokens)],
        "prompt_topk_logprobs": top_logprobs[: len(prompt_tokens)],
    }
