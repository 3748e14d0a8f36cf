"""Requests of runs that another replica serves: passed on to it, both ways in pieces, one hop at most.

`Sender` is ASGI middleware inside of `Access`, so it forwards only what this replica would have served. `Receiver` is
outside of it: it restores the client's address of a request that another replica forwarded, which proves itself by
the secret in this member's row of the database. A request is sent twice only if the first owner cannot have started it.
Answers to native clients name the owner, so that their next requests are not forwarded.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import string
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import quote
from uuid import UUID

import aiohttp
from multidict import CIMultiDict
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from atroposlib.api.http.limits import ABORT_EXTENSION, is_native, refusal
from atroposlib.api.http.metrics import HubMetrics
from atroposlib.api.http.routes import Route
from atroposlib.api.http.sending import STALL_S
from atroposlib.api.run.hub import DEFAULT_RUN
from atroposlib.api.run.replica import Replica
from atroposlib.api.run.types import NoOwner
from atroposlib.api.schemas import REPLICA_HEADER
from atroposlib.http_bodies import disconnected

if TYPE_CHECKING:  # asyncpg is an extra
    from atroposlib.api.stores.postgres.owners import Member

logger = logging.getLogger(__name__)

FIND_OWNER_S = 8.0
"""How long a request waits for an owner of its run."""
_CONNECT_S = 2.0
_KEEP_ALIVE_S = 10.0
"""Shorter than the time after which `run-api` closes idle connections."""
_FORWARDED = "atropos-forwarded"
"""Request header: the owner's secret and the client's address."""
_NOT_OWNER = "atropos-not-owner"
"""Response header: the replica has not started the request, since it does not serve the run."""
_KEPT_BYTES = 64 * 2**10
_KEEP_S = 0.5
"""A body that arrives within this size and time is kept, so that it can be sent again to the next owner."""
_HOP_BY_HOP = frozenset(
    [b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"]
    + [b"trailer", b"transfer-encoding", b"upgrade", b"expect", _FORWARDED.encode()]
)
"""RFC 9110, 7.6.1; `Expect` is answered by this hop."""
_OF_THE_SERVER = frozenset({b"date", b"server"})


class Receiver:
    """ASGI middleware: accepts the requests that other replicas forward, and answers for runs that have moved on."""

    def __init__(self, app: ASGIApp, replica: Replica) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = _FORWARDED.encode()
        sent = [value for name, value in scope.get("headers", ()) if name == header]
        if not sent:
            await self._app(scope, receive, send)
            return
        secret, _, client = sent[0].partition(b" ")
        if not hmac.compare_digest(secret, self._replica.owners.secret.encode()):
            # Meant for a process that had this address earlier.
            answer = _no_owner(503, "another replica has this address now", was_begun=False)
            await answer(scope, receive, send)
            return
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != header]
        scope["client"] = (client.decode("ascii", "replace"), 0) if client else None
        scope["is_forwarded"] = True
        await self._app(scope, receive, send)


class Sender:
    """ASGI middleware: passes requests on to the replica that owns their run, and serves those of its own runs."""

    def __init__(
        self,
        app: ASGIApp,
        replica: Replica,
        metrics: HubMetrics,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._replica = replica
        self._count = metrics.forwarded
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._under_way: dict[UUID, set[asyncio.Timeout]] = {}
        """Requests at each member, to be given up when it is gone."""

    async def open(self) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_sent)
        self._session = aiohttp.ClientSession(
            trace_configs=[trace],
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=self._tls or True
            ),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def watch(self) -> None:
        """Give up requests at members that lapsed: a stopped process keeps its connections open."""
        while not self._replica.changed.is_closed:
            await self._replica.changed.wait(FIND_OWNER_S)
            for member in [each for each in self._under_way if self._replica.is_gone(each)]:
                for patience in self._under_way[member]:
                    _end(patience)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: Route | None = scope.get("hub_route")
        if route is None or route.is_local:
            await self._app(scope, receive, send)
            return
        name: str = scope["run"]
        is_forwarded = scope.get("is_forwarded", False)
        until = time.monotonic() + (0.0 if is_forwarded else FIND_OWNER_S)
        body = _ForwardedBody(receive)
        refused_by: Member | None = None
        while True:
            try:
                owner = await self._replica.find(
                    name,
                    begins=route.begins_run,
                    is_forwarded=is_forwarded,
                    until=until,
                    refused_by=refused_by,
                )
            except NoOwner as e:
                self._count.labels("no_owner").inc()
                await _no_owner(503, str(e), was_begun=not is_forwarded)(scope, receive, send)
                return
            if owner is None:
                with self._replica.serving(name):
                    await self._app(scope, body.replayed(), send)
                return
            if is_forwarded:
                await _no_owner(503, "the run moved", was_begun=False)(scope, receive, send)
                return
            if await self._forward(owner, body, scope, send):
                return
            refused_by = owner

    async def _forward(self, owner: Member, body: _ForwardedBody, scope: Scope, send: Send) -> bool:
        """Pass a request on, and its answer back; False if it was not started and can be sent to another member."""
        is_started = False
        body.is_sent = False

        async def relay(message: Message) -> None:
            nonlocal is_started
            is_started = True
            async with asyncio.timeout(STALL_S):
                await send(message)

        under_way = self._under_way.setdefault(owner.id, set())
        try:
            async with asyncio.timeout(None) as patience:
                under_way.add(patience)
                watcher = asyncio.create_task(body.watch(patience))
                try:
                    is_begun = await self._pass_on(owner, body, scope, relay)
                finally:
                    watcher.cancel()
                    await asyncio.gather(watcher, return_exceptions=True)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            if body.is_gone:
                return True
            tls_error = _tls_refusal(e)
            if not body.is_sent and tls_error is None:
                return False
            self._count.labels("failed").inc()
            logger.warning(
                "%s %s: replica %s: %r", scope["method"], scope["path"], owner.address, e
            )
            abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
            if not is_started:
                text = f"the replica that serves the run broke the connection ({type(e).__name__})"
                if tls_error is not None:
                    text = (
                        f"no TLS connection to the replica at {owner.address}, which serves the run: {tls_error};"
                        " hubs trust the authorities of --ssl-ca-certs and SSL_CERT_FILE"
                    )
                await _no_owner(502, text)(scope, body.receive, send)
            elif abort is not None:
                abort()
            return True
        finally:
            under_way.discard(patience)
            if not under_way:
                self._under_way.pop(owner.id, None)
        if is_begun:
            self._count.labels("answered").inc()
            return True
        if body.is_kept:
            return False
        await _no_owner(503, "the run is moving; try again")(scope, body.receive, send)
        return True

    async def _pass_on(self, owner: Member, body: _ForwardedBody, scope: Scope, send: Send) -> bool:
        """Return whether the owner has started the request; if so, its answer was passed back."""
        assert self._session is not None
        async with self._session.request(
            scope["method"],
            _target(owner, scope),
            headers=_request_headers(owner, scope),
            data=await body.pieces(),
            trace_request_ctx=body,
            allow_redirects=False,
        ) as answer:
            if _NOT_OWNER in answer.headers:
                return False
            headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in _HOP_BY_HOP | _OF_THE_SERVER
            ]
            if is_native(scope):
                replica = f"{owner.id} {owner.address}/runs/{scope['run']}"
                headers.append((REPLICA_HEADER.lower().encode(), replica.encode()))
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        return True


def _no_owner(status: int, text: str, *, was_begun: bool = True) -> JSONResponse:
    answer = refusal(status, "no_owner", text)
    if not was_begun:
        answer.headers[_NOT_OWNER] = "1"
    return answer


class _ForwardedBody:
    """The body of a request that may be sent to several members in turn."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.is_kept = False
        """Whether the whole body is in memory."""
        self.is_gone = False
        """Whether the client disconnected."""
        self.is_sent = False
        """Whether the member that it is sent to may have read some of the request."""
        self._pieces: list[bytes] = []
        self._is_whole = asyncio.Event()
        """Set once the client has sent all of it."""

    async def pieces(self) -> bytes | AsyncIterator[bytes] | None:
        """Return the body to send; None if it is empty."""
        if not self._pieces:
            try:
                async with asyncio.timeout(_KEEP_S):
                    num_kept = 0
                    while not self._is_whole.is_set() and num_kept <= _KEPT_BYTES:
                        self._pieces.append(await self._next())
                        num_kept += len(self._pieces[-1])
            except TimeoutError:
                pass
            self.is_kept = self._is_whole.is_set()
        return (b"".join(self._pieces) or None) if self.is_kept else self._stream()

    async def _next(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise ConnectionResetError("the client disconnected")
        if not message.get("more_body", False):
            self._is_whole.set()
        piece: bytes = message.get("body", b"")
        return piece

    async def _stream(self) -> AsyncIterator[bytes]:
        while self._pieces:
            yield self._pieces.pop(0)
        while not self._is_whole.is_set():
            yield await self._next()

    def replayed(self) -> Receive:
        """Return a `receive` that begins with what was read already."""

        async def receive() -> Message:
            if not self._pieces:
                return await self.receive()
            body = self._pieces.pop(0)
            is_last = not self._pieces and self._is_whole.is_set()
            return {"type": "http.request", "body": body, "more_body": not is_last}

        return receive if self._pieces else self.receive

    async def watch(self, patience: asyncio.Timeout) -> None:
        """End the waiting for the owner when the client disconnects."""
        await self._is_whole.wait()
        await disconnected(self.receive)
        self.is_gone = True
        _end(patience)


def _end(patience: asyncio.Timeout) -> None:
    if not patience.expired():
        patience.reschedule(asyncio.get_running_loop().time())


def _tls_refusal(error: Exception) -> ssl.SSLError | None:
    """Return the refused certificate or protocol, which a retry does not mend; None for a broken connection."""
    cause = error.__cause__ or error
    is_end = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)
    return cause if isinstance(cause, ssl.SSLError) and not is_end else None


async def _note_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.is_sent = True


def _target(owner: Member, scope: Scope) -> URL:
    path: str = scope["raw_path"].decode("ascii")
    if scope["run"] != DEFAULT_RUN and not scope["path"].startswith("/runs/"):
        path = f"/runs/{scope['run']}{path}"
    if query := scope.get("query_string"):
        path += "?" + quote(query, safe=string.punctuation)
    return URL(owner.address + path, encoded=True)


def _request_headers(owner: Member, scope: Scope) -> CIMultiDict[str]:
    headers = CIMultiDict[str]()
    for name, value in scope["headers"]:
        if name.lower() not in _HOP_BY_HOP:
            headers.add(name.decode("latin-1"), value.decode("utf-8", "replace"))
    client = scope.get("client")
    headers[_FORWARDED] = f"{owner.secret} {client[0] if client else ''}"
    return headers
