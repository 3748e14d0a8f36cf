"""The reference environment on local rows and a scripted engine."""

from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import math_env
from atroposlib.envs.rewards import RewardFailure
from atroposlib.scored_data import Strictness, check_group
from tests.builders.rows import write_rows
from tests.environments.helpers_environments import load

gsm8k = load("gsm8k_server")

ROW = {"question": "How many eggs are a dozen?", "answer": "12 eggs. #### 12"}
WITH_OTHERS = [
    "<think>13?</think> \\boxed{12}",
    "I think it is \\boxed{13}",
    "no idea at all, sorry",
    "",
]
RIGHT = ["x" * extra + "\\boxed{12}" for extra in (0, 60, 80, 80)]


@pytest.mark.parametrize(
    ("answers", "scores"),
    [(WITH_OTHERS, [1.0, -1.0, -1.0]), (RIGHT, [1.0, *map(pytest.approx, (0.58, 0.18, 0.18))])],
)
async def test_a_group_is_judged_and_if_all_are_right_shorter_is_better(
    answers: list[str], scores: list[float], started: Any, tmp_path: Path
) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", ROW))
    settings = {"group_size": 4, "max_token_length": 100, "eval_dataset_path": "sample"}
    env = await started(gsm8k.GSM8kEnv, answers, dataset_path=path, **settings)
    group, backlog = await env.collect_trajectories(env.train_rows[0])
    assert backlog == []
    assert group["scores"] == scores
    assert group["group_overrides"] == {"group_size": len(scores)}
    check_group(group, strictness=Strictness.MEANING)
    assert [turn["role"] for turn in group["messages"][0]] == ["system", "user", "assistant"]


async def test_an_answer_that_cannot_be_judged_is_not_scored(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", ROW))
    env = await started(gsm8k.GSM8kEnv, RIGHT, dataset_path=path, eval_dataset_path="sample")
    for failed in (RewardFailure(reason="timeout", detail=""), None):

        async def judged(*_: Any, failed: Any = failed) -> Any:
            return failed

        monkeypatch.setattr(gsm8k, "is_correct", judged)
        monkeypatch.setattr(math_env, "is_correct", judged)
        row = env.train_rows[0]
        assert await env.score(row, "\\boxed{12}") is failed
        assert await math_env.VerifiedMathEnv.verify(env, row, "\\boxed{12}") is failed
