"""uvicorn's HTTP protocol with the limits it lacks: time and size of a request head, and time for an unread body.

`run-api` makes uvicorn use it. limits.py limits the bodies that are read, asyncio the TLS handshakes. The ASGI
extensions named in limits.py are set here.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import sys
import termios
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atroposlib.api.http.limits import (
    ABORT_EXTENSION,
    CROWDED_EXTENSION,
    IS_GONE_EXTENSION,
    RECEIPT_EXTENSION,
)

MAX_CONNECTIONS = 4096
_POLLRDHUP: int | None = getattr(select, "POLLRDHUP", None)
"""Linux only; elsewhere a disconnect is noticed only when the body is read."""
RESERVED_CONNECTIONS = 16
"""Accepted beyond the limit, for vital routes: health checks, and trainers that hold a batch."""


class Connections:
    """The open connections of one server, so that idle ones make room for others.

    At the limit, a new connection closes the longest idle one, unauthorised ones first. If all are busy,
    `RESERVED_CONNECTIONS` more are accepted, for vital routes; further ones are closed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[HubProtocol] = set()
        self._strangers: dict[HubProtocol, None] = {}
        self._known: dict[HubProtocol, None] = {}
        """Idle connections, longest idle first: those without and those with an authorised request so far."""

    def add(self, connection: HubProtocol) -> None:
        """Register a new connection; at the limit, close an idle one, or this one."""
        if len(self._open) >= self.limit:
            idle = next(iter(self._strangers), None) or next(iter(self._known), None)
            if idle is not None:
                self.remove(idle)
                idle.abort()
            elif len(self._open) >= self.limit + RESERVED_CONNECTIONS:
                connection.abort()
                return
        connection.is_crowded = len(self._open) >= self.limit
        self._open.add(connection)
        self._strangers[connection] = None

    @property
    def are_too_many(self) -> bool:
        return len(self._open) > self.limit

    def note_busy(self, connection: HubProtocol) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def note_idle(self, connection: HubProtocol) -> None:
        if connection in self._open:
            idle = self._known if connection.is_authorised else self._strangers
            idle[connection] = None

    def remove(self, connection: HubProtocol) -> None:
        self._open.discard(connection)
        self.note_busy(connection)


class HubProtocol(HttpToolsProtocol):
    HEAD_TIMEOUT_S = 10.0
    """From the connection, or the first byte of a later request, to the end of the head."""
    MAX_HEAD_BYTES = 64 * 2**10
    UNWANTED_BODY_S = 10.0
    """How long a client may keep sending a body after its request was answered. Closing at once would often destroy the
    response in transit."""

    def __init__(self, *args: Any, connections: Connections | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_crowded = False
        """Whether it was accepted beyond the limit."""
        self.is_authorised = False
        """Whether one of its requests was authorised for a route that needs a scope."""
        self._all = connections or Connections(MAX_CONNECTIONS)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._num_head_bytes = 0
        self._on_receipt: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.add(self)
        self._close_after(self.HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_open()
        self._all.remove(self)
        if exc is None:
            self._note_receipt()
        self._on_receipt = None  # uvicorn's timer may still run
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection without waiting for the client to read."""
        self._check_receipt()
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self._check_receipt()
        super().timeout_keep_alive_handler()

    def eof_received(self) -> None:
        self._check_receipt()
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        # Bytes between requests, such as empty lines, end uvicorn's keep-alive timer but begin no request.
        if self._deadline is None and self._is_between_requests():
            self._close_after(self.HEAD_TIMEOUT_S)
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                    b"content-length: 0\r\nconnection: close\r\n\r\n"
                )
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._note_receipt()
        self._is_in_head = True
        self._num_head_bytes = 0
        self.is_crowded = self.is_crowded and self._all.are_too_many
        extensions: dict[str, Any] = {
            IS_GONE_EXTENSION: self._is_gone,
            ABORT_EXTENSION: self.abort,
            RECEIPT_EXTENSION: self._await_receipt,
            CROWDED_EXTENSION: self.is_crowded,
        }
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._keep_open()
        self._all.note_busy(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._all.note_idle(self)
            # For the next request: uvicorn's timer has ended.
            self._close_after(self.HEAD_TIMEOUT_S)

    def on_response_complete(self) -> None:
        # With pipelining, `cycle` is the last request; the answered one had its whole body.
        is_body_missing = not self.pipeline and self.cycle.more_body
        super().on_response_complete()
        self.is_authorised = self.is_authorised or "is_authorised" in self.scope
        if self._is_between_requests():
            self._all.note_idle(self)
        if is_body_missing and not self.transport.is_closing():
            self._close_after(self.UNWANTED_BODY_S)

    def _is_between_requests(self) -> bool:
        cycle = self.cycle
        return cycle is None or (cycle.response_complete and not cycle.more_body)

    def _close_after(self, seconds: float) -> None:
        self._keep_open()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _keep_open(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _await_receipt(self, on_receipt: Callable[[], None]) -> None:
        self._on_receipt = on_receipt

    def _check_receipt(self) -> None:
        """Before the connection ends: an answer of which not all has arrived counts as not received."""
        if self._on_receipt is not None and self._num_unreceived_bytes() > 0:
            self._on_receipt = None

    def _note_receipt(self) -> None:
        on_receipt, self._on_receipt = self._on_receipt, None
        if on_receipt is not None:
            on_receipt()

    def _num_unreceived_bytes(self) -> int:
        """Return the bytes written that the client's system has not acknowledged; 0 where that is unknown."""
        connection = self.transport.get_extra_info("socket")
        if sys.platform != "linux" or connection is None:
            return 0
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))  # man 7 tcp: SIOCOUTQ
        return int.from_bytes(queued, sys.byteorder) + self.transport.get_write_buffer_size()

    def _is_gone(self) -> bool:
        """Whether the client has disconnected, by the socket: a paused transport does not notice."""
        if self.transport.is_closing():
            return True
        connection = self.transport.get_extra_info("socket")
        if _POLLRDHUP is None or connection is None:
            return False
        poll = select.poll()
        poll.register(connection.fileno(), _POLLRDHUP)
        return bool(poll.poll(0))
