"""Lists of numbers that keep an equal array: an engine's answer becomes arrays once, although authors see lists.

`joined` and `grow` make the lists of a session's nodes, and `scored_data.check_group` takes their arrays. Changing a
list only means that it is converted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

N = TypeVar("N", int, float)

_INTEGER, _FLOAT = np.dtype(np.int64), np.dtype(np.float64)


class NumberList(list[Any]):
    """A list that was made with an array of the same numbers.

    >>> tokens = NumberList([5, 6], np.array([5, 6]))
    >>> tokens.append(7)
    >>> tokens, tokens.array is None
    ([5, 6, 7], True)
    """

    __slots__ = ("_arrays", "_made_of")

    def __init__(self, values: list[Any], array: NDArray[Any]) -> None:
        super().__init__(values)
        self._made_of, self._arrays = values, [array]

    @property
    def array(self) -> NDArray[Any] | None:
        """[T] the numbers; None if the list was changed."""
        # Comparing the same objects takes 0.6 ns per number, a conversion 20.
        if self != self._made_of:
            return None
        if len(self._arrays) > 1:
            self._arrays = [np.concatenate(self._arrays)]
        return self._arrays[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # copies and pickles are plain lists


def array_of(values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Return numbers as an array: that of an unchanged `NumberList`, else as numpy converts them."""
    known = values.array if isinstance(values, NumberList) else None
    return np.asarray(values) if known is None else known


def first(values: list[N], num: int) -> list[N]:
    """Return the first `num` numbers, with their array if it is known; the same list if that is all of them."""
    if num == len(values):
        return values
    known = values.array if isinstance(values, NumberList) else None
    return values[:num] if known is None else NumberList(values[:num], known[:num])


def grow(values: list[N], *parts: list[N]) -> None:
    """Append numbers to a list, and to its array if that is known, without visiting the earlier ones."""
    for part in filter(None, parts):
        values += part
        if isinstance(values, NumberList):
            array = array_of(part)
            if array.dtype == values._arrays[0].dtype:  # else they no longer are the list's numbers
                values._made_of += part
                values._arrays.append(array)


def repeated(value: N, num: int) -> list[N]:
    """Return `num` times the same number."""
    return NumberList([value] * num, np.full(num, value))


def joined(*parts: list[N]) -> list[N]:
    """Return the concatenated lists, with their array if all are of integers or all of floats."""
    arrays = [array_of(part) for part in parts if part]
    values: list[N] = []
    for part in parts:
        values += part
    if {array.dtype for array in arrays} not in ({_INTEGER}, {_FLOAT}):
        return values
    return NumberList(values, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
