"""The tables of a hub's database, and the migrations that make them.

All names are unqualified: they belong to the first schema of the connection's `search_path`. Payloads are in tables of
their own, one per segment, which `store` makes and drops.
"""

from __future__ import annotations

from typing import Final

import asyncpg

from atroposlib.api.stores.base import UnreadableRun
from atroposlib.errors import ConfigError

_LOCK: Final = 0x6174726F706F73
"""Advisory lock of the migrations: "atropos"."""

MIGRATIONS: Final = (
    """
    create table members (
        id uuid primary key,
        address text not null,
        secret text not null,
        joined_at timestamptz not null default clock_timestamp(),
        renewed_at timestamptz not null default clock_timestamp()
    );
    create table runs (
        id bigint generated always as identity primary key,
        name text not null unique,
        term bigint not null default 0,
        owner uuid,
        kept_of text,
        kept_experiment text,
        kept_step bigint,
        kept_at double precision
    );
    create table states (
        run_id bigint primary key,
        serial bigint not null default 0,
        next_number bigint not null default 0,
        document bytea,
        changed_at timestamptz not null default clock_timestamp()
    ) with (fillfactor = 50);
    create table ids (
        run_id bigint,
        key bytea,
        digest bytea not null,
        primary key (run_id, key)
    );
    create table groups (
        run_id bigint,
        number bigint,
        key bytea not null,
        env_id bigint,
        num_sequences integer not null,
        num_tokens bigint not null,
        policy_version bigint,
        arrival_step bigint not null,
        place smallint not null,
        batch bigint,
        deliveries integer not null default 0,
        reason bytea,
        segment integer not null,
        num_bytes integer not null,
        crc bigint not null,
        primary key (run_id, number)
    ) with (fillfactor = 80);
    create table ended (
        run_id bigint,
        fate text,
        num_groups bigint not null,
        primary key (run_id, fate)
    );
    create table batches (
        run_id bigint,
        number bigint,
        state smallint not null,
        step bigint not null,
        epoch bigint not null,
        lease_id bytea not null,
        ttl_s double precision not null,
        request_id bytea,
        is_plain boolean not null,
        primary key (run_id, number)
    );
    create table facts (
        run_id bigint,
        name bytea,
        value bytea not null,
        primary key (run_id, name)
    );
    """,
)
"""The schema has as many versions; each string leads from one to the next. Never change one that was released.

No foreign keys: each inserted row would be checked against its run. Strings of clients are bytes, since `text` takes no
NUL. A run's state has a `serial`, which every transaction of its store increases: after a lost connection, it says
whether the last transaction was committed.
"""


async def migrate(pool: asyncpg.Pool) -> None:
    """Bring the database to the newest version. Raises `UnreadableRun` if a newer one made it, `ConfigError`."""
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute(f"select pg_advisory_xact_lock({_LOCK})")
        try:
            await connection.execute("create table if not exists atropos_schema (version integer)")
            version = await connection.fetchval("select max(version) from atropos_schema") or 0
            if version > len(MIGRATIONS):
                raise UnreadableRun(
                    f"the database has schema {version}, and this version reads schemas up to"
                    f" {len(MIGRATIONS)}; a newer version of atroposlib wrote it"
                )
            for migration in MIGRATIONS[version:]:
                await connection.execute(migration)
            if version < len(MIGRATIONS):
                await connection.execute(f"insert into atropos_schema values ({len(MIGRATIONS)})")
        except asyncpg.DuplicateTableError as e:
            raise ConfigError(
                f"the database holds tables of another application ({e}); give the hub a database"
                " of its own, or a schema of its own with ?search_path=NAME in the URL"
            ) from e
        except asyncpg.InsufficientPrivilegeError as e:
            raise ConfigError(f"the hub's role may not create tables in this database: {e}") from e
