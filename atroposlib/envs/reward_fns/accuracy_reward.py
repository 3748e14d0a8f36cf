"""Reward for a correct final answer in mathematics: equal texts and numbers are compared here, the rest by math-verify.

math-verify runs in a worker that can be killed (extra `math`). For an answer that could not be judged, `on_failure`
decides the value, and `failures` counts it by reason.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from atroposlib.envs.answers import boxes_in
from atroposlib.envs.reward_fns.math_worker import BlockingWorkers, is_equal, math_workers
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, after_thinking, spread
from atroposlib.envs.rewards import RewardFailure
from atroposlib.errors import ConfigError, EnvError

logger = logging.getLogger(__name__)

OnFailure = Literal["zero", "nan", "raise"]

_HASHED = re.compile(r"####\s*(\S.*)")


@registry.register
class AccuracyReward(RewardFunction):
    """1.0 for a correct answer, 0.0 for a wrong or missing one.

    `on_failure` for answers that could not be judged: "zero", "nan" (a group that contains it is refused), or "raise"
    an `EnvError`.
    """

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        *,
        timeout_s: float = 10.0,
        on_failure: OnFailure = "zero",
        workers: BlockingWorkers | None = None,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        if on_failure not in ("zero", "nan", "raise"):
            raise ConfigError(f"on_failure {on_failure!r}: use 'zero', 'nan' or 'raise'")
        self.tolerance = tolerance
        """Largest difference of two numbers that count as equal."""
        self.split_on_think_tag = split_on_think_tag
        """Judge only what follows the last `</think>`."""
        self.max_boxed_threshold = max_boxed_threshold
        """An answer with more boxes than this is a guess and scores 0.0."""
        self.timeout_s = timeout_s
        """Seconds to judge one answer."""
        self.on_failure = on_failure
        self._workers = workers

    def compute(
        self,
        completions: Sequence[Any],
        solution: Any = None,
        ground_truth: Any = None,
        **kwargs: Any,
    ) -> list[float]:
        """Judge every completion by `solution` (else `ground_truth`): one for all completions, or one each."""
        given = solution if solution is not None else ground_truth
        golds = spread(given, len(completions), name="solution")
        values = [0.0] * len(completions)
        undecided: list[tuple[int, str, str]] = []
        for index, (completion, gold) in enumerate(zip(completions, golds, strict=True)):
            text = self.get_content(completion)
            if self.split_on_think_tag:
                text = after_thinking(text)
            if gold is None or not text or text.count("\\boxed") > self.max_boxed_threshold:
                continue
            expected, answer = gold_answer(gold), final_answer(text)
            if not expected:
                continue
            if self._is_plainly_equal(expected, answer):
                values[index] = 1.0
            else:
                undecided.append((index, expected, text))
        if undecided:
            workers = self._workers or math_workers()
            calls = [(gold, text) for _, gold, text in undecided]
            outcomes = workers.run(is_equal, calls, timeout_s=self.timeout_s)
            for (index, _, _), outcome in zip(undecided, outcomes, strict=True):
                values[index] = self._value(outcome)
        return values

    def _is_plainly_equal(self, gold: str, answer: str | None) -> bool:
        """Whether the texts are equal except for white space, or are the same number."""
        if answer is None:
            return False
        if gold.split() == answer.split():
            return True
        left, right = _number(gold), _number(answer)
        return left is not None and right is not None and abs(left - right) <= self.tolerance

    def _value(self, outcome: bool | RewardFailure) -> float:
        if not isinstance(outcome, RewardFailure):
            return 1.0 if outcome else 0.0
        self.failures[outcome.reason] += 1
        logger.warning("an answer could not be judged (%s): %s", outcome.reason, outcome.detail)
        if self.on_failure == "raise":
            raise EnvError(f"an answer could not be judged ({outcome.reason}): {outcome.detail}")
        return math.nan if self.on_failure == "nan" else 0.0


def gold_answer(gold: Any) -> str:
    """Return the boxed part of a solution, else the text after `####`, else all of it; a number as text.

    >>> gold_answer("3 + 1 = 4 #### 1,004")
    '1,004'
    """
    text = str(gold).strip()
    return (final_answer(text) or text).strip().strip("$")


def final_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`, else the text after the last `####`; None without either.

    >>> final_answer(r"so \\boxed{1} or \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start >= 0 and (boxes := boxes_in(text[start:])):
        return boxes[0]
    hashed = _HASHED.findall(text)
    return hashed[-1].strip() if hashed else None


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", "").replace("\\$", "").replace("$", "").strip().rstrip("."))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def accuracy_reward(
    completions: Sequence[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """Judge with the default settings of `AccuracyReward`."""
    return AccuracyReward()(completions, solution=solution, ground_truth=ground_truth, **kwargs)
