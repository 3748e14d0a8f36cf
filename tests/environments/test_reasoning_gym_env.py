"""Puzzles of reasoning-gym: scores of the tagged answer, complexity, and what is not trained on."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load, restore

gym = load("reasoning_gym_environment.reasoning_gym_environment")


@pytest.fixture
def started(started: Any) -> Any:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra reasoning) is not installed")
    return partial(
        started, gym.ReasoningGymEnv, dataset_path=None, tasks=["gcd"], num_eval_samples_per_task=1
    )


async def test_only_one_tagged_answer_after_the_thinking_is_scored(started: Any) -> None:
    env = await started()
    puzzle = await env.get_next_item()
    right = f"<answer>{puzzle.answer}</answer>"
    assert await env.score(puzzle, f"<think>a</think> {right}") == 1.0
    assert await env.score(puzzle, right) == 1.0
    assert await env.score(puzzle, f"<think>{right}</think>") == 0.0
    assert await env.score(puzzle, f"<think>a</think> {right}{right}") == 0.0
    assert await env.score(puzzle, f"<think>a</think> {puzzle.answer}") == 0.0
    assert await env.score(puzzle, "<think>a</think> <answer>x</answer>") == 0.0
    assert await env.score(puzzle, f"<answer>-{puzzle.answer}</answer>") == 0.0
    assert await env.score(puzzle, f"<answer>1 2 3 4 5 6 {puzzle.answer}</answer>") == 0.0


async def test_an_answer_that_a_task_cannot_parse_is_wrong(started: Any) -> None:
    env = await started(tasks=["prime_factorization"])
    puzzle = await env.get_next_item()
    assert await env.score(puzzle, "<answer>I do not know</answer>") == 0.0


async def test_a_number_may_have_commas(started: Any) -> None:
    await started()
    source = gym.Source("basic_arithmetic", 8, None)
    assert gym.make_puzzle(*source)[1] == "-1043"
    scores = [gym.score_answer(*source, text) for text in ("-1043", "-1,043", "-104,3", "1,043")]
    assert scores == [1.0, 1.0, 0.0, 0.0]


async def test_the_puzzles_depend_on_the_seed_alone(started: Any) -> None:
    tasks = ["gcd", "leg_counting"]
    first, second = [await started(tasks=tasks, seed=3) for _ in range(2)]
    puzzles = [await first.get_next_item() for _ in range(6)]
    assert puzzles == [await second.get_next_item() for _ in range(6)]
    assert {puzzle.source.task for puzzle in puzzles} == set(tasks)
    assert first.eval_rows == second.eval_rows
    assert len(first.eval_rows) == 2


async def test_an_unknown_task_is_refused(started: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean sudoku"):
        await started(tasks=["suduko"])


async def test_complexity_changes_the_puzzle_and_stays_when_it_is_scored(started: Any) -> None:
    await started()
    easy, hard = (gym.dataset_of(gym.Source("gcd", 1, level)).config for level in (0.0, 1.0))
    assert hard.max_value > easy.max_value
    refused = gym.dataset_of(gym.Source("caesar_cipher", 1, 1.0))
    assert refused.config.max_rotation <= 25


async def test_the_curriculum_follows_the_success_and_is_saved(
    started: Any, tmp_path: Path
) -> None:
    env = await started(complexity_mode="curriculum")
    puzzle = await env.get_next_item()
    assert puzzle.source.complexity == 0.3
    for _ in range(3):
        env.shape_group(puzzle, {"scores": [1.0, 1.0], "masks": [[1], [1]]})
    assert env.complexity("gcd", random.Random(0)) == pytest.approx(0.4)
    resumed = restore(env, await started(complexity_mode="curriculum"), tmp_path)
    assert resumed.complexity("gcd", random.Random(0)) == pytest.approx(0.4)
    assert resumed.num_items == env.num_items


@pytest.mark.parametrize(
    ("level", "history", "expected"),
    [
        (0.6, [0.0, 0.0, 0.0], 0.5),
        (0.4, [0.0, 0.0, 0.0], 0.35),
        (0.6, [1.0, 1.0, 1.0], 0.65),
        (0.3, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.4),
        (0.3, [1.0, 0.5, 1.0, 1.0], 0.3 + 0.05 * (1 - 0.21650635)),
        (0.3, [0.7, 0.75, 0.7], 0.3),
        (0.98, [0.9, 0.9, 0.9], 1.0),
    ],
)
def test_the_size_of_a_step(level: float, history: list[float], expected: float) -> None:
    assert gym.next_complexity(level, history, target=0.7) == pytest.approx(expected)


async def test_long_answers_lose_score_only_in_a_group_without_a_wrong_one(started: Any) -> None:
    env = await started(max_token_length=100)
    puzzle = await env.get_next_item()
    masks = [[-100] * 99 + [1] * 70, [-100] * 99 + [1] * 90]  # the prompt does not count
    assert env.shape_group(puzzle, {"scores": [1.0, 0.5], "masks": masks})["scores"] == [
        1.0,
        pytest.approx(0.2),
    ]
    assert env.shape_group(puzzle, {"scores": [0.0, 1.0], "masks": masks})["scores"] == [0.0, 1.0]


async def test_an_answer_cut_at_the_limit_has_no_advantage(started: Any) -> None:
    env = await started(max_token_length=12, min_trained_tokens=1, group_size=2)
    right = iter(["<answer>1</answer>" * 3, "no"])
    env.server.servers[0].respond = lambda request: next(right)
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [0.0, 0.0]
    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}]
