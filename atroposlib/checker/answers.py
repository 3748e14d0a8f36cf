"""Scripted answers of the check, in place of a model and a judge.

The model's answers are guesses at the right one, nonsense, an empty answer and an echo. An environment can give right
answers in `example_answers(item)`; without it, the texts in the item are tried in common formats, because items often
contain the gold answer. The judge gives useless answers the lowest score. It understands the prompts of `JudgeEnv`; an
environment with other prompts defines `example_verdict(prompt)`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from atroposlib.checker.engine import Answer, question_of

EMPTY = ""
NONSENSE = ("qx", "I do not know this at all, sorry.", "0x7 zebra", "?!")
NUM_FIXED = 4
"""Answers of every round that are not guesses: two nonsense ones, the empty one and the echo."""

_GOLD_NAMES = ("answer", "gold", "solution", "target", "label", "expected", "reference", "truth")
_WRAPPINGS = (
    "{}",
    "<think>Let me see.</think> The answer is \\boxed{{{}}}",
    "<answer>{}</answer>",
    "The answer is {}",
)
_MAX_GUESS_CHARS = 2000
_MAX_GUESSES = 24

_ONE_ANSWER = re.compile(r"<request>\n(.*?)\n</request>\n<answer>\n(.*?)\n</answer>", re.DOTALL)
_TWO_ANSWERS = re.compile(
    r"<request>\n(.*?)\n</request>\n<answer_a>\n(.*?)\n</answer_a>\n<answer_b>\n(.*?)\n</answer_b>",
    re.DOTALL,
)
_BEST_SCORE = re.compile(r"\(worst\) to (\d+(?:\.\d+)?) \(best\)")


def guesses(env: object, item: Any) -> list[str]:
    """Return answers that may be right, the most likely first.

    >>> guesses(object(), {"question": "1 + 1?", "answer": 2})[:2]
    ['2', '<think>Let me see.</think> The answer is \\\\boxed{2}']
    """
    example_answers = getattr(env, "example_answers", None)
    if example_answers is not None and (examples := example_answers(item)):
        return list(dict.fromkeys(map(str, examples)))
    gold_first = sorted(_leaves(item, ""), key=lambda leaf: (not _is_gold(leaf[0]), len(leaf[1])))
    wrapped = (
        wrapping.format(text)
        for _, text in gold_first
        if 0 < len(text) <= _MAX_GUESS_CHARS
        for wrapping in _WRAPPINGS
    )
    return list(dict.fromkeys(wrapped))[:_MAX_GUESSES]


def rounds(found: Sequence[str], group_size: int) -> list[list[Answer]]:
    """Divide guesses among groups of `group_size` answers, each with nonsense, an empty answer and an echo.

    >>> [len(answers) for answers in rounds(["a", "b", "c", "d", "e"], 8)]
    [8, 8]
    """
    room = max(1, group_size - NUM_FIXED)
    rest: list[Answer] = [EMPTY, question_of, *NONSENSE, *(f"qx{i}" for i in range(group_size))]
    starts = range(0, max(len(found), 1), room)
    return [[*found[start : start + room], *rest][:group_size] for start in starts]


def is_useless(answer: str, request: str) -> bool:
    """Whether an answer is empty, nonsense, or part of the request."""
    words = answer.strip()
    return not words or words in request or words.startswith(NONSENSE[0]) or words in NONSENSE


def verdict(prompt: str) -> str | None:
    """Answer a prompt of `JudgeEnv`.

    >>> verdict("<user>Be strict.<eos><assistant>") is None
    True
    """
    text = question_of(prompt)
    if pair := _TWO_ANSWERS.search(text):
        request, first, second = pair.groups()
        marks = [not is_useless(answer, request) for answer in (first, second)]
        return f"Verdict: {'tie' if marks[0] == marks[1] else 'A' if marks[0] else 'B'}"
    one, best = _ONE_ANSWER.search(text), _BEST_SCORE.search(text)
    if one and best:
        request, answer = one.groups()
        return f"Score: {0 if is_useless(answer, request) else best[1]}"
    return None


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (field name, text) of every text and number inside an item."""
    if isinstance(value, str):
        yield name, value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, str(value)
    elif isinstance(value, BaseModel):
        yield from _leaves(value.model_dump(), name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, "")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, str(key))
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):  # a NamedTuple
        yield from _leaves(value._asdict(), name)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for inner in value:
            yield from _leaves(inner, name)


def _is_gold(name: str) -> bool:
    return any(word in name.lower() for word in _GOLD_NAMES)
