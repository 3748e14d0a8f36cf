"""Search engines for tools: the interface, BM25 over pages in memory, and search services with pages of the web.

What a page says is data of unknown authors: it is bounded, is returned to the model as a tool's result, and only pages
that a search has found can be read, and none of private networks.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import html
import ipaddress
import math
import os
import re
import socket
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import httpx

from atroposlib.errors import ConfigError, EnvError

_K1, _B = 1.5, 0.75
"""Usual constants of BM25: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009."""
_EXCERPT_CHARS = 200
_MAX_PAGE_BYTES = 1 << 18
"""Of a page: what is received, and the same after decompression."""
_LATIN = ("iso-8859-1", "latin-1", "latin1", "windows-1252", "cp1252")
"""Charsets that are read as windows-1252, as browsers do; any other as UTF-8, for some codecs take quadratic time."""
_MAX_REDIRECTS = 3
_MAX_KNOWN_PAGES = 100_000
_TIMEOUT_S = 8.0
"""Of connecting, and of each read of a reply; below `tool_timeout_s`, which is the model's fault."""
_FAULTS_OF_QUERY = (400, 414, 422)
"""Statuses of a service that the model gets as an error; others are not its fault."""
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "2002::/16")))
"""IPv6 addresses that lead to IPv4 ones (RFC 6052, RFC 3056), which may be private."""


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


class Service(NamedTuple):
    """An API that searches the web."""

    url: str
    method: str
    key: tuple[str, str, str]
    """Environment variable, header, and what the header has before the key."""
    asked: tuple[str, str]
    """Parameters: the query, and the number of hits."""
    results: str
    """Where the list of hits is in the reply."""
    fields: tuple[str, str, str]
    """Of a hit: its address, title and excerpt."""


SERVICES = {
    "brave": Service(
        "https://api.search.brave.com/res/v1/web/search", "GET",
        ("BRAVE_API_KEY", "X-Subscription-Token", ""),
        ("q", "count"), "web.results", ("url", "title", "description"),
    ),
    "serper": Service(
        "https://google.serper.dev/search", "POST", ("SERPER_API_KEY", "X-API-KEY", ""),
        ("q", "num"), "organic", ("link", "title", "snippet"),
    ),
    "tavily": Service(
        "https://api.tavily.com/search", "POST", ("TAVILY_API_KEY", "Authorization", "Bearer "),
        ("query", "max_results"), "results", ("url", "title", "content"),
    ),
}  # fmt: skip


class WebPages:
    """Pages of the web, found by one of `SERVICES`; a hit's title is its address."""

    def __init__(
        self, service: str, *, url: str | None = None, allows_private: bool = False
    ) -> None:
        """Read the key; ConfigError without one.

        `url` replaces the service's. `allows_private`: also read pages of private networks.
        """
        self._service = SERVICES[service]
        self._url = url or self._service.url
        self._allows_private = allows_private
        self._known: dict[str, None] = {}
        self._variable, header, prefix = self._service.key
        if not (key := os.environ.get(self._variable)):
            raise ConfigError(f"search by {service} needs its key in {self._variable}")
        self._headers = {header: f"{prefix}{key}"}

    async def search(self, query: str, *, limit: int) -> list[Hit]:
        """See `SearchEngine`. EnvError if the service refuses the key or does not work, as beyond its rate limit."""
        service = self._service
        asked = dict(zip(service.asked, (query, str(limit)), strict=True))
        sent = {"params" if service.method == "GET" else "json": asked}
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=self._headers) as client:
            request: Any = functools.partial(client.request, service.method, self._url)
            try:
                reply = await request(**sent)
            except httpx.TransportError as error:
                raise EnvError(f"{self._url} did not answer: {error!r}") from error
        if reply.status_code in (401, 403):
            raise EnvError(f"{self._url} refuses the key of {self._variable}")
        if not reply.is_success and reply.status_code not in _FAULTS_OF_QUERY:
            raise EnvError(f"{self._url} answered {reply.status_code}: {reply.text[:200]}")
        found = reply.raise_for_status().json()
        for name in service.results.split("."):
            found = found.get(name) or {}
        hits = [[str(each.get(name, "")) for name in service.fields] for each in [*found][:limit]]
        self._known |= dict.fromkeys(address for address, _, _ in hits)
        while len(self._known) > _MAX_KNOWN_PAGES:
            del self._known[next(iter(self._known))]
        return [Hit(address, f"{title}: {text}"[:500]) for address, title, text in hits]

    async def read(self, title: str) -> str:
        """Return the text of a page that was found; KeyError for another one, or one of a private network.

        The request goes to the address that was checked: a name may resolve to another one later, and a proxy may
        resolve it in its own way. ValueError if the page is no text, or in an unknown encoding.
        """
        if title not in self._known:
            raise KeyError(title)
        url = httpx.URL(title)
        once = httpx.Limits(max_keepalive_connections=0)  # another host may have the same address
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, limits=once) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                address = await self._public_address(url)
                async with client.stream(
                    "GET",
                    url.copy_with(host=address),
                    headers={"host": url.netloc.decode(), "accept-encoding": "gzip"},
                    extensions={"sni_hostname": url.raw_host.decode()},
                ) as reply:
                    if not reply.has_redirect_location:
                        return await _text_of_reply(reply.raise_for_status())
                    url = url.join(reply.headers["location"])
        raise KeyError(f"{title} has more than {_MAX_REDIRECTS} redirects")

    async def _public_address(self, url: httpx.URL) -> str:
        """Return an address of a URL's host; KeyError if one of them is in a private network."""
        if url.scheme not in ("http", "https"):
            raise KeyError(str(url))
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(url.host, url.port or 0, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        if not self._allows_private and not all(map(_is_public, addresses)):
            raise KeyError(f"{url} is in a private network")
        return str(addresses[0])


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not any(address in network for network in _TRANSLATED)


async def _text_of_reply(reply: httpx.Response) -> str:
    kind = reply.headers.get("content-type", "")
    if not kind.startswith(("text/", "application/json", "application/xhtml")):
        raise ValueError(f"{reply.url} is no text: {kind}")
    received = bytearray()
    async for chunk in reply.aiter_raw():  # httpx would decompress without a limit
        received += chunk
        if len(received) >= _MAX_PAGE_BYTES:
            break
    page = bytes(received[:_MAX_PAGE_BYTES])
    match reply.headers.get("content-encoding", "identity").lower():
        case "gzip" | "x-gzip":
            unpacker = zlib.decompressobj(zlib.MAX_WBITS + 16)  # of gzip's format
            page = unpacker.decompress(page, _MAX_PAGE_BYTES)
        case "identity":
            pass
        case encoding:
            raise ValueError(f"{reply.url} is encoded as {encoding}")
    charset = "cp1252" if (reply.charset_encoding or "").lower() in _LATIN else "utf-8"
    text = page.decode(charset, "replace")
    return await asyncio.to_thread(text_of_page, text) if "html" in kind else text


_MARK = re.compile(r"(<!(?=--)|-->|<!?[/a-zA-Z?\[][^<>]*>)")
"""A tag, or the begin or end of a comment. Linear: no attempt to match passes the next `<`."""
_NAME = re.compile(r"^<?/?[^\s/>]*")
_HIDDEN = {
    "<!": "--",
    **{f"<{name}": f"</{name}" for name in ("script", "style", "noscript", "template")},
}
"""What begins and ends a part of a page that is not shown."""


def text_of_page(page: str) -> str:
    """Return the visible text of a page of HTML, in linear time; not a parser: `>` in an attribute ends its tag.

    >>> text_of_page("<title>T</title><script>x<y</script><!-- <b>c</b> --><p>a &amp; <b>b</b></p>")
    'T\\na &\\nb'
    """
    pieces = _MARK.split(page)
    shown: list[str] = []
    hidden_until = ""
    for text, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        if not hidden_until and (words := html.unescape(text).split()):
            shown.append(" ".join(words))
        name = _NAME.findall(mark.lower())[0]
        if hidden_until in ("", name):
            hidden_until = _HIDDEN.get(name, "")
    return "\n".join(shown)
