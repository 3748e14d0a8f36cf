"""Chat and text completions on disk: a request of an earlier run gets its earlier answer (extra `cache`).

Requests repeated within one run are different samples, so the n-th repetition has the n-th answer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import xxhash

from atroposlib.errors import require

_answer = msgspec.json.Decoder(dict[str, Any])


class Table(Protocol):
    """The part of `diskcache.Cache` that is used."""

    def get(self, key: str) -> Any: ...
    def set(self, key: str, value: bytes) -> bool: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Repetitions:
    """How often a request was made in this run."""

    count: int = 0
    unanswered: list[int] = field(default_factory=list)
    """Repetitions that failed; the next request takes their place."""


class AnswerCache:
    """The answers of one server; a folder may be shared by servers and processes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._opened: Table | None = None
        self._repetitions: defaultdict[str, _Repetitions] = defaultdict(_Repetitions)

    async def answer(
        self, request: Mapping[str, Any], send: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Return the stored answer to `request`, with `is_cached`, else store what `send()` returns."""
        encoded = msgspec.json.encode(request, enc_hook=_plain, order="deterministic")
        digest = xxhash.xxh3_128_hexdigest(encoded)
        made = self._repetitions[digest]
        if made.unanswered:
            number = made.unanswered.pop()
        else:
            number, made.count = made.count, made.count + 1
        key = f"{digest}:{number}"
        try:
            stored = await asyncio.to_thread(self._table().get, key)
            with contextlib.suppress(TypeError, msgspec.DecodeError, UnicodeDecodeError):
                return {**_answer.decode(stored), "is_cached": True}
            answer = await send()
        except BaseException:
            made.unanswered.append(number)
            raise
        await asyncio.to_thread(self._table().set, key, msgspec.json.encode(answer))
        return answer

    def close(self) -> None:
        """Close the folder; a later request opens it again."""
        table, self._opened = self._opened, None
        if table is not None:
            table.close()

    def _table(self) -> Table:
        if self._opened is None:
            # Nothing is evicted: an answer costs more than its bytes.
            diskcache = require("diskcache", extra="cache")
            table = diskcache.Cache(self._folder, eviction_policy="none", size_limit=2**62)
            table.disk.fetch = functools.partial(_fetch, table.disk.fetch)
            self._opened = table
        return self._opened


def _fetch(fetch: Callable[..., Any], mode: int, *args: Any, **options: Any) -> Any:
    """Return stored bytes, of the table (mode 1) or of a file (2); None for a pickle, which could run code."""
    return fetch(mode, *args, **options) if mode in (1, 2) else None


def _plain(value: Any) -> Any:
    """Convert pydantic messages, as the request itself does."""
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else str(value)
