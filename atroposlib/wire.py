"""The two encodings of a scored group: the original's JSON, and packed binary.

JSON (`application/json`) is what every existing client speaks: fourteen keys, nested lists. Packed
(`application/vnd.atropos.groups+msgpack`) is what our own clients speak among themselves: a msgpack envelope around
one independent blob per group, whose arrays are little-endian buffers read with `numpy.frombuffer`. Blobs are joined
into a batch without being parsed. Both encodings hand back what was sent: floats travel as float32 only where that
loses nothing. The byte layout is written down in `api/README.md`.

Decoding always ends in `check_group`: there is no way to obtain an unchecked `ScoredGroup` from bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    IGNORE_INDEX,
    PER_TOKEN_FIELDS,
    ScoredGroup,
    Strictness,
    check_group,
)

CONTENT_TYPE_JSON: Final = "application/json"
CONTENT_TYPE_PACKED: Final = "application/vnd.atropos.groups+msgpack"
PACKED_VERSION: Final = 1

_TAIL_FIELDS: Final = (
    "messages",
    "overrides",
    "generation_params",
    "group_overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)


class _JsonGroup(msgspec.Struct, gc=False):
    """Shape of a group in JSON; fields without a fixed shape stay `Any` and are checked by the gate."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: Any = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: Any = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None
    group_id: str | None = None
    policy_version: int | None = None


class _PackedGroup(msgspec.Struct, omit_defaults=True, gc=False):
    """One group in packed form. Buffers are little-endian; `f4`/`f8` tells the width of each float buffer."""

    lengths: bytes
    """[S] u32"""
    tokens: bytes
    """[N] u32"""
    scores: bytes
    """[S] f64"""
    trained: bytes | None = None
    """[ceil(N / 8)] bit i, most significant first, is 1 where masks[i] == tokens[i]; the rest is -100."""
    masks: bytes | None = None
    """[N] i32; present instead of `trained` when a foreign client's masks are not labels."""
    arrays: dict[str, tuple[str, bytes]] = {}
    """per-token float arrays by name: ("f4" or "f8", [N])"""
    tail: bytes = b""
    """JSON object of the fields that are not arrays"""
    empty: list[str] = []
    env_id: int | None = None
    group_id: str | None = None
    policy_version: int | None = None


class _Envelope(msgspec.Struct, gc=False):
    version: int
    meta: dict[str, Any]
    groups: list[bytes]


class PackedEnvelope(NamedTuple):
    """An opened packed message: `meta` is free-form, each blob is one group for `unpack_group`."""

    meta: dict[str, Any]
    blobs: list[bytes]


def _encode_foreign(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


_json_encoder = msgspec.json.Encoder(enc_hook=_encode_foreign)
_one_decoder = msgspec.json.Decoder(_JsonGroup)
_many_decoder = msgspec.json.Decoder(list[_JsonGroup])
_packed_encoder = msgspec.msgpack.Encoder()
_packed_decoder = msgspec.msgpack.Decoder(_PackedGroup)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def decode_json_groups(body: bytes, *, many: bool) -> list[ScoredGroup]:
    """Decode one JSON group, or a list of them (`many`), and check each at the hub's strictness.

    Raises `GroupError` naming the field; for a list the path starts with `[index]`.
    """
    try:
        decoded = _many_decoder.decode(body) if many else [_one_decoder.decode(body)]
    except msgspec.ValidationError as e:
        raise GroupError(str(e)) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        return _decode_leniently(body, many=many, cause=e)
    groups = []
    for i, item in enumerate(decoded):
        groups.append(_check_at(msgspec.structs.asdict(item), i if many else None))
    return groups


def _check_at(group: Mapping[str, Any], index: int | None) -> ScoredGroup:
    try:
        return check_group(group, strictness=Strictness.WIRE)
    except GroupError as e:
        raise e if index is None else GroupError(f"[{index}].{e}") from e


def _decode_leniently(body: bytes, *, many: bool, cause: Exception) -> list[ScoredGroup]:
    """Find the path of a NaN or Infinity, which are not JSON but which Python clients send."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise GroupError(f"the body is not JSON: {cause}") from cause
    for i, item in enumerate(value if many and isinstance(value, list) else [value]):
        _check_at(item, i if many else None)
    raise GroupError(f"the body is not JSON: {cause}") from cause


def encode_json(group: ScoredGroup) -> bytes:
    """Encode the fourteen keys of the original's wire, in order."""
    try:
        return _json_encoder.encode(group.to_dict())
    except (TypeError, UnicodeEncodeError) as e:
        raise GroupError(f"the group cannot be sent: {e}") from e


def join_json_batch(parts: Iterable[bytes]) -> bytes:
    """Join groups that are already JSON into the body of `GET /batch`."""
    return b'{"batch":[' + b",".join(parts) + b"]}"


def _float_buffer(values: NDArray[np.float64]) -> tuple[str, bytes]:
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    if np.array_equal(narrow.astype(np.float64), values):
        return "f4", narrow.tobytes()
    return "f8", values.astype("<f8").tobytes()


def pack_group(group: ScoredGroup) -> bytes:
    """Encode one group as a packed blob."""
    trained = group.masks == group.tokens
    is_label = bool((trained | (group.masks == IGNORE_INDEX)).all())
    arrays = {}
    for name in PER_TOKEN_FIELDS:
        values = getattr(group, name)
        if values is not None:
            arrays[name] = _float_buffer(values)
    tail = {name: value for name in _TAIL_FIELDS if (value := getattr(group, name)) is not None}
    try:
        tail_json = _json_encoder.encode(tail) if tail else b""
    except (TypeError, UnicodeEncodeError) as e:
        raise GroupError(f"the group cannot be sent: {e}") from e
    return _packed_encoder.encode(
        _PackedGroup(
            lengths=group.lengths.astype("<u4").tobytes(),
            tokens=group.tokens.astype("<u4").tobytes(),
            scores=group.scores.astype("<f8").tobytes(),
            trained=np.packbits(trained).tobytes() if is_label else None,
            masks=None if is_label else group.masks.astype("<i4").tobytes(),
            arrays=arrays,
            tail=tail_json,
            empty=sorted(group.empty_fields),
            env_id=group.env_id,
            group_id=group.group_id,
            policy_version=group.policy_version,
        )
    )


def unpack_group(blob: bytes, *, strictness: Strictness) -> ScoredGroup:
    """Decode one packed blob and check it; raises `GroupError`."""
    try:
        packed = _packed_decoder.decode(blob)
        tail = msgspec.json.decode(packed.tail) if packed.tail else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise GroupError(f"not a packed group: {e}") from e
    if not isinstance(tail, dict):
        raise GroupError("tail: expected a JSON object")
    lengths = _buffer(packed.lengths, "<u4", None, "lengths").astype(np.int64)
    num_tokens = int(lengths.sum())
    tokens = _buffer(packed.tokens, "<u4", num_tokens, "tokens").astype(np.int64)
    if packed.masks is not None:
        masks = _buffer(packed.masks, "<i4", num_tokens, "masks").astype(np.int64)
    elif packed.trained is not None:
        bits = _buffer(packed.trained, "u1", (num_tokens + 7) // 8, "trained")
        masks = np.where(np.unpackbits(bits)[:num_tokens] == 1, tokens, IGNORE_INDEX)
    else:
        raise GroupError("masks: required, but neither `trained` nor `masks` is present")

    bounds = np.concatenate(([0], np.cumsum(lengths))).tolist()

    def rows(flat: NDArray[Any]) -> list[NDArray[Any]]:
        return [flat[start:stop] for start, stop in pairwise(bounds)]

    group: dict[str, Any] = {name: tail.get(name) for name in _TAIL_FIELDS}
    for name in packed.empty:
        group[name] = []
    for name, (width, buffer) in packed.arrays.items():
        if name not in PER_TOKEN_FIELDS or width not in ("f4", "f8"):
            raise GroupError(f"arrays.{name}: unknown array or width {width!r}")
        group[name] = rows(_buffer(buffer, f"<{width}", num_tokens, name))
    group |= {
        "tokens": rows(tokens),
        "masks": rows(masks),
        "scores": _buffer(packed.scores, "<f8", len(lengths), "scores"),
        "env_id": packed.env_id,
        "group_id": packed.group_id,
        "policy_version": packed.policy_version,
    }
    return check_group(group, strictness=strictness)


def _buffer(data: bytes, dtype: str, count: int | None, name: str) -> NDArray[Any]:
    width = np.dtype(dtype).itemsize
    if len(data) % width or (count is not None and len(data) != count * width):
        expected = "a multiple of" if count is None else f"{count} x"
        raise GroupError(f"{name}: {len(data)} bytes, expected {expected} {width}")
    return np.frombuffer(data, dtype=dtype)


def join_packed(blobs: Iterable[bytes], meta: Mapping[str, Any] | None = None) -> bytes:
    """Put packed groups, unparsed, into one message."""
    return _packed_encoder.encode(
        _Envelope(version=PACKED_VERSION, meta=dict(meta or {}), groups=list(blobs))
    )


def split_packed(body: bytes) -> PackedEnvelope:
    """Open a packed message; raises `GroupError` if it is not one, or of another version."""
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise GroupError(f"not a packed message: {e}") from e
    if envelope.version != PACKED_VERSION:
        raise GroupError(f"version: packed format {envelope.version}, expected {PACKED_VERSION}")
    return PackedEnvelope(meta=envelope.meta, blobs=envelope.groups)
