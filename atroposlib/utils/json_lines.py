"""Files and streams with one JSON value per line, also files that another process still writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ESCAPED = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029")
"""`str.splitlines` ends a line at these, JSON encoders leave them as they are, and a model may sample them."""


_BUFFER_BYTES = 2**20
"""A row of groups has tens of kilobytes: with Python's 8 KB, reading costs three times as much."""


def on_one_line(encoded: bytes) -> bytes:
    r"""Escape U+0085, U+2028 and U+2029 in encoded JSON.

    >>> on_one_line('"a\u2028b"'.encode())
    b'"a\\u2028b"'
    """
    if not encoded.isascii():
        for character, escape in _ESCAPED:
            encoded = encoded.replace(character, escape)
    return encoded


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; a last line that is not complete is left out.

    Raises ConfigError for a file that cannot be read and for another line that is no JSON object.
    """
    return (row for _, row in placed_lines(path, decode_object))


def placed_lines(path: Path, decode: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
    """Yield the first byte of each line and what `decode` makes of it; as `read_lines`, `decode` raises ValueError."""
    end = 0
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            for number, line in enumerate(file, start=1):
                start, end = end, end + len(line)
                if not line.strip():
                    continue
                try:
                    yield start, decode(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        logger.warning("%s: the last line is incomplete and left out", path)
                        return
                    raise ConfigError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error


def decode_object(line: bytes) -> dict[str, Any]:
    """Return the object of a line; NaN is a number, as for Python. ValueError for anything else.

    Half a surrogate pair, which some programs write, becomes "?": no encoder of UTF-8 takes it.
    """
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            # Python refuses to write integers of more than 4,300 digits.
            value = json.loads(line, parse_int=lambda n: int(n) if len(n) < 4000 else float(n))
            text = json.dumps(value, ensure_ascii=False)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        found = json.loads(text.encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


class LineTail:
    """Reads the complete lines that were added to a file since the last call; the file need not exist yet."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if skip_existing and path.exists() else 0

    def read(self) -> list[str]:
        """Return the added lines; an incomplete line is left for the next call.

        If the file became shorter, as when a resumed trainer removes the steps after its checkpoint, what is added
        from then on.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            self._position = min(self._position, file.seek(0, 2))
            file.seek(self._position)
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        self._position += len(complete)
        return complete.decode(errors="replace").split("\n")[:-1]
