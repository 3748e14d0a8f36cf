"""Experiments that follow each other in one run: the later one starts empty, the earlier one stays as it was."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.experiments import TRAINER_TIMEOUT_S, Entry, entry_to
from atroposlib.api.run.hub import AwakeClock, TooManyRuns
from atroposlib.api.run.hub import Hub as Runs
from atroposlib.api.run.state import RunState
from atroposlib.api.run.types import Quota, RunPolicy
from atroposlib.api.schemas import RegisterTrainer
from atroposlib.api.stores import runs as stored_runs
from atroposlib.api.stores.base import GroupStore, NewGroup, SavedRun, StoreBroken, StoreFull
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.api.stores.runs import DirectoryRuns, MemoryRuns, RunStores
from atroposlib.scored_data import GroupHeader
from tests.api.helpers_api import Hub, environment, group, registration, running_hub
from tests.builders.clocks import Clock

HEADER = GroupHeader(
    env_id=None, num_sequences=2, num_tokens=2, policy_version=None, group_id="", digest=b""
)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


ON_EVERY_STORE = pytest.mark.parametrize("hub", ["memory", "disk", "postgres"], indirect=True)


@pytest.fixture
async def hub(request: Any, tmp_path: Path, clock: Clock) -> AsyncIterator[Hub]:
    """A hub that keeps its runs in memory, or in the store of `ON_EVERY_STORE`."""
    stores: RunStores = MemoryRuns()
    kind = getattr(request, "param", "memory")
    if kind == "disk":
        stores = DirectoryRuns(tmp_path / "data", lambda path: DiskStore(path, min_free_bytes=0))
    elif kind == "postgres":
        url = request.getfixturevalue("postgres_url")
        from atroposlib.api.stores.postgres.runs import PostgresRuns

        stores = PostgresRuns(url)
    async with running_hub(runs=Runs(stores, clock=clock)) as found:
        yield found


NATIVE = {"Atropos-Client": "atroposlib/0"}


async def begin(hub: Hub, experiment: str, **changes: Any) -> dict[str, Any]:
    """Register as our trainer does, and ask for the first batch."""
    reply: dict[str, Any] = await hub.post(
        "/register", registration(experiment=experiment, **changes)
    )
    await hub.get("/batch?lease=1")
    return reply


async def post_group(hub: Hub, first_token: int, experiment: str | None = None) -> httpx.Response:
    headers = NATIVE | ({} if experiment is None else {"Atropos-Experiment": experiment})
    return await hub.http.post("/scored_data", json=group(2, first_token), headers=headers)


async def places(hub: Hub, run: str = "default") -> dict[str, int]:
    ledger = await hub.get(f"/runs/{run}/ledger")
    return {k: v for k, v in ledger.items() if k not in ("rejected", "produced") and v}


@pytest.mark.parametrize(
    ("asked", "current", "is_alive", "entry"),
    [
        ({"experiment": "a"}, None, False, Entry.BEGIN),
        ({"experiment": "b"}, "a", True, Entry.BEGIN),
        ({"experiment": "a"}, "a", False, Entry.JOIN),  # the first answer was lost
        ({"experiment": "a", "resume_step": 3}, "a", False, Entry.RESUME),
        ({"resume_step": 0}, None, False, Entry.RESUME),
        # Clients of the original:
        ({}, None, False, Entry.BEGIN),
        ({}, "a", True, Entry.JOIN),
        ({}, "a", False, Entry.BEGIN),
        ({"starting_step": 7}, "a", True, Entry.JOIN),
        ({"starting_step": 7}, "a", False, Entry.RESUME),
    ],
)
def test_what_a_registration_means(
    asked: dict[str, Any], current: str | None, is_alive: bool, entry: Entry
) -> None:
    run = RunState("run", RunPolicy())
    run.experiment = current
    run.trainer_seen = 0.5 if is_alive else 0.0
    registered = RegisterTrainer(**registration(**asked))
    assert entry_to(run, registered, now=TRAINER_TIMEOUT_S) is entry


@ON_EVERY_STORE
async def test_a_second_experiment_starts_empty_and_the_first_is_kept(hub: Hub) -> None:
    await begin(hub, "first")
    for token in range(4):
        await post_group(hub, token, "first")
    leased = await hub.get("/batch?lease=1")
    reply = await hub.post("/register", registration(experiment="second"))
    assert (reply["experiment"], reply["set_aside"]) == ("second", "default.1")
    assert await places(hub) == {}
    assert await places(hub, "default.1") == {"queued": 2, "leased": 2}
    assert (await hub.get("/status"))["current_step"] == 0
    # The first trainer, had it not ended, gets nothing of the second's, and takes nothing away.
    stale = await hub.http.get(f"/batch?lease=1&epoch={leased['epoch']}")
    assert stale.json()["detail"]["type"] == "superseded"
    refused = await hub.http.post("/policy", json={"version": 9, "epoch": leased["epoch"]})
    assert refused.status_code == 409


async def test_registering_again_after_a_lost_answer_changes_nothing(hub: Hub) -> None:
    first = await begin(hub, "first")
    await post_group(hub, 1, "first")
    again = await hub.post("/register", registration(experiment="first"))
    assert "set_aside" not in again
    assert (again["epoch"], await places(hub)) == (first["epoch"], {"queued": 1})


@ON_EVERY_STORE
async def test_resuming_brings_the_experiment_back_and_sets_the_other_aside(hub: Hub) -> None:
    await begin(hub, "first")
    for token in range(4):
        await post_group(hub, token, "first")
    batch = await hub.get("/batch?lease=1")
    lease = {"lease_id": batch["lease_id"]}
    await hub.post(f"/batches/{batch['batch_id']}/ack", lease)
    await begin(hub, "second")
    await post_group(hub, 9, "second")
    reply = await hub.post("/register", registration(experiment="first", resume_step=0))
    assert (reply["set_aside"], reply["replayed"]) == ("default.2", 2)
    assert await places(hub) == {"queued": 4}
    assert await places(hub, "default.2") == {"queued": 1}
    again = await hub.get(f"/batch?lease=1&epoch={reply['epoch']}")
    assert again["batch"] == batch["batch"]
    assert (await hub.http.get("/runs/default.1/ledger")).json()["produced"] == 0  # moved back


async def test_resuming_an_experiment_that_is_not_kept_takes_nothing_of_another(hub: Hub) -> None:
    await begin(hub, "first")
    await post_group(hub, 1, "first")
    reply = await hub.post("/register", registration(experiment="unknown", resume_step=3))
    assert (reply["experiment"], reply["set_aside"]) == ("unknown", "default.1")
    assert (await places(hub), await places(hub, "default.1")) == ({}, {"queued": 1})
    assert (await hub.get("/status"))["current_step"] == 3


@ON_EVERY_STORE
@pytest.mark.parametrize("fields", [{}, {"experiment": "third"}, {"experiment": "first"}])
async def test_no_trainer_begins_in_a_kept_experiment(hub: Hub, fields: dict[str, Any]) -> None:
    for experiment in ("first", "second"):
        await begin(hub, experiment)
        await post_group(hub, 1, experiment)
    refused = await hub.http.post("/runs/default.1/register", json=registration(**fields))
    assert refused.status_code == 409
    assert "an earlier experiment of the run 'default'" in refused.json()["detail"]["msg"]
    await hub.post("/register", registration(experiment="first", resume_step=0))
    assert await places(hub) == {"queued": 1}
    assert await places(hub, "default.2") == {"queued": 1}


async def test_environments_outlive_the_trainer_and_their_old_groups_are_refused(hub: Hub) -> None:
    await begin(hub, "first")
    named = await hub.post("/register-env", environment(env_uid="e"))
    plain = await hub.post("/register-env", environment(desired_name="original"))
    assert (named["experiment"], "experiment" in plain) == ("first", False)
    await begin(hub, "second")
    # An original client continues with its id; a native one must register again, and keeps its id.
    assert (await hub.http.get("/status-env", params={"env_id": plain["env_id"]})).is_success
    ours = {"env_id": named["env_id"], "env_uid": "e", "experiment": "first"}
    assert (await hub.http.get("/status-env", params=ours)).status_code == 404
    again = await hub.post("/register-env", environment(env_uid="e"))
    assert (again["env_id"], again["experiment"]) == (named["env_id"], "second")
    late = await post_group(hub, 1, "first")
    assert (late.status_code, late.json()["detail"]["type"]) == (409, "another_run")
    assert (await post_group(hub, 2, "second")).is_success
    ledger = await hub.balanced_ledger()
    assert (ledger["queued"], ledger["rejected"]) == (1, {"another_run": 1})


@ON_EVERY_STORE
async def test_environments_outlive_a_change_of_experiments_that_fails(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(hub, "first")
    await hub.post("/register-env", environment())
    await post_group(hub, 1, "first")

    async def fail(*_: Any) -> None:
        raise StoreBroken("no disk")

    with monkeypatch.context() as patched:
        patched.setattr(Coordinator, "open", fail)
        refused = await hub.http.post("/register", json=registration(experiment="second"))
        assert refused.status_code == 503
    assert (await hub.http.get("/status-env", params={"env_id": 0})).is_success
    assert (await begin(hub, "second"))["epoch"] > 0
    assert await places(hub, "default.1") == {"queued": 1}


async def test_groups_wait_for_the_trainer_that_they_are_for(hub: Hub) -> None:
    early = await post_group(hub, 1, "first")
    assert (early.status_code, early.json()["detail"]["type"]) == (409, "run_reset")
    await begin(hub, "first")
    assert (await post_group(hub, 1, "first")).is_success


async def test_original_trainer_joins_a_live_run_and_begins_anew_when_it_is_silent(
    hub: Hub, clock: Clock
) -> None:
    await hub.start()
    await hub.post("/scored_data", group(2))
    clock.now_s += 59
    assert (await hub.post("/register", registration(batch_size=8))).keys() == {"uuid"}
    assert (await hub.get("/info"))["batch_size"] == 4
    why = await hub.get("/explain")
    assert why["conflicts"] == ["batch_size: 4 stays, 8 was asked for"]
    assert why["reason"].endswith(
        "; not granted to a second trainer: batch_size: 4 stays, 8 was asked for"
    )
    assert await places(hub) == {"queued": 1}
    clock.now_s += 61
    assert (await hub.post("/register", registration(batch_size=8)))["set_aside"] == "default.1"
    assert (await hub.get("/info"))["batch_size"] == 8
    assert (await places(hub), await places(hub, "default.1")) == ({}, {"queued": 1})


async def test_original_trainer_is_told_that_the_run_it_would_join_has_finished(
    hub: Hub, clock: Clock
) -> None:
    await hub.start(num_steps=1)
    await hub.post("/register", registration())  # it may join before the last step
    await hub.post("/scored_data", group(4))
    assert (await hub.get("/batch"))["batch"]
    clock.now_s += 20
    refused = await hub.http.post("/register", json=registration())
    assert refused.status_code == 409
    assert refused.json()["detail"] == {
        "type": "run_finished",
        "msg": "run 'default' is at step 1 of 1 of a trainer that has called in the last minute: register again in 40 s"
        " to begin another experiment, or with another run (/runs/NAME)",
    }
    clock.now_s += 41
    assert (await hub.post("/register", registration()))["set_aside"] == "default.1"


async def test_original_trainer_goes_on_from_a_later_step(hub: Hub, clock: Clock) -> None:
    await hub.start()
    await hub.post("/scored_data", group(2))
    clock.now_s += 61
    await hub.post("/register", registration(starting_step=5))
    assert await hub.get("/status") == {"current_step": 5, "queue_size": 1}
    assert (await hub.get("/explain"))[
        "unknown_steps"
    ] == 5  # it had trained on nothing of this hub's


async def test_of_two_trainers_that_begin_at_once_the_later_one_has_the_run(hub: Hub) -> None:
    await begin(hub, "first")
    both = [hub.post("/register", registration(experiment=name)) for name in ("a", "b")]
    earlier, later = sorted(await asyncio.gather(*both), key=lambda reply: reply["epoch"])
    assert earlier["experiment"] != later["experiment"]
    refused = await hub.http.get(f"/batch?lease=1&epoch={earlier['epoch']}")
    assert refused.json()["detail"]["type"] == "superseded"
    assert await hub.get(f"/batch?lease=1&epoch={later['epoch']}") == {"batch": None}


async def test_kept_runs_survive_a_restart_closed_and_can_be_deleted(tmp_path: Path) -> None:
    def stores() -> DirectoryRuns:
        return DirectoryRuns(tmp_path, lambda path: DiskStore(path, min_free_bytes=0))

    async with running_hub(runs=Runs(stores())) as hub:
        await begin(hub, "first")
        await post_group(hub, 1, "first")
        await begin(hub, "second")
    again = Runs(stores())
    await again.open()
    assert list(again.runs) == ["default"]
    await again.close()
    async with running_hub(runs=Runs(stores())) as hub:
        assert await places(hub, "default.1") == {"queued": 1}
        assert (await hub.http.delete("/runs/default.1")).is_success
        assert (await hub.http.delete("/runs/default.1")).status_code == 404
    assert await stores().names() == ["default"]


async def test_markers_are_read_and_written_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_call(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return call(*args)

        return note_and_call

    for name in ("_read_marker", "_write_marker"):
        monkeypatch.setattr(stored_runs, name, noted(getattr(stored_runs, name)))
    stores = DirectoryRuns(tmp_path, lambda path: DiskStore(path, min_free_bytes=0))
    async with running_hub(runs=Runs(stores)) as hub:
        for experiment in ("a", "b"):
            await begin(hub, experiment)
            await post_group(hub, 1, experiment)
        assert (await hub.get("/runs/default.1/status"))["queue_size"] == 1
        assert (await hub.http.get("/runs/unknown/ledger")).json()["produced"] == 0
    assert len(threads) > 10
    assert threading.current_thread() not in threads


async def test_waiting_clients_of_the_earlier_experiment_are_answered(hub: Hub) -> None:
    first = await begin(hub, "first")
    waiting = asyncio.create_task(hub.get(f"/batch?lease=1&wait=30&epoch={first['epoch']}"))
    await asyncio.sleep(0)
    await begin(hub, "second")
    async with asyncio.timeout(30):
        assert await waiting == {"batch": None}


async def test_a_kept_run_that_is_being_opened_is_closed_before_it_is_brought_back() -> None:
    class SlowToOpen(MemoryStore):
        may_open = asyncio.Event()

        async def open(self) -> SavedRun:
            await self.may_open.wait()
            return await super().open()

    class Stores(MemoryRuns):
        def store(self, name: str) -> GroupStore:
            store = super().store(name)
            if name == "default.1":
                store.__class__ = SlowToOpen
            return store

    async with running_hub(runs=Runs(Stores())) as hub:
        await begin(hub, "first")
        await post_group(hub, 1, "first")
        await begin(hub, "second")
        looking = asyncio.create_task(hub.get("/runs/default.1/status"))
        await asyncio.sleep(0.01)
        resuming = asyncio.create_task(
            hub.post("/register", registration(experiment="first", resume_step=0))
        )
        await asyncio.sleep(0.01)
        SlowToOpen.may_open.set()
        await asyncio.gather(looking, resuming)
        assert hub.runs == ["default"]
        assert await places(hub) == {"queued": 1}


async def begin_many(hub: Hub, run: str, num_experiments: int) -> None:
    """Begin experiments with a group each; all but the last are set aside."""
    for number in range(num_experiments):
        await hub.post(f"/runs/{run}/register", registration(experiment=f"{run}{number}"))
        await hub.post(f"/runs/{run}/scored_data", group(2, number))


async def kept_by(runs: Runs) -> list[str]:
    return sorted(each.name for each in await runs._stores.kept())


@ON_EVERY_STORE
async def test_nothing_set_aside_is_deleted_unless_asked_and_then_the_oldest(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs: Runs = hub.app.state.hub
    if isinstance(runs._stores, MemoryRuns):
        pytest.skip("only the latest is kept")
    for run, num_experiments in (("default", 4), ("math", 3)):
        await begin_many(hub, run, num_experiments)
    default = runs.runs["default"]
    all_ = ["default.1", "default.2", "default.3", "math.1", "math.2"]
    later = time.time() + 400 * 86400
    with monkeypatch.context() as patched:
        patched.setattr("time.time", lambda: later)
        await runs.delete_surplus()
    assert await kept_by(runs) == all_
    assert len(default.set_aside_bytes) == 3
    assert min(default.set_aside_bytes) > 0
    await hub.get("/runs/default.1/status")  # also what is being looked at
    runs.policy = RunPolicy(keep_set_aside=2)
    await runs.delete_surplus()
    assert await kept_by(runs) == all_[1:]
    assert (default.num_set_aside_deleted, len(default.set_aside_bytes)) == (1, 2)
    assert "its earlier experiment 'default.1' (step 0, set aside 0.0 days ago)" in caplog.text
    await hub.post("/register", registration(experiment="default2", resume_step=0))
    assert await places(hub) == {"queued": 1}
    runs.policy = RunPolicy(keep_set_aside_days=30.0)
    await runs.delete_surplus()
    assert await kept_by(runs) == ["default.2", "default.4", "math.1", "math.2"]
    monkeypatch.setattr("time.time", lambda: later)
    await runs.delete_surplus()
    assert await kept_by(runs) == []
    assert await places(hub) == {"queued": 1}
    assert hub.runs == ["default", "math"]


@ON_EVERY_STORE
async def test_idle_runs_are_closed_and_the_next_request_opens_them(hub: Hub, clock: Clock) -> None:
    runs: Runs = hub.app.state.hub
    for name in ("idle", "leased", "asked"):
        await hub.post(f"/runs/{name}/register", registration(experiment=name))
        await hub.get(f"/runs/{name}/batch?lease=1")
        await hub.post(f"/runs/{name}/register-env", environment())
        for token in range(3):
            await hub.post(f"/runs/{name}/scored_data", group(2, token))
    leased = await hub.get("/runs/leased/batch?lease=1&ttl=80000")
    acked = await hub.get("/runs/idle/batch?lease=1")
    ack = f"/runs/idle/batches/{acked['batch_id']}/ack", {"lease_id": acked["lease_id"]}
    await hub.post(*ack)
    clock.now_s += 3599
    await hub.get("/runs/asked/status")
    await runs.close_idle()
    assert hub.runs == ["asked", "default", "idle", "leased"]
    clock.now_s += 2
    await runs.close_idle()
    assert hub.runs == ["asked", "default", "leased"]
    assert await places(hub, "idle") == {"queued": 1, "trained": 2}
    assert (await hub.http.get("/runs/idle/status-env", params={"env_id": 0})).is_success
    assert (await hub.get("/runs/idle/status"))["current_step"] == 1
    assert (await hub.post(*ack))["step"] == 1
    lease = {"lease_id": leased["lease_id"]}
    assert (await hub.post(f"/runs/leased/batches/{leased['batch_id']}/ack", lease))["step"] == 1


async def test_kept_runs_that_were_looked_at_leave_room_for_others() -> None:
    async with running_hub(policy=RunPolicy(max_runs=3)) as hub:
        for name in ("first", "second"):
            await begin(hub, name)
            await post_group(hub, 1, name)
        await hub.get("/runs/default.1/status")
        for name in ("math", "code"):
            await hub.post(f"/runs/{name}/register", registration())
        assert hub.runs == ["code", "default", "math"]
        full = await hub.http.get("/runs/default.1/status")
        assert full.json()["detail"]["type"] == "too_many_runs"
        refused = await hub.http.post("/runs/one-too-many/register", json=registration())
        assert refused.json()["detail"]["type"] == "too_many_runs"


async def test_runs_count_for_the_token_that_began_them_also_after_a_restart() -> None:
    stores = MemoryRuns()
    first = RegisterTrainer(**registration(experiment="first"))
    for number in range(2):
        runs = Runs(stores)
        runs.quota_of = lambda token: Quota(max_runs=1)
        await runs.open()
        for _ in range(2):  # a repeated registration begins nothing
            await runs.register("a", first, token="team")
        with pytest.raises(TooManyRuns, match="token 'team' has 1 open run;"):
            await runs.register(f"b{number}", first, token="team")
        await runs.register(f"c{number}", first, token=f"other {number}")
        await runs.close()


async def test_groups_that_arrive_at_once_share_the_quota_of_their_token() -> None:
    runs = Runs()
    runs.quota_of = lambda token: Quota(max_bytes=1000)
    for name in ("a", "b"):
        await runs.register(name, RegisterTrainer(**registration()), token="team")
    posts = [
        runs.runs[name].accept(
            [NewGroup(header=replace(HEADER, group_id=group_id), payload=bytes(400))]
        )
        for name in ("a", "b")
        for group_id in ("first", "second")
    ]
    answers = await asyncio.gather(*posts, return_exceptions=True)
    assert [isinstance(answer, StoreFull) for answer in answers] == [False, False, True, True]
    assert [run.arriving_bytes for run in runs.runs.values()] == [0, 0]
    known = NewGroup(header=replace(HEADER, group_id="first"), payload=bytes(400))
    assert [each.is_duplicate for each in await runs.runs["a"].accept([known])] == [True]
    await runs.close()


async def test_a_run_that_is_deleted_while_closed_leaves_its_epoch_to_the_next(
    clock: Clock,
) -> None:
    runs = Runs(MemoryRuns(), clock=clock)
    for name in ("first", "second"):
        await runs.register("x", RegisterTrainer(**registration(experiment=name)))
    clock.now_s += 4000
    await runs.close_idle()
    assert (list(runs.runs), runs.idle) == ([], {"x"})
    await runs.forget("x")
    assert runs.idle == set()
    assert (await runs.run("x")).state.leases.epoch == 2
    await runs.close()


async def test_an_experiment_set_aside_counts_for_no_token_until_one_resumes_it() -> None:
    runs = Runs()
    runs.quota_of = lambda token: Quota(max_runs=2)
    first = RegisterTrainer(**registration(experiment="first"))
    await runs.register("a", first, token="team")
    await runs.runs["a"].accept([NewGroup(header=HEADER, payload=b"1")])
    await runs.register("a", RegisterTrainer(**registration(experiment="second")), token="team")
    assert await runs.find("a.1") is not None  # someone looks at it
    await runs.register("b", first, token="team")
    with pytest.raises(TooManyRuns, match="token 'team' has 2 open runs;"):
        await runs.register("c", first, token="team")
    await runs.register("a", first.model_copy(update={"resume_step": 0}), token="other")
    assert runs.runs["a"].state.experiment == "first"
    await runs.register("c", first, token="team")
    await runs.close()


async def test_epochs_of_a_deleted_run_continue_after_an_opening_that_failed() -> None:
    class Broken(MemoryStore):
        async def open(self) -> SavedRun:
            raise StoreBroken("no disk")

    stores = MemoryRuns()
    runs = Runs(stores)
    for name in ("first", "second"):
        await runs.register("x", RegisterTrainer(**registration(experiment=name)))
    await runs.forget("x")
    stores._stores["x"] = Broken()
    with pytest.raises(StoreBroken):
        await runs.run("x")
    stores._stores["x"] = MemoryStore()
    assert (await runs.run("x")).state.leases.epoch == 2
    await runs.close()


async def test_a_store_that_breaks_at_the_stop_does_not_keep_others_from_closing() -> None:
    class Stores(MemoryRuns):
        closed: ClassVar[list[str]] = []

        def store(self, name: str) -> GroupStore:
            store = MemoryStore()

            async def close() -> None:
                if name == "default":
                    raise StoreBroken("no disk")
                await asyncio.sleep(0.01)
                self.closed.append(name)

            store.close = close  # type: ignore[method-assign]
            return store

        async def close(self) -> None:
            self.closed.append("all")

    runs = Runs(Stores())
    for name in ("default", "math"):
        await runs.run(name)
    with pytest.raises(StoreBroken, match="no disk"):
        await runs.close()
    assert Stores.closed == ["math", "all"]


@ON_EVERY_STORE
@pytest.mark.parametrize("how", ["reset", "delete"])
async def test_trainer_of_an_erased_run_is_not_served(hub: Hub, how: str) -> None:
    first = await begin(hub, "first")
    if how == "reset":
        await hub.http.get("/reset_data")
    else:
        await hub.http.delete("/runs/default")
    second = await begin(hub, "second")
    assert second["epoch"] > first["epoch"]
    stale = await hub.http.get(f"/batch?lease=1&epoch={first['epoch']}")
    assert stale.json()["detail"]["type"] == "superseded"


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    now = [100.0]
    clock = AwakeClock(lambda: now[0])
    began = clock()
    for _ in range(5):
        now[0] += 1.0
        clock()
    assert clock() - began == 5.0
    now[0] += 600.0
    assert clock() - began == 5.0
    now[0] += 1.0
    assert clock() - began == 6.0
