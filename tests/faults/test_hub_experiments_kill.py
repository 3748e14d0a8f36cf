"""kill -9 while one experiment replaces another: environments keep their ids, and a retry completes the change."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.hub import Hub
from atroposlib.api.schemas import RegisterEnv, RegisterTrainer
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.runs import DirectoryRuns
from tests.api.helpers_api import environment, registration
from tests.faults.store_faults import new_group

pytestmark = pytest.mark.e2e


class Change(NamedTuple):
    """The second experiment of a run ends, and the hub is killed on the way."""

    killed: str
    """A method: of the stores, killed at its end; or of the run, killed at its start."""
    is_resumed: bool = False
    """Whether the first experiment is resumed; otherwise a third begins."""
    is_empty: bool = False
    """Whether the second experiment has no group."""

    async def make(self, hub: Hub) -> None:
        """Register the trainer that ends the second experiment."""
        resumed = {"experiment": "first", "resume_step": 0}
        asked = resumed if self.is_resumed else {"experiment": "third"}
        await hub.register("default", RegisterTrainer(**registration(**asked, batch_size=8)))


def hub_in(directory: Path) -> Hub:
    return Hub(DirectoryRuns(directory, lambda path: DiskStore(path, min_free_bytes=0)))


def change_and_be_killed(directory: Path, change: Change) -> None:
    asyncio.run(_change(directory, change))


async def _change(directory: Path, change: Change) -> None:
    hub = hub_in(directory)
    await hub.open()
    for number, name in enumerate(("first", "second")):
        await hub.register(
            "default", RegisterTrainer(**registration(experiment=name, batch_size=8))
        )
        run = await hub.run()
        await run.deliver()
        await run.register_env(RegisterEnv(**environment(desired_name=name)))
        if name == "first" or not change.is_empty:
            await run.accept([new_group(number, random.Random(number))])

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if change.killed in vars(Coordinator):
        setattr(Coordinator, change.killed, die)
    else:
        work: Any = getattr(hub._stores, change.killed)

        async def work_and_die(*given: Any, **named: Any) -> None:
            await work(*given, **named)
            die()

        setattr(hub._stores, change.killed, work_and_die)
    await change.make(hub)


@pytest.mark.parametrize(
    "change",
    [
        *(Change(method) for method in ("set_aside", "open")),
        *(Change(each, is_resumed=True) for each in ("take_over", "set_aside", "bring_back")),
        Change("begin_again", is_empty=True),
        *(Change(each, is_resumed=True, is_empty=True) for each in ("forget", "bring_back")),
    ],
    ids=lambda change: "-".join(str(each) for each in change),
)
def test_environments_outlive_a_kill_between_two_experiments(
    change: Change, tmp_path: Path
) -> None:
    """Clients of the original never register again."""
    child = multiprocessing.get_context("fork").Process(
        target=change_and_be_killed, args=(tmp_path, change)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    asyncio.run(_look(tmp_path, change))


async def _look(directory: Path, change: Change) -> None:
    hub = hub_in(directory)
    await hub.open()
    for _ in range(2):  # after the restart, and once the trainer has tried again
        run = await hub.run()
        for env_id in (0, 1):
            run.status_env(env_id)
        assert [each.name for each in run.state.environments] == ["first_0", "second_0"]
        await change.make(hub)
    run = await hub.run()
    assert run.state.experiment == ("first" if change.is_resumed else "third")
    assert run.ledger().produced == change.is_resumed
    # No trainer of an earlier experiment is served.
    assert run.state.leases.epoch >= 2
    kept = await hub._stores.kept()
    assert [each.experiment for each in kept] == (
        [*(() if change.is_empty else ("second",)), *(() if change.is_resumed else ("first",))]
    )
    await hub.close()
