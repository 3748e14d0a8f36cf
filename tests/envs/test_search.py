"""BM25 over pages in memory."""

import asyncio

import pytest

from atroposlib.envs.search import LocalPages

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
