"""Wordle, hangman and crosswords: what a guess tells and earns, and that players who use what they see win."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from atroposlib.envs.rows import sample_path
from tests.environments.helpers_environments import load

wordle = load("game_environments.wordle")
hangman = load("game_environments.hangman")
crosswords = load("game_environments.crosswords")
with open(sample_path(crosswords.CrosswordsEnv, "crosswords")) as sample:
    words = {json.loads(line)["word"] for line in sample}


@pytest.fixture
def score(made: Any) -> Any:
    """Return the score of an episode with these answers, the last one repeated, or with a player of prompts."""

    async def play(env_cls: Any, row: Any, answers: Any) -> float:
        def respond(request: Any) -> Any:
            if callable(answers):
                return answers(request.prompt)
            return answers[min(request.prompt.count("<assistant>"), len(answers)) - 1]

        [rollout] = await made(env_cls, respond).roll_out(row, 1, split="train")
        return float(rollout.outcome)

    return play


def guess(text: str) -> str:
    return f"<think>Perhaps.</think><guess>{text}</guess>"


WORDLE_SCORES: list[tuple[list[str], float]] = [
    ([guess("crepe")], 1.0),
    ([guess("CREPE")], 1.0),
    ([guess("eerie"), guess("crepe")], 0.9),
    ([*map(guess, ("eerie", "trace", "apple", "paper", "chess", "crepe"))], 0.5),
    ([guess("crane")], 0.2 * 3 / 5),
    (["", guess("crepe")], 0.9),
    ([guess("creeps")], 0.0),
    (["crepe"], 0.0),
    (["<guess>eerie</guess><guess>crepe</guess>"], 0.0),
    (["<think><guess>crepe</guess></think>"], 0.0),
]


@pytest.mark.parametrize(("answers", "expected"), WORDLE_SCORES)
async def test_wordle_scores(score: Any, answers: list[str], expected: float) -> None:
    row = wordle.Word("crepe", "")
    assert await score(wordle.WordleEnv, row, answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("eerie", "crepe", "Y-Y-G"),
        ("allay", "lapel", "YYY--"),
        ("speed", "abide", "--Y-Y"),
        ("geese", "eerie", "-GY-G"),
    ],
)
def test_a_letter_gets_as_many_marks_as_the_word_has_of_it(
    guess: str, word: str, marks: str
) -> None:
    assert wordle.marks(guess, word) == marks
    matched = sum((Counter(guess) & Counter(word)).values())
    assert len(marks) - marks.count("-") == matched


async def test_a_player_who_uses_the_marks_finds_every_word(score: Any) -> None:
    candidates = sorted(word for word in words if len(word) == 5)

    def play(prompt: str) -> str:
        seen = re.findall(r"([A-Z](?: [A-Z]){4})\n([GY-](?: [GY-]){4})", prompt)
        tried = [
            (letters.replace(" ", "").lower(), signs.replace(" ", "")) for letters, signs in seen
        ]
        left = [w for w in candidates if all(wordle.marks(g, w) == signs for g, signs in tried)]
        return guess(left[0])

    for word in candidates:
        assert await score(wordle.WordleEnv, wordle.Word(word, ""), play) >= 0.5


HANGMAN_SCORES: list[tuple[list[str], float]] = [
    ([guess("apple")], 1.0),
    ([*map(guess, "aple")], 1.0),
    ([guess("z"), guess("pears"), "", guess("apple")], 0.7),
    ([guess("p")], 0.2 * 2 / 5),
    ([guess("z")], 0.0),
    ([guess("abcdefghijklmnopqrstuvwxyz")], 0.0),
    (["apple"], 0.0),
]


@pytest.mark.parametrize(("answers", "expected"), HANGMAN_SCORES)
async def test_hangman_scores(score: Any, answers: list[str], expected: float) -> None:
    row = hangman.Word("apple", "")
    assert await score(hangman.HangmanEnv, row, answers) == pytest.approx(expected)


PUZZLE = crosswords.make_puzzle(
    random.Random(0), [crosswords.Word(w, w[::-1]) for w in sorted(words)], 4
)
LINES = [f"{entry.label}: {entry.word.upper()}" for entry in PUZZLE]
WRONG = [f"{entry.label}: {'x' * len(entry.word)}" for entry in PUZZLE]


def answered(lines: list[str]) -> str:
    return "<answers>" + "\n".join(lines) + "</answers>"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([answered(LINES)], 1.0),
        ([answered([line]) for line in LINES], 1.0),
        ([answered(LINES[:1])], 0.25),
        ([answered(WRONG + LINES)], 0.0),
        (["\n".join(LINES)], 0.0),
        ([answered(WRONG) + answered(LINES)], 0.0),
    ],
)
async def test_crossword_scores(score: Any, answers: list[str], expected: float) -> None:
    assert await score(crosswords.CrosswordsEnv, PUZZLE, answers) == expected


def test_entries_cross_in_one_grid_and_touch_nowhere_else() -> None:
    choice = [crosswords.Word(word, "") for word in sorted(words)]
    for seed in range(50):
        entries = crosswords.make_puzzle(random.Random(seed), choice, 6)
        grid: dict[Any, str] = {}
        for entry in entries:
            for cell, letter in zip(entry.cells, entry.word, strict=True):
                assert grid.setdefault(cell, letter) == letter
        rows = crosswords.drawn(entries, {entry.label for entry in entries}).split("\n")
        columns = ["".join(column) for column in zip(*rows, strict=True)]
        runs = [r for line in rows + columns for r in line.lower().split("#") if len(r) > 1]
        assert sorted(runs) == sorted(entry.word for entry in entries)


async def test_the_words_of_evaluation_are_not_in_training(started: Any) -> None:
    env = await started(crosswords.CrosswordsEnv)
    train, held_out = (
        {entry.word for puzzle in rows for entry in puzzle}
        for rows in (env.train_rows, env.eval_rows)
    )
    assert len(train) > 10
    assert len(held_out) > 1
    assert not train & held_out
