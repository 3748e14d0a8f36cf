"""OpenAI's text completions: `POST .../v1/completions`. A prompt that begins with an earlier prompt and its answer
continues that sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atroposlib.proxy.chat import Sampling, whole_body
from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.stream import DONE, Part, event
from atroposlib.proxy.turn import AgentAnswer
from atroposlib.utils.answer_bodies import text_logprobs


class AgentCompletionBody(Sampling):
    """A request for a text completion."""

    prompt: str | list[Any]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


def read_prompt(body: AgentCompletionBody) -> str:
    """Return the prompt. Raises ProxyError for unsupported parameters."""
    if body.echo or body.suffix or (body.best_of or 1) > (body.n or 1):
        raise ProxyError("echo, suffix and best_of are not supported", param="prompt")
    if (body.logprobs or 0) > 1:
        raise ProxyError("logprobs: only those of sampled tokens are known", param="logprobs")
    if isinstance(body.prompt, str):
        return body.prompt
    if len(body.prompt) == 1 and isinstance(body.prompt[0], str):
        return body.prompt[0]
    raise ProxyError("prompt must be one text; send one request per prompt", param="prompt")


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


class Writer:
    """The events of a streamed text completion."""

    def __init__(self, *, shows_usage: bool) -> None:
        self._shows_usage = shows_usage
        self._head: dict[str, Any] = {}

    def begin(self, head: AgentAnswer) -> Iterator[bytes]:
        self._head = whole_body(head, [])
        del self._head["usage"]
        return iter(())

    def open(self, part: Part) -> Iterator[bytes]:
        return iter(())

    def piece(self, part: Part, text: str) -> Iterator[bytes]:
        yield self._chunk({"index": part.choice, "text": text})

    def close(self, part: Part) -> Iterator[bytes]:
        return iter(())

    def end(self, answer: AgentAnswer) -> Iterator[bytes]:
        whole = write(answer)
        for choice in whole["choices"]:
            yield self._chunk({**choice, "text": ""})
        if self._shows_usage:
            yield event({**self._head, "choices": [], "usage": whole["usage"]})
        yield DONE

    def fail(self, error: ProxyError) -> Iterator[bytes]:
        yield event(error.body())

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        filled = {"logprobs": None, "finish_reason": None, **choice}
        return event({**self._head, "choices": [filled]})
