"""Does the text show steps? Counts what steps look like; it does not judge whether they are any good."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

DEFAULT_WEIGHTS = {"numbered": 0.5, "list": 0.5, "bullets": 0.4, "transitions": 0.3}

PATTERNS = {
    "numbered": re.compile(r"\bstep\s+\d+", re.IGNORECASE),
    "list": re.compile(r"^[ \t]*\d+[.)][ \t]", re.MULTILINE),
    "bullets": re.compile(r"^[ \t]*[-*+\u2022][ \t]", re.MULTILINE),
    "transitions": re.compile(
        r"\b(?:first|second|third|next|then|finally|therefore|thus|hence|because|consequently)\b",
        re.IGNORECASE,
    ),
}
"""`Step 1`, `1. `, `- `, and words that lead from one thought to the next."""


@registry.register(name="reasoning_steps")
class ReasoningStepsReward(RewardFunction):
    """`base_score` plus, for each pattern, its weight times min(1, matches / min_steps); at most 1.

    Texts of fewer than `min_words` words get 0.0.
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
        self.pattern_weights = {**DEFAULT_WEIGHTS, **(pattern_weights or {})}

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return [self._value(self.get_content(completion)) for completion in completions]

    def _value(self, text: str) -> float:
        if len(text.split()) < self.min_words:
            return 0.0
        shares = {
            name: min(1.0, len(pattern.findall(text)) / self.min_steps)
            for name, pattern in PATTERNS.items()
        }
        found = sum(self.pattern_weights[name] * share for name, share in shares.items())
        return min(1.0, self.base_score + found)


def reasoning_steps_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Judge with the default settings of `ReasoningStepsReward`."""
    return ReasoningStepsReward()(completions, **kwargs)
