"""A policy in this process in place of an engine: it gets every request, with the chat behind token ids.

Base of what answers an environment's requests without an engine: the trainer (`stepwise.py`), or the rows of an earlier
run (`runtime/replay.py`). The environment's code runs unchanged on it.
"""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar
from typing import Any, NamedTuple

from atroposlib.inference.answerer import Ask, InProcessServer
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.api_server import in_process_config
from atroposlib.inference.sessions.managed_server import ManagedServer, SampledAnswer
from atroposlib.inference.sessions.sequences import PendingTurn

answerer: ContextVar[Any] = ContextVar("answerer", default=None)
"""What answers the requests of the current item, such as an episode; None outside an item."""


class _Chat(NamedTuple):
    """What a session's request for tokens is about."""

    answerer: Any
    messages: list[dict[str, Any]] | None
    tools: Any


_chat: ContextVar[_Chat | None] = ContextVar("_chat", default=None)


def current_answerer() -> Any:
    """Return the `answerer` of the item that asks; None outside an item."""
    chat = _chat.get()
    return (chat and chat.answerer) or answerer.get()


class InProcessPolicy(InProcessServer):
    """A server that also gets the messages of the chat whose tokens a session asks for."""

    def __init__(self, name: str) -> None:
        super().__init__(in_process_config(name))

    def serve(self, manager: ServerManager) -> None:
        """Answer the requests of a manager in place of its servers."""
        manager.proxy_url = None
        manager.servers = [self]
        manager.session_class = _ChatNotingSession

    def read(self, kwargs: dict[str, Any], *, wants_tokens: bool = False) -> Ask:
        ask, chat = super().read(kwargs, wants_tokens=wants_tokens), _chat.get()
        if chat is None:
            return ask
        keywords = {**kwargs, "tools": chat.tools}
        return dataclasses.replace(ask, messages=chat.messages, keywords=keywords)


class _ChatNotingSession(ManagedServer):
    """A session that shows the policy the chat, not only its tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # An agent's requests come from other tasks than the one that opened the session.
        self._answerer = answerer.get()

    async def _sample(
        self,
        turn: PendingTurn,
        kwargs: dict[str, Any],
        messages: list[dict[str, Any]] | None = None,
    ) -> SampledAnswer:
        token = _chat.set(_Chat(self._answerer, messages, kwargs.get("tools")))
        try:
            return await super()._sample(turn, kwargs, messages)
        finally:
            _chat.reset(token)
