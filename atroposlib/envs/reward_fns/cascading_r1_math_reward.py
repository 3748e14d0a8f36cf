"""Reward for a correct answer in mathematics, with a format bonus only if it is correct."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.accuracy_reward import accuracy_reward
from atroposlib.envs.reward_fns.reward_function import RewardFunction

FORMAT_BONUS = 0.5

_WELL_FORMED = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>[^<]*", re.DOTALL)


def cascading_r1_math_reward(
    completions: Sequence[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """Return the accuracy, plus 0.5 if it is positive and the text is one thinking block followed by plain text."""
    accuracies = accuracy_reward(completions, solution=solution, ground_truth=ground_truth)
    texts = [RewardFunction.get_content(completion) for completion in completions]
    return [
        value + FORMAT_BONUS if value > 0 and _WELL_FORMED.fullmatch(text) else value
        for value, text in zip(accuracies, texts, strict=True)
    ]
