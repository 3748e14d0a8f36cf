"""Who owns a run: terms, lapses, and what a new version of the schema means for an old hub."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from atroposlib.api.stores.base import OwnedElsewhere, UnreadableRun

asyncpg = pytest.importorskip("asyncpg", reason="NOT TESTED: pip install -e '.[postgres]'")

from atroposlib.api.stores.postgres.owners import (  # noqa: E402
    LAPSE_S,
    Owners,
    Ownership,
    Term,
    application_name,
)
from atroposlib.api.stores.postgres.schema import migrate  # noqa: E402


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
        await migrate(pool)
        yield pool


Join = Callable[[str], Awaitable[Owners]]


@pytest.fixture
async def join(postgres_url: str, pool: asyncpg.Pool) -> AsyncIterator[Join]:
    """Make members of the test's database."""
    async with AsyncExitStack() as members:

        async def join(address: str) -> Owners:
            owners = Owners(
                lambda name: asyncpg.connect(
                    postgres_url, server_settings={"application_name": name}
                )
            )
            members.push_async_callback(owners.close)
            await owners.join(address)
            return owners

        yield join


async def lapse(owners: Owners, pool: asyncpg.Pool) -> None:
    """Let a member's row look as if it had not been renewed."""
    await pool.execute(
        f"update members set renewed_at = renewed_at - interval '{LAPSE_S} s' where id = $1",
        owners.id,
    )


async def one_statement(url: str, statement: str, *arguments: object) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement, *arguments)
    finally:
        await connection.close()


def owners_of(ownership: Ownership) -> dict[str, str | None]:
    found = {name: ownership.owner_of(name) for name in ownership.runs}
    return {name: None if owner is None else owner.address for name, owner in found.items()}


async def test_one_replica_owns_a_run(join: Join) -> None:
    first, second = await join("http://a"), await join("http://b")
    term = await first.claim("math")
    with pytest.raises(OwnedElsewhere):
        await second.claim("math")
    assert owners_of(await second.renew()) == {"math": "http://a"}
    await first.release("math")
    assert owners_of(await second.renew()) == {"math": None}
    taken = await second.claim("math")
    assert (taken.run_id, taken.number > term.number) == (term.run_id, True)


async def test_a_silent_member_loses_its_runs(join: Join, pool: asyncpg.Pool) -> None:
    first, second = await join("http://a"), await join("http://b")
    await first.claim("math")
    await lapse(first, pool)
    await second.claim("math")
    assert not (await second.look()).members[first.id].is_alive
    assert owners_of(await first.renew()) == {"math": "http://b"}
    with pytest.raises(OwnedElsewhere):
        await first.claim("math")
    # A release under the earlier term must not free the run of the new owner.
    await first.release("math")
    assert owners_of(await first.look()) == {"math": "http://b"}


async def test_a_session_that_ended_while_idle_is_replaced_within_the_call(
    join: Join, postgres_url: str
) -> None:
    owners = await join("http://a")
    await owners.claim("math")
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1"

    def end_sessions() -> None:
        """In a thread of its own loop, so that the member's loop does not see its sessions end."""
        asyncio.run(one_statement(postgres_url, end, application_name(owners.id)))

    thread = threading.Thread(target=end_sessions)
    thread.start()
    thread.join()
    assert owners_of(await owners.renew()) == {"math": "http://a"}
    await owners.release("math")
    assert owners_of(await owners.look()) == {"math": None}


async def test_a_claim_ends_the_transactions_of_a_stopped_owner(
    join: Join, pool: asyncpg.Pool, postgres_url: str
) -> None:
    first, second = await join("http://a"), await join("http://b")
    await first.claim("math")
    stopped = await asyncpg.connect(
        postgres_url, server_settings={"application_name": application_name(first.id)}
    )
    await stopped.execute("begin")
    await stopped.execute("select from runs for share")
    await lapse(first, pool)
    await second.claim("math")
    pid = stopped.get_server_pid()
    assert await pool.fetchval("select count(*) from pg_stat_activity where pid = $1", pid) == 0
    stopped.terminate()


async def test_leaving_releases_every_run(join: Join) -> None:
    first, second = await join("http://a"), await join("http://b")
    for name in ("math", "code"):
        await first.claim(name)
    await first.leave()
    for name in ("math", "code"):
        await second.claim(name)
    assert list((await second.look()).members) == [second.id]


async def test_of_many_claims_at_once_one_succeeds(join: Join) -> None:
    replicas = [await join(f"http://{n}") for n in range(8)]
    claims = await asyncio.gather(
        *(each.claim("math") for each in replicas), return_exceptions=True
    )
    assert sum(isinstance(claim, Term) for claim in claims) == 1
    assert sum(isinstance(claim, OwnedElsewhere) for claim in claims) == 7


async def test_hubs_that_start_at_once_make_one_schema(postgres_url: str) -> None:
    pools = [await asyncpg.create_pool(postgres_url, min_size=1, max_size=1) for _ in range(4)]
    await asyncio.gather(*map(migrate, pools))
    for pool in pools:
        await pool.close()


async def test_the_schema_of_a_newer_version_is_refused(pool: asyncpg.Pool) -> None:
    await pool.execute("insert into atropos_schema values (999)")
    with pytest.raises(UnreadableRun, match="schema 999"):
        await migrate(pool)
