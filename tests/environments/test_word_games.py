"""Wordle, hangman and crosswords: what a guess tells and earns, and that players who use what they see win."""

import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from atroposlib.envs.rows import sample_path
from atroposlib.envs.word_games import Word
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


WORDLE, HANGMAN = (wordle.WordleEnv, "crepe"), (hangman.HangmanEnv, "apple")
SCORES: list[tuple[tuple[Any, str], list[str], float]] = [
    (WORDLE, [guess("crepe")], 1.0),
    (WORDLE, [guess("CREPE")], 1.0),
    (WORDLE, [guess("eerie"), guess("crepe")], 0.9),
    (WORDLE, [*map(guess, ("eerie", "trace", "apple", "paper", "chess", "crepe"))], 0.5),
    (WORDLE, [guess("crane")], 0.2 * 3 / 5),
    (WORDLE, ["", guess("crepe")], 0.9),
    (WORDLE, [guess("creeps")], 0.0),
    (WORDLE, ["crepe"], 0.0),
    (WORDLE, ["<guess>eerie</guess><guess>crepe</guess>"], 0.0),
    (WORDLE, ["<think><guess>crepe</guess></think>"], 0.0),
    (HANGMAN, [guess("apple")], 1.0),
    (HANGMAN, [*map(guess, "aple")], 1.0),
    (HANGMAN, [guess("z"), guess("pears"), "", guess("apple")], 0.7),
    (HANGMAN, [guess("p")], 0.2 * 2 / 5),
    (HANGMAN, [guess("z")], 0.0),
    (HANGMAN, [guess("abcdefghijklmnopqrstuvwxyz")], 0.0),
    (HANGMAN, ["apple"], 0.0),
]


@pytest.mark.parametrize(("game", "answers", "expected"), SCORES)
async def test_guesses_earn_their_score(
    score: Any, game: tuple[Any, str], answers: list[str], expected: float
) -> None:
    env_cls, word = game
    assert await score(env_cls, Word(word, ""), answers) == pytest.approx(expected)


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
        assert await score(wordle.WordleEnv, Word(word, ""), play) >= 0.5


PUZZLE = crosswords.make_puzzle(random.Random(0), [Word(w, w[::-1]) for w in sorted(words)], 4)
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
    choice = [Word(word, "") for word in sorted(words)]
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


def test_lines_that_repeat_themselves_take_no_quadratic_time() -> None:
    assert crosswords.answers_in(answered(["```"] * 100_000)) == {}
