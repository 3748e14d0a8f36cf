"""A run's groups as `view-run` serves them: the index is read at once, the groups of a chunk when it is asked for.

Of a plain row the index reads a few keys and no token: 50,000 groups take seconds. It has what the index of a whole
page (`run_files.py`) has.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atroposlib.errors import ConfigError
from atroposlib.frontend.page import GROUPS_PER_CHUNK, Index, indexed_page, row_of
from atroposlib.frontend.run_files import RunFiles, Trained, decode_of, what_the_trainer_logged
from atroposlib.frontend.view_groups import quick_view, view_of_row
from atroposlib.frontend.vocabulary import Vocabulary
from atroposlib.utils.json_lines import decode_object, placed_lines
from atroposlib.utils.wording import counted

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0
"""Time between the lines that say how far the index is."""


class _Place(NamedTuple):
    """Where a group's row is, and its names."""

    path: Path
    start: int
    """The row's first byte."""
    name: str
    """Its id if it has none."""
    shown_id: str
    """Unique in the page."""


class IndexedRun:
    """The index of a run's groups, and where their rows are."""

    def __init__(self, files: RunFiles, tokenizer: Any = None) -> None:
        """Read the index; ConfigError for a file that cannot be read or a line that is no JSON object."""
        self._files = files
        self._decode = decode_of(files, tokenizer)
        self._vocabulary = Vocabulary(self._decode)
        self._trained = Trained(files)
        self._index = Index()
        self._places: list[_Place] = []
        num_bytes, num_before = sum(path.stat().st_size for path in files.groups), 0
        said_at = time.monotonic()
        for path in files.groups:
            for number, (start, line) in enumerate(placed_lines(path, self._read), start=1):
                self._add(path, start, f"line-{number}", line)
                if time.monotonic() - said_at > PROGRESS_S:
                    said_at = time.monotonic()
                    share = (num_before + start) / num_bytes
                    logger.info(
                        "index: %s, %.0f %%", counted(len(self._places), "group"), 100 * share
                    )
            num_before += path.stat().st_size

    def page(self, chunks: str) -> bytes:
        """Return the page, which asks the URL `chunks` and a number for that chunk."""
        shown = what_the_trainer_logged(self._files)
        title = self._files.source.resolve().name
        return indexed_page(self._index, title=title, chunks=chunks, **shown)

    def chunk(self, number: int) -> bytes:
        """Return the JSON of a chunk's groups and the texts of their tokens."""
        places = self._places[number * GROUPS_PER_CHUNK :][:GROUPS_PER_CHUNK]
        groups = [{**self._view(place), "id": place.shown_id} for place in places]
        return msgspec.json.encode({"groups": groups, "vocabulary": self._vocabulary.of(groups)})

    def _read(self, line: bytes) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return a group as the index needs it, or None and its row; ValueError for no JSON object."""
        view = quick_view(line, decode=self._decode)
        if view is None or self._trained.has_tokens_of(view["id"]):
            return None, decode_object(line)
        return view, {}

    def _add(
        self, path: Path, start: int, name: str, read: tuple[dict[str, Any] | None, dict[str, Any]]
    ) -> None:
        view, row = read
        try:
            view = view or view_of_row(row, name=name, decode=self._decode)
        except RecursionError as error:
            raise ConfigError(f"{path}: a value is nested too deeply") from error
        if view is None:
            return
        view["id"] = view["id"] or name
        self._trained.add_to(view)
        chunk = len(self._places) // GROUPS_PER_CHUNK
        self._places.append(_Place(path, start, name, self._index.add(row_of(view), chunk=chunk)))

    def _view(self, place: _Place) -> dict[str, Any]:
        with place.path.open("rb") as file:
            file.seek(place.start)
            row = decode_object(file.readline())
        view = view_of_row(row, name=place.name, decode=self._decode)
        assert view is not None
        self._trained.add_to(view)
        return view
