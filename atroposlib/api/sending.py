"""Answers that are too large to hold per client: sent piece by piece, each under a deadline.

A client that does not read holds the piece that is on its way, and nothing else for long.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from atroposlib.api.calls import Delivery
from atroposlib.api.coordinator import Coordinator
from atroposlib.api.payloads import EncodedBody

logger = logging.getLogger(__name__)

_TURNS_TO_NOTICE = 3
"""Turns of the event loop between the return of `send` from a broken connection and the message that tells of it."""


class BatchResponse(Response):
    """A batch on its way, piece by piece."""

    def __init__(self, body: EncodedBody, run: Coordinator, *, timeout_s: float) -> None:
        headers = {"Vary": "Accept, Accept-Encoding"}
        headers["Content-Length"] = str(body.num_bytes)
        if body.encoding is not None:
            headers["Content-Encoding"] = body.encoding
        super().__init__(None, media_type=body.media_type, headers=headers)
        self._pieces = body.pieces
        self._run = run
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begin(send)
                *pieces, end = self._pieces
                for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": end})
        except (TimeoutError, OSError) as e:
            self._warn(e)

    async def _begin(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})

    def _warn(self, error: Exception) -> None:
        logger.warning("run %s: a batch could not be sent: %r", self._run.name, error)


class PlainBatchResponse(BatchResponse):
    """A batch without a lease, with a look at whether it got there.

    It counts as delivered when all its bytes were handed to the operating system while the client was still there; what
    the client makes of them nobody can know without a lease.
    """

    def __init__(self, body: EncodedBody, run: Coordinator, delivery: Delivery) -> None:
        super().__init__(body, run, timeout_s=delivery.expires_in_s)
        self._batch_id = delivery.batch_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_disconnect(receive))
        is_whole = False
        *pieces, end = self._pieces
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begin(send)
                for piece in (*pieces, end[:-1]):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    if watcher.done():
                        break
                else:
                    # Returns when what was written before has left the process, or the connection has broken.
                    await send({"type": "http.response.body", "body": b"", "more_body": True})
                    for _ in range(_TURNS_TO_NOTICE):
                        await asyncio.sleep(0)
                    # Nobody leaves content before the last byte: who is gone by now was cut off.
                    is_whole = not watcher.done()
                    if is_whole:
                        last: Message = {"type": "http.response.body", "body": end[-1:]}
                        last["more_body"] = True
                        await send(last)
        except (TimeoutError, OSError) as e:
            self._warn(e)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            if is_whole:
                await self._run.confirm(self._batch_id)
            else:
                await self._run.give_back(self._batch_id)
        if is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
