"""Undelivered groups on disk: written at the end of a run, sent first by the next run with the same name.

Invariant: a group stays in a file until the hub has stored it. Sending it twice is harmless: it keeps its group id. A
file belongs to one hub address, environment name and experiment; files written at a later step than the trainer's are
skipped too. Used by `serve.py` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import EnvError, GroupError, HubUnavailable
from atroposlib.runtime.outbox import Outbox
from atroposlib.scored_data import ScoredGroup, Strictness
from atroposlib.utils.files import replace_file
from atroposlib.utils.wording import without_users
from atroposlib.wire import join_packed, pack_group, split_packed, unpack_group

logger = logging.getLogger(__name__)

SUFFIX = ".groups"


class Origin(NamedTuple):
    """What a file's groups were sampled for, or what a run now samples for."""

    hub_url: str
    environment: str
    """The configured name; the hub may register the next run under another one."""
    experiment: str | None
    step: int
    """The trainer's."""


@dataclass(slots=True, kw_only=True)
class Spooled:
    """A file that this process has claimed; no other process reads it until `close` or `delete`."""

    path: Path
    groups: list[ScoredGroup]
    _file: IO[bytes]

    def close(self) -> None:
        """Release the claim and keep the file."""
        self._file.close()

    def delete(self) -> None:
        """Delete the file; its groups must be stored by the hub or in another file."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def spool_folder(data_path: str | None) -> Path:
    """Return the folder `spool` next to the environment's JSONL file, else in `data`."""
    return (Path(data_path).parent if data_path else Path("data")) / "spool"


def new_path(folder: Path, environment: str) -> Path:
    """Return the path for this process's groups."""
    name = re.sub(r"[^\w.-]+", "_", environment)
    return folder / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}{SUFFIX}"


def write(path: Path, groups: Sequence[ScoredGroup], origin: Origin) -> None:
    """Write groups atomically and durably."""
    packed = join_packed([pack_group(group) for group in groups], origin._asdict())
    replace_file(path, packed, is_durable=True)


def claim(folder: Path, run: Origin) -> list[Spooled]:
    """Claim the files that a run may send, oldest first; skip the others and log why."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with contextlib.ExitStack() as skipped:
            try:
                file = skipped.enter_context(path.open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                envelope = split_packed(file.read())
                if envelope.meta.get("environment") != run.environment:
                    continue
                if (reason := _reason_to_skip(envelope.meta, run)) is not None:
                    logger.warning("%s skipped: %s", path, reason)
                    continue
                blobs = envelope.blobs
                groups = [unpack_group(blob, strictness=Strictness.MEANING) for blob in blobs]
            except (FileNotFoundError, BlockingIOError):
                continue  # another process has just delivered it, or is sending it
            except (OSError, GroupError) as error:
                logger.error("%s skipped: cannot be read: %s", path, error)
                continue
            skipped.pop_all()
            found.append(Spooled(path=path, groups=groups, _file=file))
    return found


def _reason_to_skip(meta: Mapping[str, Any], run: Origin) -> str | None:
    if meta.get("hub_url") != run.hub_url:
        return without_users(f"its groups are for the hub at {meta.get('hub_url')}")
    made_for, made_at = meta.get("experiment"), int(meta.get("step", 0))
    if None not in (made_for, run.experiment) and made_for != run.experiment:
        return "its groups were sampled for another experiment; delete it or resume that experiment"
    if made_at > run.step:
        return f"its groups were made at step {made_at}, the trainer is at {run.step}; delete it or resume that run"
    return None


class Spool:
    """The files of one run: those it claimed from earlier runs, and the one it may write."""

    def __init__(self, env: EnvHooks, outbox: Outbox) -> None:
        self._env = env
        self._outbox = outbox
        self._folder = spool_folder(env.config.data_path_to_save_groups)
        self._claimed: list[Spooled] = []

    @property
    def _origin(self) -> Origin:
        env = self._env
        hub_url = env.config.rollout_server_url.rstrip("/")
        return Origin(hub_url, env.registered_name, self._outbox.experiment, env.curr_step)

    def send_earlier(self) -> None:
        """Queue the undelivered groups of earlier runs with this name."""
        if self._claimed or self._outbox.num_accepted:
            return  # a later registration; this run has groups of its own
        self._claimed = claim(self._folder, self._origin)
        groups = [group for file in self._claimed for group in file.groups]
        if groups:
            names = ", ".join(str(file.path) for file in self._claimed)
            logger.info("sending %d groups that an earlier run left in %s", len(groups), names)
            self._outbox.restore(groups, self._delete_claimed)

    async def deliver_rest(
        self, *, first_s: float, rest_s: float, skip_wait: asyncio.Event
    ) -> HubUnavailable | EnvError | None:
        """Wait up to `first_s + rest_s` for delivery; if groups remain, write them to a file and return an error.

        After `first_s` the groups are on disk as well. `skip_wait` ends the wait.
        """
        if not await self._outbox.flush(first_s, skip_wait):
            return None
        origin = self._origin
        path = new_path(self._folder, origin.environment)
        await self._write(path)
        if not await self._outbox.flush(rest_s, skip_wait):
            path.unlink(missing_ok=True)
            return None
        what = f"{self._outbox.num_held} groups could not be delivered to {origin.hub_url}"
        error: HubUnavailable | EnvError
        if await self._write(path):
            error = HubUnavailable(
                f"{what}; they are in {path}, and the next serve of {origin.environment!r} sends them first"
            )
        else:
            error = EnvError(f"{what} and are lost: {path} cannot be written")
        logger.error("%s", error)
        return error

    def close(self) -> None:
        """Release every claim."""
        for file in self._claimed:
            file.close()

    async def _write(self, path: Path) -> bool:
        """Write every held group to `path`, then delete the claimed files; return whether it was written.

        The undelivered groups of claimed files are among the held ones.
        """
        try:
            await asyncio.to_thread(write, path, self._outbox.held, self._origin)
        except OSError as error:
            logger.error("%s cannot be written: %s", path, error)
            return False
        self._delete_claimed()
        return True

    def _delete_claimed(self) -> None:
        for file in self._claimed:
            file.delete()
        self._claimed.clear()
