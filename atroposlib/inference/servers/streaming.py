"""Tokens on their way: what an engine has sampled so far, told to a listener per completion while its request runs.

A caller listens with `listening`; a server whose route can stream calls `hear` with the tokens as they arrive. The
answer of the call stays the whole answer, checked as ever. A server that cannot stream tells nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

from atroposlib.errors import EngineUnavailable

Listener = Callable[[list[int]], None]
"""Called with each further token or tokens of one completion."""
Hear = Callable[[int, list[int]], None]
"""Called with the index of a completion in its answer, and with each further token or tokens of it."""


class StreamBroken(EngineUnavailable):
    """An answer broke off whose beginning was told already: another one would not continue it."""


class Streamed(Protocol):
    """A completion as the engine reports it."""

    finish_reason: Any
    """None: it has not ended."""


P = TypeVar("P", bound=Streamed)


class StreamedAnswer(ABC, Generic[P]):
    """Collects the completions of an answer from its events."""

    def __init__(self, hear: Hear, *, where: str) -> None:
        self._hear = hear
        self._where = where
        self._found: dict[int, P] = {}
        """By index, with all tokens so far."""

    @abstractmethod
    def add(self, event: bytes) -> None:
        """Take the data of one event, and tell its tokens. Raises msgspec.DecodeError for other data."""

    def whole(self) -> list[P]:
        """Return the completions after the last event. Raises EngineUnavailable if that did not end them."""
        found = [each for _, each in sorted(self._found.items())]
        if not found or any(each.finish_reason is None for each in found):
            raise EngineUnavailable(f"{self._where}: the stream ended before the answer did")
        return found


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
