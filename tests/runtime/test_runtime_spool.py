"""Groups that cannot be delivered at the end of a run: on disk, an error of the run, and sent first by the next."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import EnvError, HubUnavailable
from atroposlib.runtime import spool
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.serve import serve
from atroposlib.runtime.timings import Timings
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from atroposlib.wire import content_digest
from tests.runtime.helpers_runtime import (
    FAST,
    LoopbackHub,
    ScriptedEnv,
    make_group,
    produced,
    serving,
    until,
)

QUICK = replace(FAST, flush_s=0.1, spool_after_s=0.02)
RUN = spool.Origin("http://h", "scripted", experiment="e", step=4)


def checked(number: int) -> ScoredGroup:
    group = make_group() | {
        "group_id": f"g{number}",
        "policy_version": number,
        "messages": [[{"role": "user", "content": "hi"}]] * 2,
    }
    return check_group(group, strictness=Strictness.MEANING)


async def stop_with_groups(
    hub: LoopbackHub, path: Path, *, num_groups: int, timings: Timings
) -> asyncio.Task[Outbox]:
    """Stop a run that holds groups because the hub has gone; return it."""
    release = asyncio.Event()

    async def answer(item: int) -> Any:
        await release.wait()
        return make_group()

    env = ScriptedEnv(
        rollout_server_url=hub.url,
        answer=answer,
        num_items=num_groups,
        data_path_to_save_groups=str(path),
    )
    run = asyncio.create_task(serve(env, timings=timings, stop=(stop := asyncio.Event())))
    await until(lambda: len(env.running_items) == num_groups)
    await hub.stop()
    release.set()
    await until(lambda: not env.running_items)
    stop.set()
    return run


async def leave_groups_behind(hub: LoopbackHub, path: Path, *, num_groups: int) -> str:
    """Serve while the hub goes away for good; return the error."""
    run = await stop_with_groups(hub, path, num_groups=num_groups, timings=QUICK)
    with pytest.raises(HubUnavailable) as raised:
        await run
    return str(raised.value)


async def assert_the_next_run_sends(hub: LoopbackHub, path: Path, *, num_groups: int) -> None:
    env = ScriptedEnv(rollout_server_url=hub.url, num_items=0, data_path_to_save_groups=str(path))
    async with serving(env):
        await until(lambda: produced(hub) == num_groups)
    assert list((path.parent / "spool").iterdir()) == []
    assert hub.coordinator.ledger().duplicates == 0


async def test_undelivered_groups_are_in_a_file_and_the_next_run_sends_them(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    async with LoopbackHub() as hub:
        message = await leave_groups_behind(hub, path, num_groups=3)
        (left,) = (tmp_path / "spool").iterdir()
        assert f"3 groups could not be delivered to {hub.url}; they are in {left}" in message
        assert produced(hub) == 0
        await hub.start()
        await assert_the_next_run_sends(hub, path, num_groups=3)


async def test_next_run_that_fails_too_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    async with LoopbackHub() as hub:
        await leave_groups_behind(hub, path, num_groups=2)
        await hub.start()

        is_registered, is_away = asyncio.Event(), asyncio.Event()

        class Interrupted(ScriptedEnv):
            async def get_server_info(self) -> None:
                is_registered.set()
                await is_away.wait()

        env = Interrupted(
            rollout_server_url=hub.url, num_items=0, data_path_to_save_groups=str(path)
        )
        run = asyncio.create_task(serve(env, timings=QUICK, stop=(stop := asyncio.Event())))
        await is_registered.wait()
        await hub.stop()
        is_away.set()
        await until(lambda: env.group_sink.num_held == 2)  # type: ignore[union-attr]
        stop.set()
        with pytest.raises(HubUnavailable, match="2 groups could not be delivered"):
            await run
        assert len(list((tmp_path / "spool").iterdir())) == 1
        await hub.start()
        await assert_the_next_run_sends(hub, path, num_groups=2)


async def test_groups_delivered_late_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    async with LoopbackHub() as hub:
        timings = replace(QUICK, flush_s=60.0)
        run = await stop_with_groups(hub, path, num_groups=2, timings=timings)
        await until(lambda: any((tmp_path / "spool").glob("*.groups")))
        await hub.start()
        outbox = await run
        assert (outbox.num_stored, outbox.num_held) == (2, 0)
    assert list((tmp_path / "spool").iterdir()) == []


async def test_file_that_cannot_be_written_is_said_to_be_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    (tmp_path / "spool").write_text("in the way")
    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url, num_items=1, data_path_to_save_groups=str(path)
        )
        run = asyncio.create_task(serve(env, timings=QUICK, stop=(stop := asyncio.Event())))
        await until(lambda: produced(hub) == 1)
        await hub.stop()
        env.backlog.append(1)
        await env.handle_send_to_api(make_group())
        stop.set()
        with pytest.raises(
            EnvError, match="1 groups could not be delivered .* are lost: .* cannot be"
        ):
            await run


def test_spooled_group_comes_back_as_it_was(tmp_path: Path) -> None:
    groups = [checked(0), checked(1)]
    path = spool.new_path(tmp_path, "scripted")
    spool.write(path, groups, RUN)
    (file,) = spool.claim(tmp_path, RUN)
    assert [content_digest(group) for group in file.groups] == list(map(content_digest, groups))
    assert [(g.group_id, g.policy_version) for g in file.groups] == [("g0", 0), ("g1", 1)]
    assert spool.claim(tmp_path, RUN) == []  # claimed: another process leaves it alone
    file.close()
    (file,) = spool.claim(tmp_path, RUN._replace(step=5))
    file.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"environment": "other"}, ""),
        ({"hub_url": "http://elsewhere"}, "are for the hub at http://h"),
        ({"experiment": "f"}, "were sampled for another experiment"),
        ({"step": 3}, "were made at step 4, the trainer is at 3"),
    ],
)
def test_file_of_another_name_hub_or_experiment_is_left_alone(
    tmp_path: Path, change: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = spool.new_path(tmp_path, "scripted")
    spool.write(path, [checked(0)], RUN)
    assert spool.claim(tmp_path, RUN._replace(**change)) == []
    assert said in caplog.text
    assert path.exists()


def test_damaged_file_is_named_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = spool.new_path(tmp_path, "a/b c")
    assert path.name.startswith("a_b_c-")
    path.write_bytes(b"\x83broken")
    with caplog.at_level(logging.ERROR):
        assert spool.claim(tmp_path, RUN) == []
    assert f"{path} skipped: cannot be read" in caplog.text
    assert path.exists()


def test_file_that_may_not_be_read_is_named_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "theirs.groups").mkdir()  # open() fails for root too
    assert spool.claim(tmp_path, RUN) == []
    assert "theirs.groups skipped: cannot be read" in caplog.text


async def test_items_in_flight_finish_after_the_signal_and_are_delivered() -> None:
    release = asyncio.Event()

    async def answer(item: int) -> Any:
        await release.wait()
        return make_group()

    async with LoopbackHub() as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, answer=answer, num_items=2)
        run = asyncio.create_task(serve(env, timings=FAST, stop=(stop := asyncio.Event())))
        await until(lambda: len(env.running_items) == 2)
        stop.set()
        await asyncio.sleep(0.05)
        release.set()
        outbox = await run
        assert (outbox.num_stored, produced(hub), len(env.started)) == (2, 2, 2)


async def test_items_that_take_too_long_to_finish_go_back_to_the_backlog(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url, answer=lambda item: asyncio.sleep(60), num_items=2
        )
        timings = replace(FAST, drain_s=0.05)
        run = asyncio.create_task(serve(env, timings=timings, stop=(stop := asyncio.Event())))
        await until(lambda: len(env.running_items) == 2)
        stop.set()
        await run
    assert sorted(env.backlog) == [0, 1]
    assert "2 items were not finished" in caplog.text
    assert (env.running_items, env.workers) == ({}, set())


@pytest.mark.parametrize("end", ["second signal", "engine away"])
async def test_nothing_is_waited_for_after_a_second_signal_or_without_an_engine(end: str) -> None:
    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url, answer=lambda item: asyncio.sleep(60), num_items=2
        )
        run = asyncio.create_task(serve(env, timings=replace(FAST, drain_s=60)))
        await until(lambda: len(env.running_items) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not run.done()
        if end == "second signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            env.server.servers[0].server_healthy = False
        await asyncio.wait_for(run, 30)  # half of what it would wait
    assert sorted(env.backlog) == [0, 1]


async def test_second_signal_ends_the_delivery_and_the_groups_are_in_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "groups.jsonl"
    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url, num_items=0, data_path_to_save_groups=str(path)
        )
        timings = replace(FAST, flush_s=60.0, spool_after_s=0.02)
        run = asyncio.create_task(serve(env, timings=timings))
        await until(lambda: bool(env.status_dict))
        await hub.stop()
        await env.handle_send_to_api(make_group())
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: any((tmp_path / "spool").glob("*.groups")))
        assert not run.done()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(HubUnavailable, match="1 groups could not be delivered"):
            await asyncio.wait_for(run, 30)  # half of what it would wait
    assert len(list((tmp_path / "spool").glob("*.groups"))) == 1
