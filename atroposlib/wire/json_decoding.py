"""Decode groups from JSON with two parsers: simdjson for groups of the usual form, msgspec for all others.

simdjson writes the numbers of a group straight into arrays. Without it, JSON in and out of the hub costs 1.3 to 2.1
times as much (0.43-0.64 CPU seconds per million tokens for 0.29-0.33, alternating; groups of 8 x 2048 with logprobs).
It does not locate faults, and flattens lists within rows; a group with anything unusual is therefore decoded again,
into typed lists. msgspec and `check_group` then report what is wrong and where:
`[1].sequences[2].tokens[7]: expected int, got str`. Every fault of a body is a `GroupError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
import simdjson
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    FIELD,
    FIELDS,
    Field,
    Level,
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

_QUICK_BYTES: Final = 2**26
"""simdjson needs 14 times the memory of its text, 0.9 GB at this size; msgspec half of that."""
_ODD: Final = (ValueError, TypeError, RuntimeError, AttributeError, KeyError, GroupError)
"""What parsing raises for a body that is faulty or not of the usual form; `msgspec.DecodeError` is a `ValueError`."""
_NOT_FINITE: Final = re.compile(rb"NaN|-?Infinity")

_Sequences = msgspec.Meta(max_length=MAX_SEQUENCES)


def _member(field: Field) -> tuple[Any, ...]:
    """Return the name, the type and, unless it is required, the default of a field of `_Group`."""
    if field.name in OBJECT_FIELDS:
        return field.name, msgspec.Raw, msgspec.Raw()
    kind: Any = field.kind
    if field.level is Level.SEQUENCE:
        kind = list[kind]
    elif field.level is not Level.GROUP:
        row: Any = list[kind] if field.level is Level.TOKEN else list[list[kind]]
        kind = Annotated[list[row | kind] if field.may_be_per_sequence else list[row], _Sequences]
    return (field.name, kind) if field.is_required else (field.name, kind | None, None)


_Group: Any = msgspec.defstruct("_Group", [_member(field) for field in FIELDS], gc=False)
"""A group in JSON; objects are not parsed yet."""
_Groups = msgspec.Meta(max_length=MAX_GROUPS)
_one_decoder = msgspec.json.Decoder(_Group)
_many_decoder = msgspec.json.Decoder(Annotated[list[_Group], _Groups])
_split_decoder = msgspec.json.Decoder(Annotated[list[msgspec.Raw], _Groups])


def iter_json_groups(body: Blob, *, many: bool) -> Iterator[ScoredGroup]:
    """Decode one JSON group, or a list of them (`many`), and check each at the hub's strictness.

    Raises `GroupError` naming the field; for a list the path starts with `[index]`.
    """
    if not many:
        yield _decode_group(body)
        return
    try:
        texts = _split_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        _parse(body, _many_decoder)  # says where the fault is
        raise
    for i, text in enumerate(texts):
        try:
            group = _decode_group(memoryview(text))
        except GroupError as e:
            raise GroupError(f"[{i}].{e}") from e
        yield group


def _decode_group(text: Blob) -> ScoredGroup:
    fields = _quick_fields(text)
    if fields is None:
        fields = _with_objects(_parse(text, _one_decoder))
    return check_group(fields, strictness=Strictness.WIRE)


def _quick_fields(text: Blob) -> dict[str, Any] | None:
    """Parse a group of the usual form; None for one with anything unusual."""
    # simdjson skips a byte order mark
    if len(text) > _QUICK_BYTES or text[:1] == b"\xef":
        return None
    try:
        return _QuickReader(text).read(simdjson.Parser().parse(text))
    except _ODD:
        return None


class _QuickReader:
    """Reads a group from simdjson's document, and counts the lists that it should consist of."""

    def __init__(self, text: Blob) -> None:
        self._text = text
        self._num_lists = 0

    def read(self, group: Any) -> dict[str, Any]:
        """Return the fields of a `simdjson.Object`; raises one of `_ODD` for anything unusual."""
        fields = self._fields(group)
        # Reading an array flattens lists within a row: only the number of lists reveals them.
        if self._num_lists != np.count_nonzero(np.frombuffer(self._text, np.uint8) == ord("[")):
            raise ValueError("a list where none belongs")
        return fields

    def _fields(self, group: Any) -> dict[str, Any]:
        if len(set(group)) != len(group):
            raise ValueError("a key twice")
        return {
            name: read(self, group[name] if is_required else group.get(name), name)
            for name, is_required, read in _READERS
        }

    def _scalar(self, value: Any, name: str) -> Any:
        if type(value) not in (FIELD[name].kind, type(None)):
            raise TypeError(name)
        return value

    def _any(self, value: Any, name: str) -> Any:
        is_object = isinstance(value, simdjson.Array | simdjson.Object)
        return self._object(value.mini, name) if is_object else value

    def _row(self, row: Any, name: str) -> NDArray[Any] | None:
        if row is None and not FIELD[name].is_required:
            return None
        self._num_lists += 1
        return _values(row, name)

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
        if b"\\u005" in bytes(self._text):
            raise ValueError("`text` may spell out a bracket that the group hides")
        self._num_lists += text.count(b"[")
        return decode_member(text, name)


def _reader(field: Field) -> Callable[[_QuickReader, Any, str], Any]:
    if field.name in OBJECT_FIELDS:
        return _QuickReader._any
    return {
        Level.GROUP: _QuickReader._scalar,
        Level.SEQUENCE: _QuickReader._row,
        Level.TOKEN: _QuickReader._rows,
        Level.ENTRY: _QuickReader._nested_rows,
    }[field.level]


_READERS: Final = [(field.name, field.is_required, _reader(field)) for field in FIELDS]


def _values(rows: simdjson.Array, name: str) -> NDArray[Any]:
    is_int = FIELD[name].kind is int
    buffer = rows.as_buffer(of_type="i" if is_int else "d")
    return np.frombuffer(buffer, dtype=np.int64 if is_int else np.float64)


def _lengths(rows: Any) -> NDArray[np.int64]:
    return np.array([len(cast(simdjson.Array, row)) for row in rows], dtype=np.int64)


def _parse(text: Blob, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decode into typed lists. Raises `GroupError`."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as e:
        raise _wrong_type(e) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _not_json(text, e, decoder) from e
    except RecursionError as e:
        raise GroupError("body: nested too deeply") from e


def _with_objects(group: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a `_Group` with its objects parsed."""
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    for name in OBJECT_FIELDS:
        text = memoryview(fields[name])
        fields[name] = decode_member(text, name) if text.nbytes else None
    return fields


def _wrong_type(error: Exception) -> GroupError:
    """Put the path first: "Expected `array`, got `int` - at `$[0].masks`" is "[0].masks: expected array, got int"."""
    message, _, where = str(error).partition(" - at `$")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    path = where.rstrip("`")
    if missing:
        path, message = f"{path}.{missing[1]}", "required, but missing"
    message = message.replace("`", "")
    return GroupError(f"{_place(path) or 'body'}: {message[0].lower()}{message[1:]}")


def _place(path: str) -> str:
    """Write paths as `check_group` does: `[0].tokens[2][5]` is `[0].sequences[2].tokens[5]`."""
    found = re.fullmatch(r"((?:\[\d+\])?)\.?(\w+)\[(\d+)\](.*)", path, re.DOTALL)
    if found and _is_listed_by_sequence(found[2]):
        group, name, row, rest = found.groups()
        return f"{group}{'.' if group else ''}sequences[{row}].{name}{rest}"
    return path.lstrip(".")


def _is_listed_by_sequence(name: str) -> bool:
    """Whether each entry of a field is a list or an object, rather than a number."""
    field = FIELD.get(name)
    if field is None or field.level is Level.GROUP:
        return False
    return not (field.level is Level.SEQUENCE and field.is_numeric)


def _not_json(text: Blob, error: Exception, decoder: msgspec.json.Decoder[Any]) -> GroupError:
    """Report where the JSON breaks, with the field if msgspec knows it, or a NaN, which Python's `json` writes."""
    position = re.search(r"\(byte (\d+)\)", str(error))
    start = int(position[1]) if position else len(text)
    # The fault may be found only after the minus sign of -Infinity.
    literal = _NOT_FINITE.match(text, max(0, start - 1)) or _NOT_FINITE.match(text, start)
    if literal is not None:
        start = literal.start()
        what = f"{float(literal[0])} is not finite; send a number or leave the group out"
    else:
        # Invalid UTF-8 has no position either: UnicodeDecodeError, or "Invalid UTF-8 ..." since msgspec 0.23.
        is_text = position is None and "utf-8" not in str(error).lower()
        hint = "; it ends early, or holds half of a surrogate pair" * is_text
        what = f"not JSON: {error}{hint}"
    for separator in (b"", b","):
        try:
            # An object in a list of numbers is a type error, for which msgspec reports the path.
            decoder.decode(b"".join([text[:start], separator, b"{}"]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            if "got `object`" in str(e):
                path, _, _ = str(_wrong_type(e)).partition(": ")
                return GroupError(f"{path}: {what}")
    return GroupError(f"body: byte {start}: {what}" if literal else f"body: {what}")
