"""OpenAI's text completions: `POST .../v1/completions`. A prompt that begins with an earlier prompt and its answer
continues that sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atroposlib.proxy import chat
from atroposlib.proxy.chat import Sampling, whole_body
from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.turn import AgentAnswer, AgentRequest
from atroposlib.utils.answer_bodies import text_logprobs


class AgentCompletionBody(Sampling):
    """A request for a text completion."""

    prompt: str | list[Any]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


def read(body: AgentCompletionBody) -> AgentRequest:
    """Translate a request. Raises ProxyError for unsupported parameters."""
    if body.echo or body.suffix or (body.best_of or 1) > (body.n or 1):
        raise ProxyError("echo, suffix and best_of are not supported", param="prompt")
    if (body.logprobs or 0) > 1:
        raise ProxyError("logprobs: only those of sampled tokens are known", param="logprobs")
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise ProxyError("prompt must be one text; send one request per prompt", param="prompt")
    return AgentRequest(
        prompt=prompts[0],
        sampling=body.sampling(),
        n=body.n or 1,
        split=body.split,
        max_context_tokens=body.max_context_tokens,
        wants_logprobs=body.logprobs is not None,
    )


def write(answer: AgentAnswer) -> dict[str, Any]:
    """Return the response body."""
    choices = [
        {
            "text": choice.content or "",
            "logprobs": None if choice.logprobs is None else text_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
    return whole_body(answer, choices)


class Writer(chat.Writer):
    """The events of a streamed text completion."""

    write = staticmethod(write)

    def begin(self, head: AgentAnswer) -> Iterator[bytes]:
        self._head = whole_body(head, [])
        del self._head["usage"]
        return iter(())

    def _said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}
