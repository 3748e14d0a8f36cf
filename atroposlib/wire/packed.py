"""Packed groups: native clients send them, the hub stores them and joins them into batches.

A blob is one group; a message is an envelope around blobs. Buffers are read in place and copied once. A blob is trusted
only after `unpack_group` or `check_blob`; `json_pieces` reads blobs that passed one of them before.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    DISTILL_FIELDS,
    FIELD,
    FIELDS,
    IGNORE_INDEX,
    OPTIONAL,
    OPTIONAL_ROWS,
    PER_TOKEN_FIELDS,
    GroupHeader,
    Level,
    Ragged,
    RaggedPerToken,
    ScoredGroup,
    Strictness,
    check_arrays,
    check_group,
    read_meaning,
)

CONTENT_TYPE_JSON: Final = "application/json"
CONTENT_TYPE_PACKED: Final = "application/vnd.atropos.groups+msgpack"
PACKED_VERSION: Final = 1

KEY_FIELDS: Final = ("env_id", "group_id", "policy_version")
"""Fields with a key of their own in a blob."""
ARRAY_FIELDS: Final = tuple(
    field.name
    for field in FIELDS
    if field.is_numeric and field in OPTIONAL[Level.SEQUENCE] + OPTIONAL[Level.TOKEN]
)
"""Optional fields of one number per sequence or token."""
OBJECT_FIELDS: Final = tuple(
    field.name
    for field in OPTIONAL[Level.SEQUENCE] + OPTIONAL[Level.GROUP]
    if field.name not in KEY_FIELDS + ARRAY_FIELDS
)
"""Fields that are sent as JSON."""
_WIDTHS: Final = {int: ("i4", "i8"), float: ("f4", "f8")}

MAX_GROUPS: Final = 1024
"""Groups in one message; a packed message that announces more is refused before they are allocated."""

MAX_SEQUENCES: Final = 65536
"""Sequences in one JSON group; each costs microseconds."""

MAX_NESTING: Final = 500
"""Levels of arrays and objects in the JSON of one field.

Below the recursion limit of Python, so that a value that the hub accepts also decodes in a deeper call stack.
"""

_MASKED_LABEL: Final = struct.pack("<i", IGNORE_INDEX)
_NEITHER_BRACKET_NOR_QUOTE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_FEW: Final = msgspec.Meta(max_length=32)
_TAIL_FIELDS: Final = (*OBJECT_FIELDS, *DISTILL_FIELDS)
SEQUENCE_ADVANTAGES: Final = "sequence_advantages"
"""Array that replaces `advantages` if they are one number per sequence."""
_FIELD_OF: Final = {SEQUENCE_ADVANTAGES: "advantages"}
"""The field of each array that has another name."""
Blob = bytes | bytearray | memoryview


class PackedDistillation(NamedTuple):
    """One list per token."""

    lengths: memoryview
    """[N] u32 entries per token"""
    width: str
    """i4, i8, f4, f8"""
    values: memoryview


class PackedGroup(msgspec.Struct, omit_defaults=True, gc=False):
    """One group in packed form. Buffers are little-endian; `f4`/`f8` tells the width of each float buffer."""

    lengths: memoryview
    """[S] u32"""
    tokens: memoryview
    """[N] u32"""
    scores: memoryview
    """[S] f64"""
    trained: memoryview | None = None
    """[ceil(N / 8)] bit i, most significant first, is 1 where masks[i] == tokens[i]; the rest is -100."""
    masks: memoryview | None = None
    """[N] i32; replaces `trained` if a foreign client's masks are not labels."""
    arrays: Annotated[dict[str, tuple[str, memoryview]], _FEW] = {}
    """`ARRAY_FIELDS`: (a width of `_WIDTHS`, [N] or [S]); `sequence_advantages`, in place of `advantages`, is [S]"""
    distill: Annotated[dict[str, PackedDistillation], _FEW] = {}
    """`distill_token_ids` ("i4" or "i8") and `distill_logprobs` ("f4" or "f8")"""
    tail: Annotated[dict[str, memoryview], _FEW] | memoryview = {}
    """JSON by name of the fields that are not arrays; or one JSON object of all of them"""
    empty: Annotated[list[str], _FEW] = []
    """Optional fields that are `[]`. No field may be given in more than one of these ways."""
    env_id: int | None = None
    group_id: str | None = None
    policy_version: int | None = None


class PackedEnvelope(msgspec.Struct, gc=False):
    """An opened packed message."""

    version: int
    meta: dict[str, Any]
    """Free-form."""
    blobs: Annotated[list[memoryview], msgspec.Meta(max_length=MAX_GROUPS)] = msgspec.field(
        name="groups"
    )
    """Views into the message, each one group for `unpack_group`."""


class _Narrowed(NamedTuple):
    width: str
    values: NDArray[Any]


def _encode_foreign(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


_json_encoder = msgspec.json.Encoder(enc_hook=_encode_foreign)
_sorted_encoder = msgspec.json.Encoder(enc_hook=_encode_foreign, order="sorted")
_packed_encoder = msgspec.msgpack.Encoder()
_packed_decoder = msgspec.msgpack.Decoder(PackedGroup)
_envelope_decoder = msgspec.msgpack.Decoder(PackedEnvelope)
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def json_bytes(value: Any, name: str) -> bytes:
    """Encode the value of one field; raises `GroupError` for what JSON cannot express."""
    try:
        return _json_encoder.encode(value)
    except (TypeError, UnicodeEncodeError, OverflowError, RecursionError) as e:
        raise GroupError(f"{name}: cannot be sent: {e}") from e


def _narrow(values: NDArray[Any], name: str) -> _Narrowed:
    """Return numbers of a field with 4 bytes each where that loses nothing, else with 8."""
    short, long = _WIDTHS[FIELD[name].kind]
    with np.errstate(over="ignore"):
        narrow = values.astype(f"<{short}")
    if np.array_equal(narrow, values):
        return _Narrowed(short, narrow)
    return _Narrowed(long, values.astype(f"<{long}", copy=False))


def _buffer_of(values: NDArray[Any]) -> memoryview:
    """Return the bytes of an array; of a contiguous one without a copy."""
    return np.ascontiguousarray(values).view(np.uint8).data


def _arrays(group: ScoredGroup) -> dict[str, _Narrowed]:
    """Return the arrays of `ARRAY_FIELDS` by their names in a blob."""
    arrays = {}
    for name in ARRAY_FIELDS:
        is_replaced = name == "advantages" and group.sequence_advantages is not None
        sent_as = SEQUENCE_ADVANTAGES if is_replaced else name
        values = getattr(group, sent_as)
        if values is not None:
            arrays[sent_as] = _narrow(values, name)
    return arrays


def pack_group(group: ScoredGroup) -> bytes:
    """Encode one group as a packed blob."""
    trained = group.masks == group.tokens
    is_label = bool((trained | (group.masks == IGNORE_INDEX)).all())
    distill = {}
    for name in DISTILL_FIELDS:
        entries = getattr(group, name)
        if entries is not None:
            width, narrow = _narrow(entries.values, name)
            counts = _buffer_of(entries.lengths.astype("<u4"))
            distill[name] = PackedDistillation(counts, width, _buffer_of(narrow))
    return _packed_encoder.encode(
        PackedGroup(
            lengths=_buffer_of(group.lengths.astype("<u4")),
            tokens=_buffer_of(group.tokens.astype("<i4", copy=False)),
            scores=_buffer_of(group.scores.astype("<f8", copy=False)),
            trained=_buffer_of(np.packbits(trained)) if is_label else None,
            masks=None if is_label else _buffer_of(group.masks.astype("<i4", copy=False)),
            arrays={
                name: (width, _buffer_of(values))
                for name, (width, values) in _arrays(group).items()
            },
            distill=distill,
            tail={
                name: memoryview(json_bytes(value, name))
                for name in OBJECT_FIELDS
                if (value := getattr(group, name)) is not None
            },
            empty=sorted(group.empty_fields),
            **{name: getattr(group, name) for name in KEY_FIELDS},
        )
    )


def open_blob(blob: Blob) -> PackedGroup:
    """Parse a blob without looking at its contents; raises `GroupError` if it is not one."""
    try:
        return _packed_decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise GroupError(f"not a packed group: {e}") from e


def group_id_of(blob: Blob) -> str | None:
    return open_blob(blob).group_id


def with_group_id(blob: Blob, group_id: str) -> bytes:
    """Return the same group with this id."""
    return _packed_encoder.encode(msgspec.structs.replace(open_blob(blob), group_id=group_id))


def tail_members(packed: PackedGroup) -> dict[str, memoryview]:
    """Return the JSON of each field that is not an array; raises `GroupError`."""
    tail = packed.tail
    if isinstance(tail, memoryview):
        try:
            members = _members_decoder.decode(tail) if tail.nbytes else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise GroupError(f"tail: expected a JSON object: {e}") from e
        tail = {name: memoryview(member) for name, member in members.items()}
    unknown = next((name for name in tail if name not in _TAIL_FIELDS), None)
    if unknown is not None:
        raise GroupError(f"tail: unknown field {unknown[:60]!r}")
    return tail


def tail_texts(blob: Blob) -> list[memoryview]:
    """Return the JSON in a blob: the part that is decoded into objects. Raises `GroupError`."""
    tail = open_blob(blob).tail
    return [tail] if isinstance(tail, memoryview) else list(tail.values())


def decode_member(text: Blob | msgspec.Raw, name: str) -> Any:
    """Decode the JSON of one field; raises `GroupError` with its path."""
    if _nesting(bytes(text)) > MAX_NESTING:
        raise GroupError(f"{name}: nested more than {MAX_NESTING} levels deep")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        message, _, where = str(e).partition(" - at `$")
        raise GroupError(f"{name}{where.rstrip('`')}: {message}") from e


def _nesting(text: bytes) -> int:
    """Return the deepest level of brackets outside strings, or the count of opening brackets if it is small."""
    opened = text.count(b"[") + text.count(b"{")
    if opened <= MAX_NESTING:
        return opened
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    outside_strings = unescaped.translate(None, _NEITHER_BRACKET_NOR_QUOTE).split(b'"')[::2]
    brackets = np.frombuffer(b"".join(outside_strings), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))


def unpack_group(blob: Blob | PackedGroup, *, strictness: Strictness) -> ScoredGroup:
    """Decode one packed blob, opened or not, and check it; raises `GroupError`."""
    packed = blob if isinstance(blob, PackedGroup) else open_blob(blob)
    lengths = read_buffer(packed.lengths, "<u4", None, "lengths").astype(np.int64)
    num_tokens = int(lengths.sum())
    tokens = read_buffer(packed.tokens, "<u4", num_tokens, "tokens")
    if packed.masks is not None:
        masks = read_buffer(packed.masks, "<i4", num_tokens, "masks")
    else:
        trained = read_bits(packed.trained, num_tokens)
        masks = np.where(trained, tokens.view("<i4"), np.int32(IGNORE_INDEX))

    tail = tail_members(packed)
    _refuse_two_values(packed, tail)
    group: dict[str, Any] = {name: decode_member(text, name) for name, text in tail.items()}
    for name in packed.empty:
        if name not in OPTIONAL_ROWS:
            raise GroupError(f"empty: unknown field {name[:60]!r}")
        group[name] = []
    for name, (width, buffer) in packed.arrays.items():
        field = _FIELD_OF.get(name, name)
        if field not in ARRAY_FIELDS or width not in _WIDTHS[FIELD[field].kind]:
            raise GroupError(f"arrays.{name[:60]}: unknown array or width {width[:60]!r}")
        is_per_token = FIELD[field].level is Level.TOKEN and name == field
        count = num_tokens if is_per_token else len(lengths)
        # `check_group` copies those of other widths.
        values = read_buffer(buffer, f"<{width}", count, name, copies=width.endswith("8"))
        group[field] = Ragged(values, lengths) if is_per_token else values
    for name, distillation in packed.distill.items():
        group[name] = RaggedPerToken(_read_distillation(name, distillation, num_tokens), lengths)
    group |= {
        "tokens": Ragged(tokens, lengths),
        "masks": Ragged(masks, lengths),
        "scores": read_buffer(packed.scores, "<f8", len(lengths), "scores", copies=True),
        **{name: getattr(packed, name) for name in KEY_FIELDS},
    }
    return check_group(group, strictness=strictness)


def _refuse_two_values(packed: PackedGroup, tail: Mapping[str, memoryview]) -> None:
    """Raise `GroupError` for a field given twice: readers of a blob look for it in different places."""
    seen: set[str] = set()
    arrays = (_FIELD_OF.get(name, name) for name in packed.arrays)
    for name in (*arrays, *packed.distill, *tail, *packed.empty):
        if name in seen:
            raise GroupError(f"{name[:60]}: given twice")
        seen.add(name)


def _read_distillation(name: str, packed: PackedDistillation, num_tokens: int) -> Ragged:
    if name not in DISTILL_FIELDS or packed.width not in _WIDTHS[FIELD[name].kind]:
        raise GroupError(f"distill.{name}: unknown array or width {packed.width!r}")
    lengths = read_buffer(packed.lengths, "<u4", num_tokens, f"{name}.lengths").astype(np.int64)
    num_entries = int(lengths.sum())
    values = read_buffer(packed.values, f"<{packed.width}", num_entries, name, copies=True)
    return Ragged(values, lengths)


_dtype: Callable[[str], np.dtype[Any]] = functools.cache(np.dtype)


def read_buffer(
    data: memoryview, dtype: str, count: int | None, name: str, *, copies: bool = False
) -> NDArray[Any]:
    """Return `data` as an aligned array, in place where possible unless `copies`; `GroupError` for a wrong size."""
    kind = _dtype(dtype)
    width = kind.itemsize
    if data.nbytes % width or (count is not None and data.nbytes != count * width):
        expected = "a multiple of" if count is None else f"{count} x"
        raise GroupError(f"{name}: {data.nbytes} bytes, expected {expected} {width}")
    array: NDArray[Any] = np.frombuffer(data, dtype=kind)
    return array if array.flags.aligned and not copies else array.copy()


def read_bits(data: memoryview | None, count: int) -> NDArray[np.bool_]:
    """Return the first `count` bits of `trained`; raises `GroupError`."""
    if data is None:
        raise GroupError("masks: required, but neither `trained` nor `masks` is present")
    packed = read_buffer(data, "u1", (count + 7) // 8, "trained")
    return np.unpackbits(packed, count=count).view(np.bool_)


def packed_pieces(blobs: Sequence[bytes], meta: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a message around packed groups, which are neither parsed nor copied."""
    encode = _packed_encoder.encode
    yield b"".join(
        (
            b"\x83",  # a map of three
            encode("version"),
            encode(PACKED_VERSION),
            encode("meta"),
            encode(dict(meta)),
            encode("groups"),
            b"\xdd" + struct.pack(">I", len(blobs)),
        )
    )
    for blob in blobs:
        yield b"\xc6" + struct.pack(">I", len(blob))
        yield blob


def join_packed(blobs: Iterable[bytes], meta: Mapping[str, Any] | None = None) -> bytes:
    """Put packed groups, unparsed, into one message."""
    return b"".join(packed_pieces(list(blobs), meta or {}))


def split_packed(body: Blob) -> PackedEnvelope:
    """Open a packed message; raises `GroupError` if it is not one, or of another version."""
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise GroupError(f"not a packed message: {e}") from e
    if envelope.version != PACKED_VERSION:
        raise GroupError(f"version: packed format {envelope.version}, expected {PACKED_VERSION}")
    return envelope


def content_digest(group: ScoredGroup | Blob) -> bytes:
    """Return a 16-byte digest of a group's contents.

    Equal for both encodings of a group; its environment, id and policy version are not included. Keys of JSON objects
    are sorted first, since their order has no meaning.
    """
    if not isinstance(group, ScoredGroup):
        group = unpack_group(group, strictness=Strictness.WIRE)
    trained = group.masks == group.tokens
    contents: list[tuple[str, bytes | memoryview | NDArray[Any]]] = [
        ("lengths", group.lengths.astype("<u4")),
        ("tokens", group.tokens.astype("<i4", copy=False)),
        ("trained", np.packbits(trained)),
        ("masks", group.masks[~trained].astype("<i4", copy=False)),
        ("scores", group.scores.astype("<f8", copy=False)),
    ]
    contents += [(f"{name} {width}", each) for name, (width, each) in _arrays(group).items()]
    for name in DISTILL_FIELDS:
        entries = getattr(group, name)
        if entries is not None:
            contents.append((f"{name} lengths", entries.lengths.astype("<u4")))
            _, width = _WIDTHS[FIELD[name].kind]
            contents.append((name, entries.values.astype(f"<{width}", copy=False)))
    for name in OBJECT_FIELDS:
        value = getattr(group, name)
        if value is not None:
            contents.append((name, _canonical_json(value)))
    contents.append(("empty", " ".join(sorted(group.empty_fields)).encode()))
    return _digest(contents)


def _digest(contents: Iterable[tuple[str, bytes | memoryview | NDArray[Any]]]) -> bytes:
    digest = xxhash.xxh3_128()
    for name, content in contents:
        buffer = _buffer_of(content) if isinstance(content, np.ndarray) else content
        # Framed by size, so that different lists of contents never give the same bytes.
        digest.update(b"%s %d\n" % (name.encode(), len(buffer)))
        digest.update(buffer)
    return digest.digest()


def check_blob(blob: Blob) -> GroupHeader:
    """Check a packed group as `unpack_group` does under `Strictness.MEANING`; raises the same `GroupError`."""
    packed = open_blob(blob)
    if _is_ordinary(packed):
        return _check_in_place(packed)
    # The blob is stored and delivered as sent, so its header is that of what was sent: masks of 0 and 1 stay.
    group = unpack_group(packed, strictness=Strictness.WIRE)
    read_meaning(group)
    return header_of(group)


def header_of(group: ScoredGroup) -> GroupHeader:
    return GroupHeader(
        env_id=group.env_id,
        num_sequences=group.num_sequences,
        num_tokens=group.num_tokens,
        policy_version=group.newest_version,
        group_id=group.group_id or "",
        digest=b"" if group.group_id is None else content_digest(group),
    )


def _is_ordinary(packed: PackedGroup) -> bool:
    """Whether a group has only numbers in their usual widths, as nearly all have."""
    return (
        packed.masks is None
        and not (packed.distill or packed.empty or len(packed.tail))
        and all(name in PER_TOKEN_FIELDS and w == "f4" for name, (w, _) in packed.arrays.items())
    )


def _check_in_place(packed: PackedGroup) -> GroupHeader:
    """Check an ordinary group in place, in a third of the time that unpacking and digesting it takes."""
    lengths = read_buffer(packed.lengths, "<u4", None, "lengths")
    num_tokens = int(lengths.sum(dtype=np.int64))
    tokens = read_buffer(packed.tokens, "<u4", num_tokens, "tokens")
    trained = read_bits(packed.trained, num_tokens)
    arrays = {name: packed.arrays[name][1] for name in PER_TOKEN_FIELDS if name in packed.arrays}
    check_arrays(
        lengths=lengths,
        tokens=tokens,
        trained=trained,
        scores=read_buffer(packed.scores, "<f8", len(lengths), "scores"),
        per_token={
            name: read_buffer(each, "<f4", num_tokens, name) for name, each in arrays.items()
        },
        origin={name: getattr(packed, name) for name in KEY_FIELDS},
    )
    digest = b""
    if packed.group_id is not None:
        masked = num_tokens - int(np.count_nonzero(trained))
        digest = _digest(
            [
                ("lengths", packed.lengths),
                ("tokens", packed.tokens),
                ("trained", np.packbits(trained)),
                ("masks", _MASKED_LABEL * masked),
                ("scores", packed.scores),
                *[(f"{name} f4", each) for name, each in arrays.items()],
                ("empty", b""),
            ]
        )
    return GroupHeader(
        env_id=packed.env_id,
        num_sequences=len(lengths),
        num_tokens=num_tokens,
        policy_version=packed.policy_version,
        group_id=packed.group_id or "",
        digest=digest,
    )


def _canonical_json(value: Any) -> bytes:
    try:
        return _sorted_encoder.encode(value)
    except TypeError:  # keys that are not strings, which JSON turns into strings
        return _sorted_encoder.encode(msgspec.json.decode(json_bytes(value, "digest")))
