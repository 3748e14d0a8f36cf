"""Request bodies: gzip in and out, size limits."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from atroposlib.api.limits import BodyTooLarge, HubLimits, InvalidGzip, inflate
from tests.api.helpers_api import group, registration, running_hub

GZIP = {"Content-Encoding": "GZip", "Content-Type": "application/json"}


def test_inflate_caps_output_exactly() -> None:
    data = gzip.compress(b"x" * 1000)
    assert inflate(data, max_bytes=1000) == b"x" * 1000
    with pytest.raises(BodyTooLarge):
        inflate(data, max_bytes=999)


def test_inflate_reads_several_members_and_padding() -> None:
    assert inflate(gzip.compress(b"a") + gzip.compress(b"b") + b"\0\0", max_bytes=9) == b"ab"
    with pytest.raises(BodyTooLarge):
        inflate(gzip.compress(b"a") * 10, max_bytes=9)


@pytest.mark.parametrize(
    "data",
    [b"plain", gzip.compress(b"x" * 100)[:-4], zlib.compress(b"x"), gzip.compress(b"x") + b"tail"],
    ids=["plain", "truncated", "zlib", "trailing"],
)
def test_inflate_refuses_what_is_not_gzip(data: bytes) -> None:
    with pytest.raises(InvalidGzip):
        inflate(data, max_bytes=1000)


@pytest.mark.parametrize("offload_bytes", [1, 10**6], ids=["thread", "inline"])
async def test_compressed_request_is_read_and_broken_ones_are_400(offload_bytes: int) -> None:
    async with running_hub(HubLimits(offload_bytes=offload_bytes)) as hub:
        body = gzip.compress(json.dumps(group(2)).encode())
        response = await hub.http.post("/scored_data", content=body, headers=GZIP)
        assert response.json() == {"status": "received"}
        for broken in (b"not gzip", body[:-4], body[:20]):
            response = await hub.http.post("/scored_data", content=broken, headers=GZIP)
            assert (response.status_code, response.text) == (400, "Invalid gzip payload")
        response = await hub.http.post("/scored_data", content=b"", headers=GZIP)
        assert response.status_code == 422


async def test_compressed_control_body_is_read_too() -> None:
    async with running_hub() as hub:
        body = gzip.compress(json.dumps(registration()).encode())
        response = await hub.http.post("/register", content=body, headers=GZIP)
        assert response.status_code == 200


async def test_bomb_and_oversized_bodies_are_413() -> None:
    async with running_hub(HubLimits(max_body_bytes=10_000)) as hub:
        bomb = gzip.compress(b"0" * 10_000_000)
        assert len(bomb) < 10_000
        response = await hub.http.post("/scored_data", content=bomb, headers=GZIP)
        assert response.status_code == 413
        assert "10000 bytes" in response.text
        response = await hub.http.post("/scored_data", content=b" " * 10_001)
        assert response.status_code == 413

        async def chunks():
            for _ in range(11):
                yield b" " * 1000

        response = await hub.http.post("/scored_data", content=chunks())
        assert response.status_code == 413


async def test_only_large_replies_are_compressed_and_only_if_accepted() -> None:
    async with running_hub() as hub:
        await hub.start(batch_size=200)
        await hub.post("/scored_data_list", [group(200), group(200)])
        small = await hub.http.get("/status", headers={"Accept-Encoding": "gzip"})
        assert "content-encoding" not in small.headers
        large = await hub.http.get("/batch", headers={"Accept-Encoding": "gzip"})
        assert large.headers["content-encoding"] == "gzip"
        assert len(large.json()["batch"]) == 1
        plain = await hub.http.get("/batch", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.json() == large.json()
        example = await hub.http.get("/latest_example", headers={"Accept-Encoding": "gzip"})
        assert example.headers["content-encoding"] == "gzip"
