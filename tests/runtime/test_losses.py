"""When a run warns that nothing comes of its items, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.inference.harness import HarnessRequest
from atroposlib.runtime.losses import CAUSES, LossReminder, explain, sample
from atroposlib.runtime.process import process
from tests.builders.environments import Offline
from tests.envs.helpers_envs import make_env
from tests.runtime.helpers_runtime import FAST, LoopbackHub, ScriptedEnv, make_group, serving, until

OFTEN = replace(FAST, progress_s=0.02, no_group_reminder_s=0.1)


class Echoes(Offline, DatasetEnv):
    """Every answer is right."""

    name = "echoes"

    def load_rows(self, split: str) -> Any:
        return ["a", "b"]

    def prompt(self, row: Any) -> Any:
        return row

    def score(self, row: Any, answer: str) -> Any:
        return 1.0


class Unscored(Echoes):
    def score(self, row: Any, answer: str) -> Any:
        return None


def hello(request: HarnessRequest) -> str:
    return "hello"


@pytest.mark.parametrize(
    ("env_cls", "reason", "setting"),
    [
        (Echoes, "equal_scores", "--env.ensure_scores_are_not_same"),
        (Unscored, "unjudged", "--env.on_reward_failure"),
    ],
)
async def test_serve_names_the_reason_and_the_setting_while_nothing_comes(
    env_cls: Callable[..., Any],
    reason: str,
    setting: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LoopbackHub() as hub:
        env = make_env(env_cls, respond=hello, rollout_server_url=hub.url)
        async with serving(env, timings=OFTEN):
            await until(lambda: "items end and no group comes; 0 groups so far" in caplog.text)
    warnings = [r.getMessage() for r in caplog.records if "no group comes" in r.getMessage()]
    first_cause = warnings[0].splitlines()[1]
    assert first_cause.startswith(f"  {reason} (")
    assert setting in first_cause


async def test_every_reason_is_logged_once_with_a_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {
        "equal_scores": make_group(scores=[0.25, 0.25]),
        "group_size": make_group(3),
        "malformed": {**make_group(), "masks": [[1], [2]]},
        "none": [None, make_group()],
        "no group": None,
    }
    path = str(tmp_path / "groups.jsonl")
    env = ScriptedEnv(
        answer=lambda item: [*kinds.values()][item % 5],
        data_path_to_save_groups=path,
        total_steps=6,
        max_num_workers=1,
        max_item_attempts=1,
    )
    with caplog.at_level("INFO", logger="atroposlib.runtime"):
        await process(env)
    messages = [record.getMessage() for record in caplog.records]
    for number, reason in enumerate(kinds):
        [first] = [each for each in messages if f"({reason}, 1 so far)" in each]
        assert first.endswith(f"; item {number}")
        assert not any(f"({reason}, 2 so far)" in each for each in messages)
    [end] = [each for each in messages if each.startswith("most items gave nothing")]
    assert "every score is 0.25; see ensure_scores_are_not_same; item 0" in end


def test_an_item_is_shown_in_one_short_line() -> None:
    assert sample("no", {"text": "a\nb" * 99}).startswith(r'no; item {"text":"a\nb')
    assert len(sample("no", {"text": "a" * 999})) < 200


def test_reminder_waits_for_a_loss_and_starts_again_at_every_group() -> None:
    reminder = LossReminder(0.0, every_s=30.0)
    seen = [(20, 0, 5), (30, 0, 5), (40, 0, 6), (60, 0, 6), (65, 1, 6), (90, 1, 7), (95, 1, 7)]
    due = [
        now for now, made, wasted in seen if reminder.is_due(now, num_made=made, num_wasted=wasted)
    ]
    assert due == [30, 60, 95]
    assert not LossReminder(0.0, every_s=30.0).is_due(99, num_made=0, num_wasted=0)


def test_most_frequent_reason_comes_first_and_unknown_ones_are_not_hidden() -> None:
    said = explain(
        dropped={"rejected_422": 2, "own_rule": 1},
        lost={"aborted": 0},
        num_without_groups=7,
        samples={},
    )
    assert [line.split(" (")[0].strip() for line in said.splitlines()] == [
        "no group",
        "rejected_422",
        "own_rule",
    ]


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("too_short", "--env.min_trained_tokens"),
        ("shape_group", "shape_group returned None"),
        ("unjudged", "--env.on_reward_failure"),
    ],
)
def test_a_cause_says_what_to_change(reason: str, advice: str) -> None:
    said = explain(dropped={}, lost={reason: 1}, num_without_groups=1, samples={})
    assert advice in said


def test_every_reason_of_the_base_classes_has_a_cause() -> None:
    env = make_env(type("Judged", (Echoes, JudgeEnv), {}), respond=hello)
    assert env.lost_answers().keys() <= CAUSES.keys()
