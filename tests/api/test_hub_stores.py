"""The contract of a store; every store runs all of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from atroposlib.api.stores.base import (
    Appended,
    BatchState,
    Change,
    Durability,
    Fate,
    GroupStore,
    Move,
    NewGroup,
    Place,
    SavedRun,
    StoredBatch,
    StoredGroup,
    StoreFull,
)
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.api.stores.runs import MemoryRuns
from atroposlib.api.stores.space import Bound, Space
from atroposlib.scored_data import GroupHeader

Make = Callable[[], GroupStore]
Reopen = Callable[[GroupStore], Awaitable[tuple[GroupStore, SavedRun]]]


def new_group(
    number: int, payload: bytes = b"payload", *, group_id: str | None = None, digest: bytes = b"d"
) -> NewGroup:
    header = GroupHeader(
        number=number,
        env_id=number % 3 or None,
        num_sequences=4,
        policy_version=number or None,
        arrival_step=7,
        num_tokens=100,
        num_bytes=len(payload),
        group_id=group_id or str(uuid.UUID(int=number)),
        digest=digest * 16,
    )
    return NewGroup(header=header, payload=payload)


def stored(group: NewGroup) -> StoredGroup:
    return StoredGroup(header=group.header, move=Move(place=group.place))


def new_batch(number: int, state: BatchState = BatchState.LEASED) -> StoredBatch:
    return StoredBatch(
        number=number, state=state, step=number + 1, epoch=2, lease_id=f"lease-{number}", ttl_s=9.5
    )


def disk_store(directory: Path, kind: str) -> DiskStore:
    durability = Durability.POWER if kind == "disk-power" else Durability.PROCESS
    return DiskStore(directory / "run", durability=durability, min_free_bytes=0)


@pytest.fixture(params=["memory", "disk-power", "disk-process", "postgres"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    if request.param == "memory":
        store = MemoryStore()
        yield lambda: store
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres_url")  # skips without PostgreSQL
        from atroposlib.api.stores.postgres.runs import PostgresRuns

        runs = PostgresRuns(url, segment_bytes=4096)
        await runs.open()
        yield lambda: runs.store("run")
        await runs.close()
    else:
        yield lambda: disk_store(tmp_path, request.param)


@pytest.fixture
async def store(make: Make) -> AsyncIterator[GroupStore]:
    made = make()
    assert await made.open() == SavedRun(groups=[], batches=[])
    yield made
    await made.close()


@pytest.fixture
async def reopen(make: Make) -> AsyncIterator[Reopen]:
    """Close a store and open what it left behind."""
    opened: list[GroupStore] = []

    async def do(store: GroupStore) -> tuple[GroupStore, SavedRun]:
        await store.close()
        opened.append(make())
        return opened[-1], await opened[-1].open()

    yield do
    for store in opened:
        await store.close()


async def test_a_known_id_is_a_duplicate_and_with_other_content_a_conflict(
    store: GroupStore,
) -> None:
    first = new_group(0, group_id="x")
    outcomes = await store.append(
        [first, new_group(1, group_id="x"), new_group(2, group_id="x", digest=b"e")]
    )
    assert outcomes == [Appended.STORED, Appended.DUPLICATE, Appended.CONFLICT]
    outcomes = await store.append([new_group(3, group_id="x"), new_group(4, group_id="y")])
    assert outcomes == [Appended.DUPLICATE, Appended.STORED]
    for number in (1, 2, 3):
        with pytest.raises(KeyError):
            await store.read([number])


async def test_a_known_group_needs_no_room(store: GroupStore) -> None:
    full = StoreFull("no room")
    known, other = new_group(0), new_group(1, group_id=str(uuid.UUID(int=0)), digest=b"e")
    await store.append([known])
    assert await store.append([known, other], refusal=full) == [
        Appended.DUPLICATE,
        Appended.CONFLICT,
    ]
    for groups in [new_group(2)], [known, new_group(2)]:
        with pytest.raises(StoreFull, match="no room"):
            await store.append(groups, refusal=full)
    assert await store.append([new_group(2)]) == [Appended.STORED]


async def test_id_and_number_of_an_ended_group_stay_known(
    store: GroupStore, reopen: Reopen
) -> None:
    await store.append([new_group(0, group_id="x")])
    await store.commit(Change(ends={0: Fate.TRAINED}))
    assert await store.append([new_group(1, group_id="x")]) == [Appended.DUPLICATE]
    again, saved = await reopen(store)
    assert (saved.groups, saved.next_number) == ([], 1)
    outcomes = await again.append(
        [new_group(2, group_id="x"), new_group(3, group_id="x", digest=b"e")]
    )
    assert outcomes == [Appended.DUPLICATE, Appended.CONFLICT]


async def test_nothing_is_kept_of_an_ended_group_whose_id_the_hub_made(
    store: GroupStore, reopen: Reopen
) -> None:
    await store.append([new_group(0, group_id="x", digest=b"")])
    assert await store.append([new_group(1, group_id="x", digest=b"")]) == [Appended.DUPLICATE]
    await store.commit(Change(ends={0: Fate.TRAINED}))
    again, saved = await reopen(store)
    assert saved.ended == {Fate.TRAINED: 1}
    assert await again.append([new_group(2, group_id="x")]) == [Appended.STORED]


async def test_an_ended_group_leaves_at_most_60_bytes_in_the_state(tmp_path: Path) -> None:
    """Its id of 32 digits and its digest take 32; pages of random keys are about two thirds full."""
    store = disk_store(tmp_path, "disk-process")
    await store.open()
    sizes = []
    for first in (0, 2000, 4000):
        for start in range(first, first + 2000, 200):
            await store.append(
                [new_group(n, b"", group_id=uuid.uuid4().hex) for n in range(start, start + 200)]
            )
            await store.commit(Change(ends=dict.fromkeys(range(start, start + 200), Fate.TRAINED)))
        await store.close()
        sizes.append((tmp_path / "run" / "run.db").stat().st_size)
        store = disk_store(tmp_path, "disk-process")
        await store.open()
    await store.close()
    assert sizes[2] - sizes[0] <= 4000 * 60


async def test_ids_come_back_as_they_were_sent(store: GroupStore, reopen: Reopen) -> None:
    uuids = ["0a52e1f0-9c1d-4c5e-8f43-5f6a3d1b7c22", "0a52e1f09c1d4c5e8f435f6a3d1b7c22"]
    ids = [*uuids, *map(str.upper, uuids), "123", "a\x00b", "\N{SNOWMAN}", "x" * 36]
    await store.append([new_group(n, group_id=group_id) for n, group_id in enumerate(ids)])
    _, saved = await reopen(store)
    assert [group.header.group_id for group in saved.groups] == ids


async def test_everything_comes_back_after_a_restart(store: GroupStore, reopen: Reopen) -> None:
    groups = [new_group(n, bytes([n]) * 3000) for n in range(8)]
    await store.append(groups)
    batch = new_batch(5)
    leased = Move(place=Place.LEASED, batch=5, deliveries=2)
    dead = Move(place=Place.DEAD, reason="too often")
    await store.commit(
        Change(
            moves={1: leased, 2: dead},
            ends={0: Fate.EXPIRED, 3: Fate.TRAINED},
            batches={5: batch, 4: new_batch(4), 6: new_batch(6)},
            document=b"first",
            facts={"b": b"kept", "a": b"replaced"},
        )
    )
    await store.commit(
        Change(
            batches={6: new_batch(6, BatchState.TRAINED), 4: None},
            document=b"second",
            facts={"a": b"newer"},
            is_durable=False,
        )
    )
    again, saved = await reopen(store)
    assert saved.document == b"second"
    assert list(saved.facts.items()) == [("a", b"newer"), ("b", b"kept")]
    assert saved.batches == [batch, new_batch(6, BatchState.TRAINED)]
    assert saved.ended == {Fate.EXPIRED: 1, Fate.TRAINED: 1}
    assert saved.next_number == 8
    moved = [
        StoredGroup(header=groups[n].header, move=move) for n, move in ((1, leased), (2, dead))
    ]
    assert saved.groups == [*moved, *(stored(group) for group in groups[4:])]
    assert await again.read([2, 7]) == [groups[2].payload, groups[7].payload]


async def test_runs_in_memory_share_a_bound_and_give_back_what_they_took() -> None:
    runs = MemoryRuns(Space([Bound(text="memory", left_bytes=1000, flag="--flag")]))
    first, second = runs.store("first"), runs.store("second")
    await first.append([new_group(0, bytes(400)), new_group(1, bytes(400))])
    assert await first.append([new_group(1, bytes(400))]) == [Appended.DUPLICATE]
    with pytest.raises(StoreFull):
        await second.append([new_group(0, bytes(100)), new_group(1, bytes(101))])
    assert second.usage().payload_bytes == 0
    assert await second.append([new_group(0, bytes(200))]) == [Appended.STORED]
    assert [store.usage().free_bytes for store in (first, second)] == [0, 0]
    assert first.usage().refusal is not None
    await first.commit(Change(ends={0: Fate.TRAINED}))
    assert second.usage().free_bytes == 400
    await runs.forget("first")
    assert (second.usage().free_bytes, second.usage().refusal) == (800, None)


async def test_clear_forgets_everything_ids_included(store: GroupStore, reopen: Reopen) -> None:
    await store.append([new_group(n, bytes(3000)) for n in range(4)])
    await store.commit(
        Change(
            ends={0: Fate.TRAINED},
            batches={1: new_batch(1)},
            document=b"d",
            facts={"name": b"f"},
        )
    )
    await store.clear()
    assert store.usage().payload_bytes == 0
    with pytest.raises(KeyError):
        await store.read([1])
    assert await store.append([new_group(0, b"other")]) == [Appended.STORED]
    again, saved = await reopen(store)
    assert saved.groups == [stored(new_group(0, b"other"))]
    assert (saved.document, saved.facts, saved.batches, saved.ended) == (None, {}, [], {})
    assert await again.read([0]) == [b"other"]


async def test_a_change_that_names_an_absent_group_raises_key_error_and_changes_nothing(
    store: GroupStore, reopen: Reopen
) -> None:
    """Nor does it undo the changes that were made at the same time."""
    await store.append([new_group(0), new_group(1)])
    kept = Move(place=Place.DEAD, reason="kept")
    outcomes = await asyncio.gather(
        store.commit(Change(moves={0: kept}, document=b"kept")),
        store.commit(
            Change(
                moves={0: Move(place=Place.QUEUED)},
                ends={1: Fate.TRAINED, 9: Fate.TRAINED},
                document=b"lost",
            )
        ),
        store.commit(Change(moves={1: kept})),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), KeyError, type(None)]
    again, saved = await reopen(store)
    assert (saved.document, saved.ended) == (b"kept", {})
    assert [group.move for group in saved.groups] == [kept] * 2
    assert await again.read([0, 1]) == [b"payload"] * 2
