"""Tokens on their way: what an engine has sampled so far, told to a listener per completion while its request runs.

A caller listens with `listening`; a server whose route can stream calls `hear` with the tokens as they arrive. The
answer of the call stays the whole answer, checked as ever. A server that cannot stream tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from atroposlib.errors import EngineUnavailable

T_co = TypeVar("T_co", covariant=True)

Listener = Callable[[list[int]], None]
"""Called with each further token or tokens of one completion."""
Hear = Callable[[int, list[int]], None]
"""Called with the index of a completion in its answer, and with each further token or tokens of it."""


class StreamBroken(EngineUnavailable):
    """An answer broke off whose beginning was told already: another one would not continue it."""


class StreamedAnswer(Protocol[T_co]):
    """Collects an answer from its events."""

    def add(self, event: bytes) -> None:
        """Take the data of one event, and tell its tokens. Raises msgspec.DecodeError for other data."""

    def whole(self) -> T_co:
        """Return the answer after its last event. Raises EngineUnavailable if that did not end it."""


class Hearing:
    """The listeners of one call and whether they were told anything: what they know cannot be sampled again."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        """One per completion."""
        self.has_heard = False

    def hear(self, number: int, tokens: list[int]) -> None:
        if tokens:
            self.has_heard = True
            self._listeners[number](tokens)


hearing: ContextVar[Hearing | None] = ContextVar("hearing", default=None)
"""Who listens to the current call."""


@contextmanager
def listening(listeners: Sequence[Listener]) -> Iterator[None]:
    """Let each of `listeners` hear the tokens of one completion of the call in the block; empty: no listeners."""
    token = hearing.set(Hearing(listeners) if listeners else None)
    try:
        yield
    finally:
        hearing.reset(token)
