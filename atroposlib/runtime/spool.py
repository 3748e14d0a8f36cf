"""Groups that could not be delivered, on disk: written at the end of a run, sent first by the next run of that name.

Invariant: a group stays in some file until the hub has stored it. Sending it twice is harmless, because it keeps its
group id. A file belongs to one hub address, one environment name and one experiment; groups made at a later step than
the trainer's are left alone, too. Used by `serve.py` only, which decides when.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from atroposlib.envs.base import BaseEnv
from atroposlib.errors import EnvError, GroupError, HubUnavailable
from atroposlib.runtime.outbox import Outbox
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
    """A file that this process has claimed; no other process reads it until `close` or `delete`."""

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


class Spool:
    """The files of one run: those of earlier runs that it claimed, and the one it may leave."""

    def __init__(self, env: BaseEnv, outbox: Outbox) -> None:
        self._env = env
        self._outbox = outbox
        self._owner = Owner(
            hub_url=env.config.rollout_server_url.rstrip("/"), environment=env.registered_name
        )
        self._folder = spool_folder(env.config.data_path_to_save_groups)
        self._claimed: list[Spooled] = []

    def send_earlier(self) -> None:
        """Queue the groups that an earlier run of this name left behind."""
        if self._claimed or self._outbox.num_accepted:
            return  # registered again; this run's own groups are in the outbox
        self._claimed = claim(
            self._folder,
            owner=self._owner,
            experiment=self._outbox.experiment,
            step=self._env.curr_step,
        )
        groups = [group for file in self._claimed for group in file.groups]
        if groups:
            names = ", ".join(str(file.path) for file in self._claimed)
            logger.info("sending %d groups that an earlier run left in %s", len(groups), names)
            self._outbox.restore(groups, self._delete_claimed)

    async def deliver_rest(
        self, *, first_s: float, rest_s: float, hurry: asyncio.Event
    ) -> HubUnavailable | EnvError | None:
        """Deliver what is held within `first_s + rest_s`, or leave it in a file; return that as an error.

        After `first_s` the groups are on disk as well. `hurry` ends the waiting.
        """
        if not await self._flush(first_s, hurry):
            return None
        path = new_path(self._folder, self._owner)
        await self._write(path)
        if not await self._flush(rest_s, hurry):
            path.unlink(missing_ok=True)
            return None
        what = f"{self._outbox.num_held} groups could not be delivered to {self._owner.hub_url}"
        error: HubUnavailable | EnvError
        if await self._write(path):
            error = HubUnavailable(
                f"{what}; they are in {path}, and the next serve of {self._owner.environment!r} sends them first"
            )
        else:
            error = EnvError(f"{what} and are lost: {path} cannot be written")
        logger.error("%s", error)
        return error

    def close(self) -> None:
        """Give every claim back."""
        for file in self._claimed:
            file.close()

    async def _flush(self, patience_s: float, hurry: asyncio.Event) -> int:
        """Wait until nothing is held, the time is over or `hurry` is set; return the number still held."""
        flush = asyncio.create_task(self._outbox.flush(patience_s))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({flush, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (flush, hurried):
            task.cancel()
        await asyncio.gather(flush, hurried, return_exceptions=True)
        return self._outbox.num_held

    async def _write(self, path: Path) -> bool:
        """Write every held group to `path`; files of earlier runs, whose rest is among them, are removed then."""
        try:
            await asyncio.to_thread(
                write,
                path,
                self._outbox.held,
                owner=self._owner,
                experiment=self._outbox.experiment,
                step=self._env.curr_step,
            )
        except OSError as error:
            logger.error("%s cannot be written: %s", path, error)
            return False
        self._delete_claimed()
        return True

    def _delete_claimed(self) -> None:
        for file in self._claimed:
            file.delete()
        self._claimed.clear()
