"""A policy in this process in place of an engine: `answer` gets every request, with the chat behind token ids.

Base of what answers an environment's requests without an engine: the trainer (`stepwise.py`), or the rows of an earlier
run (`runtime/replay.py`). The environment's code runs unchanged on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.api_server import APIServer, TokenCompletions, in_process_config
from atroposlib.inference.servers.openai_routes import chat_completion_from, completion_from
from atroposlib.inference.sessions.managed_server import ManagedServer
from atroposlib.inference.sessions.messages import read_messages
from atroposlib.inference.sessions.sequences import PendingTurn

answerer: ContextVar[Any] = ContextVar("answerer", default=None)
"""What answers the requests of the current item, such as an episode; None outside an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A request of the environment."""

    answerer: Any
    """The value of `answerer` for the item."""
    messages: list[Any] | None
    """The conversation; None for a text."""
    prompt: str | None
    prompt_ids: list[int] | None
    """None if only an engine would know them: plain chats, and chats with images."""
    wants_tokens: bool
    """Whether token ids and logprobs are asked for, not only texts."""
    kwargs: Mapping[str, Any]
    """All keywords."""

    @property
    def n(self) -> int:
        return int(self.kwargs.get("n") or 1)


class PolicyAnswer(NamedTuple):
    text: str | None
    finish_reason: str
    prompt_tokens: Sequence[int] = ()
    """[P] This and the next two: only for requests that want tokens."""
    tokens: Sequence[int] = ()
    """[T]"""
    logprobs: Sequence[float] = ()
    """[T]"""
    tool_calls: Any = None


class InProcessPolicy(APIServer):
    """A server whose answers are those of `answer`."""

    def __init__(self, name: str) -> None:
        super().__init__(in_process_config(name))

    @abstractmethod
    async def answer(self, request: PolicyRequest) -> list[PolicyAnswer]:
        """Return `request.n` answers."""

    def serve(self, manager: ServerManager) -> None:
        """Answer the requests of a manager in place of its servers."""
        manager.proxy_url = None
        manager.servers = [self]
        manager.session_class = _ChatNotingSession

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        answers = await self.answer(_request(kwargs))
        messages = [
            {"role": "assistant", "content": answer.text}
            | ({"tool_calls": answer.tool_calls} if answer.tool_calls else {})
            for answer in answers
        ]
        return chat_completion_from(_body("chat.completion", answers, message=messages))

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        answers = await self.answer(_request(kwargs))
        texts = [answer.text or "" for answer in answers]
        return completion_from(_body("text_completion", answers, text=texts))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        answers = await self.answer(_request(kwargs, wants_tokens=True))
        return TokenCompletions(
            list(answers[0].prompt_tokens),
            [list(answer.tokens) for answer in answers],
            [list(answer.logprobs) for answer in answers],
            [answer.finish_reason for answer in answers],
        )


class _Chat(NamedTuple):
    """What a session's request for tokens is about."""

    answerer: Any
    messages: list[dict[str, Any]] | None
    tools: Any


_chat: ContextVar[_Chat | None] = ContextVar("_chat", default=None)


class _ChatNotingSession(ManagedServer):
    """A session that shows the policy the chat, not only its tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # An agent's requests come from other tasks than the one that opened the session.
        self._answerer = answerer.get()

    async def _sample(
        self, turn: PendingTurn, kwargs: dict[str, Any]
    ) -> tuple[PendingTurn, TokenCompletions]:
        given = kwargs.get("messages")
        messages = None if given is None else read_messages(given)
        token = _chat.set(_Chat(self._answerer, messages, kwargs.get("tools")))
        try:
            return await super()._sample(turn, kwargs)
        finally:
            _chat.reset(token)


def _request(kwargs: dict[str, Any], *, wants_tokens: bool = False) -> PolicyRequest:
    chat = (_chat.get() if wants_tokens else None) or _Chat(
        None, kwargs.get("messages"), kwargs.get("tools")
    )
    return PolicyRequest(
        answerer=chat.answerer or answerer.get(),
        messages=chat.messages,
        prompt=kwargs.get("prompt"),
        prompt_ids=kwargs.get("input_ids"),
        wants_tokens=wants_tokens,
        kwargs={**kwargs, "tools": chat.tools},
    )


def _body(kind: str, answers: Sequence[PolicyAnswer], **contents: Sequence[Any]) -> dict[str, Any]:
    """Return the body of a completion; the one keyword has the content of each choice."""
    [(key, values)] = contents.items()
    choices = [
        {"index": i, "finish_reason": answer.finish_reason, "logprobs": None, key: value}
        for i, (answer, value) in enumerate(zip(answers, values, strict=True))
    ]
    return {"id": "", "object": kind, "created": 0, "model": "", "choices": choices}
