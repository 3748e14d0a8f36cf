"""Reward for a correct final answer in mathematics: equal texts and numbers are compared here, the rest by math-verify.

math-verify runs in a worker that can be killed (extra `math`). For an answer that could not be judged, `on_failure`
decides the value, and `failures` counts it by reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

from atroposlib.envs.answers import solution_of
from atroposlib.envs.math_answers import compare, final_answer, is_equal
from atroposlib.envs.reward_fns.math_worker import BlockingWorkers, math_workers
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, spread
from atroposlib.envs.rewards import RewardFailure
from atroposlib.errors import ConfigError, EnvError

logger = logging.getLogger(__name__)

OnFailure = Literal["zero", "nan", "raise"]


@registry.register
class AccuracyReward(RewardFunction):
    """1.0 for a correct answer, 0.0 for a wrong or missing one. The answer is the last box, else what follows `####`.

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
        """Judge only what follows the thinking; nothing if that does not end."""
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
                text = solution_of(text)
            answer = final_answer(text)
            if gold is None or not answer or text.count("\\boxed") > self.max_boxed_threshold:
                continue
            expected = gold_answer(gold)
            is_right: bool | None = expected.split() == answer.split()
            is_right = is_right or compare(expected, answer, tolerance=self.tolerance)
            if expected and is_right is None:
                undecided.append((index, expected, answer))
            elif expected:
                values[index] = 1.0 if is_right else 0.0
        if undecided:
            workers = self._workers or math_workers()
            calls = [(gold, answer) for _, gold, answer in undecided]
            outcomes = workers.run(is_equal, calls, timeout_s=self.timeout_s)
            for (index, _, _), outcome in zip(undecided, outcomes, strict=True):
                values[index] = self._value(outcome)
        return values

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


def accuracy_reward(
    completions: Sequence[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """Judge with the default settings of `AccuracyReward`."""
    return AccuracyReward()(completions, solution=solution, ground_truth=ground_truth, **kwargs)
