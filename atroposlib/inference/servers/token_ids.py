"""What engines that return token ids share: tokenizer, prompts as ids, weight versions, and checks of lengths.

Nothing is padded, cut or guessed: a mismatch raises `EngineProtocolError` with its position. Independent of the
engines' formats, whose typed decoding checks the values of single tokens.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from atroposlib.errors import ConfigError, EngineError, EngineProtocolError, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.admission import HEALTH_TIMEOUT_S
from atroposlib.inference.servers.api_server import (
    TokenCompletions,
    WeightSpan,
    hearing,
)
from atroposlib.inference.servers.http_peer import (
    EngineHttpRejected,
    decoded_or_none,
    strip_v1,
)
from atroposlib.inference.servers.openai_routes import CallKeywords, HttpServer, RequestPart
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.patience import is_transient_status
from atroposlib.utils.number_list import array_of, joined
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.tokenizers.backends import encode_prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")

NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent unless the caller overrides it; with vLLM's value for all tokens, 0. Engines' defaults come from the model's
generation_config.json (Qwen's cuts to the top 20 tokens, for example): samples would come from another distribution
than the reported logprobs."""

VLLM_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "seed",
        "stop",
        "stop_token_ids",
    }
)
"""Further sampling parameters of vLLM."""

THREAD_FROM_TOKENS = 4096
"""Answers with more sampled tokens are read off the event loop: over 0.5 ms each, and many may be concurrent."""

TOKENIZE_ROUTE = "/tokenize"
"""Of vLLM and newer SGLang servers."""

_LOADING = threading.Lock()
"""Held while a tokenizer is loaded: the first requests of an environment are concurrent."""


@dataclass(slots=True)
class SampledCompletion:
    """One completion."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Any
    weight_versions: list[WeightSpan] | None = None
    """None: not reported."""


class _WeightInfo(msgspec.Struct, gc=False):
    weight_version: str | int | None
    """None: no version has been set."""


_weight_info = msgspec.json.Decoder(_WeightInfo)


class _Tokenized(msgspec.Struct, gc=False):
    tokens: list[int]


_tokenized = msgspec.json.Decoder(_Tokenized)


Hear = Callable[[int, list[int]], None]
"""Called with the index of a completion in its answer, and with each further token or tokens of it."""


class Streamed(Protocol):
    """A completion as the engine reports it."""

    finish_reason: Any
    """None: it has not ended."""


P = TypeVar("P", bound=Streamed)


class StreamedAnswer(ABC, Generic[P]):
    """Collects the completions of an answer from its events."""

    def __init__(self, hear: Hear, *, where: str) -> None:
        self._hear = hear
        self._where = where
        self._found: dict[int, P] = {}
        """By index, with all tokens so far."""

    @abstractmethod
    def add(self, event: bytes) -> None:
        """Take the data of one event, and tell its tokens. Raises msgspec.DecodeError for other data."""

    def whole(self) -> list[P]:
        """Return the completions after the last event. Raises EngineUnavailable if that did not end them."""
        found = [each for _, each in sorted(self._found.items())]
        if not found or any(each.finish_reason is None for each in found):
            raise EngineUnavailable(f"{self._where}: the stream ended before the answer did")
        return found


class TokenServer(HttpServer):
    """An engine that returns token ids; `base_url` may end in `/v1` or not.

    The tokenizer of its model is loaded once, on first use.
    """

    example_url: ClassVar[str]
    version_paths: tuple[str, ...] = ()
    """Routes that may return the current weight version; those that proved missing are removed."""
    engine_name: ClassVar[str]
    _warned_about_limit = False
    _streams = True
    """False once the server refused to stream."""

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        if not config.base_url:
            raise ConfigError(
                f"{type(self).__name__} needs base_url, for example {self.example_url}"
            )
        root = strip_v1(config.base_url)
        super().__init__(config, reasoning_config, root=root, api_key=config.api_key)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer named by `tokenizer_name`, else by `model_name`; slow, not for the event loop."""
        with _LOADING:
            loaded = vars(self).get("tokenizer")
            if loaded is None:
                loaded = vars(self)["tokenizer"] = load_tokenizer(
                    self.config.tokenizer_source, flag="tokenizer_name"
                )
            return loaded

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the server's own token ids of a text, perhaps with special tokens; None if it does not tell."""
        asked = {"prompt": text, "add_special_tokens": False}
        answer = await self._ask(TOKENIZE_ROUTE, asked, _tokenized.decode)
        return await self._prompt_ids(text) if answer is None else answer.tokens

    async def _prompt_ids(self, text: str) -> list[int] | None:
        """Return the ids of a prompt that is sent as text, from servers that report them."""
        return None

    async def _sample_parts(
        self,
        path: str,
        request: CallKeywords,
        form: Callable[[RequestPart, bool], dict[str, Any]],
        read: Callable[[bytes], list[P]],
        collect: Callable[[Hear], StreamedAnswer[P]] | None,
        *,
        n: int,
        at_most: int,
    ) -> list[P]:
        """Return exactly `n` completions, in requests for `at_most`, also from servers that ignore `n`.

        `form` makes the body that asks for some of them, as a stream or not. `read` reads an answer that is no stream,
        `collect` the events of one for who listens; None: this route does not stream.
        """

        async def send(part: RequestPart) -> list[P]:
            listener = hearing.get()
            if collect is None or listener is None or not self._streams:
                return await self._send(path, form(part, False), request, read)

            def hear(number: int, tokens: list[int]) -> None:
                if not 0 <= number < part.size:
                    raise EngineProtocolError(
                        f"{self._peer.root}{path} sent completion {number} of {part.size}"
                    )
                listener.hear(part.offset + number, tokens)

            asked, answer = {**form(part, True), "stream": True}, collect(hear)

            def read_rest(rest: bytes) -> list[P]:
                return read(rest) if rest else answer.whole()

            try:
                return await self._send(path, asked, request, read_rest, answer.add)
            except EngineHttpRejected as e:
                if "stream" not in str(e) or listener.has_heard:
                    raise
                logger.info("%s does not stream (%s)", self._label, e)
                self._streams = False
                return await send(part)

        parts = await self._ask_for(n, send, count=len, at_most=at_most)
        found = [each for part in parts for each in part]
        check_count(found, n=n, what="completions", where=f"{self._label}{path}")
        return found

    async def _ask(self, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T | None:
        """Ask an optional question; None if there is no usable answer."""
        try:
            return await self._peer.post(path, body, read=read, timeout_s=HEALTH_TIMEOUT_S)
        except EngineError as e:
            logger.debug("%s: no answer at %s: %s", self._label, path, e)
            return None

    def _limit_tokens(
        self, sampling: dict[str, Any], name: str, *, num_prompt: int, default: int
    ) -> None:
        """Cut the limit `name` to what the prompt leaves of the context: some engines refuse longer requests.

        Without a limit, warn once that the engine stops after `default` tokens.
        """
        if name in sampling:
            room = (self.context_len or 0) - num_prompt
            if room > 0:
                sampling[name] = min(sampling[name], room)
        elif not self._warned_about_limit:
            self._warned_about_limit = True
            logger.warning(
                "No max_tokens given: %s stops after %d tokens", self.engine_name, default
            )

    async def _take_prompt(self, body: dict[str, Any]) -> list[int]:
        """Remove the prompt (`input_ids`, else the text `prompt`) from a body and return it as token ids."""
        text, token_ids = body.pop("prompt", None), body.pop("input_ids", None)
        messages = body.pop("messages", None)
        if isinstance(token_ids, list) and set(map(type, token_ids)) <= {int}:
            return token_ids
        if token_ids is not None:
            return [int(token) for token in token_ids]
        if text is None and messages:
            raise NotImplementedError(
                f"{self._label} reports no token ids of chats with images; serve the model with vLLM and set"
                " server_type to 'vllm'"
            )
        if text is None:
            raise ValueError("a request for tokens or logprobs needs input_ids or prompt")
        return await asyncio.to_thread(lambda: encode_prompt(self.tokenizer, text))

    async def _ask_weight_version(self) -> str | None:
        """Return the server's current weight version; None if it reports none."""
        for path in self.version_paths:
            try:
                status, body = await self._peer.get(path, timeout_s=HEALTH_TIMEOUT_S)
            except EngineUnavailable as e:
                # Do not discard a sample for lack of its version; if the server is down, sampling fails too.
                logger.debug("%s: no weight version: %s", self._label, e)
                return None
            if is_transient_status(status):
                return None
            info = decoded_or_none(_weight_info, body) if status == 200 else None
            if info is None:
                self.version_paths = tuple(each for each in self.version_paths if each != path)
            elif info.weight_version is not None:
                return str(info.weight_version)
        return None


def check_count(found: Sequence[Any], *, n: int, what: str, where: str) -> None:
    """Raise unless there is one entry per requested completion."""
    if len(found) != n:
        raise EngineProtocolError(f"{where} answered {len(found)} {what}, expected n = {n}")


def check_sampled(token_ids: list[int], logprobs: list[float], *, where: str) -> None:
    """Raise unless every token has one logprob and no id is negative."""
    if len(logprobs) != len(token_ids):
        raise EngineProtocolError(
            f"{where}: {len(logprobs)} logprobs for {len(token_ids)} token ids"
        )
    lowest = array_of(token_ids).min(initial=0)
    if lowest < 0:
        raise EngineProtocolError(f"{where}: token id {lowest} is negative")


def checked_completion(
    tokens: list[int],
    logprobs: list[float],
    finish_reason: Any,
    spans: list[WeightSpan] | None,
    *,
    where: str,
) -> SampledCompletion:
    """Return a completion whose tokens, logprobs and weight versions were checked against each other."""
    tokens, logprobs = joined(tokens), joined(logprobs)
    check_sampled(tokens, logprobs, where=where)
    if spans is not None:
        spans = [span for span in spans if span.num_tokens]
        total = sum(span.num_tokens for span in spans)
        if total != len(tokens) or any(span.num_tokens < 0 for span in spans):
            raise EngineProtocolError(
                f"{where}: weight versions cover {total} tokens of {len(tokens)}"
            )
    return SampledCompletion(tokens, logprobs, finish_reason, spans)


def gather(prompt_tokens: list[int], sampled: Sequence[SampledCompletion]) -> TokenCompletions:
    """Gather the completions of one prompt."""
    return TokenCompletions(
        prompt_tokens,
        [each.tokens for each in sampled],
        [each.logprobs for each in sampled],
        [each.finish_reason for each in sampled],
        weight_versions=[each.weight_versions for each in sampled],
    )


def most_likely(
    pairs: Sequence[tuple[int, float]], num_top: int, *, where: str
) -> list[tuple[int, float]]:
    """Return the `num_top` (at least one) most likely (token id, logprob) pairs of a position of a prompt."""
    num_wanted = max(num_top, 1)
    if len(pairs) < num_wanted:
        raise EngineProtocolError(f"{where} has {len(pairs)} logprobs, expected {num_wanted}")
    return sorted(pairs, key=lambda pair: -pair[1])[:num_wanted]


def take_num_top(keywords: dict[str, Any]) -> int:
    """Remove from the keywords of `get_logprobs` how many likeliest tokens to return, and return it; 0: only the own.

    >>> take_num_top({"top_logprobs": 2}), take_num_top({"top_k": 0, "top_logprobs": 2}), take_num_top({})
    (2, 0, 1)
    """
    given = [keywords.pop(name, None) for name in ("top_k", "top_logprobs")]
    return next((int(k) for k in given if k is not None), 1)


def gather_top(
    prompt_tokens: list[int], positions: Sequence[Sequence[tuple[int, float]]]
) -> dict[str, Any]:
    """Gather the (token id, logprob) pairs at the positions of a prompt, as `APIServer.get_logprobs` returns them."""
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_topk_token_ids": [[token for token, _ in pairs] for pairs in positions],
        "prompt_topk_logprobs": [[logprob for _, logprob in pairs] for pairs in positions],
    }
