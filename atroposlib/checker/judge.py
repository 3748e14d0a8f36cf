"""A judge for environments whose rewards come from another model: marks nothing, nonsense and echoes lowest.

It reads the prompts of `JudgeEnv`. An environment with prompts of its own defines `example_verdict(prompt)`: what its
judge could say, None for prompts that are not the judge's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from atroposlib.checker.engine import question_of
from atroposlib.checker.probes import is_useless

Judge = Callable[[str], str | None]

_ONE = re.compile(r"<request>\n(.*?)\n</request>\n<answer>\n(.*?)\n</answer>", re.DOTALL)
_TWO = re.compile(
    r"<request>\n(.*?)\n</request>\n<answer_a>\n(.*?)\n</answer_a>\n<answer_b>\n(.*?)\n</answer_b>",
    re.DOTALL,
)
_BEST = re.compile(r"\(worst\) to (\d+(?:\.\d+)?) \(best\)")


@runtime_checkable
class HasExampleVerdicts(Protocol):
    """An environment that says what its judge could say."""

    def example_verdict(self, prompt: str) -> str | None:
        """Return a verdict; None for a prompt that is not the judge's."""


def judge_of(env: object) -> Judge:
    """Return the judge for an environment."""
    return env.example_verdict if isinstance(env, HasExampleVerdicts) else verdict


def verdict(prompt: str) -> str | None:
    """Answer a prompt of `JudgeEnv`.

    >>> verdict("<user>Be strict.<eos><assistant>") is None
    True
    """
    text = question_of(prompt)
    if pair := _TWO.search(text):
        request, first, second = pair.groups()
        marks = [not is_useless(answer, request) for answer in (first, second)]
        return f"Verdict: {'tie' if marks[0] == marks[1] else 'A' if marks[0] else 'B'}"
    one, best = _ONE.search(text), _BEST.search(text)
    if one and best:
        request, answer = one.groups()
        return f"Score: {0 if is_useless(answer, request) else best[1]}"
    return None
