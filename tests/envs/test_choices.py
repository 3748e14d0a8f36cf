"""One reader of choices: what an answer must look like to have a letter, and what has none.

Right answers are made of forms, option texts and letters; each states one choice and no other.
"""

import string

import pytest

from atroposlib.envs.answers import read_choice
from tests.builders.tables import table

CHOICES = table("envs/choices")
OPTIONS, BARE, STATED = CHOICES["options"], CHOICES["bare"], CHOICES["stated"]
COLOURS = CHOICES["colours"]
TAGGED = [f"It follows. <answer>{form}</answer>" for form in (*BARE, *STATED[:21])]
RIGHT = [
    (form.format(L=letter, T=text), options, letter)
    for form in (*BARE, *STATED, *TAGGED)
    for options in OPTIONS
    for letter, text in zip(string.ascii_uppercase, options, strict=False)
]


def test_right_answers_in_usual_forms_are_read() -> None:
    missed = [(text, letter) for text, options, letter in RIGHT if read(text, options) != letter]
    assert len(RIGHT) >= 1000
    assert missed == []


@pytest.mark.parametrize("text", CHOICES["none"])
def test_an_answer_that_states_no_single_choice_has_none(text: str) -> None:
    assert read(text, OPTIONS[0]) is None


def read(text: str, options: list[str]) -> str | None:
    return read_choice(text, options)[0]


def test_only_the_end_of_a_long_answer_is_read() -> None:
    text = f"The answer is A. {'x ' * 5000}The answer is B."
    assert read_choice(text, ["red", "blue"]) == ("B", "stated")
    assert read_choice(text.replace("x " * 5000, ""), ["red", "blue"]) == (None, "none")


@pytest.mark.parametrize(("text", "letter"), COLOURS["texts"])
def test_a_choice_is_stated_once(text: str, letter: str | None) -> None:
    assert read(text, COLOURS["options"]) == letter


@pytest.mark.parametrize(
    ("stated", "options", "letter"),
    [
        ("New York City", ["New York", "New York City"], "B"),
        ("A red car", ["a blue car", "A red car"], "B"),
        ("1.5", ["1", "1.5"], "B"),
        ("1.5", ["1", "2"], None),
        ("C", ["C", "D"], "A"),
        ("A", ["C", "A"], "A"),
    ],
)
def test_the_longest_option_that_is_stated_is_the_choice(
    stated: str, options: list[str], letter: str | None
) -> None:
    assert read(f"The best answer is: {stated}", options) == letter
