"""OpenAI's chat completions: `POST .../v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.stream import DONE, Part, event
from atroposlib.proxy.turn import (
    MAX_CHOICES,
    AgentAnswer,
    AgentBody,
    AgentRequest,
    read_messages,
    read_tools,
)
from atroposlib.utils.answer_bodies import chat_logprobs, completion_body

TokenId = Annotated[int, Strict(), Field(ge=0)]


class StreamOptions(AgentBody):
    include_usage: bool = False


class EngineSampling(AgentBody):
    """Sampling parameters that the opener of a session and the agent may set, under the engine's names."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    stop: str | TokenId | list[str | TokenId] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the given parameters."""
        given = {name: getattr(self, name) for name in EngineSampling.model_fields}
        return {name: value for name, value in given.items() if value not in (None, [], {})}


class Sampling(EngineSampling):
    """What requests for chat and text completions share. None means not given."""

    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    split: Literal["train", "eval"] = "train"
    """Not OpenAI's: the engine budget that the request counts against."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Not OpenAI's: an answer gets what the prompt leaves of it, at least 1 token."""

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.response_format and self.response_format.get("type") != "text":
            given["response_format"] = self.response_format
        return given

    @property
    def shows_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


DISTRIBUTION_KEPT = frozenset({"max_tokens", "stop", "stop_token_ids"})
"""Parameters that do not change the distribution that tokens are drawn from. Engines report logprobs of the model's own
distribution: under filters, penalties, a bias, a minimum length or a forced format, tokens are drawn from another one.
With a fixed seed, all sequences of a group are equal."""


_TAKEN_NAMES = frozenset(
    {
        "self",
        "messages",
        "conversation",
        "conversations",
        "sanitize_control_tokens",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Parameters of `apply_chat_template` and of what it calls, which no variable may replace."""


class AgentChatBody(Sampling):
    """A request for a chat completion."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's extension: variables of the chat template, such as `enable_thinking`."""


def read(body: AgentChatBody) -> AgentRequest:
    """Translate a request. Raises ProxyError for unsupported parameters."""
    if body.functions:
        raise ProxyError("functions are deprecated; describe them as tools", param="functions")
    if body.top_logprobs:
        raise ProxyError(
            "top_logprobs: only the logprobs of sampled tokens are known", param="top_logprobs"
        )
    sampling = body.sampling()
    if body.max_completion_tokens is not None:
        sampling["max_tokens"] = body.max_completion_tokens
    variables = body.chat_template_kwargs or {}
    if taken := sorted(_TAKEN_NAMES & set(variables)):
        raise ProxyError(
            f"chat_template_kwargs must not have {taken[0]!r}", param="chat_template_kwargs"
        )
    return AgentRequest(
        messages=read_messages(body.messages),
        template={"chat_template_kwargs": variables} if variables else {},
        tools=read_tools(body.tools),
        tool_choice=body.tool_choice,
        sampling=sampling,
        n=body.n or 1,
        split=body.split,
        max_context_tokens=body.max_context_tokens,
        wants_logprobs=bool(body.logprobs),
    )


def write(answer: AgentAnswer) -> dict[str, Any]:
    """Return the response body."""
    choices = [
        {
            "message": choice.message(),
            "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
    return whole_body(answer, choices)


def whole_body(answer: AgentAnswer, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a response body with the choices of a chat or a text completion."""
    return completion_body(
        choices,
        model=answer.model,
        num_tokens=(answer.prompt_tokens, answer.completion_tokens),
        id=answer.id,
        created=answer.created,
    )


class Writer:
    """The events of a streamed completion: chunks that differ in their choices."""

    write = staticmethod(write)

    def __init__(self, *, num_choices: int, shows_usage: bool) -> None:
        self._num_choices = num_choices
        self._shows_usage = shows_usage
        self._head: dict[str, Any] = {}

    def begin(self, head: AgentAnswer) -> Iterator[bytes]:
        kind = {"id": f"chatcmpl-{head.id}", "object": "chat.completion.chunk"}
        self._head = {**whole_body(head, []), **kind}
        del self._head["usage"]
        for number in range(self._num_choices):
            yield self._chunk(number, {"role": "assistant", "content": ""})

    def open(self, part: Part) -> Iterator[bytes]:
        if part.call is not None:
            call = {**part.call, "function": {**part.call["function"], "arguments": ""}}
            yield self._chunk(part.choice, {"tool_calls": [{"index": part.num_call, **call}]})

    def piece(self, part: Part, text: str) -> Iterator[bytes]:
        delta: dict[str, Any] = {"content": text}
        if part.kind == "thought":
            delta = {"reasoning_content": text}
        elif part.kind == "call":
            calls = [{"index": part.num_call, "function": {"arguments": text}}]
            delta = {"tool_calls": calls}
        yield self._chunk(part.choice, delta)

    def close(self, part: Part) -> Iterator[bytes]:
        return iter(())

    def end(self, answer: AgentAnswer) -> Iterator[bytes]:
        whole = self.write(answer)
        for choice in whole["choices"]:
            rest = {key: choice[key] for key in ("logprobs", "finish_reason")}
            yield self._chunk(choice["index"], {}, **rest)
        if self._shows_usage:
            yield event({**self._head, "choices": [], "usage": whole["usage"]})
        yield DONE

    def fail(self, error: ProxyError) -> Iterator[bytes]:
        yield event(error.body())

    def _chunk(self, number: int, delta: dict[str, Any], **rest: Any) -> bytes:
        choice = {"index": number, **self._said(delta)}
        choice |= {"logprobs": None, "finish_reason": None, **rest}
        return event({**self._head, "choices": [choice]})

    def _said(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a choice for what was said."""
        return {"delta": delta}
