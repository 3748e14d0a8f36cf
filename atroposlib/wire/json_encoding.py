"""Encode packed groups as JSON: the fourteen keys of the original's wire format, in order, and native ones where given.

The text comes in pieces, each from one short call into C: a group of any size is encoded without holding the GIL for
more than a few milliseconds at a time. Blobs are trusted here: they passed `check_blob` or `check_group` on arrival.
orjson writes numbers straight from numpy's memory: 0.05 CPU seconds per million tokens, where msgspec takes 0.14
through lists, with which JSON in and out of the hub costs 1.35 to 1.5 times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from atroposlib.scored_data import (
    DISTILL_FIELDS,
    IGNORE_INDEX,
    NATIVE_ROWS,
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
    tail_members,
)

_CHUNK_VALUES: Final = 8192
"""Numbers per call: one of 17 digits takes about 40 ns."""

_CHUNK_BYTES: Final = 2**18
_SHORT_ROW: Final = 64
"""Rows shorter than this on average are encoded together: a call per row would cost more than its numbers."""

Cut = Callable[[int, int], NDArray[Any]]


def encode_json(group: ScoredGroup) -> bytes:
    """Encode a group as JSON; raises `GroupError` for what JSON cannot express."""
    return b"".join(json_pieces(pack_group(group)))


def json_pieces(blob: Blob) -> Iterator[bytes]:
    """Yield the JSON text of a packed group, which must have been checked, in pieces."""
    packed = open_blob(blob)
    bounds = [0, *np.cumsum(_view(packed.lengths, "u4"), dtype=np.int64).tolist()]
    tail = tail_members(packed)
    arrays = _array_cuts(packed)
    given = [name for name in NATIVE_ROWS if name in packed.arrays or name in tail]
    for i, name in enumerate([*WIRE_KEYS, *given]):
        yield b'%c"%s":' % (b"," if i else b"{", name.encode())
        if name in arrays:
            yield from _rows(bounds, arrays[name])
        elif (one_each := SEQUENCE_ADVANTAGES if name == "advantages" else name) in packed.arrays:
            width, buffer = packed.arrays[one_each]
            yield from _row(_cut_of(_view(buffer, width)), 0, len(bounds) - 1)
        elif name == "scores":
            yield from _row(_cut_of(_view(packed.scores, "f8")), 0, len(bounds) - 1)
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


def _view(buffer: memoryview, width: str) -> NDArray[Any]:
    """Return an array over a buffer, which may be unaligned."""
    return np.frombuffer(buffer, f"<{width}")


def _array_cuts(packed: PackedGroup) -> dict[str, Cut]:
    """Return, by field, a function that copies positions start..stop into an array that can be encoded."""
    tokens = _view(packed.tokens, "i4")
    cuts = {"tokens": _cut_of(tokens)}
    if packed.masks is not None:
        cuts["masks"] = _cut_of(_view(packed.masks, "i4"))
    else:
        assert packed.trained is not None
        cuts["masks"] = functools.partial(_masks, tokens, _view(packed.trained, "u1"))
    for name in PER_TOKEN_FIELDS:
        if name in packed.arrays:
            width, buffer = packed.arrays[name]
            cuts[name] = _cut_of(_view(buffer, width))
    return cuts


def _masks(
    tokens: NDArray[Any], bits: NDArray[np.uint8], start: int, stop: int
) -> NDArray[np.int32]:
    """Return the labels of positions start..stop; `bits` says which of the tokens are trained."""
    first = start // 8
    trained = np.unpackbits(bits[first : (stop + 7) // 8])[start - 8 * first : stop - 8 * first]
    return np.where(trained, tokens[start:stop], np.int32(IGNORE_INDEX))


def _cut_of(values: NDArray[Any]) -> Cut:
    # float32 is written with the digits of the float64 that was sent. The copy is aligned, as orjson requires.
    dtype = np.dtype(np.float64 if values.dtype.kind == "f" else np.int32)
    return lambda start, stop: values[start:stop].astype(dtype)


def _rows(bounds: list[int], cut: Cut) -> Iterator[bytes]:
    num_rows, num_values = len(bounds) - 1, bounds[-1]
    if num_values <= min(_CHUNK_VALUES, _SHORT_ROW * num_rows):
        values = cut(0, num_values).tolist()
        yield orjson.dumps([values[start:stop] for start, stop in pairwise(bounds)])
        return
    separator = b"["
    for start, stop in pairwise(bounds):
        pieces = _row(cut, start, stop)
        yield separator + next(pieces)  # a copy: bytes from orjson occupy at least 4 KiB
        yield from pieces
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
    lengths = _view(packed.lengths, "u4")
    values = _view(packed.values, packed.width)
    row_separator = b"["
    num_before = 0
    for start, stop in pairwise(bounds):
        yield row_separator + b"["
        row_separator = b","
        ends = num_before + np.cumsum(lengths[start:stop], dtype=np.int64)
        position = 0
        while position < stop - start:
            # At least one entry, and as many as fit; an entry longer than that is encoded whole.
            fits = int(np.searchsorted(ends, num_before + _CHUNK_VALUES, side="right"))
            end = min(max(position + 1, fits), position + _CHUNK_VALUES)
            cuts = [0, *(ends[position:end] - num_before).tolist()]
            numbers = values[num_before : num_before + cuts[-1]].tolist()
            entries = orjson.dumps([numbers[a:b] for a, b in pairwise(cuts)])
            yield (b"," if position else b"") + entries[1:-1]
            position = end
            num_before += cuts[-1]
        yield b"]"
    yield b"]" if len(bounds) > 1 else b"[]"


assert set(PER_TOKEN_FIELDS) | set(DISTILL_FIELDS) < set(WIRE_KEYS)
