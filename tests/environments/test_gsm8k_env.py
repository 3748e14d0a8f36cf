"""The reference environment on local rows and a scripted engine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import math_env
from atroposlib.scored_data import Strictness, check_group
from tests.builders.rows import write_rows
from tests.environments.helpers_environments import SharedWorkers, load

gsm8k = load("gsm8k_server")

ROWS = [
    {"question": "How many eggs are a dozen?", "answer": "12 eggs. #### 12"},
    {"question": "2 * 600?", "answer": "2 * 600 = 1,200 #### 1,200"},
]


@pytest.fixture
async def env(started: Any, tmp_path: Path) -> Any:
    path = write_rows(tmp_path / "rows.jsonl", *ROWS)
    return await started(
        gsm8k.GSM8kEnv,
        lambda request: ANSWERS[request.choice],
        group_size=len(ANSWERS),
        max_token_length=100,
        dataset_path=str(path),
        eval_dataset_path=str(path),
        data_dir_to_save_evals=str(tmp_path / "evals"),
    )


ANSWERS = [
    "<think>13?</think> \\boxed{12}",
    "I think it is \\boxed{13}",
    "no idea at all, sorry",
    "",
]


async def test_a_group_is_judged_and_too_short_answers_are_left_out(env: Any) -> None:
    item = next(problem for problem in env.train_rows if problem.answer == "12")
    group, backlog = await env.collect_trajectories(item)
    assert backlog == []
    assert group["scores"] == [1.0, -1.0, -1.0]
    assert group["group_overrides"] == {"group_size": 3}
    assert check_group(group, strictness=Strictness.MEANING).num_sequences == 3
    assert [turn["role"] for turn in group["messages"][0]] == ["system", "user", "assistant"]


async def test_shorter_is_better_when_all_are_right(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        globals(), "ANSWERS", ["x" * extra + "\\boxed{12}" for extra in (0, 60, 80, 80)]
    )
    item = next(problem for problem in env.train_rows if problem.answer == "12")
    group, _ = await env.collect_trajectories(item)
    assert group["scores"][0] == 1.0
    assert 0 <= group["scores"][2] < group["scores"][1] < 1.0


async def test_an_answer_that_cannot_be_judged_is_not_scored(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reward_workers = SharedWorkers(())  # it is killed: one without math-verify starts fast
    env.config.reward_timeout_s = 0.001
    monkeypatch.setattr(math_env, "compare", lambda *args, **kwargs: None)  # no number decides
    monkeypatch.setattr(math_env, "is_equal", sys.modules[__name__]._hang)
    group, _ = await env.collect_trajectories(env.train_rows[0])
    assert group is None
    assert env.num_reward_failures == len(ANSWERS) - 1
    assert env.num_too_short == 1  # the empty answer is not judged


def _hang(gold: str, answer: str | None) -> bool:
    import time

    time.sleep(60)
    return True


async def test_evaluation_counts_greedy_answers(env: Any, tmp_path: Path) -> None:
    await env.evaluate()
    results = json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"]
    assert results == {
        "eval/percent_correct": 0.5,
        "eval/pass@1": 0.5,
        "eval/mean_score": 0.0,
        "eval/reward_failures": 0.0,
    }
