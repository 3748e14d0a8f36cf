"""The two encodings of a scored group: the original's JSON, and packed binary.

JSON (`application/json`) is what every existing client speaks: fourteen keys, nested lists. Packed
(`application/vnd.atropos.groups+msgpack`) is what our own clients speak among themselves, and what the hub stores: a
msgpack envelope around one independent blob per group, whose arrays are little-endian buffers. Blobs are joined into
a batch without being parsed. Both encodings hand back what was sent: floats travel as float32 only where that loses
nothing. The byte layout is written down in `api/README.md`.

Decoding always ends in `check_group`: there is no way to obtain an unchecked `ScoredGroup` from bytes. `check_blob`,
for the hub, checks a blob by the rules of `scored_data` without making one.
"""

from __future__ import annotations

from atroposlib.wire.json_decoding import decode_json_groups as decode_json_groups
from atroposlib.wire.json_decoding import iter_json_groups as iter_json_groups
from atroposlib.wire.json_encoding import encode_json as encode_json
from atroposlib.wire.json_encoding import json_pieces as json_pieces
from atroposlib.wire.packed import CONTENT_TYPE_JSON as CONTENT_TYPE_JSON
from atroposlib.wire.packed import CONTENT_TYPE_PACKED as CONTENT_TYPE_PACKED
from atroposlib.wire.packed import PACKED_VERSION as PACKED_VERSION
from atroposlib.wire.packed import BlobFacts as BlobFacts
from atroposlib.wire.packed import PackedEnvelope as PackedEnvelope
from atroposlib.wire.packed import check_blob as check_blob
from atroposlib.wire.packed import content_digest as content_digest
from atroposlib.wire.packed import facts_of as facts_of
from atroposlib.wire.packed import join_packed as join_packed
from atroposlib.wire.packed import pack_group as pack_group
from atroposlib.wire.packed import packed_pieces as packed_pieces
from atroposlib.wire.packed import split_packed as split_packed
from atroposlib.wire.packed import tail_texts as tail_texts
from atroposlib.wire.packed import unpack_group as unpack_group
