"""Bodies of the token routes: request bytes to checked groups, payloads to response bytes.

Everything here is CPU work without state, safe to run in a thread. JSON is parsed by typed decoders
of `wire`, never by pydantic.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atroposlib.api.coordinator import Batch, IncomingGroup
from atroposlib.api.stores.base import Payload
from atroposlib.errors import GroupError
from atroposlib.scored_data import ScoredGroup, Strictness
from atroposlib.wire import (
    CONTENT_TYPE_JSON,
    CONTENT_TYPE_PACKED,
    decode_json_groups,
    encode_json,
    join_json_batch,
    join_packed,
    pack_group,
    split_packed,
    unpack_group,
)

GZIP_MINIMUM_BYTES = 1000
_GZIP_LEVEL = 1  # token arrays: level 9 takes several times the time for a few percent of size


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBody:
    """A response body, ready to send."""

    content: bytes
    media_type: str
    is_gzip: bool = False


def decode_groups(body: bytes, *, content_type: str, many: bool) -> list[IncomingGroup]:
    """Decode and check the body of `/scored_data` or, with `many`, `/scored_data_list`.

    Raises `GroupError`.
    """
    if is_packed(content_type):
        return _decode_packed(body, many=many)
    groups = decode_json_groups(body, many=many)
    return [_incoming(g, Payload(packed=pack_group(g), json=encode_json(g))) for g in groups]


def encode_batch(batch: Batch, *, packed: bool, compress: bool) -> EncodedBody:
    """Encode the body of a `GET /batch` that delivers `batch`.

    Stored bytes are joined, not parsed.
    """
    if packed:
        content = join_packed([p.packed for p in batch.payloads], {"step": batch.step})
    else:
        content = join_json_batch(map(payload_json, batch.payloads))
    media_type = CONTENT_TYPE_PACKED if packed else CONTENT_TYPE_JSON
    if compress and len(content) >= GZIP_MINIMUM_BYTES:
        content = gzip.compress(content, compresslevel=_GZIP_LEVEL, mtime=0)
        return EncodedBody(content=content, media_type=media_type, is_gzip=True)
    return EncodedBody(content=content, media_type=media_type)


def payload_json(payload: Payload) -> bytes:
    """The group's fourteen keys; encoded now if it came packed."""
    if payload.json is not None:
        return payload.json
    return encode_json(unpack_group(payload.packed, strictness=Strictness.WIRE))


def num_bytes(payloads: Iterable[Payload]) -> int:
    """Size of the stored bytes."""
    return sum(len(p.packed) + len(p.json or b"") for p in payloads)


def is_packed(header: str) -> bool:
    """Does a Content-Type or Accept header name the packed encoding?"""
    return CONTENT_TYPE_PACKED in header.lower()


def _decode_packed(body: bytes, *, many: bool) -> list[IncomingGroup]:
    blobs: Sequence[bytes] = split_packed(body).blobs
    if not many and len(blobs) != 1:
        raise GroupError(f"groups: {len(blobs)} in the message, expected 1; use /scored_data_list")
    incoming = []
    for index, blob in enumerate(blobs):
        try:
            group = unpack_group(blob, strictness=Strictness.WIRE)
        except GroupError as e:
            raise GroupError(f"[{index}].{e}" if many else str(e)) from e
        incoming.append(_incoming(group, Payload(packed=blob)))
    return incoming


def _incoming(group: ScoredGroup, payload: Payload) -> IncomingGroup:
    return IncomingGroup(
        env_id=group.env_id,
        num_sequences=group.num_sequences,
        policy_version=group.policy_version,
        group_id=group.group_id,
        payload=payload,
    )
