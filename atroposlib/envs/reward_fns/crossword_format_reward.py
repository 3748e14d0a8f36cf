"""Reward for the format of crossword answers, for example `3-Across: WORD`."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

DEFAULT_PATTERNS = (
    r"(?<!\d)\d+-Across:[ \t]*([^\s,;]+)",
    r"(?<!\d)\d+-Down:[ \t]*([^\s,;]+)",
)


@registry.register(name="crossword_format")
class CrosswordFormatReward(RewardFunction):
    """`reward_value` when a pattern is found and no answer has an invalid character; else 0.0.

    A pattern's last group is the answer; `penalize_invalid_chars` False accepts any character.
    """

    def __init__(
        self,
        format_patterns: Sequence[str] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = string.ascii_uppercase,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.format_patterns = [
            re.compile(pattern) for pattern in format_patterns or DEFAULT_PATTERNS
        ]
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = frozenset(valid_chars)

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        texts = [self.get_content(completion) for completion in completions]
        return [self.reward_value if self._is_valid(text) else 0.0 for text in texts]

    def _is_valid(self, text: str) -> bool:
        matches = [match for p in self.format_patterns for match in p.finditer(text)]
        if not matches or not self.penalize_invalid_chars:
            return bool(matches)
        answers = [match.groups()[-1] or "" for match in matches if match.groups()]
        return all(self.valid_chars.issuperset(answer) for answer in answers)


def crossword_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Judge with the default settings of `CrosswordFormatReward`."""
    return CrosswordFormatReward()(completions, **kwargs)
