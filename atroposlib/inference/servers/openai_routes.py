"""Chat and text completions over the OpenAI routes, for every server that has them.

Builds the request, parses the answer into the types of the `openai` package; the transport is `HttpPeer`. A caller
gets exactly the `n` choices it asked for, also from servers that ignore `n`, or an error.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import ValidationError

from atroposlib.errors import EngineProtocolError, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.admission import HEALTH_TIMEOUT_S, start_turn
from atroposlib.inference.servers.answer_cache import AnswerCache
from atroposlib.inference.servers.api_server import APIServer, hearing
from atroposlib.inference.servers.http_peer import (
    EngineHttpRejected,
    HttpPeer,
    decoded_or_none,
    excerpt,
)
from atroposlib.inference.servers.rate_limit import RateLimiter
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.patience import is_transient_status

logger = logging.getLogger(__name__)

T = TypeVar("T")


OTHER_LIMIT_NAMES = ("max_new_tokens", "max_completion_tokens")
"""Names that callers use for `max_tokens` at engines."""


async def import_openai() -> None:
    """Import the types off the event loop before they are needed: it takes about a second, once."""
    if "openai.types.chat" not in sys.modules:
        await asyncio.to_thread(importlib.import_module, "openai.types.chat")
        await start_turn()  # thousands of waiters would all run in this round


def completion_from(body: dict[str, Any]) -> Any:
    """Build a `ChatCompletion`, or a `Completion` of choices without messages.

    Engine-specific fields and finish reasons are kept rather than refused.
    """
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    is_chat = any("message" in choice for choice in body["choices"])
    kind: Any = ChatCompletion if is_chat else Completion
    try:
        # The same object as from `construct`, twenty times faster: 0.2 ms per answer.
        return kind.model_validate(body, strict=True)
    except ValidationError:
        return kind.construct(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKeywords:
    """One call's keywords, split into what the server reads and what the client reads."""

    body: dict[str, Any]
    timeout_s: float
    headers: dict[str, str]
    query: dict[str, str]
    skip_reasoning: bool


def read_request(kwargs: dict[str, Any], *, timeout_s: float) -> CallKeywords:
    """Split keywords. None means "not given", as in the openai package; `timeout` is in seconds."""
    body = {key: value for key, value in kwargs.items() if value is not None}
    if body.pop("stream", False):
        raise ValueError("stream=True is not supported: completions are returned whole")
    body.pop("split", None)
    extra_body = body.pop("extra_body", {})
    return CallKeywords(
        timeout_s=float(body.pop("timeout", timeout_s)),
        headers=body.pop("extra_headers", {}),
        query=body.pop("extra_query", {}),
        skip_reasoning=bool(body.pop("skip_reasoning", False)),
        body={**body, **extra_body},  # the last: what the lines above took out is not sent
    )


class RequestPart(NamedTuple):
    """Some of a call's completions, to be requested together."""

    size: int
    offset: int


def split_n(n: int, *, at_most: int) -> list[RequestPart]:
    """Cut `n` completions into requests.

    >>> [part.size for part in split_n(10, at_most=4)]
    [4, 4, 2]
    """
    return [RequestPart(min(at_most, n - offset), offset) for offset in range(0, n, at_most)]


def part_of(body: dict[str, Any], part: RequestPart, *, seed_name: str = "seed") -> dict[str, Any]:
    """Return the body that asks for a part of the completions of `body`; equal seeds would give equal ones.

    >>> part_of({"seed": 5, "n": 3}, RequestPart(size=1, offset=2))
    {'seed': 7, 'n': 1}
    """
    changes: dict[str, Any] = {}
    if part.size != body.get("n", 1):
        changes["n"] = part.size
    if body.get(seed_name) is not None:
        changes[seed_name] = body[seed_name] + part.offset
    return {**body, **changes}


def merge_bodies(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge (chat) completion bodies: all choices, renumbered, and the sum of the token counts.

    The prompt is counted once per request, as it was billed.
    """
    if len(parts) == 1:
        return parts[0]
    choices = [choice for part in parts for choice in part["choices"]]
    merged = {
        **parts[0],
        "choices": [{**choice, "index": i} for i, choice in enumerate(choices)],
    }
    usages = [part["usage"] for part in parts if part.get("usage")]
    if len(usages) == len(parts):
        merged["usage"] = {
            key: sum(usage.get(key) or 0 for usage in usages)
            for key in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
    return merged


def count_prompts(prompt: Any) -> int:
    """Return the number of prompts of a completion request: a list of texts or of token lists is several."""
    is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return len(prompt) if is_batch else 1


def with_text_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is text: Mistral's reasoning models return a list of parts.

    Thinking becomes `reasoning_content`, as in most other APIs. Other kinds of content are unchanged.
    """
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return message
    kinds = {part.get("type") for part in content}
    if not kinds <= {"text", "thinking"}:
        return message
    thoughts = [part.get("thinking") for part in content if part["type"] == "thinking"]
    thinking = "".join(_joined(thought) for thought in thoughts)
    found = {**message, "content": _joined([p for p in content if p["type"] == "text"])}
    return {"reasoning_content": thinking, **found} if thoughts else found


def _joined(parts: Any) -> str:
    if isinstance(parts, list):
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return str(parts or "")


def _num_choices(answer: dict[str, Any]) -> int:
    return len(answer["choices"])


def _refuses_n(refusal: EngineHttpRejected) -> bool:
    """Whether a request was refused because of its `n`; Groq, for example, accepts only 1."""
    return refusal.status in (400, 422) and re.search(r"""["'`]n["'`]""", str(refusal)) is not None


class ServedModel(msgspec.Struct, frozen=True, gc=False):
    """One entry of `/models`."""

    id: str
    max_model_len: Any = None
    """vLLM's and SGLang's context length; other servers omit it."""


class _ServedModels(msgspec.Struct, gc=False):
    data: list[ServedModel]


_served_models = msgspec.json.Decoder(_ServedModels)


class HttpServer(APIServer):
    """A server that is called over HTTP."""

    health_path = "/health"
    is_up_at_4xx = False
    """Whether a 4xx at `health_path` means that the server is up."""
    _n_is_ignored = False
    """Whether the server was found to return one completion per request."""

    def __init__(
        self,
        config: APIServerConfig,
        reasoning_config: ReasoningConfig | None = None,
        *,
        root: str,
        api_key: str | None,
    ) -> None:
        super().__init__(config, reasoning_config)
        self._peer = HttpPeer(root, api_key=api_key)
        self._cache = AnswerCache(config.answer_cache) if config.answer_cache else None
        self._rate: RateLimiter | None = None
        if config.requests_per_minute or config.tokens_per_minute:
            self._rate = RateLimiter(
                requests_per_minute=config.requests_per_minute,
                tokens_per_minute=config.tokens_per_minute,
            )

    async def close(self) -> None:
        await super().close()
        await self._peer.close()
        if self._cache is not None:
            self._cache.close()

    async def _send(
        self,
        path: str,
        body: dict[str, Any],
        request: CallKeywords,
        read: Callable[[bytes], T] = msgspec.json.decode,
        on_event: Callable[[bytes], None] | None = None,
    ) -> T:
        estimated = 0 if self._rate is None else await self._rate.wait(body)
        answer = await self._peer.post(
            path,
            body,
            read=read,
            timeout_s=request.timeout_s,
            headers=request.headers,
            query=request.query,
            on_event=on_event,
        )
        if self._rate is not None:
            self._rate.correct(answer, body, estimated=estimated)
        return answer

    async def _ask_for(
        self,
        n: int,
        send: Callable[[RequestPart], Coroutine[Any, Any, T]],
        *,
        count: Callable[[T], int],
        at_most: int,
    ) -> list[T]:
        """Return answers that hold `n` completions together, also from servers that ignore or refuse `n`.

        `count` counts the completions of an answer. A server that returns one completion per request is asked for one
        at a time from then on.
        """
        is_ignored = self._n_is_ignored or self.config.n_kwarg_is_ignored
        parts = split_n(n, at_most=1 if is_ignored else at_most)
        singles = split_n(n, at_most=1)
        found: dict[int, T] = {}  # by offset
        try:
            answers = await run_together([send(part) for part in parts])
        except EngineHttpRejected as e:
            if parts == singles or not _refuses_n(e):
                raise
            if (listener := hearing.get()) is not None and listener.has_heard:
                self._n_is_ignored = True
                raise  # what was told of another part cannot be sampled again
        else:
            if parts == singles or any(count(answer) != 1 for answer in answers):
                return answers
            found = {part.offset: each for part, each in zip(parts, answers, strict=True)}
            singles = [single for single in singles if single.offset not in found]
        logger.warning(
            "%s returns one completion per request (asked for %d); sending n requests from now on."
            " Set n_kwarg_is_ignored to start that way",
            self._label,
            parts[0].size,
        )
        self._n_is_ignored = True
        rest = await run_together([send(single) for single in singles])
        found |= {single.offset: each for single, each in zip(singles, rest, strict=True)}
        return [found[offset] for offset in range(n)]

    async def _find_fault(self) -> str | None:
        try:
            status, body = await self._peer.get(self.health_path, timeout_s=HEALTH_TIMEOUT_S)
        except EngineUnavailable as e:
            return str(e)
        if status < 400 or (self.is_up_at_4xx and status < 500):
            return None
        return f"GET {self._peer.root}{self.health_path} answered {status}: {excerpt(body)}"


class OpenAIRoutesServer(HttpServer):
    """A server with `/chat/completions` and `/completions`."""

    prefix = "/v1"
    """Path of the routes below the server's root."""
    reads_model_name = True
    """Whether the server refuses names of models that it does not serve."""

    async def list_models(self) -> list[str]:
        """Return the models the server lists, [] if it does not tell; set `context_len` if it tells that."""
        try:
            status, body = await self._peer.get(self.prefix + "/models", timeout_s=HEALTH_TIMEOUT_S)
        except EngineUnavailable:
            return []
        served = decoded_or_none(_served_models, body) if status == 200 else None
        models = [] if served is None else served.data
        own = [each for each in models if each.id == self.config.model_name] or models
        lengths = [each.max_model_len for each in own]
        if all(type(length) is int and length > 0 for length in lengths):
            self.context_len = min(lengths, default=None)
        return [each.id for each in models]

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        await import_openai()
        request = read_request(kwargs, timeout_s=self.config.timeout)
        body = request.body
        if self.reasoning_config is not None and not request.skip_reasoning:
            body = self.reasoning_config.apply(body, base_url=self._peer.root)
        answer = await self._complete("/chat/completions", body, request)
        self._check_choices(answer, holds="message", kind=dict)
        choices = [{**c, "message": with_text_content(c["message"])} for c in answer["choices"]]
        return completion_from({**answer, "choices": choices})

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        await import_openai()
        request = read_request(kwargs, timeout_s=self.config.timeout)
        answer = await self._complete("/completions", request.body, request)
        self._check_choices(answer, holds="text", kind=str)
        return completion_from(answer)

    def _check_choices(self, answer: dict[str, Any], *, holds: str, kind: type) -> None:
        for i, choice in enumerate(answer["choices"]):
            if not isinstance(choice, dict) or not isinstance(choice.get(holds), kind):
                raise EngineProtocolError(
                    f"{self._label}: choices[{i}] has no {holds}: {str(choice)[:400]}"
                )

    async def _complete(
        self, path: str, body: dict[str, Any], request: CallKeywords
    ) -> dict[str, Any]:
        """Return a body with exactly `n` choices, from the cache if it has them."""
        if self._cache is None:
            return await self._complete_uncached(path, body, request)
        asked = {"root": self._peer.root, "path": path, "body": body}
        return await self._cache.answer(asked, lambda: self._complete_uncached(path, body, request))

    async def _complete_uncached(
        self, path: str, body: dict[str, Any], request: CallKeywords
    ) -> dict[str, Any]:
        """Return a body with exactly `n` choices, also from servers that ignore `n`."""
        n, num_prompts = int(body.get("n", 1)), count_prompts(body.get("prompt"))

        async def send(part: RequestPart) -> dict[str, Any]:
            return await self._post(path, part_of(body, part), request)

        if num_prompts > 1:
            answer = await self._post(path, body, request)
        else:
            parts = await self._ask_for(n, send, count=_num_choices, at_most=n)
            answer = merge_bodies(parts)
        found, expected = _num_choices(answer), n * num_prompts
        if found != expected:
            raise EngineProtocolError(
                f"{self._label} answered {found} choices, expected {expected} (n = {n})"
            )
        return answer

    async def _post(self, path: str, body: dict[str, Any], request: CallKeywords) -> dict[str, Any]:
        answer: Any = await self._send(self.prefix + path, body, request)
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            self._raise_reported_error(path, answer)
            raise EngineProtocolError(
                f"{self._label}{path} answered without a list of choices: {str(answer)[:400]}"
            )
        return answer

    def _raise_reported_error(self, path: str, answer: Any) -> None:
        """Raise the error that a gateway reports with status 200: `{"error": {"code": ..., "message": ...}}`."""
        error = answer.get("error") if isinstance(answer, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        if not isinstance(code, int):
            return
        message = f"{self._label}{path} answered 200 with error {code}: {str(error)[:400]}"
        if is_transient_status(code):
            raise EngineUnavailable(message, status=code)
        raise EngineHttpRejected(message, status=code)
