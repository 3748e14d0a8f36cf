"""What the PostgreSQL store adds to the contract of every store: terms, segments as tables, a database that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

asyncpg = pytest.importorskip("asyncpg", reason="NOT TESTED: pip install -e '.[postgres]'")

from atroposlib.api.stores.base import (  # noqa: E402
    Appended,
    Change,
    CorruptGroups,
    Fate,
    GroupStore,
    OwnedElsewhere,
    StoreBroken,
    StoreFull,
    TermLost,
)
from atroposlib.api.stores.postgres import sessions  # noqa: E402
from atroposlib.api.stores.postgres import space as database_space  # noqa: E402
from atroposlib.api.stores.postgres.runs import PostgresRuns  # noqa: E402
from atroposlib.api.stores.postgres.space import DatabaseSpace  # noqa: E402
from atroposlib.api.stores.postgres.store import PostgresStore  # noqa: E402
from tests.api.test_hub_stores import new_group, stored  # noqa: E402
from tests.builders.clocks import Clock  # noqa: E402
from tests.faults.drivers import eventually  # noqa: E402


@asynccontextmanager
async def opened(url: str, *, space: DatabaseSpace | None = None) -> AsyncIterator[PostgresRuns]:
    runs = PostgresRuns(url, space=space, segment_bytes=4 << 20)
    await runs.open()
    await runs.owners.join("http://hub")
    try:
        yield runs
    finally:
        await runs.close()


@pytest.fixture
async def runs(postgres_url: str) -> AsyncIterator[PostgresRuns]:
    async with opened(postgres_url) as runs:
        yield runs


def make_store(runs: PostgresRuns, clock: Clock) -> PostgresStore:
    return PostgresStore(
        "run", pool=runs._pool, owners=runs.owners, segment_bytes=4000, clock=clock
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(runs: PostgresRuns, clock: Clock) -> AsyncIterator[PostgresStore]:
    store = make_store(runs, clock)
    await store.open()
    yield store
    await store.close()


async def payload_tables(runs: PostgresRuns) -> list[str]:
    found = await runs._pool.fetch(
        "select relname from pg_class where relnamespace = current_schema()::regnamespace"
        " and relkind = 'r' and relname like 'payloads%' order by 1"
    )
    return [name for (name,) in found]


def ends(*numbers: int) -> Change:
    return Change(ends=dict.fromkeys(numbers, Fate.TRAINED))


async def test_an_owner_whose_term_ended_writes_nothing(postgres_url: str) -> None:
    async with opened(postgres_url) as first, opened(postgres_url) as second:
        store = first.store("run")
        await store.open()
        await store.append([new_group(0), new_group(1)])
        with pytest.raises(OwnedElsewhere):
            await second.forget("run")
        await first.owners.release("run")
        taken = second.store("run")
        saved = await taken.open()
        assert saved.groups == [stored(new_group(0)), stored(new_group(1))]
        answers = await asyncio.gather(
            store.append([new_group(2)]), store.commit(ends(0)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [TermLost, TermLost]
        await taken.append([new_group(2, b"the new owner's")])
        assert await taken.read([0, 2]) == [b"payload", b"the new owner's"]
        await store.close()
        await taken.close()


async def test_a_read_after_the_term_ended_never_calls_groups_damaged(postgres_url: str) -> None:
    """The new owner may have dropped their segment."""
    async with opened(postgres_url) as first, opened(postgres_url) as second:
        store = first.store("run")
        await store.open()
        await store.append([new_group(0)])
        await first.owners.release("run")
        await second.forget("run")
        with pytest.raises(TermLost):
            await store.read([0])
        await store.close()


async def test_a_claim_waits_for_the_transaction_in_progress(
    runs: PostgresRuns, store: PostgresStore
) -> None:
    """So the next owner reads all that the one before has committed."""
    async with runs._pool.acquire() as connection:
        async with connection.transaction():
            await connection.execute("select 1 from runs for share")
            claim = asyncio.create_task(runs.owners.claim("run"))
            done, _ = await asyncio.wait([claim], timeout=0.2)
            assert not done
        await claim


async def test_a_segment_is_dropped_once_none_of_its_groups_is_held(
    runs: PostgresRuns, store: PostgresStore, clock: Clock
) -> None:
    for number in range(6):
        await store.append([new_group(number, bytes(2000))])
    assert await payload_tables(runs) == [f"payloads_1_{n}" for n in range(3)]
    await store.commit(ends(0, 1, 2))
    clock.now_s += 2
    await store.commit(Change())
    assert await payload_tables(runs) == ["payloads_1_1", "payloads_1_2"]
    await store.clear()
    assert await payload_tables(runs) == []


async def test_a_segment_that_is_being_read_is_dropped_later(
    runs: PostgresRuns, store: PostgresStore, clock: Clock
) -> None:
    await store.append([new_group(0, bytes(5000))])
    async with runs._control.acquire() as connection, connection.transaction():
        await connection.execute("select count(*) from payloads_1_0")
        await store.commit(ends(0))
        clock.now_s += 2
        await store.commit(Change())
        assert await payload_tables(runs) == ["payloads_1_0"]
    clock.now_s += 62
    await store.commit(Change())
    assert await payload_tables(runs) == []


async def test_the_last_groups_of_a_segment_are_moved(
    runs: PostgresRuns, store: PostgresStore, clock: Clock
) -> None:
    await store.append([new_group(n, bytes([n]) * 500) for n in range(9)])
    await store.append([new_group(9)])
    await store.commit(ends(*range(8)))
    for _ in range(2):
        clock.now_s += 601
        await store.commit(Change())
    assert await payload_tables(runs) == ["payloads_1_1"]
    assert await store.read([9, 8]) == [b"payload", bytes([8]) * 500]
    await store.close()
    again = make_store(runs, clock)
    await again.open()
    assert await again.read([8]) == [bytes([8]) * 500]
    await again.close()


async def test_a_damaged_payload_is_reported_by_number(
    runs: PostgresRuns, store: PostgresStore
) -> None:
    await store.append([new_group(n) for n in range(4)])
    await runs._pool.execute("delete from payloads_1_0 where number = 1")
    await runs._pool.execute("update payloads_1_0 set payload = 'paxload' where number = 3")
    with pytest.raises(CorruptGroups) as caught:
        await store.read([0, 1, 2, 3])
    assert caught.value.numbers == [1, 3]


async def test_a_full_database_refuses_groups_while_changes_work(
    runs: PostgresRuns, store: PostgresStore
) -> None:
    await store.append([new_group(0)])
    await runs._pool.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'no room' using errcode = '53100'; end $$;"
        "create trigger refuse before insert on groups execute function refuse()"
    )
    answers = await asyncio.gather(
        store.append([new_group(1)]), store.commit(ends(0)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [StoreFull, type(None)]
    await runs._pool.execute("drop trigger refuse on groups")
    assert await store.append([new_group(1)]) == [Appended.STORED]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure all the time."""
    monkeypatch.setattr(database_space, "MEASURE_S", 0.02)


async def until_groups_are_accepted(store: GroupStore) -> None:
    await eventually(lambda: store.usage().refusal is None, timeout_s=10, what="room")


@pytest.mark.usefixtures("quick")
async def test_a_database_of_its_greatest_size_takes_changes_and_no_groups(
    runs: PostgresRuns, postgres_url: str
) -> None:
    used = await runs._pool.fetchval("select pg_database_size(current_database())")
    max_bytes = used + (8 << 20)
    space = DatabaseSpace(max_bytes=max_bytes, min_free_bytes=0)
    async with opened(postgres_url, space=space) as bounded:
        store = bounded.store("run")
        await store.open()
        assert store.usage().refusal is None
        groups = [new_group(number, random.randbytes(1 << 20)) for number in range(20)]
        answers = await asyncio.gather(
            *map(store.append, [[group] for group in groups]), return_exceptions=True
        )
        stored_ones = [n for n, answer in enumerate(answers) if answer == [Appended.STORED]]
        [refused, *_] = [answer for answer in answers if isinstance(answer, StoreFull)]
        # What is being written during a measurement may count twice, or not at all.
        assert 4 <= len(stored_ones) < 12
        refusal = store.usage().refusal or ""
        for text in (refusal, str(refused)):
            assert "the database uses" in text
            assert "MiB are missing" in text
            assert f"change --max-database-bytes (now {max_bytes})" in text
        for number in stored_ones:
            await store.commit(ends(number))
        await until_groups_are_accepted(store)
        await store.append([new_group(20, bytes(1 << 20))])
        await store.close()


async def test_calls_wait_for_a_database_that_ends_their_connections(
    runs: PostgresRuns, store: PostgresStore
) -> None:
    for number in range(5):
        await runs._control.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            f" where application_name = 'atropos {runs.owners.id}' and pid <> pg_backend_pid()"
        )
        assert await store.append([new_group(number)]) == [Appended.STORED]


async def test_a_database_out_of_reach_for_long_breaks_the_store(
    runs: PostgresRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_PATIENCE_S", 0.2)
    failures: list[BaseException] = []
    store = PostgresStore("run", pool=runs._pool, owners=runs.owners, on_failure=failures.append)
    await store.open()
    runs._pool.terminate()
    with pytest.raises(StoreBroken, match="cannot be reached"):
        await store.append([new_group(0)])
    assert len(failures) == 1
    with pytest.raises(StoreBroken):
        await store.commit(Change())
    await store.close()
