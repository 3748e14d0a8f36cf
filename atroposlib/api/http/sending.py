"""Responses too large to buffer per client: sent in pieces, each with a deadline.

A client that does not read is disconnected; until then its response holds bytes of a budget (`limits.ByteBudget`), so
slow clients cannot exhaust the memory. This module also decides whether a plain batch was delivered.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Iterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from atroposlib.api.http.limits import ABORT_EXTENSION, RECEIPT_EXTENSION, HeldBytes
from atroposlib.api.http.payloads import EncodedBody, even_pieces
from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.stores.base import StoredBatch
from atroposlib.errors import AtroposError
from atroposlib.http_bodies import disconnected
from atroposlib.wire import CONTENT_TYPE_JSON

logger = logging.getLogger(__name__)

STALL_S = 30.0
"""A client that accepts no piece for this long is disconnected."""
_SHORT_S = 0.1
"""Pieces that are sent within this time share a deadline."""
_TURNS_TO_NOTICE = 3
"""Event loop iterations between the return of `send` on a broken connection and the disconnect message."""
PIECE_BYTES = 256 * 2**10
"""Piece of a response that is encoded while it is sent. Compressing one takes 4 ms on the event loop."""


class PiecewiseResponse(StreamingResponse):
    """A response in several pieces. It holds `held` until its end; `timeout_s` limits the whole."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        held: HeldBytes,
        *,
        media_type: str = CONTENT_TYPE_JSON,
        headers: dict[str, str] | None = None,
        timeout_s: float,
    ) -> None:
        super().__init__((), media_type=media_type, headers=headers)
        self._pieces = pieces
        self._held = held
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._held:
                await self._send_all(scope, receive, send)
        except (TimeoutError, OSError, AtroposError) as e:
            # Close the connection at once: what is written to it but not read would stay in memory.
            logger.warning("%s %s: cut off: %r", scope["method"], scope["path"], e)
            abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
            if abort is not None:
                abort()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole response. Raises TimeoutError."""
        await self._send_pieces(self._pieces, send)
        await send({"type": "http.response.body", "body": b""})

    async def _send_pieces(self, pieces: Iterable[bytes], send: Send) -> None:
        """Send the head and the pieces, but not the end. Raises TimeoutError."""
        now = asyncio.get_running_loop().time
        end = now() + self._timeout_s
        async with asyncio.timeout(None) as patience:
            start = {"type": "http.response.start", "status": self.status_code}
            await send({**start, "headers": self.raw_headers})
            began = -STALL_S
            for piece in pieces:
                if now() - began > _SHORT_S:  # setting a timer costs as much as sending a piece
                    began = now()
                    patience.reschedule(min(end, began + STALL_S))
                await send({"type": "http.response.body", "body": piece, "more_body": True})


class JsonPieces(PiecewiseResponse):
    """A long JSON text, encoded while it is sent; each of its texts must take only a few milliseconds."""

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_yield(message: Message) -> None:
            await send(message)
            await asyncio.sleep(0)  # other tasks run between two pieces

        # One piece is encoded while the previous one waits for the client.
        await self._held.grow(2 * PIECE_BYTES)
        pieces = even_pieces(self._pieces, PIECE_BYTES)
        await self._send_pieces(pieces, send_and_yield)
        await send({"type": "http.response.body", "body": b""})


class BatchResponse(PiecewiseResponse):
    """A leased batch, which releases each piece once it is sent."""

    def __init__(self, body: EncodedBody, held: HeldBytes, *, timeout_s: float) -> None:
        headers = {"Vary": "Accept, Accept-Encoding", "Content-Length": str(body.num_bytes)}
        if body.encoding is not None:
            headers["Content-Encoding"] = body.encoding
        pieces = _drain(body.pieces, held)
        super().__init__(
            pieces, held, media_type=body.media_type, headers=headers, timeout_s=timeout_s
        )


class PlainBatchResponse(BatchResponse):
    """A batch without a lease, which the hub counts as delivered just before it sends the last byte.

    A client that disconnects before that did not get the batch: its groups go back to the queue. Afterwards the batch
    is never delivered again, even if the hub crashes. It counts as trained once the client has received it; if the
    connection breaks before, it stays `delivered_unconfirmed`: without a lease the hub cannot know.
    """

    def __init__(
        self, body: EncodedBody, held: HeldBytes, run: Coordinator, row: StoredBatch
    ) -> None:
        super().__init__(body, held, timeout_s=row.ttl_s)
        self._last = body.pieces[-1][-1:]
        body.pieces[-1] = body.pieces[-1][:-1]
        self._run = run
        self._row = row

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A server without the extension: at once.
        when_received = scope.get("extensions", {}).get(RECEIPT_EXTENSION, lambda note: note())
        watcher = asyncio.create_task(disconnected(receive))
        is_delivered = False
        try:
            await self._send_pieces(self._while_connected(watcher), send)
            for _ in range(_TURNS_TO_NOTICE):
                await asyncio.sleep(0)
            if not watcher.done():
                is_delivered = await self._run.end_plain(self._row)
            if is_delivered:
                when_received(functools.partial(self._run.note_receipt, self._row))
                await send({"type": "http.response.body", "body": self._last})
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            if not is_delivered:
                await self._run.give_back(self._row)

    def _while_connected(self, watcher: asyncio.Task[None]) -> Iterator[bytes]:
        """Yield pieces while the client is connected, then an empty one: sending it waits for the earlier writes."""
        for piece in self._pieces:
            yield piece
            if watcher.done():
                return
        yield b""


def _drain(pieces: list[bytes], held: HeldBytes) -> Iterator[bytes]:
    """Yield the pieces, releasing each once it is sent."""
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        yield piece
        held.hold(held.num_bytes - len(piece))
