"""Search engines for tools: the interface, and BM25 over pages in memory.

Environments take any `SearchEngine`, so that a live one can replace the local pages.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple, Protocol

_K1, _B = 1.5, 0.75
"""Usual constants of BM25: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009."""
_EXCERPT_CHARS = 200


class Hit(NamedTuple):
    title: str
    excerpt: str


class SearchEngine(Protocol):
    """Finds pages and returns them."""

    async def search(self, query: str, *, limit: int) -> list[Hit]:
        """Return the pages that fit the query best, the best first."""

    async def read(self, title: str) -> str:
        """Return the text of a page; KeyError if there is none with this title."""


class LocalPages:
    """Pages in memory, ranked by BM25 over title and text."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        """Index the pages, given as title -> text."""
        self._pages = dict(pages)
        self._postings: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._lengths: dict[str, int] = {}
        for title, text in self._pages.items():
            words = _words(f"{title} {text}")
            self._lengths[title] = len(words)
            for word, count in Counter(words).items():
                self._postings[word].append((title, count))
        self._mean_length = sum(self._lengths.values()) / max(1, len(self._lengths))

    async def search(self, query: str, *, limit: int) -> list[Hit]:
        """See `SearchEngine`; ranks in a thread: a long query over 20,000 pages takes half a second."""
        return await asyncio.to_thread(self._ranked, query, limit)

    def _ranked(self, query: str, limit: int) -> list[Hit]:
        scores: Counter[str] = Counter()
        for word in set(_words(query)):
            found = self._postings.get(word, [])
            rarity = math.log(1 + (len(self._pages) - len(found) + 0.5) / (len(found) + 0.5))
            for title, count in found:
                norm = _K1 * (1 - _B + _B * self._lengths[title] / self._mean_length)
                scores[title] += rarity * count * (_K1 + 1) / (count + norm)  # type: ignore[assignment]
        best = heapq.nlargest(limit, scores, key=lambda title: (scores[title], title))
        return [Hit(title, self._pages[title][:_EXCERPT_CHARS]) for title in best]

    async def read(self, title: str) -> str:
        return self._pages[title]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
