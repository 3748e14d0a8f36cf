"""The JSONL file of accepted groups: one line per group, in the original's keys and those of `group_rows.py`.

An existing file is never overwritten. `GroupLog.append_to` adds to one and returns which items it holds.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from atroposlib.errors import ConfigError
from atroposlib.runtime.group_rows import MADE_UP_KEYS, fingerprint, plain
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.utils.json_lines import on_one_line

logger = logging.getLogger(__name__)

ALWAYS_WRITTEN = (
    "ref_logprobs",
    "overrides",
    "group_overrides",
    "distill_token_ids",
    "distill_logprobs",
)


class Found(NamedTuple):
    """The groups of an existing file."""

    num_groups: int
    items: dict[int, int]
    """`fingerprint` of each item by its `item_id`."""


class GroupLog:
    """A file of groups that is open for writing."""

    def __init__(self, path: Path, file: IO[bytes], found: Found | None = None) -> None:
        self.path = path
        self.num_groups = found.num_groups if found else 0
        """Lines in the file."""
        self.items = found.items if found else {}
        """`fingerprint` of each item that the file had when it was opened, by its `item_id`."""
        self._file = file
        logger.info("writing groups to %s", path)

    @classmethod
    def open(cls, path: str | Path) -> GroupLog:
        """Create `path`, or the first free of `<stem>_1`, `<stem>_2`, ...; parent folders are created."""
        wanted = Path(path)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        candidate, number = wanted, 0
        while True:
            try:
                return cls(candidate, _locked(candidate, "xb"))
            except FileExistsError:
                number += 1
                candidate = wanted.with_name(f"{wanted.stem}_{number}{wanted.suffix}")

    @classmethod
    def append_to(cls, path: str | Path) -> GroupLog:
        """Open `path` to add lines to it, or create it; a last line that was cut off is removed.

        Raises ConfigError if another line is not a group, or if another process writes to the file.
        """
        if not Path(path).exists():
            return cls.open(path)
        file = _locked(Path(path), "ab")
        try:
            return cls(Path(path), file, _read(Path(path)))
        except ConfigError:
            file.close()
            raise

    def write(self, line: bytes | Mapping[str, Any]) -> None:
        """Append one group: its JSON, or a dict, as environments pass to `jsonl_writer.write`."""
        if not isinstance(line, bytes):
            line = msgspec.json.encode(dict(line), enc_hook=plain)
        self._file.write(on_one_line(line) + b"\n")
        self._file.flush()
        self.num_groups += 1

    def close(self) -> None:
        """Close the file; one without groups is removed, so that the next run gets its name."""
        self._file.close()
        if not self.num_groups:
            self.path.unlink(missing_ok=True)


def _locked(path: Path, mode: str) -> IO[bytes]:
    """Open a file for this process alone; ConfigError if another one has it open here."""
    file: IO[bytes] = path.open(mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"{path}: another process is writing groups to it") from error
    except OSError as error:  # a network file system without locks
        logger.debug("%s is not locked: %s", path, error)
    return file


class _Written(msgspec.Struct):
    """The fields of a line that are read."""

    item_id: Any = None
    item: msgspec.Raw = msgspec.Raw(b"null")


_written = msgspec.json.Decoder(_Written)


def _read(path: Path) -> Found:
    """Read the groups of a file; remove a last line that was cut off."""
    items: dict[int, int] = {}
    num_groups = num_unknown = num_bytes = 0
    ends_line = True
    with path.open("r+b") as file:
        for line in file:
            try:
                written = _written.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    logger.warning("%s: removed a last line that was cut off", path)
                    break
                raise ConfigError(f"{path}, line {num_groups + 1}: not a group: {error}") from error
            num_bytes += len(line)
            ends_line = line.endswith(b"\n")
            num_groups += 1
            if isinstance(written.item_id, int):
                items[written.item_id] = fingerprint(bytes(written.item))
            else:
                num_unknown += 1
        file.truncate(num_bytes)
        if not ends_line:
            file.seek(num_bytes)
            file.write(b"\n")
    if num_unknown:
        logger.warning(
            "%d of %d groups in %s have no item_id: their items may be sampled again",
            num_unknown,
            num_groups,
            path,
        )
    return Found(num_groups, items)


def group_line(
    group: Mapping[str, Any], checked: ScoredDataGroup, more: Mapping[str, Any]
) -> bytes:
    """Return the JSON of the author's keys in their checked form, the keys that are always written, and `more`.

    The group's own keys win over `more`, except `MADE_UP_KEYS`, which are there only if the group's are made up.
    """
    record: dict[str, Any] = dict(group)
    for key, value in checked.items():
        if (
            key in ALWAYS_WRITTEN
            or (key in record and key != "env_id")
            or (key in ("messages", "weight_versions") and value)
        ):
            record[key] = value
    for key, value in more.items():
        if key not in record or key in MADE_UP_KEYS:
            record[key] = value
    return msgspec.json.encode(record, enc_hook=plain)
