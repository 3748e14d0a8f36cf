"""Groups from JSON, with two parsers: simdjson for what is well formed, msgspec for everything else.

simdjson writes the numbers of a body into arrays and makes no Python object of any: 0.06 CPU seconds per million tokens
where msgspec and numpy take 0.22, so without it JSON through the hub would cost half as much again (AMD EPYC, groups
of 8 x 2048 tokens and logprobs). It wants 14 times the memory of its text: large bodies are given to it row by row, for
0.11 s. It names no place of a fault and flattens lists within rows; a body with anything odd is therefore decoded once
more, into typed lists. msgspec and `check_group` then say what is wrong and where:
`[1].sequences[2].tokens[7]: expected int, got str`. Every fault of a body is a `GroupError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
import simdjson
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    DISTILL_FIELDS,
    PER_SEQUENCE_FIELDS,
    PER_TOKEN_FIELDS,
    Ragged,
    RaggedPerToken,
    ScoredGroup,
    Strictness,
    check_group,
)
from atroposlib.wire.packed import (
    MAX_GROUPS,
    MAX_SEQUENCES,
    OBJECT_FIELDS,
    Blob,
    decode_member,
)

_WHOLE_BYTES: Final = 2**22
"""Parsed whole. For more, simdjson needs fresh pages each time: 8 MB take a sixth longer than row by row, 60 MB half as
long again, and 400 MB of memory."""
_ODD: Final = (ValueError, TypeError, RuntimeError, AttributeError, KeyError, GroupError)
"""What parsing raises for a body that is faulty or not of the usual form; `msgspec.DecodeError` is a `ValueError`."""
_INT_FIELDS: Final = ("tokens", "masks", "distill_token_ids")
_ROW_FIELDS: Final = ("tokens", "masks", *PER_TOKEN_FIELDS, *DISTILL_FIELDS, *PER_SEQUENCE_FIELDS)
_SCALARS: Final = (("env_id", int), ("group_id", str), ("policy_version", int))
_NOT_FINITE: Final = re.compile(rb"NaN|-?Infinity")

_Sequences = msgspec.Meta(max_length=MAX_SEQUENCES)
_IntRows = Annotated[list[list[int]], _Sequences]
_FloatRows = Annotated[list[list[float]], _Sequences]


_RawRows = Annotated[list[msgspec.Raw], _Sequences]


class _RawGroup(msgspec.Struct, gc=False):
    """Where the fields and rows of a group lie in the body."""

    tokens: _RawRows
    masks: _RawRows
    scores: msgspec.Raw
    advantages: _RawRows | None = None
    ref_logprobs: _RawRows | None = None
    messages: msgspec.Raw = msgspec.Raw()
    generation_params: msgspec.Raw = msgspec.Raw()
    inference_logprobs: _RawRows | None = None
    overrides: msgspec.Raw = msgspec.Raw()
    group_overrides: msgspec.Raw = msgspec.Raw()
    images: msgspec.Raw = msgspec.Raw()
    env_id: int | None = None
    distill_token_ids: _RawRows | None = None
    distill_logprobs: _RawRows | None = None
    group_id: str | None = None
    policy_version: int | None = None


class _Group(msgspec.Struct, gc=False):
    """A group in JSON; objects are not parsed yet."""

    tokens: _IntRows
    masks: _IntRows
    scores: list[float]
    advantages: Annotated[list[list[float] | float], _Sequences] | None = None
    ref_logprobs: _FloatRows | None = None
    messages: msgspec.Raw = msgspec.Raw()
    generation_params: msgspec.Raw = msgspec.Raw()
    inference_logprobs: _FloatRows | None = None
    overrides: msgspec.Raw = msgspec.Raw()
    group_overrides: msgspec.Raw = msgspec.Raw()
    images: msgspec.Raw = msgspec.Raw()
    env_id: int | None = None
    distill_token_ids: Annotated[list[list[list[int]]], _Sequences] | None = None
    distill_logprobs: Annotated[list[list[list[float]]], _Sequences] | None = None
    group_id: str | None = None
    policy_version: int | None = None


_Groups = msgspec.Meta(max_length=MAX_GROUPS)
_one_decoder = msgspec.json.Decoder(_Group)
_many_decoder = msgspec.json.Decoder(Annotated[list[_Group], _Groups])
_one_raw_decoder = msgspec.json.Decoder(_RawGroup)
_many_raw_decoder = msgspec.json.Decoder(Annotated[list[_RawGroup], _Groups])


def decode_json_groups(body: Blob, *, many: bool) -> list[ScoredGroup]:
    """Decode one JSON group, or a list of them (`many`), and check each at the hub's strictness.

    Raises `GroupError` naming the field; for a list the path starts with `[index]`.
    """
    return list(iter_json_groups(body, many=many))


def iter_json_groups(body: Blob, *, many: bool) -> Iterator[ScoredGroup]:
    """Decode as `decode_json_groups` does, one group at a time."""
    parse = _whole_fields if len(body) <= _WHOLE_BYTES else _piecewise_fields
    groups = parse(body, many=many)
    for i, fields in enumerate(_thorough_fields(body, many=many) if groups is None else groups):
        try:
            group = check_group(fields, strictness=Strictness.WIRE)
        except GroupError as e:
            raise (GroupError(f"[{i}].{e}") if many else e) from e
        yield group


def _whole_fields(body: Blob, *, many: bool) -> list[dict[str, Any]] | None:
    """Parse groups of the usual form; None for any body with something odd."""
    if body[:1] == b"\xef":  # simdjson skips a byte order mark
        return None
    try:
        document: Any = simdjson.Parser().parse(body)
        return _WholeReader(body).read(document if many else [document])
    except _ODD:
        return None


class _WholeReader:
    """Reads the groups of one body out of simdjson's document, and counts the lists that they ought to consist of."""

    def __init__(self, body: Blob) -> None:
        self._body = body
        self._num_lists = 0

    def read(self, groups: Sequence[Any]) -> list[dict[str, Any]]:
        """Raise `ValueError`, or what simdjson does, for anything odd."""
        if len(groups) > MAX_GROUPS:
            raise ValueError("too many groups")
        fields = [self._fields(group) for group in groups]
        # Arrays take in what the lists in a row hold: only the number of lists tells whether there are any.
        num_lists = self._num_lists + (not isinstance(groups, list))
        if num_lists != np.count_nonzero(np.frombuffer(self._body, np.uint8) == ord("[")):
            raise ValueError("a list where none belongs")
        return fields

    def _fields(self, group: Any) -> dict[str, Any]:
        """`group` is a `simdjson.Object` if it is a group at all."""
        if len(set(group)) != len(group):
            raise ValueError("a key twice")
        fields: dict[str, Any] = {
            name: self._rows(group[name], name) for name in ("tokens", "masks")
        }
        for name in PER_TOKEN_FIELDS:
            fields[name] = self._rows(group.get(name), name)
        for name in DISTILL_FIELDS:
            fields[name] = self._nested_rows(group.get(name), name)
        fields["scores"] = _values(group["scores"], "scores")
        self._num_lists += 1
        for name in OBJECT_FIELDS:
            value = group.get(name)
            is_object = isinstance(value, simdjson.Array | simdjson.Object)
            fields[name] = self._object(value.mini, name) if is_object else value
        for name, kind in _SCALARS:
            fields[name] = group.get(name)
            if type(fields[name]) not in (kind, type(None)):
                raise TypeError(name)
        return fields

    def _rows(self, rows: Any, name: str) -> Ragged | list[Any] | None:
        if rows is None:
            return None
        self._num_lists += 1 + len(rows)
        if len(rows) > MAX_SEQUENCES:
            raise ValueError("too many sequences")
        return Ragged(_values(rows, name), _lengths(rows)) if len(rows) else []

    def _nested_rows(self, rows: Any, name: str) -> RaggedPerToken | list[Any] | None:
        flat = self._rows(rows, name)
        if not isinstance(flat, Ragged):
            return flat
        entries = [entry for row in rows for entry in row]
        self._num_lists += len(entries)
        return RaggedPerToken(Ragged(flat.values, _lengths(entries)), flat.lengths)

    def _object(self, text: bytes, name: str) -> Any:
        if b"\\u005" in bytes(self._body):
            raise ValueError("`text` may spell out a bracket that the body hides")
        self._num_lists += text.count(b"[")
        return decode_member(text, name)


def _piecewise_fields(body: Blob, *, many: bool) -> list[dict[str, Any]] | None:
    """Do as `_whole_fields`, with the memory of one row at a time."""
    parser = simdjson.Parser()
    decoder: Any = _many_raw_decoder if many else _one_raw_decoder
    try:
        decoded = decoder.decode(body)
        return [_raw_fields(group, parser) for group in (decoded if many else [decoded])]
    except (*_ODD, RecursionError):
        return None


def _raw_fields(group: _RawGroup, parser: simdjson.Parser) -> dict[str, Any]:
    fields = _with_objects(group)
    fields["scores"] = _row(fields["scores"], "scores", parser).values
    for name in ("tokens", "masks", *PER_TOKEN_FIELDS, *DISTILL_FIELDS):
        if fields[name]:  # the gate tells [] from null
            is_nested = name in DISTILL_FIELDS
            rows = [_row(text, name, parser, is_nested=is_nested) for text in fields[name]]
            values = np.concatenate([row.values for row in rows])
            lengths = np.array([len(row.lengths) for row in rows], dtype=np.int64)
            fields[name] = Ragged(values, lengths)
            if is_nested:
                counts = np.concatenate([row.lengths for row in rows])
                fields[name] = RaggedPerToken(Ragged(values, counts), lengths)
    return fields


def _row(
    raw: msgspec.Raw, name: str, parser: simdjson.Parser, *, is_nested: bool = False
) -> Ragged:
    """Parse the numbers of one sequence; `lengths` has an entry for each token, which counts if they are nested."""
    text = bytes(raw)
    row = cast(simdjson.Array, parser.parse(text))
    lengths = _lengths(row) if is_nested else np.broadcast_to(np.int64(1), len(row))
    if text.count(b"[") != 1 + (len(row) if is_nested else 0):
        raise ValueError("a list where none belongs")
    return Ragged(_values(row, name), lengths)


def _values(rows: simdjson.Array, name: str) -> NDArray[Any]:
    is_int = name in _INT_FIELDS
    buffer = rows.as_buffer(of_type="i" if is_int else "d")
    return np.frombuffer(buffer, dtype=np.int64 if is_int else np.float64)


def _lengths(rows: Any) -> NDArray[np.int64]:
    return np.array([len(cast(simdjson.Array, row)) for row in rows], dtype=np.int64)


def _thorough_fields(body: Blob, *, many: bool) -> Iterator[dict[str, Any]]:
    decoder: Any = _many_decoder if many else _one_decoder
    try:
        decoded = decoder.decode(body)
    except msgspec.ValidationError as e:
        raise _wrong_type(e) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _not_json(body, e, decoder) from e
    except RecursionError as e:
        raise GroupError("body: nested too deeply") from e
    yield from map(_with_objects, decoded if many else [decoded])


def _with_objects(group: _Group | _RawGroup) -> dict[str, Any]:
    """Return the fields of a group with its objects parsed."""
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    for name in OBJECT_FIELDS:
        text = memoryview(fields[name])
        fields[name] = decode_member(text, name) if text.nbytes else None
    return fields


def _wrong_type(error: msgspec.ValidationError) -> GroupError:
    """Say where first: "Expected `array`, got `int` - at `$[0].masks`" is "[0].masks: expected array, got int"."""
    message, _, where = str(error).partition(" - at `$")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    path = where.rstrip("`")
    if missing:
        path, message = f"{path}.{missing[1]}", "required, but missing"
    message = message.replace("`", "")
    return GroupError(f"{_place(path) or 'body'}: {message[0].lower()}{message[1:]}")


def _place(path: str) -> str:
    """Say paths as the gate does: `[0].tokens[2][5]` is `[0].sequences[2].tokens[5]`."""
    found = re.fullmatch(r"((?:\[\d+\])?)\.?(\w+)\[(\d+)\](.*)", path, re.DOTALL)
    if found and found[2] in _ROW_FIELDS:
        group, name, row, rest = found.groups()
        return f"{group}{'.' if group else ''}sequences[{row}].{name}{rest}"
    return path.lstrip(".")


def _not_json(body: Blob, error: Exception, decoder: Any) -> GroupError:
    """Name the place of a NaN, which Python's `json` writes; otherwise say what the parser does."""
    position = re.search(r"\(byte (\d+)\)", str(error))
    start = int(position[1]) if position else 0
    # A minus sign is a number until what follows it is seen.
    literal = _NOT_FINITE.match(body, max(0, start - 1)) or _NOT_FINITE.match(body, start)
    if literal is None:
        hint = "; it ends early, or holds half of a surrogate pair" if position is None else ""
        return GroupError(f"body: not JSON: {error}{hint}")
    what = f"{float(literal[0])} is not finite; send a number or leave the group out"
    try:
        # An object there is a fault of type, whose path msgspec tells.
        decoder.decode(b"".join([body[: literal.start()], b"{}", body[literal.end() :]]))
    except msgspec.ValidationError as e:
        path, _, _ = str(_wrong_type(e)).partition(": ")
        return GroupError(f"{path}: {what}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # in an object, and not the only fault
    return GroupError(f"body: byte {literal.start()}: {what}")
