"""Reading the one answer of a text; a text that hedges has none."""

from __future__ import annotations

import pytest

from atroposlib.envs.answers import after_thinking_once, only_choice, only_tagged, read_tag

COLOURS = ["red", "blue", "a reddish blue", "none of these"]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("<think>a</think>b", "b"),
        ("x<Think>a</THINK>b", "b"),
        ("a</think>b", None),
        ("</think>a<think>b", None),
        ("<think>a", None),
        ("<think>a</think>b<think>c</think>d", None),
        ("<think><think>a</think>b", None),
    ],
)
def test_thinking_is_one_block(text: str, after: str | None) -> None:
    assert after_thinking_once(text) == after


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<a> b </a>", "b"),
        ("<A>b</A> c", "b"),
        ("<a>line\nline</a>", "line\nline"),
        ("<a></a>", ""),
        ("</a>b<a>", None),
        ("<a>b", None),
        ("<a>b</a><a>", None),
        ("<a><a>b</a></a>", None),
        ("b", None),
    ],
)
def test_a_tag_is_read_where_it_is_the_only_one(text: str, inside: str | None) -> None:
    assert only_tagged(text, "a") == inside


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The best answer is: B", "B"),
        ("the correct answer is (C).", "C"),
        ("**The answer is B**", "B"),
        ("Final answer: **D**", "D"),
        ("the final answer is \\boxed{B}", "B"),
        ("\\boxed{\\text{C}}", "C"),
        ("The best answer is: blue", "B"),
        ("The best answer is: a reddish blue.", "C"),
        ("The best answer is a compromise", None),
        ("The best answer is: bluebird", None),
        ("B", None),
        ("The answer is A. The answer is B.", None),
        ("The best answer is A, B, C or D", "A"),
        ("The answer is A, so \\boxed{B}", None),
        ("The best answer is: LETTER", None),
    ],
)
def test_a_choice_is_stated_once(text: str, letter: str | None) -> None:
    assert only_choice(text, COLOURS) == letter


@pytest.mark.parametrize(
    ("stated", "options", "letter"),
    [
        ("New York City", ["New York", "New York City"], "B"),
        ("A red car", ["a blue car", "A red car"], "B"),
        ("1.5", ["1", "1.5"], "B"),
        ("1.5", ["1", "2"], None),
        ("C", ["C", "D"], "C"),
    ],
)
def test_the_longest_option_that_is_stated_is_the_choice(
    stated: str, options: list[str], letter: str | None
) -> None:
    assert only_choice(f"The best answer is: {stated}", options) == letter


@pytest.mark.parametrize(
    "text", ["The " * 50_000, "The answer is" + " " * 100_000 + "?", "\\boxed{" + " " * 100_000]
)
def test_a_text_that_repeats_itself_takes_no_quadratic_time(text: str) -> None:
    assert only_choice(text, COLOURS) is None
    assert read_tag("<answer>" * len(text), "answer") is None
