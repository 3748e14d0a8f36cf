"""Scripted answers of the check, in place of a model and a judge.

The model's answers are guesses at the right one, nonsense, an empty answer and an echo. An environment can give right
answers in `example_answers(item)`: texts, or functions from the prompt to a text, which play several turns. Without it,
the texts in the item are tried in common formats, because items often contain the gold answer. Judge and reward model
give useless answers the lowest score. They understand the prompts of `JudgeEnv`, also with several lines `name: N`, and
the routes of common servers; an environment with others defines `example_verdict(prompt)` or
`example_reply(path, body)`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from atroposlib.checker.engine import Answer, ProbeEngine, question_of
from atroposlib.checker.probes import result_of

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
_MARK_TO_FILL_IN = re.compile(r"^(\w+): N$", re.MULTILINE)
_BEST_SCORE = re.compile(r"\(worst\) to (\d+(?:\.\d+)?) \(best\)")


def guesses(env: object, item: Any) -> list[Answer]:
    """Return answers that may be right, the most likely first.

    >>> guesses(object(), {"question": "1 + 1?", "answer": 2})[:2]
    ['2', '<think>Let me see.</think> The answer is \\\\boxed{2}']
    """
    if examples := _examples(env, item):
        return list(dict.fromkeys(examples))
    gold_first = sorted(_leaves(item, ""), key=lambda leaf: (not _is_gold(leaf[0]), len(leaf[1])))
    wrapped: Iterator[Answer] = (
        wrapping.format(text)
        for _, text in gold_first
        if 0 < len(text) <= _MAX_GUESS_CHARS
        for wrapping in _WRAPPINGS
    )
    return list(dict.fromkeys(wrapped))[:_MAX_GUESSES]


def knows_answers(env: object, item: Any) -> bool:
    """Whether the author gives answers to an item, or the item has a field that is named like one."""
    return bool(_examples(env, item)) or any(_is_gold(name) for name, _ in _leaves(item, ""))


def gold_result(env: Any, item: Any) -> str | None:
    """Return the one right result of an item: that of `gold_answer`, else a short field that is named like one.

    >>> gold_result(object(), {"question": "1 + 1?", "answer": "1 + 1 is 2 #### 2"})
    '2'
    """
    gold_answer = getattr(env, "gold_answer", None)
    gold = gold_answer(item) if gold_answer is not None else None
    texts = [gold] if gold else [text for name, text in _leaves(item, "") if _is_gold(name)]
    results = [result for text in texts if (result := result_of(text))]
    return results[0].stated if results else None


def short_texts(item: Any) -> list[str]:
    """Return the short texts and numbers inside an item, each once.

    >>> short_texts({"q": "1 + 1?", "a": [2, 2]})
    ['1 + 1?', '2']
    """
    texts = (text for _, text in _leaves(item, ""))
    return list(dict.fromkeys(text for text in texts if 0 < len(text) <= _MAX_GUESS_CHARS))


def fields_with(gold: str | None, item: Any) -> list[str]:
    """Return the names of an item's fields that hold the gold answer.

    >>> fields_with("2", {"q": "1 + 1?", "a": 2})
    ['a']
    """
    return [name for name, text in _leaves(item, "") if name and text == gold]


def _examples(env: object, item: Any) -> list[Answer]:
    example_answers = getattr(env, "example_answers", None)
    examples = example_answers(item) if example_answers is not None else None
    return [answer if callable(answer) else str(answer) for answer in examples or ()]


def rounds(found: Sequence[Answer], group_size: int) -> list[list[Answer]]:
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
        mark = 0 if is_useless(answer, request) else best[1]
        return "\n".join(f"{name}: {mark}" for name in _MARK_TO_FILL_IN.findall(text))
    return None


class FakeRewardModel:
    """Takes the place of an `HttpPeer`: a useful answer gets 1, a useless one 0, in the replies of common servers."""

    def __init__(self, env: object, engine: ProbeEngine) -> None:
        self._reply = getattr(env, "example_reply", self._common_reply)
        self._engine = engine

    async def post(self, path: str, body: Mapping[str, Any], **options: Any) -> Any:
        self._engine.num_verdicts += 1
        return self._reply(path, body)

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def _common_reply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        texts = [text for name, text in _leaves(body, "") if name not in ("model", "role")]
        score = 0.0 if is_useless(texts[-1], "\n".join(texts[:-1])) else 1.0
        entry = {"data": [[score]], "score": score, "embedding": [score], "probs": [score]}
        return {"data": [entry], "results": [entry], "score": score, "reward": score}


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
