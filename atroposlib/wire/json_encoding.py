"""Groups as JSON: the fourteen keys of the original's wire, in order, written from packed blobs.

The text comes in pieces, each from one short call into C: a group of any size is encoded without holding the GIL for
more than a few milliseconds at a time. Blobs are trusted here: they passed `check_blob` or `check_group` when they came
in. orjson writes numbers straight from numpy's memory: 0.04 CPU seconds per million tokens, where msgspec takes 0.12 by
way of lists, a quarter of what JSON in and out costs the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from atroposlib.scored_data import (
    DISTILL_FIELDS,
    IGNORE_INDEX,
    PER_TOKEN_FIELDS,
    WIRE_KEYS,
    ScoredGroup,
)
from atroposlib.wire.packed import (
    SEQUENCE_ADVANTAGES,
    Blob,
    PackedDistillation,
    PackedGroup,
    open_blob,
    pack_group,
    read_bits,
    read_buffer,
    tail_members,
)

_CHUNK_VALUES: Final = 16384
"""Numbers per call: one of 17 digits takes about 40 ns."""

_CHUNK_BYTES: Final = 2**20
_SHORT_ROW: Final = 64
"""Rows shorter than this on average are encoded together: a call per row would cost more than its numbers."""

Cut = Callable[[int, int], NDArray[Any]]


def encode_json(group: ScoredGroup) -> bytes:
    """Encode a group as JSON; raises `GroupError` for what JSON cannot express."""
    return b"".join(json_pieces(pack_group(group)))


def json_pieces(blob: Blob) -> Iterator[bytes]:
    """Yield the JSON of a packed group that was checked before; joined, the pieces are the text."""
    packed = open_blob(blob)
    lengths = read_buffer(packed.lengths, "<u4", None, "lengths").astype(np.int64)
    bounds = [0, *np.cumsum(lengths).tolist()]
    tail = tail_members(packed)
    arrays = _array_cuts(packed, bounds[-1])
    for i, name in enumerate(WIRE_KEYS):
        yield b'%c"%s":' % (b"," if i else b"{", name.encode())
        if name in arrays:
            yield from _rows(bounds, arrays[name])
        elif name == "advantages" and SEQUENCE_ADVANTAGES in packed.arrays:
            width, buffer = packed.arrays[SEQUENCE_ADVANTAGES]
            values = read_buffer(buffer, f"<{width}", len(lengths), name)
            yield from _row(_cut_of(values), 0, len(lengths))
        elif name == "scores":
            yield from _row(_cut_of(read_buffer(packed.scores, "<f8", None, name)), 0, len(lengths))
        elif name in packed.distill:
            yield from _nested(bounds, packed.distill[name])
        elif name in tail:
            member = tail[name]
            for start in range(0, member.nbytes, _CHUNK_BYTES):
                yield bytes(member[start : start + _CHUNK_BYTES])
        elif name == "env_id" and packed.env_id is not None:
            yield b"%d" % packed.env_id
        else:
            yield b"[]" if name in packed.empty else b"null"
    yield b"}"


def _array_cuts(packed: PackedGroup, num_tokens: int) -> dict[str, Cut]:
    """Return, by field, what cuts out positions start..stop as an array that can be encoded."""
    tokens = read_buffer(packed.tokens, "<i4", num_tokens, "tokens")
    cuts = {"tokens": _cut_of(tokens)}
    if packed.masks is not None:
        cuts["masks"] = _cut_of(read_buffer(packed.masks, "<i4", num_tokens, "masks"))
    else:
        trained = read_bits(packed.trained, num_tokens)
        ignored = np.int32(IGNORE_INDEX)
        cuts["masks"] = lambda start, stop: np.where(
            trained[start:stop], tokens[start:stop], ignored
        )
    for name in PER_TOKEN_FIELDS:
        if name in packed.arrays:
            width, buffer = packed.arrays[name]
            cuts[name] = _cut_of(read_buffer(buffer, f"<{width}", num_tokens, name))
    return cuts


def _cut_of(values: NDArray[Any]) -> Cut:
    # float32 is written with the digits of the float64 that was sent
    dtype = np.dtype(np.float64 if values.dtype.kind == "f" else np.int32)
    return lambda start, stop: values[start:stop].astype(dtype, copy=False)


def _rows(bounds: list[int], cut: Cut) -> Iterator[bytes]:
    num_rows, num_values = len(bounds) - 1, bounds[-1]
    if num_values <= min(_CHUNK_VALUES, _SHORT_ROW * num_rows):
        values = cut(0, num_values).tolist()
        yield orjson.dumps([values[start:stop] for start, stop in pairwise(bounds)])
        return
    separator = b"["
    for start, stop in pairwise(bounds):
        yield separator
        yield from _row(cut, start, stop)
        separator = b","
    yield b"]"


def _row(cut: Cut, start: int, stop: int) -> Iterator[bytes]:
    if stop - start <= _CHUNK_VALUES:
        yield _numbers(cut(start, stop))
        return
    separator = b"["
    for middle in range(start, stop, _CHUNK_VALUES):
        yield separator
        yield _numbers(cut(middle, min(middle + _CHUNK_VALUES, stop)))[1:-1]
        separator = b","
    yield b"]"


def _numbers(values: NDArray[Any]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def _nested(bounds: list[int], packed: PackedDistillation) -> Iterator[bytes]:
    lengths = read_buffer(packed.lengths, "<u4", None, "lengths").astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    values = read_buffer(packed.values, f"<{packed.width}", int(ends[-1]), "values")
    row_separator = b"["
    for start, stop in pairwise(bounds):
        yield row_separator + b"["
        row_separator = b","
        position = start
        while position < stop:
            first = int(ends[position])
            # At least one entry, and as many as fit; an entry longer than that is encoded whole.
            fits = int(np.searchsorted(ends, first + _CHUNK_VALUES, side="right")) - 1
            end = min(stop, max(position + 1, fits), position + _CHUNK_VALUES)
            cuts = (ends[position : end + 1] - first).tolist()
            numbers = values[first : int(ends[end])].tolist()
            entries = orjson.dumps([numbers[a:b] for a, b in pairwise(cuts)])
            yield (b"," if position > start else b"") + entries[1:-1]
            position = end
        yield b"]"
    yield b"]" if len(bounds) > 1 else b"[]"


assert set(PER_TOKEN_FIELDS) | set(DISTILL_FIELDS) < set(WIRE_KEYS)
