"""The demo's environment on a scripted engine."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli._demo.commands import DemoConfig, DemoFiles, environment_command
from atroposlib.envs.env_config import workers_are_set
from atroposlib.runtime.env_command import read_flags
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.letter_reversal import Split, split_of
from tests.environments.helpers_environments import load

letters = load("letter_reversal_server")


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, letters.LetterReversalEnv)


async def test_items_are_training_prompts_and_repeat_for_a_seed(started: Any) -> None:
    runs = []
    for _ in range(2):
        env = await started(seed=5)
        runs.append([await env.get_next_item() for _ in range(50)])
    assert runs[0] == runs[1]
    assert {split_of(prompt) for prompt in runs[0]} == {Split.TRAIN}


async def test_a_group_is_scored_checked_and_knows_its_policy_version(started: Any) -> None:
    prompt = "abcde>"
    answers = ["edcba", "abcde", "", "edcbb"]
    env = await started(answers, group_size=4, weight_version="7")
    group, backlog = await env.collect_trajectories(prompt)
    assert backlog == []
    assert group["scores"] == [1.0, 0.0, 0.0, 0.0]
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.policy_version == 7
    assert checked.num_trained == sum(len(text) + 1 for text in ("edcba", "abcde", "", "edcbb"))
    assert group["messages"][0][-1] == {"role": "assistant", "content": "edcba"}


async def test_weights_that_are_not_announced_are_named_once_a_step(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(letters, "LONG_WAIT_S", -1.0)
    env = await started()
    env.curr_step, env.status_dict = 3, {"policy_version": 2}
    assert [await env.get_next_item() for _ in range(4)] == [None] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the weights of step 3: the trainer has announced version 2. A trainer that announces none, "
        "such as atropos-sft-gen, needs --env.strictly_on_policy false"
    ]
    env.status_dict = {"policy_version": 3}
    assert await env.get_next_item() is not None


async def test_an_answer_cut_at_the_limit_is_wrong(started: Any) -> None:
    env = await started("edcba" + "a" * 20, group_size=2)
    group, _ = await env.collect_trajectories("abcde>")
    assert group["scores"] == [0.0, 0.0]
    # Where the engine does not tell its version, what the trainer announced is used.
    assert group["policy_version"] == 0


async def test_an_environment_that_may_lag_asks_before_the_weights_are_there(started: Any) -> None:
    lagging = await started(strictly_on_policy=False)
    lagging.curr_step, lagging.status_dict = 3, {"policy_version": 2}
    assert await lagging.get_next_item() is not None


@pytest.mark.parametrize("is_async", [False, True])
def test_the_demo_waits_for_weights_and_limits_the_items_unless_asynchronous(
    is_async: bool, tmp_path: Path
) -> None:
    demo = DemoConfig(asynchronous=is_async)
    urls = {"hub_url": "http://127.0.0.1:1", "engine_url": "http://127.0.0.1:2"}
    _, _, _, mode, *flags = environment_command(demo, DemoFiles(tmp_path), **urls)
    given = read_flags(letters.LetterReversalEnv, mode, flags, prog="demo").flags["env"]
    config = letters.LetterReversalConfig(**given)
    assert (config.strictly_on_policy, workers_are_set(config)) == (not is_async, not is_async)


async def test_evaluation_measures_heldout_prompts(started: Any, tmp_path: Any) -> None:
    env = await started("wrong", data_dir_to_save_evals=str(tmp_path))
    await env.evaluate()
    results = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    assert results == {"eval/percent_correct": 0.0}
