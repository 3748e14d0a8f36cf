"""The two encodings of a scored group: the original's JSON, and packed binary.

JSON (`application/json`) is what every existing client uses: fourteen keys, nested lists. Packed
(`application/vnd.atropos.groups+msgpack`) is what native clients use and the hub stores: a msgpack envelope around one
independent blob per group, whose arrays are little-endian buffers. Blobs are joined into a batch without being parsed.
Both encodings are lossless: floats are sent as float32 only if that loses nothing. `api/README.md` has the byte layout.

Decoding always ends in `check_group`: there is no way to obtain an unchecked `ScoredGroup` from bytes. `check_blob`,
for the hub, checks a blob by the rules of `scored_data` without making one.
"""

from __future__ import annotations

from atroposlib.wire.json_decoding import iter_json_groups
from atroposlib.wire.json_encoding import encode_json, json_pieces
from atroposlib.wire.packed import (
    CONTENT_TYPE_JSON,
    CONTENT_TYPE_PACKED,
    check_blob,
    content_digest,
    group_id_of,
    header_of,
    join_packed,
    pack_group,
    packed_pieces,
    split_packed,
    tail_texts,
    unpack_group,
    with_group_id,
)

__all__ = [
    "CONTENT_TYPE_JSON",
    "CONTENT_TYPE_PACKED",
    "check_blob",
    "content_digest",
    "encode_json",
    "group_id_of",
    "header_of",
    "iter_json_groups",
    "join_packed",
    "json_pieces",
    "pack_group",
    "packed_pieces",
    "split_packed",
    "tail_texts",
    "unpack_group",
    "with_group_id",
]
