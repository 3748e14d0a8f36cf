"""Tokens on their way: what an engine has sampled so far, told to one listener while its request runs.

A caller listens with `listening`; a server whose route can stream calls `heard` with the tokens of a request for one
completion. The answer of the call stays the whole answer, checked as ever. A server that cannot stream tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from atroposlib.errors import EngineUnavailable

Listener = Callable[[list[int]], None]
"""Called with each further token or tokens."""


class StreamBroken(EngineUnavailable):
    """An answer broke off whose beginning was told already: another one would not continue it."""


class Hearing:
    """A listener and whether it was told anything: what it knows cannot be sampled again."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.has_heard = False

    def hear(self, tokens: list[int]) -> None:
        if tokens:
            self.has_heard = True
            self._listener(tokens)


hearing: ContextVar[Hearing | None] = ContextVar("hearing", default=None)
"""Who listens to the current call."""


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Let `listener` hear the tokens of the calls in the block; None: nobody does."""
    token = hearing.set(None if listener is None else Hearing(listener))
    try:
        yield
    finally:
        hearing.reset(token)
