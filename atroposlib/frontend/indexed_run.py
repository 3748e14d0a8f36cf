"""The groups of one run or two as `view-run` serves them: the index is read at once, a chunk when it is asked for.

Of a plain row the index reads a few keys and no token: 50,000 groups take seconds. It has what the index of a whole
page (`run_files.py`) has.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atroposlib.errors import ConfigError
from atroposlib.frontend.page import GROUPS_PER_CHUNK, Index, row_of, served_page
from atroposlib.frontend.run_files import RunFiles, Trained, decode_of, in_run, shown_of
from atroposlib.frontend.view_groups import quick_view, view_of_row
from atroposlib.frontend.vocabulary import Vocabulary
from atroposlib.utils.json_lines import decode_object, placed_lines
from atroposlib.utils.wording import counted

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0
"""Time between the lines that say how far the index is."""


class _Place(NamedTuple):
    """Where a group's row is, and its names."""

    run: int
    path: Path
    start: int
    """The row's first byte."""
    name: str
    """Its id if it has none."""
    shown_id: str
    """Unique in the page."""


class IndexedRun:
    """The index of the groups of one run, or of two to compare, and where their rows are."""

    def __init__(self, *runs: RunFiles, tokenizer: Any = None) -> None:
        """Read the index; ConfigError for a file that cannot be read or a line that is no JSON object."""
        self._shown = shown_of(*runs)
        self._decode = decode_of(runs[0], tokenizer)
        self._vocabulary = Vocabulary(self._decode)
        self._trained = list(map(Trained, runs))
        self._index = Index()
        self._places: list[_Place] = []
        paths = [(number, path) for number, run in enumerate(runs) for path in run.groups]
        num_bytes, num_before = sum(path.stat().st_size for _, path in paths), 0
        said_at = time.monotonic()
        for run, path in paths:
            lines = placed_lines(path, partial(self._read, run))
            for number, (start, (view, row)) in enumerate(lines, start=1):
                self._add(_Place(run, path, start, f"line-{number}", ""), view, row)
                if time.monotonic() - said_at > PROGRESS_S:
                    said_at = time.monotonic()
                    share = (num_before + start) / num_bytes
                    logger.info(
                        "index: %s, %.0f %%", counted(len(self._places), "group"), 100 * share
                    )
            num_before += path.stat().st_size

    def page(self, chunks: str, *, render: str) -> bytes:
        """Return the page, which asks the URL `chunks` and a number for that chunk; `render` as in `write_page`."""
        about = self._index.told(self._shown["about"])
        head = {**self._shown, "about": about, "chunks": chunks, "render": render}
        return served_page(head, self._index)

    def chunk(self, number: int) -> bytes:
        """Return the JSON of a chunk's groups and the texts of their tokens."""
        places = self._places[number * GROUPS_PER_CHUNK :][:GROUPS_PER_CHUNK]
        groups = [{**self._view(place), "id": place.shown_id} for place in places]
        return msgspec.json.encode({"groups": groups, "vocabulary": self._vocabulary.of(groups)})

    def _read(self, run: int, line: bytes) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return a group as the index needs it, or None and its row; ValueError for no JSON object."""
        view = quick_view(line, decode=self._decode)
        if view is None or self._trained[run].has_tokens_of(view["id"]):
            return None, decode_object(line)
        return view, {}

    def _add(self, place: _Place, view: dict[str, Any] | None, row: dict[str, Any]) -> None:
        try:
            view = view or view_of_row(row, name=place.name, decode=self._decode)
        except RecursionError as error:
            raise ConfigError(f"{place.path}: a value is nested too deeply") from error
        if view is None:
            return
        view["id"] = view["id"] or place.name
        indexed = row_of(self._of_run(place, view))
        chunk = len(self._places) // GROUPS_PER_CHUNK
        self._places.append(place._replace(shown_id=self._index.add(indexed, chunk=chunk)))

    def _view(self, place: _Place) -> dict[str, Any]:
        with place.path.open("rb") as file:
            file.seek(place.start)
            row = decode_object(file.readline())
        view = view_of_row(row, name=place.name, decode=self._decode)
        assert view is not None
        return self._of_run(place, view)

    def _of_run(self, place: _Place, view: dict[str, Any]) -> dict[str, Any]:
        """Return a view group with what the trainer of its run recorded."""
        self._trained[place.run].add_to(view)
        return in_run(view, self._shown["compared"], place.run)
