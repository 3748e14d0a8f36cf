"""Reward for visible reasoning steps. Counts their markers; it does not judge their quality."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, merge_weights

DEFAULT_WEIGHTS = {
    "numbered_steps": 0.5,
    "list_numbers": 0.5,
    "bullet_points": 0.4,
    "transition_words": 0.3,
}

_TRANSITIONS = (
    "first|second|third|fourth|fifth|next|then|after that|afterward|subsequently|eventually"
    "|finally|lastly|initially|in conclusion|to begin|let's begin|begin by|i'll first|to solve"
    "|understand|analyze|apply|compute"
)

PATTERNS = {
    "numbered_steps": re.compile(r"step\s+\d+[\s:]", re.IGNORECASE),
    "list_numbers": re.compile(r"^[^\S\n]*\d+\.\s", re.MULTILINE),
    "bullet_points": re.compile(r"^[^\S\n]*[-*\u2022]\s", re.MULTILINE),
    "transition_words": re.compile(rf"\b(?:{_TRANSITIONS})\b", re.IGNORECASE),
}
"""`Step 1:`; `1. ` and `- ` at the start of a line; words that connect steps (the original's list)."""


@registry.register(name="reasoning_steps")
class ReasoningStepsReward(RewardFunction):
    """The sum over the patterns of weight times min(1, matches / min_steps), at most 1.

    Texts of more than `min_words` words get `base_score` in addition. `pattern_weights` overrides entries of
    `DEFAULT_WEIGHTS`.
    """

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: Mapping[str, float] | None = None,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.min_words = min_words
        self.min_steps = max(1, min_steps)
        self.base_score = base_score
        self.pattern_weights = merge_weights(
            DEFAULT_WEIGHTS, pattern_weights, name="pattern_weights"
        )

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return [self._value(self.get_content(completion)) for completion in completions]

    def _value(self, text: str) -> float:
        value = sum(
            self.pattern_weights[name] * min(1.0, len(pattern.findall(text)) / self.min_steps)
            for name, pattern in PATTERNS.items()
        )
        if len(text.split()) > self.min_words:
            value += self.base_score
        return min(1.0, value)


def reasoning_steps_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Judge with the default settings of `ReasoningStepsReward`."""
    return ReasoningStepsReward()(completions, **kwargs)
