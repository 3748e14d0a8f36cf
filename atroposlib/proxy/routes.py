"""The proxy's endpoints: permissions, requests and responses.

A handler passes requests from HTTP to a `Session` and holds no state; the dialects translate. Every failure, bugs
included, becomes an error body in the form of the API that was called. Called by `create_app`.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.http_bodies import decode_json, disconnected, read_body
from atroposlib.http_guard import CROSS_SITE, foreign_host, is_cross_site
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.sessions.proxy_client import OWNER_HEADER
from atroposlib.proxy import chat, completions, messages, responses
from atroposlib.proxy.engines import Engines
from atroposlib.proxy.errors import ProxyError, error_for, unauthorized
from atroposlib.proxy.sessions import Session, SessionOptions, Sessions
from atroposlib.proxy.stream import AnswerStream, Writer
from atroposlib.proxy.turn import AgentAnswer, AgentRequest
from atroposlib.utils.answer_bodies import model_card
from atroposlib.utils.off_loop import off_loop
from atroposlib.utils.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

THREAD_FROM_BYTES = 256 * 1024
"""Larger bodies are decoded off the event loop: that takes over a millisecond."""
DROPPED_HEADER = "X-Atropos-Dropped"
"""Response header: the sampling parameters and `tools.<type>` of the request that were not used."""


class Routes:
    """The handlers. Each returns a response or raises; `_route` turns exceptions into error bodies."""

    def __init__(self, sessions: Sessions, *, token: str | None, is_private: bool) -> None:
        self._sessions = sessions
        self._token = token
        self._is_private = is_private
        self._own_managers: list[ServerManager] = []
        """Created by `/setup`; earlier ones still serve the sessions that were opened on them."""

    def table(self) -> list[Route]:
        """Return every route; for a private proxy, only those that an agent needs for its own session."""
        table = []
        for prefix in ("", "/{uuid}"):
            table += [
                self._route("GET", f"{prefix}/v1/models", self._models),
                self._route("GET", f"{prefix}/v1/models/{{model:path}}", self._model),
                self._route("POST", f"{prefix}/v1/chat/completions", self._chat),
                self._route("POST", f"{prefix}/v1/chat/completions/render", self._render),
                self._route("POST", f"{prefix}/v1/completions", self._completions),
                self._route("POST", f"{prefix}/v1/responses", self._responses),
                self._route("POST", f"{prefix}/v1/messages", self._messages),
                self._route("POST", f"{prefix}/v1/messages/count_tokens", self._count_tokens),
            ]
        if self._is_private:
            return table
        return [
            self._route("GET", "/health", self._health),
            self._route("POST", "/setup", self._control(self._setup)),
            self._route("GET", "/servers", self._control(self._servers)),
            self._route("POST", "/sessions/create", self._control(self._create)),
            self._route("GET", "/sessions", self._control(self._list)),
            *table,
            self._route("GET", "/{uuid}/nodes", self._nodes),
            self._route("DELETE", "/{uuid}/nodes", self._forget),
            self._route("DELETE", "/{uuid}", self._delete),
        ]

    async def close(self) -> None:
        """Close all sessions, and the managers created by `/setup`."""
        await self._sessions.close_all()
        for manager in self._own_managers:
            await manager.close()

    # Information and control.

    async def _health(self, request: Request) -> Response:
        await self._sessions.expire()
        servers = self._sessions.manager.servers
        return _json(
            {
                "status": "ok",
                "model": self._sessions.model_name,
                "sessions": len(self._sessions.open_sessions()),
                "servers": len(servers),
                "healthy_servers": sum(bool(server.server_healthy) for server in servers),
            }
        )

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        # Any model name that an agent uses means this model.
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return model_card(self._sessions.model_name, owner="atropos")

    async def _servers(self, request: Request) -> Response:
        entries = [
            {
                "index": i,
                "base_url": getattr(server.config, "base_url", None),
                "healthy": bool(server.server_healthy),
                "model_name": server.config.model_name,
                "server_type": getattr(server.config, "server_type", None),
            }
            for i, server in enumerate(self._sessions.manager.servers)
        ]
        return _json({"servers": entries})

    async def _setup(self, request: Request) -> Response:
        engines = await self._body(request, Engines)
        manager = engines.manager()
        if engines.tokenizer_name is not None:
            self._sessions.tokenizer = await asyncio.to_thread(
                load_tokenizer, engines.tokenizer_name
            )
        self._own_managers.append(manager)
        self._sessions.manager = manager
        self._sessions.model_name = engines.model_name
        logger.info("%d engines of %s", len(manager.servers), engines.model_name)
        return _json(
            {
                "status": "ok",
                "servers": len(manager.servers),
                "model_name": engines.model_name,
            }
        )

    async def _create(self, request: Request) -> Response:
        session = await self._sessions.open(await self._body(request, SessionOptions))
        return _json(
            {
                "uuid": session.uuid,
                "model_name": session.model_name,
                "tool_parser": session.options.tool_parser,
                "base_url": session.base_url,
                "agent_base_url": f"{request.base_url}{session.uuid}/v1",
                "created_at": session.created_at,
            }
        )

    async def _list(self, request: Request) -> Response:
        await self._sessions.expire()
        now = time.time()
        entries = [
            {
                "uuid": session.uuid,
                "model_name": session.model_name,
                "base_url": session.base_url,
                "created_at": session.created_at,
                "last_accessed": now - self._sessions.idle_s(session),
                "num_nodes": session.num_nodes,
            }
            for session in self._sessions.open_sessions()
        ]
        return _json({"sessions": entries})

    # Sessions.

    async def _chat(self, request: Request) -> Response:
        session = await self._session(request)
        body = await self._body(request, chat.AgentChatBody)
        ask = chat.read(body)
        writer = chat.Writer(num_choices=ask.n, shows_usage=body.shows_usage)
        return await _reply(request, session, ask, chat.write, body.stream and writer)

    async def _render(self, request: Request) -> Response:
        session = await self._session(request)
        rendered = session.render(chat.read(await self._body(request, chat.AgentChatBody)))
        return _json(
            {
                "prompt_text": rendered.text,
                "token_ids": rendered.tokens,
                "num_tokens": len(rendered.tokens),
            }
        )

    async def _completions(self, request: Request) -> Response:
        session = await self._session(request)
        body = await self._body(request, completions.AgentCompletionBody)
        ask = completions.read(body)
        writer = completions.Writer(num_choices=ask.n, shows_usage=body.shows_usage)
        return await _reply(request, session, ask, completions.write, body.stream and writer)

    async def _responses(self, request: Request) -> Response:
        session = await self._session(request)
        body = await self._body(request, responses.ResponsesBody)
        ask, conversation, tools = responses.read(body, session.responses)
        writer = responses.Writer(body, tools)

        def keep(answer: AgentAnswer) -> None:
            if body.store is not False:
                limit = self._sessions.limits.max_nodes
                responses.remember(session.responses, answer, conversation, at_most=limit)

        return await _reply(
            request,
            session,
            ask,
            functools.partial(responses.write, body=body, tools=tools),
            body.stream and writer,
            keep=keep,
        )

    async def _messages(self, request: Request) -> Response:
        session = await self._session(request)
        body = await self._body(request, messages.MessagesBody)
        writer = body.stream and messages.Writer()
        return await _reply(request, session, messages.read(body), messages.write, writer)

    async def _count_tokens(self, request: Request) -> Response:
        session = await self._session(request)
        rendered = session.render(messages.read(await self._body(request, messages.MessagesBody)))
        return _json({"input_tokens": len(rendered.tokens)})

    async def _nodes(self, request: Request) -> Response:
        session = await self._owned(request)
        # Up to megabytes of numbers, so encoded off the event loop.
        found = {
            "nodes": list(map(dict, session.nodes())),
            "broken_prefixes": session.broken_prefixes,
        }
        return await asyncio.to_thread(_json, found)

    async def _forget(self, request: Request) -> Response:
        session = await self._owned(request)
        session.forget()
        return _json({"status": "forgotten", "uuid": session.uuid})

    async def _delete(self, request: Request) -> Response:
        session = await self._owned(request)
        await self._sessions.close(session.uuid)
        return _json({"status": "deleted", "uuid": session.uuid})

    # Permissions and bodies.

    def _control(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            if self._token is not None and not _same(_key(request), self._token):
                raise unauthorized("the proxy's token is required: Authorization: Bearer TOKEN")
            return await handler(request)

        return checked

    async def _session(self, request: Request) -> Session:
        uuid = request.path_params.get("uuid") or _key(request)
        if uuid is None or (self._token is not None and _same(uuid, self._token)):
            raise unauthorized(
                "the request names no session: use its URL, http://.../<uuid>/v1, or its uuid as the API key"
            )
        return await self._sessions.get(uuid)

    async def _owned(self, request: Request) -> Session:
        """Return the session of a request for its sequences; its agent, without the owner key, is refused."""
        session = await self._session(request)
        key = session.options.owner_key
        if key is not None and not _same(request.headers.get(OWNER_HEADER), key):
            raise ProxyError(
                f"the sequences of this session belong to its opener: send {OWNER_HEADER}",
                status=403,
                type="permission_error",
                code="not_the_owner",
            )
        return session

    async def _body(self, request: Request, model: type[B]) -> B:
        """Read a JSON body into `model`. Raises BodyRefused for one that is too large or not JSON."""
        body = await read_body(request.receive, max_bytes=self._sessions.limits.max_body_bytes)
        is_large = len(body) >= THREAD_FROM_BYTES
        return await off_loop(_parse, body, model) if is_large else _parse(body, model)

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            """Answer every failure with an error body; bugs are logged with their traceback."""
            try:
                self._check_web(request)
                return await handler(request)
            except Exception as e:  # noqa: BLE001 - boundary: one request; bugs are logged
                return _refusal(request, _shown(request, e))

        return Route(path, endpoint, methods=[method])

    def _check_web(self, request: Request) -> None:
        """Refuse requests that a web page made a browser on this machine send."""
        headers, server = request.scope["headers"], request.scope.get("server")
        if is_cross_site(headers):
            raise ProxyError(CROSS_SITE, status=403)
        if self._is_private or self._token is not None:
            return  # a page knows neither the token nor a session's uuid
        host = foreign_host(headers, server=server[0] if server else None)
        if host is not None:
            raise ProxyError(
                f"a proxy without a token serves only its own machine, which {host!r} does not name; call it as"
                " localhost, or start it with a token",
                status=403,
            )


def _parse(body: bytes, model: type[B]) -> B:
    content = decode_json(body, object)
    if not isinstance(content, dict):
        raise ProxyError("the body must be a JSON object")
    return model.model_validate(content)


def _shown(request: Request, fault: Exception) -> ProxyError:
    """Return the error that the client sees; a bug is logged with its traceback."""
    error = error_for(fault)
    if error is None:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=fault)
        error = ProxyError(
            f"{type(fault).__name__}: {fault}",
            status=500,
            type="server_error",
            code="internal_error",
        )
    return error


def _refusal(request: Request, error: ProxyError) -> Response:
    is_anthropic = "/v1/messages" in request.url.path
    body = error.anthropic_body() if is_anthropic else error.body()
    answer = _json(body, status=error.status)
    # The proxy has retried already. The SDKs of OpenAI and Anthropic obey this header.
    answer.headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        answer.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return answer


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _refusal(request, ProxyError(message, status=error.status_code, code="unknown_route"))


def _key(request: Request) -> str | None:
    """Return the key that OpenAI's (Authorization) or Anthropic's (x-api-key) SDK sends."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return request.headers.get("x-api-key")


def _same(given: str | None, secret: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), secret.encode())


def _json(content: Any, *, status: int = 200) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=status, media_type="application/json")


async def _reply(
    request: Request,
    session: Session,
    ask: AgentRequest,
    write: Callable[[AgentAnswer], Any],
    writer: Writer | Literal[False] | None,
    *,
    keep: Callable[[AgentAnswer], None] = lambda answer: None,
) -> Response:
    """Sample an answer and return the response: events if there is a `writer`, else JSON.

    `keep` is called once the answer was written.
    """
    gone = disconnected(request.receive)
    unused = session.unused(ask)
    headers = {DROPPED_HEADER: ", ".join(unused)} if unused else {}
    if not writer:

        def whole(answer: AgentAnswer) -> Response:
            response = _json(write(answer))
            response.headers.update(headers)
            keep(answer)
            return response

        return await session.run(session.ask(ask, whole), gone=gone)
    head = session.head()
    shown = functools.partial(_shown, request)
    stream = AnswerStream(writer, head, error_for=shown, headers=headers)

    def finish(answer: AgentAnswer) -> None:
        stream.finish(answer)
        keep(answer)

    await stream.begin(session.run(session.ask(ask, finish, head=head, say=stream.say), gone=gone))
    return stream
