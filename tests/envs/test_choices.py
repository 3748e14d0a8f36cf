"""One reader of choices: what an answer must look like to have a letter, and what has none.

Right answers are made of forms, option texts and letters; each states one choice and no other.
"""

from __future__ import annotations

import string

import pytest

from atroposlib.envs.answers import read_choice

OPTIONS = [
    ["Paris", "London", "Rome", "Madrid"],
    ["4", "14", "1.5", "-14"],
    ["A red car", "a red car and a bus", "New York", "New York City"],
]
BARE = [
    "{L}",
    "{L}.",
    "{L})",
    "({L})",
    "[{L}]",
    "**{L}**",
    "**({L})**",
    "`{L}`",
    '"{L}"',
    "${L}$",
    "$({L})$",
    "\\({L}\\)",
    "\\text{{{L}}}",
    "\\boxed{{{L}}}",
    "\\boxed{{({L})}}",
    "\\boxed{{\\text{{{L}}}}}",
    "\\boxed{{\\mathbf{{{L}}}}}",
    "$\\boxed{{\\textbf{{({L})}}}}$",
    "\\[\n\\boxed{{{L}}}\n\\]",
    "Option {L}",
    "**Option {L}**",
    "Choice ({L}).",
    "{T}",
    "**{T}**.",
    "{L}) {T}",
    "{L}. {T}",
    "{L}: {T}",
    "{L} - {T}",
    "{L} \N{EN DASH} {T}",
    "{L} ({T})",
    "({L}) {T}.",
    "**{L})** {T}",
    "**{L}. {T}**",
    "Option {L}: {T}",
    "\\boxed{{{L}. {T}}}",
]
"""The whole text, or the content of the tag."""
STATED = [
    "Answer: {L}",
    "answer: {L}.",
    "**Answer:** {L}",
    "**Answer: {L}**",
    "### Answer: ({L})",
    "Answer: **({L})** {T}",
    "Answer: {L}) {T}",
    "Answer: Option {L}",
    "Correct answer: {L}",
    "Final answer: {L}",
    "**Final Answer:** $\\boxed{{{L}}}$",
    "The answer is {L}",
    "The answer is: {L}.",
    "The answer is ({L}).",
    "The answer is [{L}].",
    "The answer is **{L}**.",
    "**The answer is {L}.**",
    "The answer is $\\text{{{L}}}$.",
    "The answer is option {L}.",
    "The answer is {L}, {T}.",
    "The answer is {L} ({T}).",
    "The answer is {L} because it fits.",
    "The answer is {L}, since the others do not fit.",
    "The answer is {T}.",
    "The answer is therefore {L}.",
    "So the correct answer is {L}) {T}.",
    "The correct option is ({L}).",
    "The correct choice is {L}.",
    "The best answer is: {L}",
    "The best answer is: **{L}**.",
    "The best answer is: {T}",
    "My answer is {L}.",
    "The final answer is $\\boxed{{{L}}}$. I hope it is correct.",
    "Thus \\boxed{{{L}}}.",
    "Option {L} is correct.",
    "Option ({L}) is the correct answer.",
    "{L} is correct.",
    "**{L}** is the right answer.",
    "({L}) is the best choice.",
    "So it's {L}.",
    "So it is ({L}) {T}.",
    "It must be {L}.",
    "Therefore, {L}.",
    "I choose {L}.",
    "I would go with option {L}.",
    "We weigh them all.\n\n{L}",
    "We weigh them all.\n\n**{L}) {T}**",
    "We weigh them all.\nAnswer: {L}",
    "First (A), then (B), (C) and (D) are tried. The answer is {L}.",
    "The answer is {L}. So \\boxed{{{L}}}.",
    "The answer is {L}.\n\nThe answer is {T}.",
    "The answer is {L}. There is no evidence for another; each of them is incorrect.",
    "The answer is {L}. Note that none could be better, and that the rest is actually wrong.",
    "The answer is {L}. A, C and D may be tempting, but no option beats it.",
    "If the answer were (A), it would be blue. The answer is {L}.",
]
"""In a sentence, a line, or the last line."""
TAGGED = [f"It follows. <answer>{form}</answer>" for form in (*BARE, *STATED[:21])]
RIGHT = [
    (form.format(L=letter, T=text), options, letter)
    for form in (*BARE, *STATED, *TAGGED)
    for options in OPTIONS
    for letter, text in zip(string.ascii_uppercase, options, strict=False)
]
BAD = [
    "",
    "I do not know.",
    "A good guess is impossible.",
    "A city in France, I think.",
    "The answer is A good guess.",
    "The answer is a matter of taste.",
    "A or B",
    "A, B",
    "A/B",
    "A and B",
    "A B C D",
    "The answer is A or B.",
    "The answer is (A) or (B).",
    "The answer is A/B.",
    "The answer is A, B, C or D.",
    "The answer is A and B.",
    "The answer is A, or maybe B.",
    "The answer is A (or B).",
    "The answer is either A or B.",
    "The answer is Paris or London.",
    "The answer is A or London.",
    "The answer is A?",
    "The answer is A. The answer is B.",
    "The answer is A. No, the answer is B.",
    "The answer is A. Wait, no, B.",
    "The answer is A. Actually, it's B.",
    "The answer is A. Or maybe B.",
    "The answer is A, but it could be B.",
    "The answer is A. Wait, that is wrong.",
    "The answer is A. Sorry, I made a mistake.",
    "The answer is A, so \\boxed{B}",
    "\\boxed{A} \\boxed{B}",
    "\\boxed{A",
    "\\boxed{A, B}",
    "Answer: A\nAnswer: B",
    "A) London",
    "The answer is A) London.",
    "<answer>A</answer><answer>B</answer>",
    "<answer>A or B</answer>",
    "<answer>A) London</answer>",
    "<answer>The answer is A. The answer is B.</answer>",
    "<answer>A good guess</answer>",
    "The answer is not A.",
    "I doubt that the answer is A.",
    "I don't think the answer is A.",
    "If the answer is A, then it is far.",
    "Option A is not correct.",
    "Option A is correct. Option B is correct.",
    "It's not A.",
    "It's A, or it's B.",
    "A) Paris\nB) London\nC) Rome\nD) Madrid",
    "A\nB",
    "Let me see.\nA\nB\nC\nD",
    "The answer is E.",
    "E",
    "<answer>E</answer>",
    "The answer is Parisian.",
    "The answer is Paris-like.",
    "Not Paris",
    "Paris and London",
]
"""None of these states exactly one of Paris, London, Rome and Madrid."""


def test_right_answers_in_usual_forms_are_read() -> None:
    missed = [(text, letter) for text, options, letter in RIGHT if read(text, options) != letter]
    assert len(RIGHT) >= 1000
    assert missed == []


@pytest.mark.parametrize("text", BAD)
def test_an_answer_that_states_no_single_choice_has_none(text: str) -> None:
    assert read(text, OPTIONS[0]) is None


def read(text: str, options: list[str]) -> str | None:
    return read_choice(text, options)[0]


def test_only_the_end_of_a_long_answer_is_read() -> None:
    text = f"The answer is A. {'x ' * 5000}The answer is B."
    assert read_choice(text, ["red", "blue"]) == ("B", "stated")
    assert read_choice(text.replace("x " * 5000, ""), ["red", "blue"]) == (None, "none")
