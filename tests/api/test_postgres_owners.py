"""Who owns a run: terms, lapses, and what a new version of the schema means for an old hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from atroposlib.api.stores.base import UnreadableRun

asyncpg = pytest.importorskip("asyncpg", reason="NOT TESTED: pip install 'atroposlib[postgres]'")

from atroposlib.api.stores.postgres.owners import LAPSE_S, Owner, Owners, Term  # noqa: E402
from atroposlib.api.stores.postgres.schema import migrate  # noqa: E402


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
        await migrate(pool)
        yield pool


async def joined(pool: asyncpg.Pool, address: str) -> Owners:
    owners = Owners(pool)
    await owners.join(address)
    return owners


async def test_one_replica_owns_a_run(pool: asyncpg.Pool) -> None:
    first, second = await joined(pool, "http://a"), await joined(pool, "http://b")
    term = await first.claim("math")
    assert isinstance(term, Term)
    assert await second.claim("math") == Owner(address="http://a")
    assert [each.num_runs for each in await first.members()] == [1, 0]
    await first.release("math")
    taken = await second.claim("math")
    assert isinstance(taken, Term)
    assert (taken.run_id, taken.number > term.number) == (term.run_id, True)


async def test_a_silent_member_loses_its_runs(pool: asyncpg.Pool) -> None:
    first, second = await joined(pool, "http://a"), await joined(pool, "http://b")
    await first.claim("math")
    await pool.execute(
        f"update members set renewed_at = renewed_at - interval '{LAPSE_S} s' where id = $1",
        first.id,
    )
    assert isinstance(await second.claim("math"), Term)
    assert [each.address for each in await second.members()] == ["http://b"]
    await first.renew()
    assert await first.claim("math") == Owner(address="http://b")


async def test_leaving_releases_every_run(pool: asyncpg.Pool) -> None:
    first, second = await joined(pool, "http://a"), await joined(pool, "http://b")
    for name in ("math", "code"):
        await first.claim(name)
    await first.leave()
    for name in ("math", "code"):
        assert isinstance(await second.claim(name), Term)
    assert [each.address for each in await second.members()] == ["http://b"]


async def test_of_many_claims_at_once_one_succeeds(pool: asyncpg.Pool) -> None:
    replicas = [await joined(pool, f"http://{n}") for n in range(8)]
    claims = await asyncio.gather(*(each.claim("math") for each in replicas))
    assert sum(isinstance(claim, Term) for claim in claims) == 1


async def test_hubs_that_start_at_once_make_one_schema(postgres_url: str) -> None:
    pools = [await asyncpg.create_pool(postgres_url, min_size=1, max_size=1) for _ in range(4)]
    await asyncio.gather(*map(migrate, pools))
    for pool in pools:
        await pool.close()


async def test_the_schema_of_a_newer_version_is_refused(pool: asyncpg.Pool) -> None:
    await pool.execute("insert into atropos_schema values (999)")
    with pytest.raises(UnreadableRun, match="schema 999"):
        await migrate(pool)
