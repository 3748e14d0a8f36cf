"""Counting letters: exact answers in the required form, and a level that follows the success."""

import random
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.environments.helpers_environments import load, logged, restore

counting = load("letter_counting_environment.letter_counting_environment")


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, counting.LetterCountingEnv)


@pytest.mark.parametrize("level", range(1, 11))
def test_every_level_asks_for_letters_that_are_counted_right(level: int) -> None:
    for seed in range(20):
        question = counting.make_question(random.Random(seed), ["banana"], level)
        text = question.prompt.split('"')[-2]
        answer = question.answer
        if isinstance(answer, int):
            answer = {question.prompt.split('"')[1]: answer}
        assert answer == {letter: text.count(letter) for letter in answer}
        assert len(answer) <= counting.LEVELS[level - 1].max_letters


async def test_format_errors_of_training_are_counted_and_those_of_evaluation_are_not(
    started: Any,
) -> None:
    answers = ["3 I think", "<think>a</think> 3", "<think>a</think><answer>3</answer>"]
    env = await started(answers=answers, group_size=3, num_eval_samples=3, min_trained_tokens=0)
    await env.evaluate()
    await env.collect_trajectories(counting.Question("?", 3, 3))
    metrics = await logged(env)
    assert {name: value for name, value in metrics.items() if name.startswith("errors/")} == {
        "errors/total_format_errors": 2,
        "errors/think_format_error_rate": pytest.approx(1 / 3),
        "errors/answer_format_error_rate": pytest.approx(1 / 3),
    }


async def test_the_level_and_what_was_asked_survive_a_restart(started: Any, tmp_path: Path) -> None:
    env = await started()
    asked = [await env.get_next_item() for _ in range(5)]
    env.level = 2
    resumed = restore(env, await started(), tmp_path)
    assert resumed.level == 2
    asked.append(await resumed.get_next_item())
    metrics = resumed.train_metrics()
    lengths = [len(question.text) for question in asked]
    num_letters = [1 if isinstance(each.answer, int) else len(each.answer) for each in asked]
    assert metrics["stats/total_letters_asked"] == sum(num_letters) > 6
    assert metrics["stats/total_words_asked"] == 6
    assert metrics["stats/avg_word_length"] == pytest.approx(sum(lengths) / 6)
    assert metrics["stats/min_word_length"] == min(lengths)
    assert metrics["stats/max_word_length"] == max(lengths)
    counts = [
        sum(letter in each.letters for each in asked) for letter in "abcdefghijklmnopqrstuvwxyz"
    ]
    assert metrics["stats/most_common_letter_count"] == max(counts)
    assert metrics["stats/least_common_letter_count"] == min(filter(None, counts))


async def test_the_level_follows_the_success(started: Any) -> None:
    env = await started(difficulty_window_size=20)
    for score, level in [(1.0, 4), (0.1, 3), (0.5, 3)]:
        for _ in range(10):
            env.adapt_level(score)
        assert env.level == level
    env.config.max_difficulty_level = 3
    for _ in range(40):
        env.adapt_level(1.0)
    assert env.level == 3


async def test_a_group_of_another_level_does_not_count_for_this_one(started: Any) -> None:
    env = await started()
    group = {"scores": [1.0, 0.0]}
    assert env.shape_group(counting.Question("?", 3, 1), group) is group
    assert env.recent_scores == []
    assert env.shape_group(counting.Question("?", 3, 3), {"scores": [1.0, 1.0]}) is None
    assert env.recent_scores == [1.0]


async def test_the_posterior_chooses_a_level_for_each_question(started: Any) -> None:
    env = await started(item_choice="posterior", max_difficulty_level=4)
    env.runtime = SimpleNamespace()
    asked = []
    for _ in range(100):
        asked.append(await env.get_next_item())
        env.note_scores(asked[-1], [float(asked[-1].level < 2), float(asked[-1].level < 3)] * 4)
    assert Counter(question.level for question in asked).most_common(1)[0][0] == 2
    assert {question.level for question in asked} == {1, 2, 3, 4}


@pytest.mark.parametrize("field", ["min", "max", "starting"])
@pytest.mark.parametrize("level", [0, 11])
def test_a_level_that_does_not_exist_is_refused(field: str, level: int) -> None:
    with pytest.raises(ValueError, match=f"{field}_difficulty_level"):
        counting.LetterCountingConfig(**{f"{field}_difficulty_level": level})
