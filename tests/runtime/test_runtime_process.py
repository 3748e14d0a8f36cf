"""Process: exactly the wanted groups, in item order, in a fresh file, without hub and wandb."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.env_config import ProcessOptions
from atroposlib.errors import (
    ConfigError,
    EngineRejected,
    EngineUnavailable,
    EnvError,
    MissingDependency,
    Suspicion,
)
from atroposlib.inference.harness import ByteTokenizer
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.runtime.group_log import GroupLog
from atroposlib.runtime.process import process, process_and_render
from atroposlib.runtime.timings import Timings
from tests.builders.environments import Offline
from tests.builders.rows import rows_in
from tests.frontend.helpers_pages import read_page
from tests.runtime.helpers_runtime import ScriptedEnv, make_group
from tests.utils.test_tracing import start_recorder

APPEND = ProcessOptions(append=True)


def scores(path: Path) -> list[float]:
    return [row["scores"][1] for row in rows_in(path)]


def env_at(folder: Path, **fields: Any) -> ScriptedEnv:
    """Return an environment that writes its groups to `g.jsonl`."""
    return ScriptedEnv(data_path_to_save_groups=str(folder / "g.jsonl"), **fields)


def numbered(item: int) -> dict[str, Any]:
    return make_group(scores=[-1.0, float(item)])


async def test_groups_are_written_in_item_order_though_they_finish_in_another(
    tmp_path: Path,
) -> None:
    async def answer(item: int) -> Any:
        await asyncio.sleep(0.02 if item % 2 == 0 else 0)
        return numbered(item)

    result = await process(env_at(tmp_path, answer=answer, total_steps=5))
    assert scores(result.path) == [0, 1, 2, 3, 4]
    assert result.num_groups == 5


async def test_existing_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("g.jsonl", "g_1.jsonl", "g_2.jsonl"):
        env = env_at(tmp_path / "sub", total_steps=1)
        result = await process(env)
        assert result.path == tmp_path / "sub" / name
        assert env.config.data_path_to_save_groups == str(result.path)
    assert [len(rows_in(path)) for path in (tmp_path / "sub").iterdir()] == [1, 1, 1]


async def test_a_run_without_groups_leaves_no_file(tmp_path: Path) -> None:
    result = await process(env_at(tmp_path, answer=lambda _: None, total_steps=1, num_items=2))
    assert result.num_groups == 0
    assert not os.listdir(tmp_path)


async def test_rejected_and_empty_groups_do_not_count(tmp_path: Path) -> None:
    def answer(item: int) -> Any:
        return {0: None, 1: [], 2: make_group(3)}.get(item, numbered(item))

    env = env_at(tmp_path, answer=answer, total_steps=2)
    assert scores((await process(env)).path) == [3, 4]
    assert env.group_sink.dropped == {"group_size": 1}


async def test_failing_item_is_tried_again_then_left_out(tmp_path: Path) -> None:
    def answer(item: int) -> Any:
        return ValueError("no") if item == 1 else numbered(item)

    env = env_at(tmp_path, answer=answer, total_steps=4, max_num_workers=1)
    assert scores((await process(env)).path) == [0, 2, 3, 4]
    assert env.started.count(1) == 3


@pytest.mark.parametrize(
    ("answer", "has_traceback"),
    [
        (lambda i: ValueError(f"no {i}"), [True] + [False] * 4),
        (lambda _: EngineRejected("there is no model 'm'"), [False]),
    ],
)
async def test_failures_of_one_kind_are_logged_with_one_traceback_and_the_engines_once(
    tmp_path: Path, answer: Any, has_traceback: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    kind = type(answer(0)).__name__
    env = env_at(tmp_path, answer=answer, max_consecutive_failures=5)
    with pytest.raises(EnvError, match=f"5 items in a row failed with {kind}"):
        await process(env)
    told = [record for record in caplog.records if f"item failed: {kind}" in record.message]
    assert [record.exc_info is not None for record in told] == has_traceback


async def test_an_engine_without_the_model_ends_the_run_with_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = EngineHttpRejected("the model 'm' does not exist", status=404)
    with pytest.raises(EngineHttpRejected, match="'m' does not exist"):
        await process(env_at(tmp_path, answer=lambda _: refusal))
    assert "does not exist" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, r"gave no group:\n  no group \(4\): collect_trajectories or postprocess_histories"),
        (ValueError("x"), "failed with ValueError: x"),
    ],
)
async def test_environment_that_never_yields_ends_with_an_error(
    tmp_path: Path, answer: Any, said: str
) -> None:
    env = env_at(tmp_path, answer=lambda i: answer, max_consecutive_failures=4)
    with pytest.raises(EnvError, match=f"4 items in a row {said}"):
        await process(env)


async def test_items_that_run_out_end_the_run_once_the_last_was_tried_again(tmp_path: Path) -> None:
    failures = [ValueError("once")]

    def answer(item: int) -> Any:
        return failures.pop() if failures else make_group()

    env = env_at(tmp_path, answer=answer, num_items=1, total_steps=9)
    assert (await process(env)).num_groups == 1


async def test_items_that_run_out_after_failures_are_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(item: int) -> Any:
        return ValueError("no") if item < 2 else numbered(item)

    fields = {"total_steps": 3, "num_items": 3, "max_num_workers": 1}
    with pytest.raises(EnvError, match="no more items: 1 of 3 groups; items given up: ValueError"):
        await process(env_at(tmp_path, answer=answer, **fields))
    assert scores(tmp_path / "g.jsonl") == [2]
    assert await process(env_at(tmp_path, answer=numbered, **fields | {"num_items": 2}))
    assert "no more items: 2 of 3 groups" in caplog.text


async def test_groups_of_equal_scores_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fields = {"total_steps": 5, "ensure_scores_are_not_same": False}
    more = {3: {"advantages": [[0.0, 1.0, 1.0]] * 2}, 4: {"group_overrides": {"sft": True}}}

    def answer(item: int) -> Any:
        return make_group(scores=[1.0 if item in more else item, 1.0]) | more.get(item, {})

    await process(env_at(tmp_path, answer=answer, **fields))
    assert "equal scores  1 of 5 groups, which teach nothing" in caplog.text


async def test_code_that_blocks_the_loop_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(item: int) -> Any:
        time.sleep(0.15)
        return numbered(item)

    timings = Timings(progress_s=0.01)
    env = env_at(tmp_path, answer=answer, total_steps=8, max_num_workers=1)
    await process(env, timings=timings)
    warnings = [r.message for r in caplog.records if "blocked the event loop" in r.message]
    assert len(warnings) == 1
    assert "ScriptedEnv.collect_trajectories (helpers_runtime.py:" in warnings[0]


async def test_process_needs_a_path_and_a_number() -> None:
    with pytest.raises(ConfigError, match="data_path_to_save_groups"):
        await process(ScriptedEnv())
    with pytest.raises(ConfigError, match="total_steps: got -1"):
        await process(ScriptedEnv(total_steps=-1, data_path_to_save_groups="x.jsonl"))


async def test_missing_wandb_is_named_with_both_cures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python does for an absent package
    env = env_at(tmp_path, use_wandb=True)
    with pytest.raises(MissingDependency, match=r"\[wandb\].*--env.use_wandb false"):
        await process(env)


@pytest.mark.parametrize(
    "error", [MissingDependency("no x"), EngineUnavailable("no answer"), Suspicion("swap_gold")]
)
async def test_missing_package_an_engine_that_stays_down_and_a_suspicion_end_the_run(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    env = env_at(tmp_path, answer=lambda i: error)
    with pytest.raises(type(error), match=str(error)):
        await process(env)
    assert "item failed" not in caplog.text
    assert len(env.started) <= env.config.max_num_workers


async def test_each_item_is_a_span_in_the_traces_of_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = start_recorder(monkeypatch)
    result = await process(env_at(tmp_path, answer=numbered, total_steps=2, max_num_workers=1))
    rows = rows_in(result.path)
    found = [dict(span.attributes or {}) for span in finished() if span.name == "item"]
    assert [span["atropos.group_id"] for span in found] == [row["group_id"] for row in rows]
    assert [(span["atropos.item"], span["atropos.score_mean"]) for span in found] == [
        (0, -0.5),
        (1, 0.0),
    ]


# Appending.


async def test_append_makes_what_the_file_lacks(tmp_path: Path) -> None:
    def answer(item: int) -> Any:
        return ValueError("not yet") if item == 1 and not is_second else numbered(item)

    is_second = False
    first = env_at(tmp_path, answer=answer, total_steps=3, max_item_attempts=1)
    assert scores((await process(first)).path) == [0, 2, 3]
    is_second = True
    second = env_at(tmp_path, answer=answer, total_steps=6)
    result = await process(second, APPEND)
    assert scores(result.path) == [0, 2, 3, 1, 4, 5]
    assert (result.path.name, result.num_groups) == ("g.jsonl", 6)
    assert sorted(second.started) == [1, 4, 5]


@pytest.mark.parametrize("left_out", [None, ValueError("no")])
async def test_append_passes_many_items_that_an_earlier_run_left_out(
    tmp_path: Path, left_out: Any
) -> None:
    """As many as would end a run, were they not known."""

    def answer(item: int) -> Any:
        return numbered(item) if item % 3 == 0 else left_out

    fields = {"answer": answer, "max_consecutive_failures": 3, "max_item_attempts": 1}
    await process(env_at(tmp_path, total_steps=4, **fields))
    result = await process(env_at(tmp_path, total_steps=6, **fields), APPEND)
    assert scores(result.path) == [0, 3, 6, 9, 12, 15]


async def test_an_iterator_of_items_that_ends_says_what_to_return(tmp_path: Path) -> None:
    class Listed(ScriptedEnv):
        async def setup(self) -> None:
            self.items = iter([1, 2])

        async def get_next_item(self) -> Any:
            return next(self.items)

    env = Listed(data_path_to_save_groups=str(tmp_path / "g.jsonl"), total_steps=3)
    with pytest.raises(EnvError, match="return None at the end"):
        await process(env)


async def test_append_knows_items_that_the_environment_changes(tmp_path: Path) -> None:
    class Changing(ScriptedEnv):
        async def get_next_item(self) -> Any:
            return {"number": await super().get_next_item()}

        async def collect_trajectories(self, item: Any) -> Any:
            return numbered(item.pop("number")), []

    path = str(tmp_path / "g.jsonl")
    await process(Changing(data_path_to_save_groups=path, total_steps=2))
    result = await process(Changing(data_path_to_save_groups=path, total_steps=3), APPEND)
    assert scores(result.path) == [0, 1, 2]


async def test_append_to_a_complete_file_changes_nothing(tmp_path: Path) -> None:
    path = (await process(env_at(tmp_path, answer=numbered, total_steps=2))).path
    before = path.read_bytes()
    again = env_at(tmp_path, answer=numbered, total_steps=2)
    await process(again, APPEND)
    assert path.read_bytes() == before
    assert again.started == []


async def test_append_without_a_file_begins_one(tmp_path: Path) -> None:
    result = await process(env_at(tmp_path, answer=numbered, total_steps=2), APPEND)
    assert scores(result.path) == [0, 1]


@pytest.mark.parametrize("end", ["", "\n", '\n{"scores": [0, 1'])
async def test_append_repairs_the_end_of_a_killed_run(tmp_path: Path, end: str) -> None:
    path = (await process(env_at(tmp_path, answer=numbered, total_steps=2))).path
    path.write_text(path.read_text().rstrip("\n") + end)
    await process(env_at(tmp_path, answer=numbered, total_steps=4), APPEND)
    assert scores(path) == [0, 1, 2, 3]


def test_append_leaves_a_file_alone_that_another_run_writes(tmp_path: Path) -> None:
    path, half_a_line = tmp_path / "g.jsonl", '{"scores": [0,'
    running = GroupLog.open(path)
    path.write_text(half_a_line)
    with pytest.raises(ConfigError, match="another process is writing groups"):
        GroupLog.append_to(path)
    assert path.read_text() == half_a_line
    running.write(numbered(0))
    running.close()
    GroupLog.append_to(path).close()


async def test_append_refuses_a_file_of_other_items(tmp_path: Path) -> None:
    path = (await process(env_at(tmp_path, answer=numbered, total_steps=2))).path
    path.write_text(path.read_text().replace('"item":1,', '"item":7,'))
    env = env_at(tmp_path, answer=numbered, total_steps=3)
    with pytest.raises(ConfigError, match="item 1 differs from the one in .*g.jsonl"):
        await process(env, APPEND)
    path.write_text("no group\n")
    with pytest.raises(ConfigError, match="line 1: not a group"):
        await process(env, APPEND)


async def test_append_says_which_groups_name_no_item(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "g.jsonl").write_text(json.dumps(numbered(0)) + "\n")
    result = await process(env_at(tmp_path, answer=numbered, total_steps=2), APPEND)
    assert scores(result.path) == [0, 0]
    assert "1 of 1 groups" in caplog.text


# Epochs.


class Rows(Offline, DatasetEnv):
    """Five rows; an answer to row 2 cannot be judged."""

    name = "rows"

    def load_rows(self, split: str) -> Any:
        return list(range(5)) if split == "train" else []

    def prompt(self, row: int) -> str:
        return str(row)

    def score(self, row: int, answer: str) -> float | None:
        return None if row == 2 else 1.0


def rows_at(folder: Path, **fields: Any) -> Rows:
    values = {"group_size": 1, "max_token_length": 8, "total_steps": 2, **fields}
    path = str(folder / "g.jsonl")
    config = DatasetEnvConfig(
        data_path_to_save_groups=path, ensure_scores_are_not_same=False, **values
    )
    return Rows(config, [APIServerConfig()], testing=True)


async def test_an_epoch_has_each_row_once(tmp_path: Path) -> None:
    result = await process(rows_at(tmp_path), ProcessOptions(epochs=2))
    rows = rows_in(result.path)
    assert sorted(row["item"] for row in rows) == [0, 0, 1, 1, 3, 3, 4, 4]
    assert {row["item"] for row in rows[:4]} == {0, 1, 3, 4}


async def test_another_epoch_is_appended(tmp_path: Path) -> None:
    await process(rows_at(tmp_path), ProcessOptions(epochs=1))
    result = await process(rows_at(tmp_path), ProcessOptions(epochs=2, append=True))
    rows = rows_in(result.path)
    assert sorted(row["item"] for row in rows) == [0, 0, 1, 1, 3, 3, 4, 4]


async def test_epochs_need_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--epochs: scripted has no list of rows"):
        await process(env_at(tmp_path), ProcessOptions(epochs=1))


# The page.


async def test_a_failed_run_has_its_page(tmp_path: Path) -> None:
    def answer(item: int) -> Any:
        return EngineUnavailable("gone") if item == 2 else numbered(item)

    with pytest.raises(EngineUnavailable):
        await process_and_render(env_at(tmp_path, answer=answer, max_num_workers=1))
    page = read_page(tmp_path / "g.html")
    assert [len(group["sequences"]) for group in page.groups] == [2, 2]
    used = {t for group in page.groups for s in group["sequences"] for t in s["tokens"]}
    pieces = page.chunks[0]["vocabulary"]
    assert pieces == {str(token): ByteTokenizer().decode([token]) for token in used}


async def test_a_cancelled_run_has_its_page(tmp_path: Path) -> None:
    async def answer(item: int) -> Any:
        if item == 2:
            running.cancel()
            await asyncio.sleep(60)
        return numbered(item)

    env = env_at(tmp_path, answer=answer, max_num_workers=1)
    running = asyncio.create_task(process_and_render(env))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "2 groups" in (tmp_path / "g.html").read_text()
