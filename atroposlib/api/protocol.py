"""uvicorn's HTTP protocol with the limits it lacks: time and size of a request head, and of a body nobody wants.

For `run-api`, which makes uvicorn use it. Bodies that are read have their limits in limits.py; TLS handshakes have
asyncio's. Applications also get the `IS_GONE_EXTENSION` from here.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atroposlib.api.limits import ABORT_EXTENSION, IS_GONE_EXTENSION

_POLLRDHUP: int | None = getattr(select, "POLLRDHUP", None)
"""Only Linux has it; elsewhere a hang-up shows when the body is read."""


class HubProtocol(HttpToolsProtocol):
    """One connection."""

    HEAD_TIMEOUT_S = 10.0
    """From the connection, or the first byte of a later request, to the end of the head."""
    MAX_HEAD_BYTES = 64 * 2**10
    UNWANTED_BODY_S = 10.0
    """How long a client may go on sending a body after its request was answered. Closing at once would often destroy
    the answer on its way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(self.HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_open()
        super().connection_lost(exc)

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
        self._is_in_head = True
        self._num_head_bytes = 0
        extensions: dict[str, Any] = {
            IS_GONE_EXTENSION: self._is_gone,
            ABORT_EXTENSION: self.transport.abort,
        }
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._keep_open()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._close_after(self.HEAD_TIMEOUT_S)  # for the next request: uvicorn's timer is gone

    def on_response_complete(self) -> None:
        # Of pipelined requests `cycle` is the last, and the one that was answered had all its body.
        is_body_missing = not self.pipeline and self.cycle.more_body
        super().on_response_complete()
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

    def _is_gone(self) -> bool:
        """Has the client hung up? Asked of the socket: while nobody reads, the transport does not notice."""
        if self.transport.is_closing():
            return True
        connection = self.transport.get_extra_info("socket")
        if _POLLRDHUP is None or connection is None:
            return False
        poll = select.poll()
        poll.register(connection.fileno(), _POLLRDHUP)
        return bool(poll.poll(0))
