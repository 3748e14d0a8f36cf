"""The PostgreSQL store under broken connections, a killed database, killed hubs, and random programs."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from atroposlib.api.stores.base import Change, GroupStore, TermLost
from atroposlib.cli import hub_database
from atroposlib.errors import ConfigError
from tests.conftest import require_postgres
from tests.faults.drivers import hub_process
from tests.faults.proxy import Direction, Proxy, Toxics
from tests.faults.store_faults import Judge, Workload
from tests.faults.test_store_model import StoreMachine, run_machine
from tests.postgres import Cluster, running_cluster

pytest.importorskip("asyncpg", reason="NOT TESTED: pip install -e '.[postgres]'")

from atroposlib.api.stores.postgres.runs import PostgresRuns


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresRuns]:
    runs = PostgresRuns(url, segment_bytes=20_000)
    await runs.open()
    try:
        yield runs
    finally:
        await runs.close()


async def check_what_is_left(url: str, judge: Judge) -> None:
    async with opened(url) as runs:
        store = runs.store("run")
        saved = await store.open()
        await judge.check(store, saved)
        await store.close()


async def several(store: GroupStore, rng: random.Random, judge: Judge, *, until: Any) -> None:
    """Run the workload until the task `until` ends."""
    workload = Workload(store, rng, judge)
    while not until.done():
        await workload.step()


@pytest.mark.parametrize("direction", list(Direction))
async def test_connections_that_break_anywhere_lose_and_repeat_nothing(
    postgres: Cluster, postgres_url: str, direction: Direction
) -> None:
    """Also between a commit and its answer."""
    rng = random.Random(direction.value)
    judge = Judge()
    async with Proxy(postgres.port) as proxy:
        url = postgres_url.replace(str(postgres.port), str(proxy.port))
        async with opened(url) as runs:
            store = runs.store("run")
            await store.open()
            workload = Workload(store, rng, judge)
            for _ in range(25):
                proxy.reset_after(direction, rng.randint(1, 4000))
                while proxy.is_armed:
                    await workload.step()
                await workload.step()
            await store.close()
    await check_what_is_left(postgres_url, judge)


async def set_aside_and_delete(runs: PostgresRuns) -> None:
    """Do all that can be done to a run that is not open."""
    await runs._claim("run")
    name = await runs.set_aside("run", experiment="a", step=1, resumed=None)
    [kept] = await runs.kept()
    assert await runs.names() == [kept.name] == [name]
    await runs.bring_back(kept)
    assert [each.name for each in await runs.stored()] == ["run"]
    await runs.forget("run")
    assert await runs.names() == []


@pytest.mark.parametrize(("direction", "stride"), [(Direction.REQUEST, 120), (Direction.REPLY, 30)])
async def test_connections_that_break_anywhere_neither_fail_nor_repeat_changes_of_runs(
    postgres: Cluster, postgres_url: str, direction: Direction, stride: int
) -> None:
    """Also between a commit and its answer, which has 18 bytes."""
    async with Proxy(postgres.port) as proxy:
        url = postgres_url.replace(str(postgres.port), str(proxy.port))
        async with opened(url) as runs:
            for num_bytes in itertools.count(1, stride):
                await set_aside_and_delete(runs)  # fills the caches of new connections
                proxy.reset_after(direction, num_bytes)
                await set_aside_and_delete(runs)
                if proxy.is_armed:
                    break
    assert num_bytes > 15 * stride


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One that the test may kill."""
    require_postgres()
    with running_cluster() as cluster:
        yield cluster


async def test_a_killed_database_is_a_pause(cluster: Cluster) -> None:
    rng = random.Random(5)
    judge = Judge()
    async with opened(cluster.url()) as runs:
        store = runs.store("run")
        await store.open()

        async def kill() -> None:
            for _ in range(2):
                await asyncio.sleep(rng.random())
                await asyncio.to_thread(cluster.kill)
                await asyncio.to_thread(cluster.start)

        killing = asyncio.create_task(kill())
        await several(store, rng, judge, until=killing)
        await killing
        await store.close()
    await check_what_is_left(cluster.url(), judge)


async def test_the_list_of_runs_waits_for_a_database_that_restarts(cluster: Cluster) -> None:
    async with opened(cluster.url()) as runs:
        await runs.owners.claim("run")
        await asyncio.to_thread(cluster.kill)
        asking = asyncio.create_task(runs.names())
        await asyncio.sleep(0.3)
        await asyncio.to_thread(cluster.start)
        assert await asking == ["run"]


@pytest.mark.parametrize("how", ["reset", "hang"])
async def test_a_new_owner_continues_where_the_one_before_was_cut_off(
    postgres: Cluster, postgres_url: str, how: str
) -> None:
    """The earlier owner's writes are refused once it reaches the database again."""
    rng = random.Random(6)
    judge = Judge()
    async with Proxy(postgres.port) as proxy:
        url = postgres_url.replace(str(postgres.port), str(proxy.port))
        async with opened(url) as runs:
            store = runs.store("run")
            await store.open()
            running = asyncio.create_task(several(store, rng, judge, until=asyncio.Future()))
            await asyncio.sleep(1)
            if how == "reset":
                await proxy.cut()
            else:
                proxy.toxics = Toxics(is_blackhole=True)
            await check_what_is_left(postgres_url, judge.snapshot())
            await proxy.heal()
            with pytest.raises(TermLost):
                await running
            await store.close()


# Whole hubs.


async def test_fresh_erases_nothing_beside_a_living_hub(tmp_path: Path, postgres_url: str) -> None:
    with hub_process(tmp_path, "--database", postgres_url) as hub:
        with pytest.raises(ConfigError, match=f"the hub at {hub.url} uses .* stop it first"):
            await hub_database.erase(postgres_url)
        assert hub.stop() == 0
    assert [run.name for run in await hub_database.erase(postgres_url)] == ["default"]
    assert await hub_database.stored(postgres_url) == []


# Random programs.


class PostgresMachine(StoreMachine):
    """A crash is an owner whose term ends: the next one opens what it left."""

    kind = "postgres"
    cluster: ClassVar[Cluster]

    def make(self) -> GroupStore:
        if not hasattr(self, "url"):
            self.url = self.cluster.create_schema(f"test_{uuid.uuid4().hex}")
            self.runs = self.join()
        return self.runs.store("run")

    def join(self) -> PostgresRuns:
        runs = PostgresRuns(self.url, segment_bytes=4000)
        self.loop.run_until_complete(runs.open())
        return runs

    @rule(is_meant=st.integers(0, 2))
    def crash(self, is_meant: int) -> None:
        if is_meant:
            return
        before, store = self.runs, self.store
        self.loop.run_until_complete(before.owners.release("run"))
        self.runs = self.join()
        self.store = self.make()
        self.open()
        [answer] = self.wait(store.commit(Change(document=b"stale")))
        assert isinstance(answer, TermLost)
        assert self.wait(store.close(), before.close()) == [None, None]

    def teardown(self) -> None:
        self.wait(self.store.close())
        self.wait(self.runs.close())
        self.loop.close()
        shutil.rmtree(self.home)


@pytest.mark.timeout(300)
def test_the_store_agrees_with_a_dict(postgres: Cluster, tmp_path: Path) -> None:
    members = {"cluster": postgres, "directory": tmp_path}
    machine = type("Machine", (PostgresMachine,), members)
    assert run_machine(machine, num_programs=10) >= 250
