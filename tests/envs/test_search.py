"""BM25 over pages in memory, and search services with pages, imitated by a server on the loopback."""

import asyncio
import gzip
import json
import socket
import time
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from atroposlib.envs.search import SERVICES, LocalPages, WebPages, text_of_page
from atroposlib.errors import ConfigError, EnvError
from tests.api.helpers_api import serving

PAGES = LocalPages(
    {
        "Heron": "A heron is a bird that eats fish.",
        "Trout": "A trout is a fish. A trout lives in rivers.",
        "Moss": "Moss grows on stones by rivers.",
    }
)


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("heron", ["Heron"]),
        ("Which bird eats fish?", ["Heron", "Trout"]),
        ("trout rivers", ["Trout", "Moss"]),
        ("volcano", []),
        ("", []),
    ],
)
async def test_pages_with_the_rarer_words_come_first(query: str, titles: list[str]) -> None:
    assert [hit.title for hit in await PAGES.search(query, limit=2)] == titles


async def test_no_pages_find_nothing() -> None:
    assert await LocalPages({}).search("fish", limit=2) == []
    with pytest.raises(KeyError):
        await PAGES.read("fish")


async def test_a_search_does_not_block_the_event_loop() -> None:
    search = asyncio.ensure_future(PAGES.search("trout", limit=1))
    await asyncio.sleep(0)
    assert not search.done()
    assert [hit.title for hit in await search] == ["Trout"]


REPLIES: dict[str, Any] = {
    "brave": lambda hits: {"web": {"results": [{"url": u, "title": t, "description": e} for u, t, e in hits]}},
    "serper": lambda hits: {"organic": [{"link": u, "title": t, "snippet": e} for u, t, e in hits]},
    "tavily": lambda hits: {"results": [{"url": u, "title": t, "content": e} for u, t, e in hits]},
}  # fmt: skip
KEYS = {
    "brave": ("x-subscription-token", "the-key"),
    "serper": ("x-api-key", "the-key"),
    "tavily": ("authorization", "Bearer the-key"),
}
WORDS = {"brave": ("q", "count"), "serper": ("q", "num"), "tavily": ("query", "max_results")}


def web(service: str) -> FastAPI:
    """Imitate a service, and the pages that it finds."""
    app = FastAPI()

    async def search(request: Request) -> Any:
        header, key = KEYS[service]
        if request.headers.get(header) != key:
            return Response(status_code=401)
        body = await request.body()
        asked = json.loads(body) if body else dict(request.query_params)
        query, limit = (asked[name] for name in WORDS[service])
        names = ["page", "moved", "loop", "picture", "endless", "bomb", "twice", "more"]
        return REPLIES[service](
            [(f"{request.base_url}{name}", query, f"{limit} " + "x" * 999) for name in names]
        )

    methods = [SERVICES[service].method]
    app.add_api_route("/search", search, methods=methods)
    app.add_api_route("/busy", lambda: Response("slower", status_code=429), methods=methods)
    page = "<html><script>no()</script><h1>Heron</h1><p>It eats <b>fish</b>.</p></html>"
    app.get("/page")(lambda: Response(page, media_type="text/html"))
    app.get("/moved")(lambda: Response(status_code=302, headers={"location": "/page"}))
    app.get("/loop")(lambda: Response(status_code=302, headers={"location": "/loop"}))
    app.get("/picture")(lambda: Response(b"\x89PNG", media_type="image/png"))
    app.get("/endless")(lambda: Response("x" * (3 << 20), media_type="text/plain"))
    bomb = gzip.compress(b"x" * (3 << 20))
    for name, encoding in (("bomb", "gzip"), ("twice", "gzip, gzip")):
        headers = {"content-encoding": encoding}
        app.get(f"/{name}")(lambda h=headers: Response(bomb, headers=h, media_type="text/plain"))
    return app


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_finds_pages_and_only_those_can_be_read(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = SERVICES[service].key[0]
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match=variable):
        WebPages(service)
    with serving(web(service)) as url:
        monkeypatch.setenv(variable, "the-key")
        pages = WebPages(service, url=f"{url}/search", allows_private=True)
        with pytest.raises(KeyError):
            await pages.read(f"{url}/page")
        hits = await pages.search("heron", limit=7)
        assert [hit.title for hit in hits][:2] == [f"{url}/page", f"{url}/moved"]
        assert len(hits) == 7
        assert hits[0].excerpt.startswith("heron: 7 xx")
        assert len(hits[0].excerpt) == 500
        for name in ("page", "moved"):
            assert await pages.read(f"{url}/{name}") == "Heron\nIt eats\nfish\n."
        for name in ("endless", "bomb"):
            assert await pages.read(f"{url}/{name}") == "x" * (1 << 18)
        faults = {"loop": KeyError, "picture": ValueError, "twice": ValueError, "more": KeyError}
        for name, error in faults.items():
            with pytest.raises(error):
                await pages.read(f"{url}/{name}")
        private = WebPages(service, url=f"{url}/search")
        await private.search("heron", limit=5)
        with pytest.raises(KeyError, match="private network"):
            await private.read(f"{url}/page")
        with pytest.raises(EnvError, match="429: slower"):
            await WebPages(service, url=f"{url}/busy").search("heron", limit=5)
        with pytest.raises(EnvError, match="did not answer"):
            await WebPages(service, url="http://127.0.0.1:9/").search("heron", limit=5)
        monkeypatch.setenv(variable, "another")
        with pytest.raises(EnvError, match=variable):
            await WebPages(service, url=f"{url}/search").search("heron", limit=5)


@pytest.mark.parametrize("address", ["127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::1"])
async def test_a_name_is_resolved_once_and_only_to_public_addresses(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads to another address the second time."""
    resolved: list[str] = []

    async def resolve(self: Any, host: str, port: int, **kwargs: Any) -> Any:
        resolved.append(host)
        return [(socket.AF_INET, 1, 6, "", (address if len(resolved) == 1 else "192.0.2.1", port))]

    monkeypatch.setenv("BRAVE_API_KEY", "the-key")
    app = FastAPI()
    app.add_route(
        "/page", lambda request: Response(request.headers["host"], media_type="text/plain")
    )
    with serving(app) as url:
        page = url.replace("127.0.0.1", "pages.example") + "/page"
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
        pages = WebPages("brave", allows_private=address == "127.0.0.1")
        pages._known[page] = None
        if address == "127.0.0.1":
            assert await pages.read(page) == page.split("/")[2]
        else:
            with pytest.raises(KeyError, match="private network"):
                await pages.read(page)
    assert resolved == ["pages.example"]


@pytest.mark.parametrize("text", ["<a ", "<!--", "<", "&#9;", "<script>", "<!-->"])
def test_the_text_of_a_page_takes_linear_time(text: str) -> None:
    begin = time.process_time()
    text_of_page(text * ((1 << 18) // len(text)))
    assert time.process_time() - begin < 1


def test_scripts_comments_and_declarations_are_not_shown() -> None:
    page = "<!DOCTYPE html><!--[if !IE]><!--><p\nclass=x>a<!-- b > c --> 1 < 2 <SCRIPT\nsrc=x>y<z</script >d<!-->e"
    assert text_of_page(page) == "a\n1 < 2\nd\ne"
