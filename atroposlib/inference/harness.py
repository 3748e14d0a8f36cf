"""A scripted engine in place of an inference server: for tests, conformance checks and offline demos.

Deterministic and token-exact: the same calls give the same tokens and logprobs, and every answer is one a real engine
could give. Answers come from exact scripts (`set_...`), else from `respond`. Injected faults pass through the same
gate, limiter and retry as a real server's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atroposlib.inference.answerer import (
    Answers,
    Ask,
    Completion,
    InProcessServer,
    Sampled,
    sample_text,
    with_prompt,
    write_chat,
    write_text,
)
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.scripted_answers import (
    ByteTokenizer,
    HarnessRequest,
    Respond,
    answer_from_hash,
    complete,
    made_up_candidates,
    made_up_logprobs,
    request_of,
    vocab_size_of,
)
from atroposlib.inference.servers.api_server import TokenCompletions, WeightSpan
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.token_ids import gather_top, take_num_top
from atroposlib.inference.tools.messages import as_dict


class ServerHarness(InProcessServer):
    """A server that answers from a script."""

    max_backoff_s = 0.0

    def __init__(
        self,
        config: APIServerConfig | None = None,
        reasoning_config: ReasoningConfig | None = None,
        *,
        tokenizer: Any = None,
        respond: Respond | None = None,
        weight_version: str | None = None,
    ) -> None:
        super().__init__(config or APIServerConfig(model_name="test_model"), reasoning_config)
        self.checks_health = False
        self.tokenizer: Any = tokenizer or ByteTokenizer()
        self.respond = respond
        self.weight_version = weight_version
        """Policy version reported for every sampled token; None: none is reported."""
        self.delay_s = 0.0
        """Seconds every request takes."""
        self.requests: list[dict[str, Any]] = []
        """The keywords of every attempt, failed ones included."""
        self._faults: deque[Exception] = deque()
        self.response_map: dict[str, Any] = {}
        """Scripted chats by `conv_to_dictkey` of their messages, and completions by their prompt."""
        self.tokens_and_logprobs_map: dict[str, TokenCompletions] = {}

    # Scripts.

    def conv_to_dictkey(self, input_message: Sequence[Mapping[str, Any]]) -> str:
        """Return the key of a conversation: its roles and contents."""
        return "\n".join(
            f"role:{message.get('role')}\ncontent:{message.get('content')}"
            for message in input_message
        )

    def set_desired_response(
        self, input_message: Sequence[Mapping[str, Any]], desired_response: Any
    ) -> None:
        """Answer `chat_completion` for exactly these messages with this `ChatCompletion`."""
        self.response_map[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Any) -> None:
        """Answer `completion` for exactly this prompt with this `Completion`."""
        self.response_map[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[Any],
    ) -> None:
        """Answer `tokens_and_logprobs_completion` for exactly this prompt text."""
        self.tokens_and_logprobs_map[prompt] = TokenCompletions(
            prompt_tokens, output_tokens_list, output_logprobs_list, finish_reasons
        )

    def fail(self, error: Exception, *, times: int = 1) -> None:
        """Make the next `times` attempts raise `error`, for example `EngineUnavailable` or `ConnectionResetError`."""
        self._faults.extend([error] * times)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        """Answer like an engine; like the other two calls, None if no script matches and `respond` is None."""
        return await self._call("tokens_and_logprobs_completion", kwargs)

    # One attempt.

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        call = len(self.requests)
        self.requests.append(kwargs)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self._faults:
            raise self._faults.popleft()
        return call

    async def _respond(self, ask: Ask, write: Callable[[Answers], Any]) -> Any:
        call = await self._begin(dict(ask.keywords))
        exact = self._exact(ask)
        if exact is not None or self.respond is None:
            return exact
        return await super()._respond(dataclasses.replace(ask, call=call), write)

    def _exact(self, ask: Ask) -> Any:
        """Return the exact script for a request; None if there is none."""
        if ask.wants_tokens:
            scripts = self.tokens_and_logprobs_map
            return scripts.get(str(with_prompt(self.tokenizer, ask).prompt)) if scripts else None
        if ask.messages is None:
            return self.response_map.get(str(ask.prompt))
        messages = [as_dict(message) for message in ask.messages]
        return self.response_map.get(self.conv_to_dictkey(messages))

    async def answer(self, ask: Ask) -> Answers:
        """Answer with the texts of `respond`."""
        ask = with_prompt(self.tokenizer, ask)
        assert ask.prompt_tokens is not None
        sampled = [self._sample(ask, choice) for choice in range(ask.n)]
        return Answers(
            ask.prompt_tokens,
            [complete(self.tokenizer, ask, each, spans_of=self._spans_of) for each in sampled],
        )

    def _sample(self, ask: Ask, choice: int) -> Sampled:
        assert self.respond is not None
        return sample_text(self.tokenizer, self.respond(request_of(ask, choice)), ask.max_tokens)

    def _spans_of(self, num_tokens: int) -> list[WeightSpan] | None:
        version = self.weight_version
        return None if version is None else [WeightSpan(version, num_tokens)]

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        await self._begin(kwargs)
        tokens = with_prompt(self.tokenizer, self.read(kwargs)).prompt_tokens or []
        num_top = take_num_top(kwargs)
        ranked = made_up_candidates(
            tokens,
            num_top=num_top,
            vocab_size=vocab_size_of(self.tokenizer),
            version=self.weight_version,
        )
        return gather_top(tokens, [pairs[: max(num_top, 1)] for pairs in ranked])


def create_chat_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: str | Sequence[str] = "stop"
) -> Any:
    """Build a `ChatCompletion` from one text `n` times or a list of texts; one finish reason for all, or one each."""
    return write_chat(_canned(resp, n, finish_reason))


def create_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: str | Sequence[str] = "stop"
) -> Any:
    """Build a `Completion` from one text `n` times or a list of texts; one finish reason for all, or one each."""
    return write_text(_canned(resp, n, finish_reason))


def _canned(resp: str | Sequence[str], n: int, finish_reason: str | Sequence[str]) -> Answers:
    texts = [resp] * n if isinstance(resp, str) else resp
    reasons = [finish_reason] * len(texts) if isinstance(finish_reason, str) else finish_reason
    pairs = zip(texts, reasons, strict=True)
    return Answers(
        [],
        [
            Completion(tokens=[], logprobs=[], finish_reason=reason, text=text)
            for text, reason in pairs
        ],
    )


__all__ = [
    "ByteTokenizer",
    "HarnessRequest",
    "Respond",
    "ServerHarness",
    "answer_from_hash",
    "create_chat_completion",
    "create_completion",
    "made_up_logprobs",
]
