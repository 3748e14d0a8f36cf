"""An answer as server-sent events, sent while it is sampled.

`AnswerStream` cuts an answer into parts (a thought, a text, one per tool call), each with a beginning, pieces and an
end; a dialect's `Writer` says how these look. Invariant: the pieces of a part, joined, are what the same answer holds
when it is not streamed. The response begins with the first piece, at the latest after `OPEN_AFTER_S`; a failure before
that has its HTTP status, a later one is an event. While nothing is sampled, comments keep the connection alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.inference.tools.thoughts import Spoken
from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.turn import AgentAnswer
from atroposlib.utils.json_lines import on_one_line

DONE = b"data: [DONE]\n\n"
"""Ends a stream of OpenAI's chat and text completions."""
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 1.0
"""Clients give up after seconds without a byte; LangChain after 120, some agents after 3."""
OPEN_AFTER_S = 0.2
"""Most refusals, such as a prompt that is too long, come within this time."""


def event(data: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """Return one event with a JSON payload.

    >>> event({"a": 1}, name="start")
    b'event: start\\ndata: {"a":1}\\n\\n'
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + on_one_line(msgspec.json.encode(data)) + b"\n\n"


@dataclass(slots=True, kw_only=True)
class Part:
    """A thought, the text, or a tool call of one choice."""

    choice: int
    index: int
    """Among the parts of its choice."""
    kind: Literal["thought", "text", "call"]
    call: dict[str, Any] | None = None
    """In the form of chat completions."""
    num_call: int = 0
    """Of a call, its place among the calls of its choice."""
    text: str = ""
    """What was sent; of a call, its arguments."""


class Writer(Protocol):
    """The events of one dialect; a stream has its own writer, which may count them."""

    def begin(self, head: AgentAnswer) -> Iterable[bytes]:
        """Return the events before the first token; `head` has no choices."""

    def open(self, part: Part) -> Iterable[bytes]:
        """Return the events that begin a part, which has no text yet."""

    def piece(self, part: Part, text: str) -> Iterable[bytes]:
        """Return the events for more text of a part."""

    def close(self, part: Part) -> Iterable[bytes]:
        """Return the events that end a part."""

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the events after the last part."""

    def fail(self, error: ProxyError) -> Iterable[bytes]:
        """Return the events of a failure."""


class AnswerStream(Response):
    """The response with the events of one answer: filled while a session samples, from `begin` on."""

    media_type = "text/event-stream"

    def __init__(
        self,
        writer: Writer,
        head: AgentAnswer,
        *,
        error_for: Callable[[Exception], ProxyError],
        headers: Mapping[str, str],
    ) -> None:
        self._writer = writer
        self._error_for = error_for
        self._parts: dict[int, Part] = {}
        """The open part of each choice that has one."""
        self._num_parts: Counter[int] = Counter()
        """Of each choice."""
        self._unsent: list[bytes] = [*writer.begin(head)]
        self._has_news = asyncio.Event()
        self._task: asyncio.Future[Any] = asyncio.Future()
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "Cache-Control": "no-cache"})

    def say(self, choice: int, spoken: Spoken) -> None:
        """Send what is certain of a choice so far: the beginning of its thought and its text."""
        self._extend(choice, "thought", spoken.thought)
        self._extend(choice, "text", spoken.content)

    def finish(self, answer: AgentAnswer) -> None:
        """Send what is left of the whole answer."""
        for number, choice in enumerate(answer.choices):
            self._extend(number, "thought", choice.thought or "")
            needs_text = not choice.tool_calls
            self._extend(number, "text", choice.content or "", even_empty=needs_text)
            for i, call in enumerate(choice.tool_calls):
                self._open(Part(choice=number, index=0, kind="call", call=call, num_call=i))
                self._extend(number, "call", call["function"]["arguments"])
            self._close(number)
        self._add(self._writer.end(answer))

    def _extend(
        self,
        choice: int,
        kind: Literal["thought", "text", "call"],
        whole: str,
        *,
        even_empty: bool = False,
    ) -> None:
        """Send what `whole` has more than was sent of it."""
        part = self._parts.get(choice)
        if part is None or part.kind != kind:
            if not whole and not even_empty:
                return
            if part is not None and (part.kind, kind) == ("text", "thought"):
                return  # a thought ends before the text begins, and was sent whole
            part = self._open(Part(choice=choice, index=0, kind=kind))
        if not whole.startswith(part.text):
            raise AssertionError(
                f"{kind}: {part.text[-80:]!r} was sent and is not in {whole[:80]!r}"
            )
        if piece := whole[len(part.text) :]:
            part.text = whole
            self._add(self._writer.piece(part, piece))

    def _open(self, part: Part) -> Part:
        self._close(part.choice)
        part.index = self._num_parts[part.choice]
        self._num_parts[part.choice] += 1
        self._parts[part.choice] = part
        self._add(self._writer.open(part))
        return part

    def _close(self, choice: int) -> None:
        if (part := self._parts.pop(choice, None)) is not None:
            self._add(self._writer.close(part))

    def _add(self, events: Iterable[bytes]) -> None:
        self._unsent += events
        self._has_news.set()

    # The response.

    async def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        """Start `call`, which fills this stream. Raises what it raises at once."""
        self._task = task = asyncio.ensure_future(call)
        task.add_done_callback(lambda _: self._has_news.set())
        try:
            await self._news(OPEN_AFTER_S)
        except BaseException:
            await self._cancel()
            raise
        if task.done() and (task.cancelled() or task.exception() is not None):
            task.result()

    async def _news(self, timeout_s: float) -> None:
        """Return when there is something to send, the call has ended, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()

    def take(self) -> bytes:
        """Return the events that were not sent yet."""
        self._has_news.clear()
        taken, self._unsent = b"".join(self._unsent), []
        return taken

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the events until the call has ended; its failure is the last event."""
        task = self._task
        while not task.done():
            if events := self.take():
                yield events
            await self._news(KEEP_ALIVE_S)
            if not self._unsent and not task.done():
                yield KEEP_ALIVE
        error: Exception | None
        try:
            error = task.exception()  # type: ignore[assignment]
        except asyncio.CancelledError:
            error = ProxyError("the proxy is shutting down", status=503)
        if error is not None:
            self._add(self._writer.fail(self._error_for(error)))
        yield self.take()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
            async for events in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._cancel()

    async def _cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
