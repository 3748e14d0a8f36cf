"""Bodies that the servers refuse: too large, too slow, cut off, no JSON, nested too deeply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from atroposlib.http_bodies import BodyRefused, Receive, decode_json, read_body


def receiving(*chunks: bytes, ends: bool = True) -> Receive:
    """Return the `receive` of a client that sends these chunks, and then nothing more or a disconnect."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": not ends or i < len(chunks) - 1}
        for i, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


async def test_a_body_in_pieces_is_joined_up_to_its_limit() -> None:
    assert await read_body(receiving(b"ab", b"", b"cd"), max_bytes=4) == b"abcd"
    assert await read_body(receiving(b""), max_bytes=0) == b""


@pytest.mark.parametrize(
    ("receive", "status"), [(receiving(b"ab", b"cde"), 413), (receiving(b"ab", ends=False), 499)]
)
async def test_a_body_that_is_not_taken_has_a_status(receive: Receive, status: int) -> None:
    with pytest.raises(BodyRefused) as refused:
        await read_body(receive, max_bytes=4)
    assert refused.value.status == status


async def test_a_body_that_does_not_arrive_is_408() -> None:
    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(BodyRefused, match="within"):
        await read_body(never, timeout_s=0.01)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "not_json"),
        (b"\xff", "not_json"),
        (b'{"a": "\\ud800"}', "not_json"),
        (b'{"a":' * 100_000, "nested_too_deeply"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested_too_deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_400(body: bytes, code: str) -> None:
    with pytest.raises(BodyRefused) as refused:
        decode_json(body, dict[str, Any])
    assert (refused.value.status, refused.value.code) == (400, code)


def test_an_empty_body_is_an_empty_object() -> None:
    assert decode_json(b"", dict[str, Any]) == {}


def test_types_are_the_callers_to_explain() -> None:
    import msgspec

    kinds: Sequence[bytes] = [b"[]", b"1", b"null"]
    for body in kinds:
        with pytest.raises(msgspec.ValidationError):
            decode_json(body, dict[str, Any])
