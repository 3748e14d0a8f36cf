"""Bodies are decoded and encoded exactly, wherever that runs; processes are replaced and never left behind."""

from __future__ import annotations

import asyncio
import errno
import functools
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from atroposlib import wire
from atroposlib.api.http import decoding, payloads
from atroposlib.api.http.payloads import (
    DecoderUnavailable,
    EncodedBody,
    GroupCodec,
    choose_encoding,
    is_packed,
)
from atroposlib.api.stores.base import NewGroup
from atroposlib.errors import GroupError
from atroposlib.scored_data import GroupHeader, Strictness, check_group
from atroposlib.wire import CONTENT_TYPE_JSON, CONTENT_TYPE_PACKED
from tests.api.helpers_api import FOURTEEN_KEYS, group, running_hub

LEASE = {"step": 3, "batch_id": 7, "lease_id": "abc", "epoch": 1, "expires_in_s": 900.0}


@pytest.fixture
async def codec() -> AsyncIterator[GroupCodec]:
    codec = GroupCodec(decoder_timeout_s=30.0)
    yield codec
    await codec.close()


def big_group(num_tokens: int = 40_000, **changes: Any) -> dict[str, Any]:
    """Two sequences, and more text than is decoded on the event loop."""
    row = list(range(num_tokens // 2))
    logprobs = [-i / 7 for i in row]
    return (
        group(tokens=[row, row], masks=[row, row], inference_logprobs=[logprobs, logprobs])
        | changes
    )


def json_body(value: Any) -> bytes:
    return json.dumps(value).encode()


def stored(*groups: dict[str, Any]) -> list[bytes]:
    """Return payloads as the hub stores them."""
    return list(map(wire.pack_group, wire.iter_json_groups(json_body(groups), many=True)))


def packed_body(*groups: dict[str, Any]) -> bytes:
    return wire.join_packed(stored(*groups))


def everything_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_LIGHT_JSON_BYTES", -1)
    monkeypatch.setattr(decoding, "_LIGHT_PACKED_BYTES", -1)


def process_id(codec: GroupCodec) -> int | None:
    """The decoder process that waits for work."""
    return None if codec._decoder is None else codec._decoder._process.pid


def big_blob(num_tokens: int) -> bytes:
    """A stored payload, made without decoding a body."""
    row = np.arange(num_tokens // 2)
    group = {"tokens": [row] * 2, "masks": [row] * 2, "scores": [0.0, 1.0]}
    checked = check_group(group | {"ref_logprobs": [-row / 7] * 2}, strictness=Strictness.WIRE)
    return wire.pack_group(checked)


def content(body: EncodedBody) -> bytes:
    joined = b"".join(body.pieces)
    if body.encoding == "gzip":
        return gzip.decompress(joined)
    if body.encoding == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(joined)
    return joined


@pytest.mark.parametrize("place", ["loop", "process"])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_decodes_to_the_same_groups_wherever_it_is_decoded(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch, place: str, packed: bool
) -> None:
    sent = [
        group(env_id=3, group_id="a", policy_version=9, messages=[[], []]),
        group(3, group_id="b", images={"x": [1]}),
    ]
    if place == "process":
        everything_in_a_process(monkeypatch)
    body = packed_body(*sent) if packed else json_body(sent)
    content_type = CONTENT_TYPE_PACKED if packed else CONTENT_TYPE_JSON
    got = await codec.decode(memoryview(body), content_type=content_type, many=True)
    assert (process_id(codec) is not None) is (place == "process")
    first, second = got
    digest, other = (wire.content_digest(each.payload) for each in got)
    assert first.header == GroupHeader(
        env_id=3,
        num_sequences=2,
        num_tokens=4,
        policy_version=9,
        group_id="a",
        digest=digest,
        num_bytes=len(first.payload),
    )
    assert second.header.digest == other
    assert (second.header.group_id, second.header.num_sequences) == ("b", 3)
    for want, have in zip(sent, got, strict=True):
        text = json.loads(b"".join(wire.json_pieces(have.payload)))
        assert {k: text[k] for k in want if k in text} == {
            k: v for k, v in want.items() if k in FOURTEEN_KEYS
        }


async def test_the_event_loop_decodes_and_encodes_one_piece_in_each_of_its_rounds(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rounds = 0
    worked_in: list[int] = []

    async def count_rounds() -> None:
        nonlocal num_rounds
        while True:
            num_rounds += 1
            await asyncio.sleep(0)

    def noting(body: decoding.Body, **kwargs: bool) -> list[NewGroup]:
        worked_in.append(num_rounds)
        return decoding.decode_body(body, **kwargs)

    monkeypatch.setattr(payloads, "decode_body", noting)
    monkeypatch.setattr(payloads, "_TURN_S", 0.0)
    monkeypatch.setattr(payloads, "_SHORT_S", 0.0)
    counting = asyncio.create_task(count_rounds())
    body = json_body(group())
    decode = functools.partial(codec.decode, content_type=CONTENT_TYPE_JSON, many=False)
    await asyncio.gather(*(decode(body) for _ in range(8)))
    assert len(set(worked_in)) == 8

    before = num_rounds
    batch = await codec.encode_batch(stored(group()) * 600, {}, packed=False, encoding=None)
    counting.cancel()
    assert num_rounds - before > 600
    assert len(json.loads(content(batch))["batch"]) == 600


@pytest.mark.parametrize("place", ["loop", "process"])
async def test_a_refusal_keeps_its_path_wherever_it_is_found(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "process":
        everything_in_a_process(monkeypatch)
    good, bad = group(), group(masks=[[1], [2, 3]])
    path = r"^\[1\].sequences\[0\].masks: 1 values for 2 tokens"
    with pytest.raises(GroupError, match=path):
        await codec.decode(json_body([good, bad]), content_type=CONTENT_TYPE_JSON, many=True)
    blobs = [bytes(blob) for blob in wire.split_packed(packed_body(good, good)).blobs]
    blobs[1] = msgspec.msgpack.encode(msgspec.msgpack.decode(blobs[1]) | {"trained": b""})
    message = wire.join_packed(blobs)
    with pytest.raises(GroupError, match=r"^\[1\].trained: 0 bytes"):
        await codec.decode(message, content_type=CONTENT_TYPE_PACKED, many=True)
    with pytest.raises(GroupError, match="groups: 2 in the message, expected 1"):
        await codec.decode(message, content_type=CONTENT_TYPE_PACKED, many=False)
    got = await codec.decode(json_body(good), content_type=CONTENT_TYPE_JSON, many=False)
    assert len(got) == 1


@pytest.mark.parametrize("place", ["loop", "process"])
async def test_what_no_trainer_can_use_is_refused_when_packed_and_handed_on_as_json(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "process":
        everything_in_a_process(monkeypatch)
    sent = group(inference_logprobs=[[1.0, 0.5], [1.0, -0.5]])
    with pytest.raises(
        GroupError, match=r"^sequences\[0\].inference_logprobs\[1\]: 0.5 at a trained"
    ):
        await codec.decode(packed_body(sent), content_type=CONTENT_TYPE_PACKED, many=False)
    [got] = await codec.decode(json_body(sent), content_type=CONTENT_TYPE_JSON, many=False)
    text = json.loads(b"".join(wire.json_pieces(got.payload)))
    assert text["inference_logprobs"] == sent["inference_logprobs"]


def test_objects_by_the_thousand_are_not_for_the_event_loop() -> None:
    sent = group(messages=[[{"role": "user", "content": i} for i in range(12_000)]] * 2)
    for body, packed in ((json_body(sent), False), (packed_body(sent), True)):
        assert len(body) < 2**20
        assert not decoding.is_light(body, is_packed=packed)


async def test_the_event_loop_runs_while_a_body_is_decoded(codec: GroupCodec) -> None:
    body = json_body(big_group(100_000))
    task = asyncio.create_task(codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False))
    num_turns = 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns > 100
    assert process_id(codec) is not None
    [got] = await task
    assert got.header.num_tokens == 100_000


async def test_a_process_that_was_killed_is_replaced_and_none_outlives_the_codec(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    everything_in_a_process(monkeypatch)
    body = json_body(big_group())
    await codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False)
    pid = process_id(codec)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    [got] = await codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False)
    assert got.header.num_tokens == 40_000
    assert "ended unexpectedly" in caplog.text
    second = process_id(codec)
    assert second not in (pid, None)
    await codec.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second or 0, 0)


async def test_a_body_that_ends_two_processes_is_refused(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_in_a_process(monkeypatch)
    deadly = (
        "import os\n"
        "from atroposlib.api.http import decoding\n"
        "decoding.decode_body = lambda *_, **__: os._exit(1)\n"
        "decoding.main()\n"
    )
    monkeypatch.setattr(payloads, "_DECODER_COMMAND", ("-c", deadly))
    with pytest.raises(GroupError, match="ended the decoder process, twice"):
        await codec.decode(json_body(big_group()), content_type=CONTENT_TYPE_JSON, many=False)
    assert process_id(codec) is None


def no_process(*_: Any, **__: Any) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


async def test_without_a_decoder_process_the_answer_is_later_and_not_that_the_body_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything_in_a_process(monkeypatch)
    exits = ("-c", "raise SystemExit(1)")  # while it imports what it needs
    async with running_hub() as hub:
        await hub.start()
        for owner, name, value in (
            (subprocess, "Popen", no_process),
            (payloads, "_DECODER_COMMAND", exits),
        ):
            for headers in ({}, {"Atropos-Client": "test"}):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, value)
                    answer = await hub.http.post("/scored_data", json=group(), headers=headers)
                assert answer.status_code == 503
                assert answer.json()["detail"]["type"] == "decoder_unavailable"
                assert "Retry-After" in answer.headers
        assert not any((await hub.balanced_ledger())["rejected"].values())
        assert await hub.post("/scored_data", group()) == {"status": "received"}


async def test_a_bug_in_the_process_is_raised_in_the_hub_with_its_traceback(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_in_a_process(monkeypatch)
    broken = (
        "from atroposlib.api.http import decoding\n"
        "def explode(*_, **__): raise KeyError('boom')\n"
        "decoding.decode_body = explode\n"
        "decoding.main()\n"
    )
    monkeypatch.setattr(payloads, "_DECODER_COMMAND", ("-c", broken))
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*in explode.*KeyError: 'boom'"):
        await codec.decode(json_body(big_group()), content_type=CONTENT_TYPE_JSON, many=False)
    assert process_id(codec) is not None


async def test_a_body_that_takes_too_long_is_refused_and_its_process_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything_in_a_process(monkeypatch)
    codec = GroupCodec(decoder_timeout_s=0.001)
    body = json_body(big_group())
    with pytest.raises(DecoderUnavailable, match="does not start"):
        await codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False)
    assert process_id(codec) is None
    codec._decoder_timeout_s = 30.0
    await codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False)
    codec._decoder_timeout_s = 0.001
    with pytest.raises(GroupError, match=r"takes more than 0.001 s; send fewer groups"):
        await codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False)
    assert process_id(codec) is None
    await codec.close()


async def test_a_body_that_needs_too_much_memory_is_refused_and_the_next_is_served(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_in_a_process(monkeypatch)
    monkeypatch.setattr(payloads, "_DECODER_MEMORY_BYTES", 400 * 2**20)
    hostile = b'{"tokens":[[' + b"777," * 8_000_000 + b'7]],"masks":[],"scores":[]}'
    with pytest.raises(GroupError, match="more memory than one request may take"):
        await codec.decode(hostile, content_type=CONTENT_TYPE_JSON, many=False)
    pid = process_id(codec)
    assert pid is not None
    [got] = await codec.decode(json_body(group()), content_type=CONTENT_TYPE_JSON, many=False)
    assert got.header.num_sequences == 2
    big = await codec.decode(json_body(big_group()), content_type=CONTENT_TYPE_JSON, many=False)
    assert big[0].header.num_tokens == 40_000
    assert process_id(codec) == pid


async def test_a_cancelled_decode_ends_its_process_and_frees_its_slot(
    codec: GroupCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_in_a_process(monkeypatch)
    monkeypatch.setattr(payloads, "_DECODER_COMMAND", ("-c", "import time; time.sleep(60)"))
    body = json_body(big_group())
    task = asyncio.create_task(codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False))
    while codec._decoder is None:  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0)
    process = codec._decoder._process
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process_id(codec) is None
    assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    monkeypatch.undo()
    [got] = await codec.decode(body, content_type=CONTENT_TYPE_JSON, many=False)
    assert got.header.num_tokens == 40_000


@pytest.mark.parametrize("encoding", [None, "gzip", "zstd"])
async def test_an_original_client_is_handed_its_groups_and_nothing_else(
    codec: GroupCodec, encoding: str | None
) -> None:
    sent = [big_group(env_id=0, group_id="a"), group(ref_logprobs=[])]
    body = await codec.encode_batch(stored(*sent), {"step": 1}, packed=False, encoding=encoding)
    reply = json.loads(content(body))
    assert (body.media_type, body.encoding) == (CONTENT_TYPE_JSON, encoding)
    assert list(reply) == ["batch"]
    for want, have in zip(sent, reply["batch"], strict=True):
        assert list(have) == FOURTEEN_KEYS
        assert have == dict.fromkeys(FOURTEEN_KEYS) | {
            k: v for k, v in want.items() if k in FOURTEEN_KEYS
        }


async def test_rollouts_sent_as_json_are_handed_out_as_json(codec: GroupCodec) -> None:
    sent = stored(group() | {"rollout": [3, 3]}, group())
    body = await codec.encode_batch(sent, {}, packed=False, encoding=None)
    first, second = json.loads(content(body))["batch"]
    assert list(first) == [*FOURTEEN_KEYS, "rollout"]
    assert first["rollout"] == [3, 3]
    assert list(second) == FOURTEEN_KEYS


async def test_a_lease_lies_beside_the_batch_in_json(codec: GroupCodec) -> None:
    body = await codec.encode_batch(stored(group(), group(3)), LEASE, packed=False, encoding=None)
    reply = json.loads(content(body))
    assert [len(each["tokens"]) for each in reply.pop("batch")] == [2, 3]
    assert reply == LEASE
    empty = await codec.encode_batch([], LEASE, packed=False, encoding=None)
    assert json.loads(content(empty)) == LEASE | {"batch": []}


@pytest.mark.parametrize("encoding", [None, "gzip", "zstd"])
async def test_a_packed_batch_holds_the_stored_blobs_untouched(
    codec: GroupCodec, encoding: str | None
) -> None:
    blobs = [*stored(group(), group(5)), big_blob(40_000), big_blob(60_000)]
    body = await codec.encode_batch(blobs, LEASE, packed=True, encoding=encoding)
    envelope = wire.split_packed(content(body))
    assert (body.media_type, body.encoding) == (CONTENT_TYPE_PACKED, encoding)
    assert list(map(bytes, envelope.blobs)) == blobs
    assert envelope.meta == LEASE


async def test_pieces_are_neither_many_nor_long(codec: GroupCodec) -> None:
    blobs = [*stored(*[group(first_token=i) for i in range(500)]), big_blob(700_000)]
    assert len(blobs[-1]) > 2 * 2**20
    for packed in (False, True):
        body = await codec.encode_batch(blobs, {}, packed=packed, encoding=None)
        assert max(map(len, body.pieces)) <= 2**20
        assert len(body.pieces) <= 2 + body.num_bytes // (2**20 // 8)
        assert body.num_bytes == len(content(body))


async def test_a_blob_of_ordinary_size_is_sent_without_a_copy(codec: GroupCodec) -> None:
    other = big_blob(80_000)
    assert 2**18 < len(other) < 2**20
    body = await codec.encode_batch([other], {}, packed=True, encoding=None)
    assert any(piece is other for piece in body.pieces)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_short_body_is_not_compressed(codec: GroupCodec, encoding: str) -> None:
    for packed in (False, True):
        body = await codec.encode_batch(stored(group()), {}, packed=packed, encoding=encoding)
        assert body.encoding is None
        assert body.num_bytes < 1000


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        ("", None),
        ("identity", None),
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("ZSTD", "zstd"),
        ("gzip;q=1.0, zstd; q=0.5", "gzip"),
        ("zstd;q=0, gzip;q=0", None),
        ("gzip;q=x", None),
        ("*", None),
    ],
)
def test_the_client_chooses_the_encoding(header: str, encoding: str | None) -> None:
    assert choose_encoding(header) == encoding


def test_the_packed_encoding_is_recognised_in_a_header() -> None:
    assert is_packed(f"application/json;q=0.5, {CONTENT_TYPE_PACKED.upper()}; v=1")
    assert not is_packed("application/json")


def test_a_decoder_process_loads_no_server() -> None:
    code = "import sys, atroposlib.api.http.decoding; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"fastapi", "starlette", "pydantic", "asyncio"}.isdisjoint(run.stdout.split())


@pytest.mark.parametrize("encoding", ["json", "packed"])
async def test_a_group_without_an_id_gets_one_that_its_payload_shows(
    codec: GroupCodec, encoding: str
) -> None:
    sent = [group(), group(group_id="mine"), group()]
    body = packed_body(*sent) if encoding == "packed" else json_body(sent)
    content_type = CONTENT_TYPE_PACKED if encoding == "packed" else CONTENT_TYPE_JSON
    found = await codec.decode(body, content_type=content_type, many=True)
    ids = [each.header.group_id for each in found]
    assert ids[1] == "mine"
    assert len(set(ids)) == 3
    unpacked = [wire.unpack_group(each.payload, strictness=Strictness.WIRE) for each in found]
    assert [each.group_id for each in unpacked] == ids
    assert all(wire.content_digest(each) == wire.content_digest(unpacked[0]) for each in unpacked)
    assert [bool(each.header.digest) for each in found] == [False, True, False]
