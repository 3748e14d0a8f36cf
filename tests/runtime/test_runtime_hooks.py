"""Hooks: the runtime calls each through the instance; an override may add to the default or take its place."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.errors import EnvError
from atroposlib.inference.harness import ServerHarness, answer_from_hash
from atroposlib.runtime.serve import serve
from tests.runtime.helpers_runtime import (
    FAST,
    LoopbackHub,
    ScriptedEnv,
    make_group,
    produced,
    serving,
    until,
)

HOOKS = (
    *("setup_wandb", "register_env", "get_server_info", "get_status", "env_step_checks", "cleanup"),
    *("add_train_workers", "handle_env", "handle_send_to_api", "_send_scored_data_to_api"),
)


async def serve_steps(env: BaseEnv, hub: LoopbackHub, *, steps: int) -> None:
    """Serve until the trainer has taken `steps` batches."""
    env.config.total_steps = steps
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(env, timings=FAST))
        await hub.train(steps)


def counting(name: str, seen: list[str]) -> Any:
    async def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return await getattr(ScriptedEnv, name)(self, *args, **kwargs)

    return hook


async def test_every_hook_is_called_and_super_does_the_work() -> None:
    seen: list[str] = []
    env_cls = type("Counting", (ScriptedEnv,), {name: counting(name, seen) for name in HOOKS})
    async with LoopbackHub(batch_size=4) as hub:
        env = env_cls(rollout_server_url=hub.url)
        await serve_steps(env, hub, steps=2)
        ledger = hub.coordinator.ledger()
    assert set(seen) == set(HOOKS)
    assert seen[:3] == ["setup_wandb", "register_env", "get_server_info"]
    assert ledger.trained >= 4
    assert ledger.duplicates == 0
    assert (env.curr_step, env.config.batch_size) == (2, 4)


async def test_register_env_asks_once_per_call_and_is_what_registration_waits_for() -> None:
    answers: list[dict[str, Any]] = []

    class Asking(ScriptedEnv):
        async def _register_env(self) -> dict[str, Any]:
            answers.append(await super()._register_env())
            return answers[-1]

    hub = LoopbackHub()
    await hub.start()
    async with serving(Asking(rollout_server_url=hub.url)) as env:
        await until(lambda: len(answers) >= 2)
        assert answers[0] == {"status": "wait for trainer to start"}
        await hub.start_trainer()
        await until(lambda: env.env_id is not None)
    await hub.stop()
    names = "status env_id wandb_name checkpoint_dir starting_step checkpoint_interval num_steps"
    assert answers[-1].keys() >= {*names.split()}
    assert (answers[-1]["status"], answers[-1]["env_id"]) == ("success", 0)


class Loader(ScriptedEnv):
    """Pushes rows of a data set into the stream when the step changes, in the shape of the original's SFT loader."""

    def __init__(self, **fields: Any) -> None:
        values = {"group_size": 1, "ensure_scores_are_not_same": False, "inference_weight": -1.0}
        super().__init__(**{**values, **fields})
        self.row = 0
        self.max_per_step = 4
        self.looks: list[tuple[int, int]] = []
        """`curr_step` and the hub's step, where they differed."""

    async def add_train_workers(self) -> None:
        pass

    async def get_next_item(self) -> int:
        self.row += 1
        return self.row

    def format_row(self, row: int) -> dict[str, Any]:
        return {
            "tokens": [[5, 6, row]],
            "masks": [[-100, 6, row]],
            "messages": [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]],
            "scores": [1],
            "advantages": [1],
            "group_overrides": {"sft": True},
            "overrides": [{"sft": True}],
        }

    async def env_step_checks(self) -> None:
        if self.curr_step != self.status_dict["current_step"]:
            self.looks.append((self.curr_step, self.status_dict["current_step"]))
            room = self.config.max_batches_offpolicy * self.config.batch_size
            num_rows = min(room - self.status_dict["queue_size"], self.max_per_step)
            self.items_sent_this_step = num_rows
            rows = [self.format_row(await self.get_next_item()) for _ in range(num_rows)]
            await asyncio.gather(*(self.handle_send_to_api(row, None) for row in rows))
        await super().env_step_checks()


async def test_environment_that_sends_when_the_step_changes_feeds_the_trainer_alone() -> None:
    saved: list[int] = []
    async with LoopbackHub(batch_size=4) as hub:
        env = Loader(rollout_server_url=hub.url, steps_per_eval=1)
        env.save_checkpoint = lambda step, data=None: saved.append(step)  # type: ignore[method-assign]
        await serve_steps(env, hub, steps=3)
        ledger = hub.coordinator.ledger()
    assert [now for _, now in env.looks] == [0, 1, 2, 3]
    assert [before for before, _ in env.looks] == [-1, 0, 1, 2]
    assert ledger.trained == 12
    assert ledger.produced == 16
    assert env.curr_step == 3
    assert env.num_evaluations == 3  # steps 1, 2, 3: the first look is no step of the trainer's


async def test_it_also_begins_the_next_experiment_alone() -> None:
    hub = LoopbackHub(batch_size=4)
    await hub.start()
    await hub.start_trainer(experiment="first")
    env = Loader(rollout_server_url=hub.url)
    async with serving(env):
        await until(lambda: produced(hub) == 4)
        await hub.start_trainer(experiment="second")
        await until(lambda: produced(hub) == 4)
        assert env.looks == [(-1, 0), (-1, 0)]
    await hub.stop()


async def test_step_checks_come_at_every_tick_and_workers_only_with_a_status() -> None:
    class Watching(ScriptedEnv):
        checks = 0

        async def env_step_checks(self) -> None:
            assert self.status_dict["current_step"] == 0
            self.checks += 1

        async def add_train_workers(self) -> None:
            assert self.status_dict["queue_size"] == 0

    timings = replace(FAST, poll_wait_s=60.0)
    async with LoopbackHub() as hub, hub.serve(Watching, timings=timings) as env:
        await until(lambda: env.checks > 5)
    assert hub.calls["/status-env"] < 5


async def test_environment_whose_hooks_make_nothing_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Idle(Loader):
        async def env_step_checks(self) -> None:
            pass

    timings = replace(FAST, no_item_reminder_s=0.05)
    async with LoopbackHub() as hub, serving(Idle(rollout_server_url=hub.url), timings=timings):
        await until(lambda: "env_step_checks() sends nothing (step" in caplog.text)


async def test_overrides_may_take_the_place_of_the_defaults() -> None:
    class Own(ScriptedEnv):
        sent: list[Any] = []

        async def get_server_info(self) -> None:
            self.config.batch_size, self.max_token_len = 4, 55

        async def get_status(self) -> None:
            self.status_dict = {
                "current_step": min(len(self.sent), 3),
                "queue_size": 0,
                "unallocated_fraction": 1.0,
                "self_queue_size": 0,
                "max_group_size": 2,
                "env_weight": 1.0,
            }

        async def handle_env(self, item_uuid: str) -> Any:
            item = self.running_items[item_uuid]["item"]
            groups, _ = await self.collect_trajectories(item)
            self.running_items.pop(item_uuid)
            await self.handle_send_to_api(groups, item)

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            self.sent.append(scored_data)

    async with LoopbackHub() as hub:
        env = Own(rollout_server_url=hub.url, total_steps=3, max_num_workers=1)
        await serve(env, timings=FAST)
        assert produced(hub) == 0
    assert env.max_token_len == 55
    assert env.sent[0].keys() >= {"tokens", "masks", "scores", "ref_logprobs", "env_id"}
    assert env.sent[0]["env_id"] == env.env_id == 0


async def test_replaced_sender_gets_one_dict_or_a_list_as_it_was_returned() -> None:
    sent: list[Any] = []

    async def sender(scored_data: Any) -> None:
        sent.append(scored_data)

    async with LoopbackHub() as hub:
        env = ScriptedEnv(
            rollout_server_url=hub.url,
            answer=lambda item: [make_group(), None, make_group()] if item else make_group(),
            num_items=2,
            max_num_workers=1,
        )
        env._send_scored_data_to_api = sender  # type: ignore[method-assign]
        async with serving(env):
            await until(lambda: len(sent) == 2)
        assert produced(hub) == 0
    assert isinstance(sent[0], dict)
    assert [type(group) for group in sent[1]] == [dict, dict]
    assert env.items_sent_this_step == 3


async def test_sender_that_changes_the_group_and_calls_super_stores_what_it_made() -> None:
    class Scaled(ScriptedEnv):
        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            scored_data["scores"] = [10.0 * score for score in scored_data["scores"]]
            await super()._send_scored_data_to_api(scored_data)

    async with LoopbackHub() as hub, hub.serve(Scaled, num_items=1) as env:
        await until(lambda: produced(hub) == 1)
    outbox: Any = env.group_sink
    latest = hub.coordinator.ledger()
    assert (outbox.num_accepted, outbox.num_stored, latest.queued) == (1, 1, 1)


async def test_failure_in_an_override_of_handle_env_is_the_items() -> None:
    class Failing(ScriptedEnv):
        async def handle_env(self, item_uuid: str) -> Any:
            raise LookupError("my own loop is broken")

    async with LoopbackHub() as hub:
        env = Failing(rollout_server_url=hub.url, max_consecutive_failures=3)
        with pytest.raises(EnvError, match="3 items in a row failed with LookupError: my own"):
            await serve(env, timings=FAST)
    assert env.running_items == {}


async def test_status_dict_that_is_none_ends_the_run_and_says_why() -> None:
    class Wrong(ScriptedEnv):
        async def get_status(self) -> None:
            self.status_dict = {"current_step": 1}

    async with LoopbackHub() as hub:
        with pytest.raises(EnvError, match="get_status left an unusable status_dict: queue_size"):
            await serve(Wrong(rollout_server_url=hub.url), timings=FAST)


async def test_hooks_of_serve_without_a_runtime_say_how_to_start_one() -> None:
    env = ScriptedEnv()
    for hook in (env.get_status, env.register_env, env.add_train_workers, env.env_step_checks):
        with pytest.raises(EnvError, match="belongs to serve"):
            await hook()


async def test_attributes_of_the_loop_have_their_meaning() -> None:
    release = asyncio.Event()

    async def answer(item: int) -> Any:
        await release.wait()
        return None if item == 1 else make_group()

    async with LoopbackHub() as hub:
        env = ScriptedEnv(rollout_server_url=hub.url, answer=answer, num_items=3, max_num_workers=3)
        assert env.derived_batch_size == -1
        async with serving(env):
            await until(lambda: len(env.running_items) == 3)
            entry = next(iter(env.running_items.values()))
            assert entry.keys() == {"item", "worker", "start_time"}
            assert env.workers == {each["worker"] for each in env.running_items.values()}
            assert (env.derived_batch_size, env.workers_added_list[0]) == (4, 3)
            assert env.status_dict["current_step"] == 0
            release.set()
            await until(lambda: not env.running_items and produced(hub) == 2)
    assert env.last_completed_item["scores"] == [0.0, 1.0]
    assert len(env.task_duration) == 3
    assert (len(env.succeeded_task_duration), len(env.failed_task_duration)) == (2, 1)
    assert sorted(env.task_successful) == [0, 1, 1]
    assert env.items_sent_this_step == 2
    assert env.last_loop_time is not None
    metrics = env.perf_stats({})
    assert (metrics["train/items_sent_to_api"], metrics["train/items_rejected"]) == (2, 1)
    assert {"train_perf/task_duration_mean", "train_perf/mainloop_timings_max"} <= metrics.keys()


@pytest.mark.parametrize(
    ("every", "steps", "evaluated_at"),
    [(1, [1, 2], [1, 2]), (2, [5], [5]), (100, [100, 200], [100, 200]), (3, [2, 3, 8], [3, 8])],
)
async def test_evaluation_starts_when_a_multiple_is_reached_or_jumped_over(
    every: int, steps: list[int], evaluated_at: list[int]
) -> None:
    class Evaluating(ScriptedEnv):
        at: list[int] = []

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.at.append(self.curr_step)

    async with LoopbackHub() as hub:
        env = Evaluating(rollout_server_url=hub.url, steps_per_eval=every, num_items=0)
        env.at = []
        async with serving(env):
            await until(lambda: env.env_id is not None and bool(env.status_dict))
            for step in steps:
                env.status_dict = {**env.status_dict, "current_step": step}
                await env.env_step_checks()
                await asyncio.sleep(0)
            assert env.at == evaluated_at


async def test_failing_evaluate_save_checkpoint_and_wandb_log_do_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(ScriptedEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no eval set")

        def save_checkpoint(self, step: int, data: Any = None) -> None:
            raise OSError("disk full")

        async def wandb_log(self, wandb_metrics: Any = None) -> None:
            raise RuntimeError("no network")

    async with LoopbackHub(batch_size=2) as hub:
        hub.registration.save_checkpoint_interval = 1
        await hub.coordinator.reset()
        await hub.start_trainer()
        fields = {"min_items_sent_before_logging": 0, "steps_per_eval": 1}
        await serve_steps(Failing(rollout_server_url=hub.url, **fields), hub, steps=2)
    assert "evaluate failed at step" in caplog.text
    assert "save_checkpoint failed at step" in caplog.text
    assert "wandb_log failed at step" in caplog.text


async def test_close_of_the_base_may_be_awaited_or_not() -> None:
    class Both(ScriptedEnv):
        def close(self) -> Any:
            return super().close()

    env = Both()
    env.close()
    assert await env.close() is None


async def test_run_the_author_opened_is_logged_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(ScriptedEnv):
        async def setup_wandb(self) -> None:
            """The author calls wandb.init."""

    logged: list[Any] = []
    run = SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    env = Own(use_wandb=True)
    env.curr_step = 4
    await env.wandb_log({"a": 1})
    assert logged[0][0]["a"] == 1
    assert logged[0][1] == 4
    await ScriptedEnv().wandb_log({"a": 1})  # use_wandb false
    assert len(logged) == 1


async def test_checkpoint_data_may_hold_numpy_values_and_is_written_whole(tmp_path: Path) -> None:
    env = ScriptedEnv()
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "scripted_0"
    env.save_checkpoint(3, {"iter": np.int64(3), "row": np.arange(2), "seen": {2, 1}})
    env.save_checkpoint(4)
    folder = tmp_path / "env_checkpoints" / "scripted_0"
    with pytest.raises(TypeError, match="JSON"):
        env.save_checkpoint(3, {"iter": 9, "bad": object()})
    env.curr_step = 7
    env.load_checkpoint()
    assert vars(env)["row"] == [0, 1]
    assert (vars(env)["iter"], vars(env)["seen"]) == (3, [1, 2])
    assert [path.name for path in folder.iterdir()] == ["step-3.json"]


@pytest.mark.parametrize(
    ("handling", "num_running"), [("STOP_TRAIN", 0), ("LIMIT_TRAIN", 2), ("NONE", 4)]
)
async def test_training_during_an_evaluation_is_as_eval_handling_says(
    handling: str, num_running: int
) -> None:
    release = asyncio.Event()

    class Evaluating(ScriptedEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await release.wait()

    async def answer(item: int) -> Any:
        await release.wait()
        return make_group()

    async with LoopbackHub() as hub:
        env = Evaluating(
            rollout_server_url=hub.url,
            eval_handling=handling,
            steps_per_eval=1,
            max_num_workers=4,
            max_batches_offpolicy=50,
            answer=answer,
        )

        async def nothing_yet() -> None:
            return None

        env.get_next_item = nothing_yet  # type: ignore[method-assign]
        async with serving(env):
            await until(lambda: bool(env.status_dict))
            env.status_dict = {**env.status_dict, "current_step": 1}
            await env.env_step_checks()
            assert env.eval_runner is not None
            del env.get_next_item
            await until(lambda: len(env.running_items) == num_running)
            await asyncio.sleep(0.06)
            assert len(env.running_items) == num_running
            release.set()


async def test_metrics_of_all_servers_are_logged_and_none_is_no_error() -> None:
    logged: list[dict[str, Any]] = []
    env = ScriptedEnv()
    env.wandb_run = SimpleNamespace(log=lambda metrics, step: logged.append(metrics))
    harness = env.server.servers[0]
    env.server.servers = [harness, ServerHarness(harness.config, respond=answer_from_hash)]
    for server in env.server.servers:
        for _ in range(2):
            await server.completion(prompt="p")
    await env.wandb_log({})
    found = {key.split("_")[1] for key in logged[0] if key.startswith("server/server_")}
    assert found == {"0", "1"}
    env.server.servers = []
    await env.wandb_log({"a": 1.0})
    assert logged[1] == {"a": 1.0}
