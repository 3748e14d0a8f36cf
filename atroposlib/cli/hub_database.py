"""The database of `run-api --database`: its URL, which never shows a password, and the commands on its runs."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from atroposlib.api.run.hub import Hub
from atroposlib.api.run.replica import Replica
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.stores.base import OwnedElsewhere
from atroposlib.api.stores.runs import StoredRun
from atroposlib.errors import ConfigError, require
from atroposlib.hub_address import SILENCE_S

if TYPE_CHECKING:
    from atroposlib.api.stores.postgres.owners import Owners
    from atroposlib.api.stores.postgres.runs import PostgresRuns
    from atroposlib.api.stores.postgres.space import DatabaseSpace

DATABASE_VARIABLE: Final = "ATROPOS_DATABASE"


def url_of(flag: str | None, *, conflicting: Sequence[str]) -> str | None:
    """Return the URL that --database or ATROPOS_DATABASE gives; None if there is none.

    `conflicting`: flags given that describe another place for the runs; they win over the variable. Raises
    `ConfigError` for a flag with a password.
    """
    if flag is None:
        url = None if conflicting else os.environ.get(DATABASE_VARIABLE) or None
        return None if url is None else _checked(url, DATABASE_VARIABLE)
    if conflicting:
        raise ConfigError(f"--database and {conflicting[0]}: the database keeps the runs; drop one")
    parts = urllib.parse.urlsplit(flag)
    if parts.password or {"password", "sslpassword"} & urllib.parse.parse_qs(parts.query).keys():
        raise ConfigError(
            "--database: the URL has a password, which process lists and shell histories show; change the password,"
            " and give it in PGPASSWORD or a file named by PGPASSFILE, or give the whole URL in"
            f" {DATABASE_VARIABLE}"
        )
    return _checked(flag, "--database")


def _checked(url: str, source: str) -> str:
    if urllib.parse.urlsplit(url).scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"{source}: not a URL like postgresql://USER@HOST:PORT/NAME")
    return url


def shown(url: str) -> str:
    """Return the URL of a database without its password and parameters.

    >>> shown("postgresql://hub:secret@db:5432/runs?sslmode=require")
    'postgresql://hub@db:5432/runs'
    """
    parts = urllib.parse.urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{place}{parts.path}"


def replica_of(
    url: str,
    *,
    policy: RunPolicy,
    address: str,
    max_bytes: int | None = None,
    min_free_bytes: int | None = None,
) -> Replica:
    """Return a hub as one of those that share the database; the others reach it at the URL `address`.

    `max_bytes`, `min_free_bytes`: when it refuses groups, see `DatabaseSpace`.
    """
    require("asyncpg", extra="postgres")
    from atroposlib.api.stores.postgres.space import DatabaseSpace

    space = DatabaseSpace(max_bytes=max_bytes, min_free_bytes=min_free_bytes)
    runs = runs_in(url, space=space)
    replica = Replica(Hub(runs, policy=policy), runs.owners, address=address)
    runs.on_failure = replica.note_broken
    return replica


def runs_in(url: str, *, space: DatabaseSpace | None = None) -> PostgresRuns:
    """Return the runs of a database, not yet opened; `space` None: for a command.

    Raises `MissingDependency` without the driver.
    """
    require("asyncpg", extra="postgres")
    from atroposlib.api.stores.postgres.runs import PostgresRuns

    return PostgresRuns(url, space=space)


def reachable_address(host: str, port: int, *, scheme: str) -> str:
    """Return the URL of a server that listens on `host`; every address means this machine's name.

    >>> reachable_address("10.0.0.7", 8000, scheme="http"), reachable_address("::1", 80, scheme="https")
    ('http://10.0.0.7:8000', 'https://[::1]:80')
    """
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[PostgresRuns]:
    """The runs for a command, which serves none and is no member."""
    runs = runs_in(url)
    await runs.open()
    try:
        yield runs
    finally:
        await runs.close()


async def _other_hub(owners: Owners) -> str | None:
    """Return the address of another living hub; waits for the lapse of one that died."""
    deadline_s = time.monotonic() + SILENCE_S + 1
    while others := (await owners.look()).others(owners.id):
        if time.monotonic() >= deadline_s:
            return others[0].address
        await asyncio.sleep(0.25)
    return None


async def stored(url: str) -> list[StoredRun]:
    """Return the runs of a database, by name."""
    async with _connected(url) as runs:
        return await runs.stored()


async def erase(url: str, *, only: str | None = None) -> list[StoredRun]:
    """Erase one run, or all; return what was erased.

    Raises `ConfigError`, with nothing erased, for a run that is unknown or served by a hub, and for all while another
    hub uses the database.
    """
    async with _connected(url) as runs:
        found = [run for run in await runs.stored() if only in (None, run.name)]
        if only is not None and not found:
            raise ConfigError(f"--forget {only}: no such run in {shown(url)}; --list shows them")
        if only is None and (address := await _other_hub(runs.owners)) is not None:
            raise ConfigError(f"--fresh: the hub at {address} uses {shown(url)}; stop it first")
        for run in found:
            try:
                await runs.forget(run.name)
            except OwnedElsewhere as e:
                raise ConfigError(f"{e}; stop it first") from e
        return found
