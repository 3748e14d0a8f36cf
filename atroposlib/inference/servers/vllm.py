"""vLLM, or any engine that speaks its routes: completions with token ids and the logprob of each sampled token.

Routes in order of preference: `/inference/v1/generate` if the server lists it (it reports the weight version of each
token), stock `/v1/completions` with `return_token_ids`, the original's `/generate`. A route that was found not to work
is not tried again. Chats with images use `/v1/chat/completions`. The bodies are in `vllm_bodies.py`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from atroposlib.errors import EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.admission import HEALTH_TIMEOUT_S
from atroposlib.inference.servers.api_server import (
    TokenCompletions,
    WeightSpan,
)
from atroposlib.inference.servers.choices import part_of
from atroposlib.inference.servers.http_peer import EngineHttpRejected, excerpt
from atroposlib.inference.servers.openai_routes import (
    CallKeywords,
    OpenAIRoutesServer,
    read_request,
)
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.streaming import hearing
from atroposlib.inference.servers.token_ids import (
    NEUTRAL_SAMPLING,
    THREAD_FROM_TOKENS,
    TokenServer,
    check_count,
    gather,
    take_num_top,
)
from atroposlib.inference.servers.vllm_bodies import (
    DEFAULT_MAX_TOKENS,
    NoTokenIds,
    StreamedChoices,
    completions_per_request,
    fits_tokens_route,
    gather_choices,
    read_choices,
    read_generated,
    read_prompt_ids,
    read_prompt_logprobs,
    rename_max_tokens,
    tokens_request,
)
from atroposlib.utils.off_loop import off_loop

__all__ = ["NEUTRAL_SAMPLING", "VLLMServer"]

logger = logging.getLogger(__name__)

TOKENS_ROUTE = "/inference/v1/generate"
"""Token ids in and out, with policy versions: vLLM 0.32 and later, started with `--enable-scale-out`."""
ORIGINAL_ROUTE = "/generate"
FORBIDDEN = 403
"""vLLM's status for routes that it was not started with."""


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
        """Paths in the server's `/openapi.json`; None if it has none."""
        self._has_listed = False
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
        if not self._has_listed:
            async with self._listing:
                if not self._has_listed:
                    self._listed = await self._list_routes()
                    self._has_listed = True
        return unless_known if self._listed is None else path in self._listed

    async def _list_routes(self) -> frozenset[str] | None:
        status, body = await self._peer.get("/openapi.json", timeout_s=HEALTH_TIMEOUT_S)
        if status >= 500:  # not permanent
            raise EngineUnavailable(
                f"GET {self._peer.root}/openapi.json answered {status}: {excerpt(body)}",
                status=status,
            )
        if status != 200:
            return None
        try:
            return frozenset(_description.decode(body).paths)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

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


class _Description(msgspec.Struct):
    """The fields of an OpenAPI document that are read."""

    paths: dict[str, msgspec.Raw]


_description = msgspec.json.Decoder(_Description)
