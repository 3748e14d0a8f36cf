"""Compare the tool calls of a model with those that a data set expects. Pure functions.

A call matches if it has the expected name and at least the expected arguments; further arguments are allowed, because
data sets leave out defaults. Values are compared as JSON: 5 and 5.0 are equal, "5" and 5, 1 and true are not; with
`reads_texts` a text is first read as JSON or Python, so that "5" and 5 are equal. Used by environments whose reward is
a match.
"""

from __future__ import annotations

import ast
import contextlib
import json
import warnings
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.tool_env import MalformedCall, ToolCall

_MAX_LITERAL_CHARS = 10_000
"""Longer texts are compared as they are."""


def call_matches(
    call: ToolCall | MalformedCall, gold: ToolCall, *, reads_texts: bool = False
) -> bool:
    """Whether a call has the name and at least the arguments of the expected one.

    >>> gold = ToolCall(name="find", arguments={"city": "Oslo", "price": {"max": 5}})
    >>> call_matches(ToolCall(name="find", arguments={"city": "Oslo", "price": {"max": 5, "min": 0}, "n": 3}), gold)
    True
    >>> call_matches(ToolCall(name="find", arguments={"city": "Oslo"}), gold)
    False
    """
    return (
        isinstance(call, ToolCall)
        and call.name == gold.name
        and _contains(call.arguments, gold.arguments, reads_texts)
    )


def calls_match(calls: Sequence[ToolCall | MalformedCall], golds: Sequence[ToolCall]) -> bool:
    """Whether there are as many calls as expected and each matches another one, in any order.

    >>> one, two = ToolCall(name="a", arguments={}), ToolCall(name="b", arguments={})
    >>> calls_match([two, one], [one, two]), calls_match([one, two, one], [one, two])
    (True, False)
    """
    if len(calls) != len(golds):
        return False
    left = list(calls)
    # Most demanding first: a call that matches several expected ones must not go to the least demanding.
    for gold in sorted(golds, key=lambda gold: -len(json.dumps(gold.arguments))):
        found = next((i for i, call in enumerate(left) if call_matches(call, gold)), None)
        if found is None:
            return False
        del left[found]
    return True


def _contains(value: Any, gold: Any, reads_texts: bool) -> bool:
    if reads_texts:
        value, gold = _read(value), _read(gold)
    if isinstance(gold, dict):
        return isinstance(value, dict) and all(
            key in value and _contains(value[key], gold[key], reads_texts) for key in gold
        )
    if isinstance(gold, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(gold)
            and all(_contains(*pair, reads_texts) for pair in zip(value, gold, strict=True))
        )
    return isinstance(value, bool) == isinstance(gold, bool) and bool(value == gold)


def _read(value: Any) -> Any:
    """Return what a text stands for in JSON or Python; itself, stripped, if it is neither."""
    if not isinstance(value, str) or len(value) > _MAX_LITERAL_CHARS:
        return value
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value, parse_constant=_refuse)
    with (
        contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError),
        warnings.catch_warnings(action="ignore"),  # about escapes in the model's text
    ):
        return ast.literal_eval(value.strip())
    return value.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is a word: NaN would not equal itself")
