"""Groups from JSON: number by number into arrays, never through lists of Python objects.

A body is scanned once for the raw text of its fields and rows; rows are parsed about a MiB at a time, so neither the
memory nor the time of one call grows with the size of a row. Every fault of a body that anybody can send is a
`GroupError` with a path: `[1].sequences[2].tokens[7]: expected an integer, got ...`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final, cast

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

_CHUNK_BYTES: Final = 2**20
_PLAIN_BYTES: Final = 2**19
"""Parsed in one call, which holds the GIL for up to 4 ms."""
_INT_ROWS: Final = ("tokens", "masks")
_ROW_FIELDS: Final = (*_INT_ROWS, *PER_TOKEN_FIELDS, *DISTILL_FIELDS, *PER_SEQUENCE_FIELDS)
_PLAIN_SCALARS: Final = (("env_id", int), ("group_id", str), ("policy_version", int))
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(rb"NaN|-?Infinity")
_SPACE: Final = b" \t\n\r"


class _RawGroup(msgspec.Struct, gc=False):
    """Where the fields of a group lie in the body; numbers and objects are not parsed yet."""

    tokens: list[msgspec.Raw]
    masks: list[msgspec.Raw]
    scores: msgspec.Raw
    advantages: list[msgspec.Raw] | None = None
    ref_logprobs: list[msgspec.Raw] | None = None
    messages: msgspec.Raw = msgspec.Raw()
    generation_params: msgspec.Raw = msgspec.Raw()
    inference_logprobs: list[msgspec.Raw] | None = None
    overrides: msgspec.Raw = msgspec.Raw()
    group_overrides: msgspec.Raw = msgspec.Raw()
    images: msgspec.Raw = msgspec.Raw()
    env_id: int | None = None
    distill_token_ids: list[msgspec.Raw] | None = None
    distill_logprobs: list[msgspec.Raw] | None = None
    group_id: str | None = None
    policy_version: int | None = None


_one_decoder = msgspec.json.Decoder(_RawGroup)
_many_decoder = msgspec.json.Decoder(list[_RawGroup])


def decode_json_groups(body: Blob, *, many: bool) -> list[ScoredGroup]:
    """Decode one JSON group, or a list of them (`many`), and check each at the hub's strictness.

    Raises `GroupError` naming the field; for a list the path starts with `[index]`.
    """
    return list(iter_json_groups(body, many=many))


def iter_json_groups(body: Blob, *, many: bool) -> Iterator[ScoredGroup]:
    """Decode as `decode_json_groups` does, one group at a time."""
    if not many and (plain := _plain_fields(body)) is not None:
        yield check_group(plain, strictness=Strictness.WIRE)
        return
    try:
        raws = _many_decoder.decode(body) if many else [_one_decoder.decode(body)]
    except msgspec.ValidationError as e:
        raise _wrong_type(e) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _not_json(body, e) from e
    except RecursionError as e:
        raise GroupError("body: nested too deeply") from e
    if len(raws) > MAX_GROUPS:
        raise GroupError(f"body: {len(raws)} groups; send at most {MAX_GROUPS} at once")
    rows = _RowParser()
    for i, raw in enumerate(raws):
        try:
            group = check_group(_fields(raw, rows), strictness=Strictness.WIRE)
        except GroupError as e:
            raise (GroupError(f"[{i}].{e}") if many else e) from e
        yield group


def _plain_fields(body: Blob) -> dict[str, Any] | None:
    """Parse an ordinary group of at most half a MiB, in half the time that `_fields` takes.

    Returns None for every other body, faulty ones among them: `_fields` says what is wrong.
    """
    if len(body) > _PLAIN_BYTES or body[:1] not in (b"{", b" ", b"\n"):
        return None
    try:
        return _plain_group(simdjson.Parser().parse(body), body)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, GroupError):
        return None


def _plain_group(group: Any, body: Blob) -> dict[str, Any] | None:
    """`group` is a `simdjson.Object` if it is a group at all: the caller takes errors of type and attribute."""
    if any(group.get(name) is not None for name in DISTILL_FIELDS):
        return None
    fields: dict[str, Any] = {}
    num_lists = 1
    for name in (*_INT_ROWS, *PER_TOKEN_FIELDS):
        rows = group[name] if name in _INT_ROWS else group.get(name)
        fields[name] = None
        if rows is not None:
            fields[name] = _plain_rows(rows, is_int=name in _INT_ROWS)
            num_lists += 1 + len(rows)
    scores = group["scores"].as_buffer(of_type="d")
    fields["scores"] = np.frombuffer(scores, dtype=np.float64)
    for name in OBJECT_FIELDS:
        value = group.get(name)
        text = b"null" if value is None else value.mini
        fields[name] = decode_member(text, name)
        num_lists += text.count(b"[")
        if value is not None and b"\\u005" in bytes(body):
            return None  # `text` may spell out a bracket that the body hides
    for name, kind in _PLAIN_SCALARS:
        fields[name] = group.get(name)
        if type(fields[name]) not in (kind, type(None)):
            return None
    # The buffer of rows takes in what the lists in a row hold: only the number of lists tells whether there are any.
    is_flat = num_lists == np.count_nonzero(np.frombuffer(body, np.uint8) == ord("["))
    return fields if is_flat and len(set(group)) == len(group) else None


def _plain_rows(rows: simdjson.Array, *, is_int: bool) -> Ragged:
    if not len(rows):
        raise ValueError("no rows: the gate tells [] from null")
    lengths = np.array([len(cast(simdjson.Array, row)) for row in rows], dtype=np.int64)
    buffer = rows.as_buffer(of_type="i" if is_int else "d")
    values = np.frombuffer(buffer, dtype=np.int64 if is_int else np.float64)
    return Ragged(_narrow(values) if is_int else values, lengths)


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Return 32 bits where they are enough."""
    narrow = values.astype(np.int32)
    return narrow if np.array_equal(narrow, values) else values


def _fields(raw: _RawGroup, rows: _RowParser) -> dict[str, Any]:
    for name in (*_INT_ROWS, *PER_TOKEN_FIELDS, *DISTILL_FIELDS):
        texts: list[msgspec.Raw] | None = getattr(raw, name)
        if texts and len(texts) > MAX_SEQUENCES:
            raise GroupError(
                f"{name}: {len(texts)} sequences, at most {MAX_SEQUENCES} are accepted"
            )
    group: dict[str, Any] = {
        "scores": rows.flat(raw.scores, "scores", is_int=False),
        "env_id": raw.env_id,
        "group_id": raw.group_id,
        "policy_version": raw.policy_version,
    }
    for name in _INT_ROWS:
        group[name] = rows.ragged(getattr(raw, name), name)
    # Null and [] are passed on as they are: the gate tells one from the other.
    for name in PER_TOKEN_FIELDS:
        texts = getattr(raw, name)
        group[name] = rows.ragged(texts, name) if texts else texts
    for name in DISTILL_FIELDS:
        texts = getattr(raw, name)
        group[name] = rows.ragged_per_token(texts, name) if texts else texts
    for name in OBJECT_FIELDS:
        text = memoryview(getattr(raw, name))
        group[name] = decode_member(text, name) if text.nbytes else None
    return group


class _RowParser:
    """Parses rows of numbers. Not to be shared between threads: a parser has one document at a time."""

    def __init__(self) -> None:
        self._parser = simdjson.Parser()

    def ragged(self, texts: list[msgspec.Raw], name: str) -> Ragged:
        """Parse one flat row per sequence."""
        is_int = name in _INT_ROWS
        rows = [
            self.flat(text, f"sequences[{i}].{name}", is_int=is_int) for i, text in enumerate(texts)
        ]
        return Ragged(_concatenate(rows, is_int=is_int), _lengths(rows))

    def ragged_per_token(self, texts: list[msgspec.Raw], name: str) -> RaggedPerToken:
        """Parse one row of rows per sequence."""
        is_int = name == "distill_token_ids"
        rows = [
            self._nested(bytes(text), f"sequences[{i}].{name}", is_int=is_int)
            for i, text in enumerate(texts)
        ]
        entries = Ragged(
            _concatenate([row.values for row in rows], is_int=is_int),
            _concatenate([row.lengths for row in rows], is_int=True),
        )
        return RaggedPerToken(entries, _lengths([row.lengths for row in rows]))

    def flat(self, raw: msgspec.Raw, path: str, *, is_int: bool) -> NDArray[Any]:
        """Parse a list of numbers, whose text is known to be JSON."""
        text = bytes(raw)
        if text[:1] != b"[":
            raise GroupError(f"{path}: expected a list of numbers, got {_shown(text)}")
        odd = min((p for p in (text.find(c, 1) for c in b'[{"') if p >= 0), default=-1)
        if odd >= 0:
            index = text.count(b",", 0, odd)
            raise GroupError(f"{path}[{index}]: {_expected(is_int)}, got {_shown(text[odd:-1])}")
        parts: list[NDArray[Any]] = []
        num_values, start, end = 0, 1, len(text) - 1
        while True:
            stop = text.find(b",", start + _CHUNK_BYTES, end)
            stop = end if stop < 0 else stop
            part = self._numbers(text[start:stop], path, num_values, is_int=is_int)
            parts.append(part)
            num_values += len(part)
            start = stop + 1
            if start > end:
                return parts[0] if len(parts) == 1 else _concatenate(parts, is_int=is_int)

    def _numbers(self, text: bytes, path: str, offset: int, *, is_int: bool) -> NDArray[Any]:
        """Parse numbers with commas between them, which stand `offset` numbers into `path`."""
        try:
            return self._buffer(b"[" + text + b"]", is_int=is_int)
        except (ValueError, TypeError, RuntimeError):
            # The parser names no position, and refuses integers of more than 64 bits among floats.
            return _numbers_slowly(text, path, offset, is_int=is_int)

    def _buffer(self, text: bytes, *, is_int: bool) -> NDArray[Any]:
        array = cast(simdjson.Array, self._parser.parse(text))
        if not is_int:
            return np.frombuffer(array.as_buffer(of_type="d"), dtype=np.float64)
        return _narrow(np.frombuffer(array.as_buffer(of_type="i"), dtype=np.int64))

    def _nested(self, text: bytes, path: str, *, is_int: bool) -> Ragged:
        """Parse a list of lists of numbers, whose text is known to be JSON."""
        if text[:1] != b"[":
            raise GroupError(f"{path}: expected a list of lists of numbers, got {_shown(text)}")
        odd = min((p for p in (text.find(c) for c in b'{"') if p >= 0), default=-1)
        if odd >= 0:
            raise GroupError(f"{path}: {_expected(is_int)}, got {_shown(text[odd:-1])}")
        values: list[NDArray[Any]] = []
        counts: list[int] = []
        start, end = 1, len(text) - 1
        while start < end:
            close = text.find(b"]", start + _CHUNK_BYTES, end)
            stop = text.find(b"[", close, end) if close >= 0 else -1
            stop = end if stop < 0 else stop
            part = text[start:stop].rstrip(_SPACE + b",") if stop < end else text[start:stop]
            chunk = self._entries(b"[" + part + b"]", path, len(counts), is_int=is_int)
            values.append(chunk.values)
            counts += chunk.lengths.tolist()
            start = stop
        return Ragged(_concatenate(values, is_int=is_int), np.array(counts, dtype=np.int64))

    def _entries(self, text: bytes, path: str, offset: int, *, is_int: bool) -> Ragged:
        try:
            return self._plain_entries(text, is_int=is_int)
        except (ValueError, TypeError, RuntimeError):
            pass  # The parser names no position; one entry at a time, the fault is found.
        try:
            raws = msgspec.json.decode(text, type=list[msgspec.Raw])
        except msgspec.DecodeError as e:  # cut in the middle of a list that is nested further
            raise GroupError(f"{path}: expected a list of lists of numbers") from e
        rows = [
            self.flat(raw, f"{path}[{offset + i}]", is_int=is_int) for i, raw in enumerate(raws)
        ]
        return Ragged(_concatenate(rows, is_int=is_int), _lengths(rows))

    def _plain_entries(self, text: bytes, *, is_int: bool) -> Ragged:
        array = cast(simdjson.Array, self._parser.parse(text))
        counts = np.array([len(cast(simdjson.Array, e)) for e in array], dtype=np.int64)
        # One bracket for each entry and one around them: then no entry holds another list.
        if text.count(b"[") != len(counts) + 1:
            raise ValueError("nested")
        buffer = array.as_buffer(of_type="i" if is_int else "d")
        return Ragged(np.frombuffer(buffer, dtype=np.int64 if is_int else np.float64), counts)


def _numbers_slowly(text: bytes, path: str, offset: int, *, is_int: bool) -> NDArray[Any]:
    """Parse numbers one by one, to name the one that is at fault."""
    values: list[float] = []
    for i, element in enumerate(text.split(b",")):
        element = element.strip(_SPACE)
        place = f"{path}[{offset + i}]"
        number = _NUMBER.fullmatch(element)
        if number is None or (is_int and (number[1] or number[2])):
            raise GroupError(f"{place}: {_expected(is_int)}, got {_shown(element)}")
        if is_int and abs(float(element)) >= 2.0**63:
            raise GroupError(f"{place}: {_shown(element)} does not fit 64 bits")
        value = int(element) if is_int else float(element)
        if math.isinf(value):
            raise GroupError(f"{place}: {_shown(element)} is not finite")
        values.append(value)
    return np.array(values, dtype=np.int64 if is_int else np.float64)


def _concatenate(parts: list[NDArray[Any]], *, is_int: bool) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64 if is_int else np.float64)


def _lengths(rows: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.array([len(row) for row in rows], dtype=np.int64)


def _expected(is_int: bool) -> str:
    return "expected an integer" if is_int else "expected a number"


def _shown(text: bytes) -> str:
    cut = text[:57] + b"..." if len(text) > 60 else text
    return cut.decode("utf-8", "backslashreplace")


def _wrong_type(error: msgspec.ValidationError) -> GroupError:
    """Say where first: "Expected `array`, got `int` - at `$[0].masks`" is "[0].masks: expected array, got int"."""
    message, _, where = str(error).partition(" - at `$")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    path = where.rstrip("`")
    if missing:
        path, message = f"{path}.{missing[1]}", "required, but missing"
    message = message.replace("`", "")
    return GroupError(f"{_place(path) or 'body'}: {message[0].lower()}{message[1:]}")


def _not_json(body: Blob, error: Exception) -> GroupError:
    """Name the path at which the body stops being JSON, such as that of a NaN."""
    position = re.search(r"\(byte (\d+)\)", str(error))
    if position is None:
        hint = (
            "; it ends early, or holds half of a surrogate pair"
            if "truncated" in str(error)
            else ""
        )
        return GroupError(f"body: not JSON: {error}{hint}")
    start = int(position[1])
    path = _place(_path_at(body, start))
    # A minus sign is a number until what follows it is seen.
    for at in (max(0, start - 1), start):
        literal = _NOT_FINITE.match(body, at)
        if literal:
            value = float(literal[0])
            return GroupError(
                f"{path}: {value} is not finite; send a number or leave the group out"
            )
    return GroupError(f"{path or 'body'}: not JSON: {error}")


# A string that does not end is one token too, and nothing is tried twice: else each of its escaped quotes would be
# taken for the start of a string and read to the end, which takes hours for a megabyte of them.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]|[^"\[\]{}]++', re.DOTALL)


def _path_at(body: Blob, position: int) -> str:
    """Return the path of the value at `position` of a body that is JSON up to there."""
    stack: list[int | str | None] = []  # index in a list; key in an object, None before the first
    is_key = False
    for token in _TOKEN.finditer(body, 0, position):
        text = token[0]
        first = text[:1]
        if first in (b"[", b"{"):
            stack.append(0 if first == b"[" else None)
            is_key = first == b"{"
        elif first in (b"]", b"}"):
            if stack:
                stack.pop()
            is_key = False
        elif first == b'"':
            if is_key and stack:
                stack[-1] = _shown(text[1:-1])
                is_key = False
        elif stack and (commas := text.count(b",")):
            top = stack[-1]
            is_key = not isinstance(top, int)
            if isinstance(top, int):
                stack[-1] = top + commas
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in stack if p is not None)


def _place(path: str) -> str:
    """Say paths as the gate does: `[0].tokens[2][5]` is `[0].sequences[2].tokens[5]`."""
    found = re.fullmatch(r"((?:\[\d+\])?)\.?(\w+)\[(\d+)\](.*)", path, re.DOTALL)
    if found and found[2] in _ROW_FIELDS:
        group, name, row, rest = found.groups()
        return f"{group}{'.' if group else ''}sequences[{row}].{name}{rest}"
    return path.lstrip(".")
