"""Read the answer out of a model's text: after its thinking, inside a tag, as the letter of a choice.

Pure functions that accept exactly one answer: a text that gives several gives none, so that listing them earns nothing.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

THINK_FIRST = (
    "Think about the problem step by step inside <think> </think> tags. Then give your answer."
)
"""System prompt of environments that require thinking."""


class ChoiceQuestion(NamedTuple):
    """A question with options, one of which is right."""

    text: str
    options: list[str]
    letter: str
    subject: str = "none"


# Bounded and possessive repeats: a text that repeats "the" or spaces must not take quadratic time.
_LEAD_IN = r"\b(?:(?:the|best|correct|final)\s+){1,4}answer(?:\s+is)?\s*+:?\s*+"
_LETTER = re.compile(
    rf"(?i:{_LEAD_IN})\**\s*\(?([A-Z])\b|\\boxed\{{\s*+(?:\\text\{{)?\s*+\(?([A-Z])\b"
)

BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{")


def after_thinking_once(text: str) -> str | None:
    """Return the text after the thinking; None unless `<think>` and `</think>` occur once each, in this order.

    >>> after_thinking_once("<think>2 + 2</think> 4"), after_thinking_once("4")
    (' 4', None)
    """
    tags = list(re.finditer(r"</?think>", text, re.IGNORECASE))
    if [tag[0].lower() for tag in tags] != ["<think>", "</think>"]:
        return None
    return text[tags[1].end() :]


def only_tagged(text: str, tag: str) -> str | None:
    """Return what is inside the only `<tag>...</tag>`, stripped; None without it, or if a second one begins.

    >>> only_tagged("so <answer> 3 </answer>", "answer"), only_tagged("<answer>3</answer><answer>4</answer>", "answer")
    ('3', None)
    """
    marks = list(re.finditer(rf"</?{re.escape(tag)}>", text, re.IGNORECASE))
    if [mark[0][1] == "/" for mark in marks] != [False, True]:
        return None
    return text[marks[0].end() : marks[1].start()].strip()


def boxes_in(text: str) -> list[str]:
    """Return the contents of all `\\boxed{...}` that are closed, stripped; a box inside of another is part of that.

    >>> boxes_in(r"\\boxed{1} or \\boxed{\\frac{1}{2}} or \\boxed{3")
    ['1', '\\\\frac{1}{2}']
    """
    opened: list[int | None] = []
    found: list[tuple[int, str]] = []
    for mark in re.finditer(rf"{BOX.pattern}|[{{}}]", text):
        if mark[0] != "}":
            opened.append(None if mark[0] == "{" else mark.end())
        elif opened and (start := opened.pop()) is not None:
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, text[start : mark.start()].strip()))
    return [content for _, content in found]


def words_of(text: str) -> list[str]:
    """Return the words without case, articles and punctuation.

    >>> words_of("The  U.S. Navy")
    ['us', 'navy']
    """
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def lettered(options: Sequence[str]) -> str:
    """Return one line per option.

    >>> lettered(["red", "blue"])
    'A. red\\nB. blue'
    """
    return "\n".join(
        f"{letter}. {option}"
        for letter, option in zip(string.ascii_uppercase, options, strict=False)
    )


def only_choice(text: str, options: Sequence[str]) -> str | None:
    """Return the letter of the only choice that the text states; None if it states none or several.

    A choice is a capital letter or the text of an option after words like "the best answer is", or a boxed letter.

    >>> only_choice("The best answer is: **B**.", ["red", "blue"]), only_choice("The answer is blue", ["red", "blue"])
    ('B', 'B')
    >>> only_choice("The answer is A. No, the answer is B.", ["red", "blue"]) is None
    True
    """
    found = {match.start(): match[1] or match[2] for match in _LETTER.finditer(text)}
    by_length = sorted(
        zip(string.ascii_uppercase, options, strict=False), key=lambda each: len(each[1])
    )
    for letter, option in by_length:  # the longest last: "New York City" is not "New York"
        stated = rf"{_LEAD_IN}\**{re.escape(option)}(?!\w|[.,]\d)"
        for match in re.finditer(stated, text, re.IGNORECASE):
            if len(option) > 1 or match.start() not in found:  # "A" is a letter before an option
                found[match.start()] = letter
    return next(iter(found.values())) if len(found) == 1 else None


def solution_of(text: str) -> str:
    """Return the text after the last `</think>`; "" if the thinking does not end.

    >>> solution_of("<think>A?</think> B"), solution_of("<think>A? Or"), solution_of("B")
    (' B', '', 'B')
    """
    said = text.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def all_tagged(text: str, tag: str) -> list[str]:
    """Return what each `<tag>...</tag>` contains, stripped; takes linear time, unlike a regex with `.*?`.

    >>> all_tagged("<a>1</a> or <a>2</A> or <a>3", "a")
    ['1', '2']
    """
    closed = re.split(f"</{tag}>", text, flags=re.IGNORECASE)[:-1]
    opened = [re.split(f"<{tag}>", each, maxsplit=1, flags=re.IGNORECASE) for each in closed]
    return [found.strip() for _, *inside in opened for found in inside]


def read_tag(text: str, tag: str) -> str | None:
    """Return what every `<tag>...</tag>` that is not empty contains; None without one, or if two differ.

    >>> read_tag("<answer> 3 </answer> ... <answer>3</answer>", "answer")
    '3'
    """
    stated = {*all_tagged(text, tag)} - {""}
    return stated.pop() if len(stated) == 1 else None


def read_choice(text: str, options: Sequence[str]) -> tuple[str | None, str]:
    """Return the letter of the only choice that a text states, and where: `answer_tag`, `stated`, `bare` or `none`.

    Without an `<answer>` tag it is stated in words ("the answer is B"), or it is the whole text ("B", "B. blue").

    >>> read_choice("<answer>(b) blue</answer>", ["red", "blue"]), read_choice("B.", ["red", "blue"])
    (('B', 'answer_tag'), ('B', 'bare'))
    """
    if re.search(r"</?answer>", text, re.IGNORECASE):
        tagged = read_tag(text, "answer")
        letter = None if tagged is None else bare_choice(tagged, options)
        return letter, "none" if letter is None else "answer_tag"
    if re.search(_LEAD_IN, text, re.IGNORECASE) or "\\boxed" in text:
        letter = only_choice(text, options)
        is_known = letter is not None and letter in string.ascii_uppercase[: len(options)]
        return (letter, "stated") if is_known else (None, "none")
    letter = bare_choice(text, options)
    return letter, "none" if letter is None else "bare"


def bare_choice(text: str, options: Sequence[str]) -> str | None:
    """Return the letter of a text that is nothing but a choice: its letter, its content, or both; else None.

    >>> [bare_choice(text, ["red", "blue"]) for text in ("**(B)**", "b) Blue.", "blue", "A or B")]
    ['B', 'B', 'B', None]
    """
    plain = _plain(text)
    for stated in (plain, re.sub(rf"^{_LEAD_IN}", "", plain, flags=re.IGNORECASE)):
        contents = [_plain(option) for option in options]
        by_text = [i for i, content in enumerate(contents) if content == stated]
        if len(by_text) == 1:
            return string.ascii_uppercase[by_text[0]]
        match = re.fullmatch(r"\(?([a-z])(?:[).:]+\s*(.*))?", stated, re.DOTALL)
        if match is None or (index := string.ascii_lowercase.index(match[1])) >= len(options):
            continue
        if not match[2] or match[2].strip() == contents[index]:
            return string.ascii_uppercase[index]
    return None


def _plain(text: str) -> str:
    """Return the text in lower case, without emphasis, final punctuation and repeated spaces."""
    return " ".join(text.lower().split()).strip("*_ ").rstrip(".").strip("*_ ")
