"""A scripted engine in place of an inference server: for tests, conformance checks and offline demos.

Deterministic and token-exact: the same calls give the same tokens and logprobs, and every answer is one a real engine
could have given. Answers come from exact scripts (`set_...`), else from `respond`. Faults come on demand and take the
same path as a real server's: gate, limiter, retry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.api_server import APIServer, TokenCompletions, WeightSpan
from atroposlib.envs.server_handling.chat_template import as_dict
from atroposlib.envs.server_handling.openai_routes import chat_completion_from, completion_from
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import EngineProtocolError, EngineRejected

Respond = Callable[["HarnessRequest"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRequest:
    """What a scripted answer may depend on."""

    prompt: str
    """The prompt as text."""
    choice: int
    """Which of the `n` completions."""
    call: int
    """How many requests came before this one."""
    kwargs: Mapping[str, Any]
    """The call's keywords."""


class ByteTokenizer:
    """UTF-8 bytes as tokens (id = byte + 3), with BOS, EOS and a chat template: a tokenizer that needs no files."""

    pad_token_id = 0
    bos_token_id = 1
    eos_token_id = 2
    all_special_ids = (0, 1, 2)
    vocab_size = 259
    bos_token = "<bos>"
    eos_token = "<eos>"
    pad_token = "<pad>"
    chat_template = "<role>content<eos>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = [self.bos_token_id] if add_special_tokens else []
        pieces = text.split(self.eos_token)
        for i, piece in enumerate(pieces):
            tokens += [byte + 3 for byte in piece.encode()]
            if i < len(pieces) - 1:
                tokens.append(self.eos_token_id)
        return tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        names = {0: self.pad_token, 1: self.bos_token, 2: self.eos_token}
        parts: list[bytes] = []
        for token in tokens:
            if token >= 3:
                parts.append(bytes([token - 3]))
            elif not skip_special_tokens:
                parts.append(names[token].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        text = "".join(
            f"<{message['role']}>{message['content']}{self.eos_token}" for message in messages
        )
        if add_generation_prompt:
            text += "<assistant>"
        return self.encode(text, add_special_tokens=False) if tokenize else text


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
        """Policy version that every sampled token is said to come from; None: the engine does not tell."""
        self.delay_s = 0.0
        """Seconds every request takes."""
        self.requests: list[dict[str, Any]] = []
        """The keywords of every attempt, failed ones included."""
        self._faults: deque[Exception] = deque()
        self._num_misaligned = 0
        self._chats: dict[tuple[str, ...], Any] = {}
        self._completions: dict[str, Any] = {}
        self._tokens: dict[str, TokenCompletions] = {}

    @classmethod
    def answering_anything(
        cls, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> ServerHarness:
        """Return a harness that answers every prompt with a short text drawn from the prompt's hash."""
        return cls(config, reasoning_config, respond=_answer_from_hash)

    # Scripts.

    def set_desired_response(self, messages: Sequence[Mapping[str, Any]], completion: Any) -> None:
        """Answer `chat_completion` for exactly these messages with this `ChatCompletion`."""
        self._chats[_chat_key(messages)] = completion

    def set_desired_completion(self, prompt: str, completion: Any) -> None:
        """Answer `completion` for exactly this prompt with this `Completion`."""
        self._completions[prompt] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[Any],
    ) -> None:
        """Answer `tokens_and_logprobs_completion` for exactly this prompt text."""
        self._tokens[prompt] = TokenCompletions(
            prompt_tokens, output_tokens_list, output_logprobs_list, finish_reasons
        )

    def fail(self, error: Exception, *, times: int = 1) -> None:
        """Let the next `times` attempts raise `error`, for example `EngineUnavailable` or `ConnectionResetError`."""
        self._faults.extend([error] * times)

    def misalign(self, *, times: int = 1) -> None:
        """Fail the next `times` token requests as if the engine had answered one logprob too few."""
        self._num_misaligned += times

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
        scripted = self._chats.get(_chat_key(messages))
        if scripted is not None or self.respond is None:
            return scripted
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return create_chat_completion(self._texts(prompt, call, kwargs), n=_n(kwargs))

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        call = await self._begin(kwargs)
        prompt = kwargs["prompt"]
        scripted = self._completions.get(prompt)
        if scripted is not None or self.respond is None:
            return scripted
        return create_completion(self._texts(prompt, call, kwargs), n=_n(kwargs))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        call = await self._begin(kwargs)
        prompt_tokens = kwargs.get("input_ids")
        prompt = kwargs.get("prompt")
        if prompt is None:
            prompt = self.tokenizer.decode(prompt_tokens)
        answer = self._tokens.get(prompt)
        if answer is None:
            if self.respond is None:
                raise EngineRejected(f"no scripted answer for the prompt {prompt!r:.400}")
            if prompt_tokens is None:
                prompt_tokens = self.tokenizer.encode(prompt)
            answer = self._sample(list(prompt_tokens), prompt, call, kwargs)
        if self._num_misaligned > 0:
            self._num_misaligned -= 1
            raise EngineProtocolError(
                f"{len(answer.output_logprobs[0]) - 1} logprobs for {len(answer.output_tokens[0])} token ids"
            )
        return answer

    def _sample(
        self, prompt_tokens: list[int], prompt: str, call: int, kwargs: dict[str, Any]
    ) -> TokenCompletions:
        limit = int(kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or 2**31)
        all_tokens, all_logprobs, reasons = [], [], []
        for text in self._texts(prompt, call, kwargs):
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            tokens = [*tokens, self.tokenizer.eos_token_id]
            reasons.append("stop" if len(tokens) <= limit else "length")
            tokens = tokens[:limit]
            all_tokens.append(tokens)
            all_logprobs.append(made_up_logprobs(prompt_tokens, tokens))
        spans: list[list[WeightSpan] | None] | None = None
        if self.weight_version is not None:
            spans = [[WeightSpan(self.weight_version, len(tokens))] for tokens in all_tokens]
        return TokenCompletions(
            prompt_tokens, all_tokens, all_logprobs, reasons, weight_versions=spans
        )

    def _texts(self, prompt: str, call: int, kwargs: dict[str, Any]) -> list[str]:
        assert self.respond is not None
        return [
            self.respond(HarnessRequest(prompt=prompt, choice=i, call=call, kwargs=kwargs))
            for i in range(_n(kwargs))
        ]


def made_up_logprobs(prompt_tokens: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return negative numbers that depend on every token before them, so that a mix-up never goes unseen."""
    state = hashlib.blake2b(repr(list(prompt_tokens)).encode(), digest_size=8)
    logprobs = []
    for token in tokens:
        state.update(token.to_bytes(8, "little"))
        logprobs.append(-(1 + int.from_bytes(state.digest()[:2], "little")) / 65536)
    return logprobs


def create_chat_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: str = "stop"
) -> Any:
    """Build a `ChatCompletion` with `n` choices; one string is repeated."""
    return chat_completion_from(
        {
            "id": "test_id",
            "object": "chat.completion",
            "created": 0,
            "model": "test_model",
            "choices": [
                {
                    "index": i,
                    "finish_reason": finish_reason,
                    "logprobs": None,
                    "message": {"role": "assistant", "content": text},
                }
                for i, text in enumerate([resp] * n if isinstance(resp, str) else resp)
            ],
        }
    )


def create_completion(resp: str | Sequence[str], n: int = 1, finish_reason: str = "stop") -> Any:
    """Build a `Completion` with `n` choices; one string is repeated."""
    return completion_from(
        {
            "id": "test_id",
            "object": "text_completion",
            "created": 0,
            "model": "test_model",
            "choices": [
                {"index": i, "finish_reason": finish_reason, "logprobs": None, "text": text}
                for i, text in enumerate([resp] * n if isinstance(resp, str) else resp)
            ],
        }
    )


def _chat_key(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(f"{message.get('role')}:{message.get('content')}" for message in messages)


def _n(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs.get("n") or 1)


def _answer_from_hash(request: HarnessRequest) -> str:
    seed = f"{request.prompt}|{request.choice}".encode()
    return f"answer {int.from_bytes(hashlib.blake2b(seed, digest_size=2).digest(), 'little')}"
