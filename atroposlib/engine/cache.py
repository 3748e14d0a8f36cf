"""Keys and values of the running rows, for a batch whose membership changes at every step.

Invariant: all rows end at the same column `end`, so a decode step writes one column of every layer and reads the
window `[start, end)` as a view, without concatenation. A row with `length` tokens occupies `[end - length, end)`;
columns left of it are masked. All rows share the columns, so sliding-window masks, which count columns, stay correct.
Removed rows are overwritten by rows moved from the end. Buffers grow by doubling.

    columns      0 1 2 3 4 5 6 7
    row 0        . . a b c d e .     start = 2, end = 7, lengths = [5, 2]
    row 1        . . . . . f g .
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

_MIN_COLUMNS = 64


class CacheMove(NamedTuple):
    """Row `source` was moved to index `target`."""

    target: int
    source: int


class _Window:
    """The live block of every layer's buffers: rows `[0, num_rows)`, columns `[start, end)`."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.start = 0
        self.end = 0


class _Layer(DynamicLayer):
    """One layer's buffers, `[row_capacity, heads, column_capacity, head_dim]`, read through the shared window."""

    def __init__(self, window: _Window, like: DynamicLayer) -> None:
        """Start without rows and columns, with the heads, dimensions and dtypes of `like`."""
        super().__init__()
        self.window = window
        self.keys, self.values = like.keys[:0, :, :0].clone(), like.values[:0, :, :0].clone()
        self.dtype, self.device = like.keys.dtype, like.keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one column and return the window including it; `finish_step` moves `end` after the forward pass."""
        rows, start, end = self.window.num_rows, self.window.start, self.window.end
        self.keys[:rows, :, end] = key_states[:, :, 0]
        self.values[:rows, :, end] = value_states[:, :, 0]
        return self.keys[:rows, :, start : end + 1], self.values[:rows, :, start : end + 1]

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start


class RunningCache(Cache):
    """The cache of the running rows; row `i` here is row `i` of the scheduler."""

    layers: list[_Layer]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._window = _Window()
        self._first_columns: list[int] = []
        self._first_column_tensor: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self._window.num_rows

    def prepare_step(self) -> None:
        """Allocate the next column if needed; call before each decode step."""
        if self._window.end == self._column_capacity():
            self._relocate(end=self._window.end - self._window.start)

    def finish_step(self) -> None:
        """Move `end` past the column that the forward pass has written."""
        self._window.end += 1

    def attention_mask(self, device: torch.device) -> torch.Tensor:
        """Return the mask of the next decode step, `[num_rows, window + 1]`, 1 where a token may be attended to."""
        columns = torch.arange(self._window.start, self._window.end + 1, device=device)
        return (columns[None, :] >= self._first_tensor(device)[:, None]).long()

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the position of each row's next input token, `[num_rows, 1]`."""
        return (self._window.end - self._first_tensor(device))[:, None]

    def insert(
        self, prefilled: DynamicCache, source_rows: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Append rows copied from a left-padded prefill: row `source_rows[j]` with its last `lengths[j]` columns."""
        window, width = self._window, max(lengths)
        if not self.layers:
            self.layers = [_Layer(window, layer) for layer in prefilled.layers]
        if window.num_rows == 0:
            window.start = window.end = min(width, self._column_capacity())
        rows = window.num_rows + len(lengths)
        if window.end < width or rows > self._row_capacity():
            self._relocate(end=max(window.end - window.start, width), num_rows=rows)
        source = torch.tensor(source_rows, device=self.layers[0].device)
        start = min(window.start, window.end - width)
        for mine, theirs in zip(self.layers, prefilled.layers, strict=True):
            for buffer, new in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                target = buffer[window.num_rows : rows, :, start : window.end]
                gap = target.shape[2] - width
                # Stale values are masked, but a masked NaN would still make the sum over values NaN.
                target[:, :, :gap] = 0
                target[:, :, gap:] = new[source, :, -width:]
        self._first_columns += [window.end - length for length in lengths]
        self._first_column_tensor = None
        window.num_rows, window.start = rows, start

    def remove(self, rows: Sequence[int]) -> list[CacheMove]:
        """Remove `rows` (ascending) and move rows from the end into their places; return the moves."""
        window, gone = self._window, set(rows)
        remaining = window.num_rows - len(rows)
        holes = [row for row in rows if row < remaining]
        movers = [row for row in range(remaining, window.num_rows) if row not in gone]
        moves = [CacheMove(hole, mover) for hole, mover in zip(holes, movers, strict=True)]
        if moves:
            live = slice(window.start, window.end)
            device = self.layers[0].device
            target = torch.tensor(holes, device=device)
            source = torch.tensor(movers, device=device)
            for layer in self.layers:
                layer.keys[target, :, live] = layer.keys[source, :, live]
                layer.values[target, :, live] = layer.values[source, :, live]
        for target_row, source_row in moves:
            self._first_columns[target_row] = self._first_columns[source_row]
        del self._first_columns[remaining:]
        self._first_column_tensor = None
        window.num_rows = remaining
        window.start = min(self._first_columns, default=window.end)
        return moves

    def _first_tensor(self, device: torch.device) -> torch.Tensor:
        if self._first_column_tensor is None:
            self._first_column_tensor = torch.tensor(self._first_columns, device=device)
        return self._first_column_tensor

    def _row_capacity(self) -> int:
        return int(self.layers[0].keys.shape[0])

    def _column_capacity(self) -> int:
        return int(self.layers[0].keys.shape[2])

    def _relocate(self, *, end: int, num_rows: int = 0) -> None:
        """Move the live block into new buffers so that it ends at column `end`, with room to grow.

        At least half of the new columns are free, so on average at most one column is moved per step.
        """
        window = self._window
        width, shift = window.end - window.start, end - window.end
        row_capacity = self._row_capacity()
        if num_rows > row_capacity:
            row_capacity = max(num_rows, 2 * row_capacity)
        column_capacity = max(2 * end, _MIN_COLUMNS)
        for layer in self.layers:
            for name in ("keys", "values"):
                old: torch.Tensor = getattr(layer, name)
                _, heads, _, dim = old.shape
                new = old.new_zeros(row_capacity, heads, column_capacity, dim)
                live = old[: window.num_rows, :, window.start : window.end]
                new[: window.num_rows, :, end - width : end] = live
                setattr(layer, name, new)
        window.start, window.end = end - width, end
        self._first_columns = [column + shift for column in self._first_columns]
        self._first_column_tensor = None
