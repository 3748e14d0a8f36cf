"""A scripted engine in place of an inference server: for tests, conformance checks and offline demos.

Deterministic and token-exact: the same calls give the same tokens and logprobs, and every answer is one a real engine
could give. Answers come from exact scripts (`set_...`), else from `respond`. Injected faults pass through the same
gate, limiter and retry as a real server's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.scripted_answers import (
    ByteTokenizer,
    HarnessRequest,
    Respond,
    ScriptedAnswer,
    answer_from_hash,
    answer_tokens,
    made_up_logprobs,
)
from atroposlib.inference.servers.api_server import APIServer, TokenCompletions, WeightSpan
from atroposlib.inference.servers.openai_routes import (
    chat_completion_from,
    completion_from,
)
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.token_ids import SampledCompletion, gather
from atroposlib.inference.tools.tool_messages import as_dict
from atroposlib.utils.answer_bodies import completion_body


class ServerHarness(APIServer):
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
        asked = dict(kwargs)
        raw = await self._call(self._tokens_and_logprobs_completion_wrapper, kwargs)
        return None if raw is None else self._noted(asked, raw)

    # One attempt.

    @property
    def _checks_health(self) -> bool:
        return False

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        call = len(self.requests)
        self.requests.append(kwargs)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self._faults:
            raise self._faults.popleft()
        return call

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        call = await self._begin(kwargs)
        messages = [as_dict(message) for message in kwargs["messages"]]
        scripted = self.response_map.get(self.conv_to_dictkey(messages))
        if scripted is not None or self.respond is None:
            return scripted
        prompt = self._prompt_of(messages)
        return create_chat_completion(self._texts(prompt, call, kwargs), n=_n(kwargs))

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        call = await self._begin(kwargs)
        prompt = kwargs["prompt"]
        scripted = self.response_map.get(prompt)
        if scripted is not None or self.respond is None:
            return scripted
        return create_completion(self._texts(prompt, call, kwargs), n=_n(kwargs))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        call = await self._begin(kwargs)
        prompt_tokens = kwargs.get("input_ids")
        prompt = kwargs.get("prompt")
        if prompt is None and prompt_tokens is None:
            prompt = self._prompt_of(kwargs["messages"])
        elif prompt is None:
            prompt = self.tokenizer.decode(prompt_tokens)
        answer = self.tokens_and_logprobs_map.get(prompt)
        if answer is None:
            if self.respond is None:
                return None
            if prompt_tokens is None:
                prompt_tokens = self.tokenizer.encode(
                    prompt, add_special_tokens="messages" not in kwargs
                )
            answer = self._sample(list(prompt_tokens), prompt, call, kwargs)
        return answer

    def _prompt_of(self, messages: Sequence[Any]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _sample(
        self, prompt_tokens: list[int], prompt: str, call: int, kwargs: dict[str, Any]
    ) -> TokenCompletions:
        version, sampled = self.weight_version, []
        for tokens, reason in self._completions(prompt, call, kwargs):
            spans = None if version is None else [WeightSpan(version, len(tokens))]
            logprobs = made_up_logprobs(prompt_tokens, tokens, spans=spans)
            sampled.append(SampledCompletion(tokens, logprobs, reason, spans))
        return gather(prompt_tokens, sampled)

    def _completions(self, prompt: str, call: int, kwargs: dict[str, Any]) -> list[ScriptedAnswer]:
        """Return the completions of a prompt."""
        limit = int(kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or 2**31)
        texts = self._texts(prompt, call, kwargs)
        return [answer_tokens(self.tokenizer, text, limit=limit) for text in texts]

    def _texts(self, prompt: str, call: int, kwargs: dict[str, Any]) -> list[str]:
        assert self.respond is not None
        return [
            self.respond(HarnessRequest(prompt=prompt, choice=i, call=call, kwargs=kwargs))
            for i in range(_n(kwargs))
        ]


def create_chat_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: str | Sequence[str] = "stop"
) -> Any:
    """Build a `ChatCompletion` from one text `n` times or a list of texts; one finish reason for all, or one each."""
    contents = [{"message": {"role": "assistant", "content": text}} for text in _repeated(resp, n)]
    return chat_completion_from(_body(contents, finish_reason))


def create_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: str | Sequence[str] = "stop"
) -> Any:
    """Build a `Completion` from one text `n` times or a list of texts; one finish reason for all, or one each."""
    contents = [{"text": text} for text in _repeated(resp, n)]
    return completion_from(_body(contents, finish_reason))


def _repeated(resp: str | Sequence[str], n: int) -> Sequence[str]:
    return [resp] * n if isinstance(resp, str) else resp


def _body(contents: Sequence[dict[str, Any]], finish_reason: str | Sequence[str]) -> dict[str, Any]:
    """Return the body of a (chat) completion; `contents` holds the text or the message of each choice."""
    reasons = [finish_reason] * len(contents) if isinstance(finish_reason, str) else finish_reason
    choices = [
        {**content, "finish_reason": reason}
        for content, reason in zip(contents, reasons, strict=True)
    ]
    return {**completion_body(choices, model="test_model"), "id": "test_id", "created": 0}


def _n(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs.get("n") or 1)


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
