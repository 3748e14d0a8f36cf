"""Groups that could not be delivered, on disk: written at the end of a run, sent first by the next run of that name.

Invariant: a group stays in some file until the hub has stored it. Sending it twice is harmless, because it keeps its
group id. A file belongs to one hub address, one environment name and one experiment; groups made at a later step than
the trainer's are left alone, too. Used by `serve.py` only; it does not decide when.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from atroposlib.errors import GroupError
from atroposlib.scored_data import ScoredGroup, Strictness
from atroposlib.wire import join_packed, pack_group, split_packed, unpack_group

logger = logging.getLogger(__name__)

SUFFIX = ".groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose groups a file holds."""

    hub_url: str
    environment: str
    """The configured name, which is the same in the next run; the registered one may not be."""


@dataclass(slots=True, kw_only=True)
class Spooled:
    """A file that this process has claimed; nobody else reads it until `close` or `delete`."""

    path: Path
    groups: list[ScoredGroup]
    _file: IO[bytes]

    def close(self) -> None:
        """Give the claim back and leave the file."""
        self._file.close()

    def delete(self) -> None:
        """Remove the file: its groups are stored, or in another file."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def spool_folder(data_path: str | None) -> Path:
    """Return the folder: beside the environment's JSONL file, else below `data`."""
    return (Path(data_path).parent if data_path else Path("data")) / "spool"


def new_path(folder: Path, owner: Owner) -> Path:
    """Return the path for this process's groups."""
    name = re.sub(r"[^\w.-]+", "_", owner.environment)
    return folder / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}{SUFFIX}"


def write(
    path: Path,
    groups: Sequence[ScoredGroup],
    *,
    owner: Owner,
    experiment: str | None,
    step: int,
) -> None:
    """Write `groups`, made up to `step`; a reader sees the whole file or none, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    meta = {"hub_url": owner.hub_url, "environment": owner.environment, "step": step}
    meta |= {"experiment": experiment}
    with partial.open("wb") as file:
        file.write(join_packed([pack_group(group) for group in groups], meta))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def claim(folder: Path, *, owner: Owner, experiment: str | None, step: int) -> list[Spooled]:
    """Claim the owner's files of this experiment, oldest first; others stay as they are, each named in the log."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # delivered by another process just now
            file = path.open("rb")
            spooled = _claim_one(path, file, owner, experiment, step)
            if spooled is None:
                file.close()
            else:
                found.append(spooled)
    return found


def _claim_one(
    path: Path, file: IO[bytes], owner: Owner, experiment: str | None, step: int
) -> Spooled | None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None  # another process of this name sends it
    try:
        envelope = split_packed(file.read())
        meta = envelope.meta
        if meta.get("environment") != owner.environment:
            return None
        if meta.get("hub_url") != owner.hub_url:
            logger.warning(
                "%s: its groups are for the hub at %s: left alone", path, meta.get("hub_url")
            )
            return None
        made_for = meta.get("experiment")
        if None not in (made_for, experiment) and made_for != experiment:
            logger.warning(
                "%s: its groups were sampled for another experiment: left alone; delete it, or resume that one",
                path,
            )
            return None
        made_at = int(meta.get("step", 0))
        if made_at > step:
            logger.warning(
                "%s: its groups were made at step %d, the trainer is at %d: left alone; delete it or resume the run",
                path,
                made_at,
                step,
            )
            return None
        groups = [unpack_group(blob, strictness=Strictness.MEANING) for blob in envelope.blobs]
    except GroupError as error:
        logger.error("%s cannot be read and is left alone: %s", path, error)
        return None
    return Spooled(path=path, groups=groups, _file=file)


def close_all(files: Iterable[Spooled]) -> None:
    """Give every claim back."""
    for file in files:
        file.close()
